"""Random small training programs, run for real on the CPU and foreseen: real over estimate, real over bound, misses.

    python benchmarks/random_programs.py [COUNT [SEED]]

Each program is run in a process of its own, where the events of torch's allocator give the real peak. It is foreseen twice: as a
step with `outsize.estimate`, and every tenth also as a script with `outsize estimate program.py`. A miss is silent if no guess
says that the estimate does not know.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "model"))

from training_programs import load, real_peak, write_program

SCRIPTS = 10
"""Every this many programs one is also followed as a script."""


def foresee(text: str, script: bool) -> Any:
    """The footprint of a program, or what was refused."""
    import outsize
    from outsize.model.scripts.start import estimate_script

    try:
        if not script:
            program = load(text)
            return outsize.estimate(program["step"], build=program["build"], device="cpu")
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "program.py")
            Path(path).write_text(text)
            return estimate_script(path, device="cpu")
    except outsize.OutsizeError as error:
        return str(error)


def main() -> None:
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    count, seed = (
        (int(word) for word in [*sys.argv[1:], "200", "0"][:2]) if len(sys.argv) < 3 else map(int, sys.argv[1:3])
    )
    print("| program | form | real MiB | real / estimate | real / bound | guesses | |\n|---|---|---|---|---|---|---|")
    ratios: dict[str, list[float]] = {"step": [], "script": []}
    found: dict[str, int] = dict.fromkeys(("silent misses", "announced misses", "with a guess", "refused"), 0)
    begin, done, number = time.time(), 0, 0
    while done < count:
        name, number = f"{seed}-{number}", number + 1
        text = write_program(random.Random(name))
        real = real_peak(text)
        if not isinstance(real, int):
            continue  # torch refuses it
        done += 1
        for form in ("step", "script") if done % SCRIPTS == 0 else ("step",):
            footprint = foresee(text, form == "script")
            if isinstance(footprint, str):
                found["refused"] += 1
                print(f"| {name} | {form} | {real / 2**20:.2f} | | | | refused: {footprint[:150]} |", flush=True)
                continue
            likely = footprint.peak_requested
            missed = real > likely.bound
            ratios[form].append(real / likely.bytes)
            found["with a guess"] += bool(footprint.guesses)
            found["announced misses"] += missed and bool(footprint.guesses)
            found["silent misses"] += missed and not footprint.guesses
            word = "" if not missed else "missed, announced" if footprint.guesses else "SILENT MISS"
            print(
                f"| {name} | {form} | {real / 2**20:.2f} | {real / likely.bytes:.3f} | {real / likely.bound:.3f} | "
                f"{len(footprint.guesses)} | {word} |",
                flush=True,
            )
    print(
        f"\n{count} programs, {time.time() - begin:.0f} s; {', '.join(f'{key} {value}' for key, value in found.items())}"
    )
    for form, values in ratios.items():
        if values:
            within = sum(abs(value - 1) <= 0.02 for value in values) / len(values)
            print(
                f"{form}: real / estimate median {statistics.median(values):.4f}, lowest {min(values):.3f}, "
                f"highest {max(values):.3f}, within 2 % {within:.0%}"
            )


if __name__ == "__main__":
    main()
