"""Run in fresh processes by the tests: `python factor_child.py FILE OUT BUDGET` rebuilds factors and prints one JSON line."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np

import outsize
import outsize.factor.files  # code is no part of the promise
from outsize.array.store.registry import FORMATS
from outsize.array.tuning import current, use


def read(name: str) -> int:
    """A row of this process's status, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))


def main(path: str, out: str, budget: str) -> None:
    """Warm up so little that BLAS has taken nothing, but in passes as the work itself; then rebuild and measure."""
    for row in FORMATS:  # opening a file tries them
        _ = row.module
    with use(replace(current(), at_once=0)):
        few = outsize.array.asarray(np.ones((8, 8), "float32"))
        ((few - few.mean(axis=0)) * 2).save(f"{out}.warm.npy", budget="1MiB")
    with open("/proc/self/clear_refs", "w") as kernel:
        kernel.write("5")
    before = read("VmHWM")
    with outsize.budget(host=budget):
        x = outsize.open(path)
        z = x.array * 2 if out.endswith("plain.npy") else (x - x.array.mean(axis=0)) * 2
        plan = z.plan(budget)
        z.save(out, budget=budget)
    print(json.dumps({"projected": plan.peak(), "smallest": plan.smallest, "grew": read("VmHWM") - before}))


if __name__ == "__main__":
    main(*sys.argv[1:])
