"""Decomposes a file in a fresh process and prints what it held and what its plan said: arguments path, method, error, budget."""

import json
import sys
from dataclasses import replace

import numpy as np

import outsize
import outsize.factor.decompose  # code is no part of the promise
from outsize.array.tuning import current, use


def read(name: str) -> int:
    """A row of this process's status, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))


path, method, error, budget = sys.argv[1:5]
outsize.decompose(np.ones((6, 7, 8)), "tucker")  # what is loaded once
outsize.decompose(np.ones((6, 7, 8)), "tt")
outsize.open(path)
with use(replace(current(), small=0)):  # passes too
    outsize.decompose(np.ones((40, 40, 40), "f4"), method, float(error), budget="4MiB")
with open("/proc/self/clear_refs", "w") as kernel:
    kernel.write("5")
before, code = read("VmHWM"), read("RssFile")
made = outsize.decompose(path, method, float(error), budget=budget)
held = read("VmHWM") - before - max(0, read("RssFile") - code)  # libraries that are used for the first time
print(json.dumps({"held": held, "projected": made.facts.plan.peak(), "ranks": made.ranks, "said": made.error}))
