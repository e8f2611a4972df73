"""Runs a program of `leak_programs` under a watch and prints what was found.

    python leak_runner.py FOLDER STEPS MODE NAME

Programs of `CARD` take memory of a card that is scripted: `take(bytes)` is what it has handed out.

MODE `every`: a point at every step, so that few steps are enough. `frozen`: the same, and what libraries had loaded before
the program began is not looked through again and again, which is most of the time that a census takes. `paced`: as users
have it, with steps of some milliseconds. `free`: no steps are marked and no optimizer is heard of. One line of JSON: the
program's name, findings and notes."""

import array
import gc
import importlib
import json
import os
import pathlib
import runpy
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import leak_programs

import outsize
from outsize.monitor import growth

AT_EVERY_STEP = ("every", "frozen")
PROGRAMS = (
    leak_programs.CARD
    | leak_programs.LEAKS
    | leak_programs.CLEAN
    | leak_programs.BLIND_LEAKS
    | leak_programs.BLIND_CLEAN
)


def run(name, folder, steps, mode):
    code = PROGRAMS[name]
    path = folder / f"{name.replace(' ', '_')}.py"
    path.write_text(code)
    has_optimizer = "optimizer" in code
    taken = array.array("q")  # a function of C: its line is no line of the program
    if name in leak_programs.CARD:
        growth.device_meters = lambda: {"meta:0": lambda: sum(taken)}
    gc.collect()
    with outsize.watch() as w:
        if mode == "free":
            w._find_steps = lambda: None

        def pause():
            if mode not in AT_EVERY_STEP:
                time.sleep(0.004)
            if mode != "free" and not has_optimizer:
                w.step()

        runpy.run_path(str(path), {"STEPS": steps, "pause": pause, "take": taken.append}, run_name="__main__")
        if mode not in AT_EVERY_STEP:
            time.sleep(1.0)
        found = w.leaks()
    return {
        "name": name,
        "findings": [finding.to_dict() for finding in found],
        "notes": list(w.notes),
        "steps": w.readings[-1].step,
    }


if __name__ == "__main__":
    folder, steps, mode, name = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    for module in ("numpy", "torch"):
        if f"import {module}" in PROGRAMS[name]:
            importlib.import_module(module)
    if mode in AT_EVERY_STEP:
        growth._SHARE, growth._LEAST_PAUSE = float("inf"), 0.0
        gc.unfreeze()  # a fork of the tests begins with all that is loaded frozen
    if mode == "frozen":
        gc.collect()
        gc.freeze()
    os.chdir(folder)
    print(json.dumps(run(name, folder, steps, mode)))
