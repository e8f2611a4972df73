"""Run in fresh processes by the tests: `python child.py WORK FOLDER BUDGET [WARM]` prints one JSON line about how it went."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time

import numpy as np

import outsize
import outsize.array as xp


def anonymous() -> int:
    """Bytes of anonymous memory of this process now."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def peak() -> int:
    """Highest resident memory of this process so far."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def slow(block: object) -> object:
    """A function that takes its time, so that a kill meets it at work."""
    time.sleep(0.004)
    return np.asarray(block) * 2


def blur(block: object) -> object:
    """Mean of three neighbours along the last axis."""
    x = np.asarray(block)
    return (np.roll(x, 1, -1) + x + np.roll(x, -1, -1)) / np.float32(3)


def softmax(x: xp.Array) -> xp.Array:
    """Of rows."""
    grown = xp.exp(x - x.max(axis=1, keepdims=True))
    return grown / grown.sum(axis=1, keepdims=True)


def picks(below: int, number: int, ordered: bool = False) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Random indices."""
    found = np.random.default_rng(4).integers(0, below, number)
    if ordered:
        found.sort()  # in place: a copy would be measured with the work
    return found


WORKS = {
    "sum": lambda x: x.sum(),
    "moments": lambda x: x.var(axis=0) + x.mean(axis=0),
    "rows": lambda x: x.std(axis=1),
    "expression": lambda x: xp.sqrt(abs(xp.sin(x) * x + 2)),
    "zscore": lambda x: (x - x.mean(axis=0)) / x.std(axis=0),
    "softmax": lambda x: softmax(x),
    "layer norm": lambda x: (x - x.mean(axis=1, keepdims=True)) / xp.sqrt(x.var(axis=1, keepdims=True) + 1e-5),
    "unit rows": lambda x: (x / xp.sqrt((x * x).sum(axis=1, keepdims=True))) @ x[:512].T,
    "ranks": lambda x: xp.argsort(xp.argsort(x, axis=1), axis=1),
    "transpose": lambda x: x.T,
    "gram": lambda x: x.T @ x,
    "product": lambda x: x[:2000] @ x[2000:2512].T,
    "strided product": lambda x: x[::2, ::2].T @ x[::2, 1::2],
    "complex product": lambda x: x[: x.shape[0] // 4].T.astype("complex64") @ x[: x.shape[0] // 4],
    "blocks of products": lambda x: xp.einsum("aib,ajb->ij", *[x.reshape(x.shape[0] // 8, 8, x.shape[1])] * 2),
    "product of axes": lambda x: xp.tensordot(*[x.reshape(-1, 8, 64, 8)] * 2, axes=([0, 1], [0, 1])),
    "product, sorted": lambda x: xp.sort(x.T @ x, axis=1),
    "svd of one": lambda x: xp.linalg.svd(x[:512], full_matrices=False).Vh,
    "inverse of one": lambda x: xp.linalg.inv(x[: x.shape[1]]),
    "cumsum": lambda x: xp.cumsum(x, 0),
    "filter": lambda x: xp.map_overlap(blur, x, depth=(0, 1), boundary="reflect", memory=4),
    "reshape": lambda x: x.reshape(-1, 1024),
    "concat": lambda x: xp.concat([x, x[::-1], x * 2], axis=1),
    "sort": lambda x: xp.sort(x, axis=1),
    "sort of columns": lambda x: xp.sort(x, axis=0),
    "median": lambda x: xp.median(x),
    "median of columns": lambda x: xp.median(x, axis=0),
    "percentiles": lambda x: xp.percentile(x, [1.0, 10.0, 50.0, 90.0, 99.0]),
    "sort of all": lambda x: xp.sort(x.reshape(-1)),
    "argsort of all": lambda x: xp.argsort(x.reshape(-1)),
    "unique": lambda x: xp.unique_counts(x).counts,
    "nonzero": lambda x: xp.nonzero(x > 0.5)[0],
    "mask": lambda x: x[x > 0.5],
    "searchsorted": lambda x: xp.searchsorted(xp.linspace(0, 1, 1000), x),
    "topk": lambda x: xp.topk(x.reshape(-1), 1000)[1],
    "fft": lambda x: xp.fft.fft(x, axis=1),
    "fft of columns": lambda x: xp.fft.rfft(x, axis=0),
    "fft of all": lambda x: xp.fft.fft(x[: x.shape[0] // 4].reshape(-1)),
    "svd": lambda x: xp.linalg.svd(x.reshape(-1, 32, 16), full_matrices=False).Vh,
    "random": lambda x: xp.random.default_rng(7).standard_normal(x.shape, np.float32),
    "argmax": lambda x: x.argmax(axis=0),
    "strided": lambda x: x[::7, ::-3],
    "take": lambda x: xp.take(x.reshape(-1), picks(x.size, x.size // 8)),
    "take sorted": lambda x: xp.take(x.reshape(-1), picks(x.size, x.size // 8, ordered=True)),
    "chosen rows": lambda x: x[picks(x.shape[0], x.shape[0] // 4)],
    "rows under a mask": lambda x: x[picks(2, x.shape[0]) == 1],
    "slow": lambda x: xp.map_blocks(slow, x, memory=2),
    "slow-turned": lambda x: xp.map_blocks(slow, x, memory=2).T,
}


def main(work: str, folder: str, budget: str, warm: str = "small.npy") -> None:
    """Warm up on a small array, then run the work and measure."""
    if not work.startswith("slow"):
        WORKS[work](outsize.open(f"{folder}/{warm}")).save(f"{folder}/warm-{os.getpid()}.npy", budget="64MiB")
        os.unlink(f"{folder}/warm-{os.getpid()}.npy")
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as kernel:
        kernel.write("5")  # what the warming took is forgotten: the peak is what is held now
    before = anonymous()
    high = peak()
    with outsize.budget(host=budget):  # some works count at once
        array = WORKS[work](outsize.open(f"{folder}/x.npy"))
    plan = array.plan(budget)
    seen = {"tiles": 0, "done": 0, "bytes": 0}
    if work.startswith("slow"):
        from outsize.array.passes.map import MapPass

        before_close = MapPass.close

        def close(self: MapPass, job: object, tile: object, state: object) -> None:
            before_close(self, job, tile, state)  # type: ignore[arg-type]
            seen["tiles"] += 1

        MapPass.close = close  # type: ignore[method-assign]

    def listen(event: object) -> None:
        if type(event).__name__ == "Started":
            seen["done"], seen["bytes"] = event.done, event.bytes  # type: ignore[attr-defined]
            if work.startswith("slow"):
                open(f"{folder}/started", "w").close()  # from here on a kill meets it at work

    array.save(f"{folder}/out-{work}.npy", budget=budget, progress=listen)
    print(json.dumps({
        "projected": plan.peak(), "grew": peak() - max(high, before), "tiles": seen["tiles"], "total": plan.steps[-1].tiles,
        "share": seen["done"] / max(1, seen["bytes"]),
    }))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
