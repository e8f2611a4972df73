"""Runs programs of `leak_programs`, each in a fork of this process and under a watch of its own, and prints what was found.
What one leaves in memory is no part of the next.

    python leak_runner.py FOLDER STEPS MODE NAME...

Programs of `CARD` take memory of a card that is scripted: `take(bytes)` is what it has handed out.

MODE `every`: a point at every step, so that few steps are enough. `frozen`: the same, and what libraries had loaded before
the program began is not looked through again and again, which is most of the time that a census takes. `paced`: as users
have it, with steps of some milliseconds. `free`: no steps are marked and no optimizer is heard of. One line of JSON for each
program: its name, findings and notes."""

import array
import gc
import importlib
import json
import os
import pathlib
import runpy
import sys
import time
import traceback

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


def run_in_fork(name, folder, steps, mode):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            print(json.dumps(run(name, folder, steps, mode)), flush=True)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    folder, steps, mode = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if mode in AT_EVERY_STEP:
        growth._SHARE, growth._LEAST_PAUSE = 1.0, 0.0
    for module in ("numpy", "torch"):  # loaded once, for all forks
        if any(f"import {module}" in PROGRAMS[name] for name in sys.argv[4:]):
            importlib.import_module(module)
    if mode == "frozen":
        if "torch" in sys.modules:
            importlib.import_module("torch._dynamo")  # as the first optimizer does
        gc.collect()
        gc.freeze()
    os.chdir(folder)
    sys.exit(max([run_in_fork(name, folder, steps, mode) for name in sys.argv[4:]]))
