"""What `outsize run` costs a program: the same work with and without it, taken in turns, and what it is made of.

    python benchmarks/run_overhead.py [rounds]

The work is half pure Python, half NumPy that grows to 512 MiB and shrinks again, so that stacks are asked for. Wall and
processor seconds of both are given, but on a busy machine they scatter by far more than a hundredth; so the cost is also
summed up from its parts, each of which can be measured well: the parent's own processor time, the stacks that were asked
for times what one costs the child, and what loading our `sitecustomize` adds to its start.
"""

from __future__ import annotations

import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

from outsize.failure.run import run
from outsize.monitor.launch import CHILD

WORK = """
import time, resource
import numpy as np
total, kept = 0, []
for step in range(12):
    for number in range(1_500_000):
        total += number * number % 7
    kept.append(np.ones(2**23))  # 64 MiB
    kept[-1] *= 1.0001
    if len(kept) == 8:
        kept.clear()
use = resource.getrusage(resource.RUSAGE_SELF)
open(RESULT, "w").write(str(use.ru_utime + use.ru_stime))
"""


DUMPS = """
import faulthandler, os, signal, sys, time
faulthandler.register(signal.SIGURG, file=open(os.devnull, "wb"), all_threads=False)
def deep(depth):
    if depth:
        return deep(depth - 1)
    began = time.perf_counter()
    for _ in range(5000):
        os.kill(os.getpid(), signal.SIGURG)
    return (time.perf_counter() - began) / 5000
print(min(deep(30) for _ in range(5)))
"""


def cost_of_a_stack() -> float:
    """Seconds of the child for one stack of thirty frames, the signal included."""
    return float(subprocess.run([sys.executable, "-c", DUMPS], capture_output=True, text=True, check=True).stdout)


def cost_of_the_start() -> float:
    """Seconds that our `sitecustomize` adds to the start of a Python program: the best of many, with and without."""
    best = []
    with tempfile.TemporaryDirectory() as folder:
        watched = {
            "PYTHONPATH": os.pathsep.join([CHILD, os.environ.get("PYTHONPATH", "")]),
            "OUTSIZE_RUN_FOLDER": folder,
        }
        for extra in ({}, watched):
            times = []
            for _ in range(15):
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                subprocess.run([sys.executable, "-c", ""], env=os.environ | extra, check=True)
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            best.append(min(times))
    return max(0.0, best[1] - best[0])


def main(rounds: int) -> int:
    plain, watched, walls = [], [], ([], [])  # type: tuple[list[float], list[float], tuple[list[float], list[float]]]
    own, stacks = 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        result, script = pathlib.Path(folder) / "seconds", pathlib.Path(folder) / "work.py"
        script.write_text(f"RESULT = {str(result)!r}\n" + WORK)
        for _ in range(rounds):
            began = time.perf_counter()
            subprocess.run([sys.executable, str(script)], check=True)
            walls[0].append(time.perf_counter() - began)
            plain.append(float(result.read_text()))
            before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            status, _, seen = run([str(script)])
            walls[1].append(time.perf_counter() - began)
            after = resource.getrusage(resource.RUSAGE_SELF)
            own += after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            watched.append(float(result.read_text()))
            assert status == 0
            stacks += seen.stacks
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}, {rounds} rounds")
    print(f"child, processor seconds, best: plain {min(plain):.3f}, under outsize run {min(watched):.3f}")
    print(f"wall seconds, best: plain {min(walls[0]):.3f}, under outsize run {min(walls[1]):.3f}")
    parent, stack, start = own / sum(walls[1]), cost_of_a_stack(), cost_of_the_start()
    child = (stacks / rounds * stack + start) / min(watched)
    print(f"parent: {parent:.2%} of one processor while it watches")
    print(
        f"child: {stacks / rounds:.0f} stacks of {stack * 1e6:.0f} us each and {start * 1e3:.1f} ms at its start: {child:.2%}"
    )
    return 0 if parent <= 0.01 and child <= 0.01 else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 6))
