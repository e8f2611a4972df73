"""The card's results against the processor's, and what is said where something cannot be. Used by `arrays_h200.py`."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np

import outsize
import outsize.array as xp


def equality(say):
    """The card's results against the processor's."""
    rng = np.random.default_rng(0)
    whole = rng.integers(-1000, 1000, size=(3000, 2000)).astype(np.int32)
    real = rng.normal(size=(3000, 2000)).astype(np.float32)
    x, y = outsize.open(whole), outsize.open(real)
    rows = {
        "int chain": (x * 3 + x) & 255, "int sum": x.sum(axis=0), "int min": x.min(axis=1), "count": (x * 2 > 1).sum(),
        "uint8": x.astype("u1").sum(axis=0), "any": (x > 998).any(axis=1), "product": y @ y.T,
        "float chain": xp.tanh(y) * 2 + xp.exp(-y * y), "float mean": y.mean(axis=0), "float std": y.std(axis=1),
        "standardised": (y - y.mean(axis=0)) / y.std(axis=0), "remainder of integers": x % 7,
    }  # fmt: skip
    with outsize.budget(host="4GiB", device="256MiB"):
        for name, node in rows.items():
            try:
                here, there = node.compute(), node.compute(device="cuda")
            except outsize.InputError as error:
                say("6 equality", name, refused=str(error))
                continue
            if here.dtype.kind in "biu":
                say("6 equality", name, bitwise=bool(np.array_equal(here, there)), dtype=str(here.dtype))
            else:
                worst = float(np.max(np.abs(here - there)) / np.max(np.abs(here)))
                say("6 equality", name, largest_difference=worst, dtype=str(here.dtype))
        try:
            big = outsize.open(rng.normal(size=(2000, 1500)))
            a = big.sum(axis=0).compute(device="cupy")
            say("6 equality", "cupy", largest_difference=float(np.max(np.abs(a - big.sum(axis=0).compute()))),
                product=float(np.max(np.abs((big @ big.T).compute(device="cupy") - (big @ big.T).compute()))))  # fmt: skip
        except Exception as error:
            say("6 equality", "cupy", failed=f"{type(error).__name__}: {error}")


def bad_input(say):
    """What is said where it cannot be: no card, no such card, too little of it, all of it taken."""
    x = outsize.open(np.ones((4096, 4096), np.float32))
    attempts = {
        "device out of range": lambda: (x * 2).compute(device="cuda:7"),
        "no such device": lambda: (x * 2).compute(device="tpu"),
        "budget too small": lambda: _with("16MiB", lambda: (x @ x).compute(device="cuda")),
        "no rule": lambda: xp.sort(x).compute(device="cuda"),
    }
    for name, attempt in attempts.items():
        say("7 bad input", name, said=_said(attempt))
    code = (
        "import numpy as np, outsize\nx = outsize.open(np.ones((512, 512), 'f4'))\n"
        "try:\n    (x @ x).compute(device='cuda')\nexcept outsize.InputError as error:\n    print(error)\n"
        "print((x @ x).compute(device='auto').sum())\n"
    )
    hidden = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
                            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})  # fmt: skip
    say("7 bad input", "no card to be seen", said=(hidden.stdout + hidden.stderr[-500:]).strip())
    code = (
        "import torch, sys, time\nfree, total = torch.cuda.mem_get_info()\n"
        "t = torch.empty(free - (90 << 20), dtype=torch.uint8, device='cuda')\nprint('held', flush=True)\ntime.sleep(60)\n"
    )
    hog = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    hog.stdout.readline()
    try:
        for name in ("cuda", "auto"):
            say("7 bad input", f"card taken, budget 8 GiB, {name}",
                said=_said(lambda name=name: _with("8GiB", lambda: (x @ x).compute(device=name))))  # fmt: skip
        with outsize.budget(device="8GiB"):
            say("7 bad input", "card taken, sum", said=_said(lambda: x.sum().compute(device="cuda")))
    finally:
        hog.kill()
        hog.wait()


def _with(budget, work):
    with outsize.budget(host="4GiB", device=budget):
        return work()


def _said(work):
    import warnings

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            work()
        except outsize.OutsizeError as error:
            return f"{type(error).__name__}: {error}"
        return "done" + "".join(f"; warned: {w.message}" for w in heard)
