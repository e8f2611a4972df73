"""Outsize on one work: `python ours.py WORK DATA OUT [MEMORY BUDGET]`. Prints its plan's projection and the result."""

from __future__ import annotations

import sys
import time

import numpy as np
from data import COSINE_ROWS, SORTED_ROWS, part
from filters import gauss5

import outsize
import outsize.array as xp


def main(work: str, data: str, out: str) -> None:
    """Run one work inside the default budget of this container."""
    if work == "sum":
        print(outsize.open(f"{data}/tall.npy").sum().compute())
    elif work == "expression":
        x = outsize.open(f"{data}/tall.npy")
        print(np.sqrt(np.abs(np.sin(x) * x + 2)).mean().compute())
    elif work == "normalise" or work.startswith("zscore"):
        x = outsize.open(f"{data}/tall.npy")
        _save((x - x.mean(axis=0)) / x.std(axis=0), f"{out}/z.npy")
    elif work == "softmax":
        x = outsize.open(f"{data}/tall.npy")
        grown = xp.exp(x - x.max(axis=1, keepdims=True))
        _save(grown / grown.sum(axis=1, keepdims=True), f"{out}/s.npy")
    elif work == "layernorm":
        x = outsize.open(f"{data}/tall.npy")
        _save((x - x.mean(axis=1, keepdims=True)) / xp.sqrt(x.var(axis=1, keepdims=True) + 1e-5), f"{out}/l.npy")
    elif work == "cosine":
        x = outsize.open(f"{data}/tall.npy")[:COSINE_ROWS]
        unit = x / xp.sqrt((x * x).sum(axis=1, keepdims=True))
        _save(unit @ unit[:4096].T, f"{out}/c.npy")
    elif work == "argmax":
        _save(outsize.open(f"{data}/tall.npy").argmax(axis=1), f"{out}/i.npy")
    elif work == "three":
        x = outsize.open(f"{data}/tall.npy")
        outsize.save({f"{out}/m.npy": x.mean(axis=0), f"{out}/r.npy": x.max(axis=1), f"{out}/q.npy": xp.sqrt(x)})
    elif work == "sort":
        _save(xp.sort(_sorted(data)), f"{out}/s.npy")
    elif work == "median":
        print(xp.median(_sorted(data)).compute())
    elif work == "unique":
        _save(xp.unique_values(outsize.open(f"{data}/whole.npy")), f"{out}/u.npy")
    elif work == "rfft":
        x = outsize.open(f"{data}/tall.npy")
        _save(xp.fft.rfft(x[: part(SORTED_ROWS, len(x))], axis=0), f"{out}/f.npy")
    elif work == "rsvd":
        u, s, v = xp.linalg.svd_lowrank(outsize.open(f"{data}/tall.npy"), 20)
        outsize.save({f"{out}/u.npy": u, f"{out}/s.npy": s, f"{out}/v.npy": v})
    elif work == "qr":
        q, r = xp.linalg.qr(outsize.open(f"{data}/tall.npy"))
        outsize.save({f"{out}/q.npy": q, f"{out}/r.npy": r})
    elif work == "matmul":
        _save(outsize.open(f"{data}/a.npy") @ outsize.open(f"{data}/b.npy"), f"{out}/c.npy")
    elif work == "transpose":
        _save(outsize.open(f"{data}/tall.npy").T, f"{out}/t.npy")
    elif work == "filter":
        x = outsize.open(f"{data}/image.npy")
        _save(xp.map_overlap(gauss5, x, depth=(0, 0, 2, 2), boundary="reflect", memory=3), f"{out}/f.npy")


def _sorted(data: str) -> outsize.array.Array:
    x = outsize.open(f"{data}/tall.npy")
    return x[: part(SORTED_ROWS, len(x))].reshape(-1)


def _save(array: outsize.array.Array, path: str) -> None:
    plan = array.plan()
    print(f"projected {plan.peak()} budget {plan.budgets[0].bytes}")
    array.save(path)


if __name__ == "__main__":
    if len(sys.argv) > 5:
        outsize.budget(host=sys.argv[5])
    begin = time.perf_counter()
    main(*sys.argv[1:4])
    print(f"worked {time.perf_counter() - begin:.3f} s")  # without the start of the interpreter
