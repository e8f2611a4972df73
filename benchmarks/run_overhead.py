"""What `outsize run` costs a program: the same work with and without it, taken in turns.

    python benchmarks/run_overhead.py [rounds]

The work is half pure Python, half NumPy that grows to 1 GiB and shrinks again, so that stacks are asked for. Compared are the
processor seconds of the child (which a busy machine does not disturb) and the shortest wall times; the parent's own
processor time is given as a share of the run. Starting the parent is not part of it: it comes once.
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


def main(rounds: int) -> int:
    plain, watched, walls = [], [], ([], [])  # type: tuple[list[float], list[float], tuple[list[float], list[float]]]
    own = 0.0
    with tempfile.TemporaryDirectory() as folder:
        result, script = pathlib.Path(folder) / "seconds", pathlib.Path(folder) / "work.py"
        script.write_text(f"RESULT = {str(result)!r}\n" + WORK)
        for _ in range(rounds):
            began = time.perf_counter()
            subprocess.run([sys.executable, str(script)], check=True)
            walls[0].append(time.perf_counter() - began)
            plain.append(float(result.read_text()))
            before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            status, _, _ = run([str(script)])
            walls[1].append(time.perf_counter() - began)
            after = resource.getrusage(resource.RUSAGE_SELF)
            own += after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            watched.append(float(result.read_text()))
            assert status == 0
    share = min(watched) / min(plain) - 1
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} processors, {rounds} rounds")
    print(f"child, processor seconds, best: plain {min(plain):.3f}, under outsize run {min(watched):.3f}: {share:+.2%}")
    print(
        f"wall seconds, best: plain {min(walls[0]):.3f}, under outsize run {min(walls[1]):.3f}: "
        f"{min(walls[1]) / min(walls[0]) - 1:+.2%}"
    )
    print(f"parent, processor seconds as a share of the run: {own / sum(walls[1]):.2%}")
    return 0 if share <= 0.01 else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 6))
