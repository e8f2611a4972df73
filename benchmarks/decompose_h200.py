"""`decompose` through a card: host memory of 64 GiB through 8 GiB of an H200, beside the level that binds.

`python benchmarks/decompose_h200.py [--gib 64] [--device-gib 8]` makes a low-rank tensor of float32 in host memory, measures the
link (page-locked copies) and the card's rate of double-precision products, decomposes with `device="cuda"`, and prints how much
of the binding level was reached, and the true error of a few slabs. The data must pass the link once. Needs torch with
CUDA.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from outsize.array.kernels.blas import blas_threads


def main() -> None:
    """Measure the levels, decompose, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=64)
    parser.add_argument("--device-gib", type=float, default=8)
    parser.add_argument("--rank", type=int, default=40)
    given = parser.parse_args()
    import torch

    import outsize

    began = time.perf_counter()
    link, rate = measure_link(torch), measure_products(torch)
    tell(began, "levels measured")
    length = 1024
    rows = int(given.gib * 2**30 / 4 / length / length)
    x = make(rows, length, given.rank)
    tell(began, f"{x.nbytes / 2**30:.1f} GiB made")
    runs, stages = [], clock_stages()
    for part in (x[: max(1, rows // 64)], x, x, x):  # the first loads libraries
        stages.clear()
        started = time.perf_counter()
        with outsize.budget(device=int(given.device_gib * 2**30)):
            made = outsize.decompose(part, "tucker", 0.01, device="cuda")
        runs.append(time.perf_counter() - started)
        tell(began, f"{part.nbytes / 2**30:.1f} GiB in {runs[-1]:.2f} s: {stages}")
    seconds = min(runs[1:])
    crossing = x.nbytes / link
    products = 2 * x.size * max(made.ranks) / rate
    floor = max(crossing, products)
    row = {
        "GiB": x.nbytes / 2**30, "seconds": round(seconds, 2), "runs": [round(run, 2) for run in runs],
        "link GB/s": link / 1e9, "double precision TFLOP/s": rate / 1e12,
        "binding": "link" if crossing >= products else "products",
        "floor": round(floor, 2), "reached": round(floor / seconds, 3), "ranks": made.ranks, "said": made.error,
        "true of some slabs": sample_error(x, made),
    }  # fmt: skip
    print(json.dumps(row, default=list))


def clock_stages() -> dict[str, float]:
    """Seconds of each stage of a decomposition, as they pass; several calls of one name add up."""
    from outsize.factor.algorithms import session as sessions
    from outsize.factor.algorithms.session import Session

    found: dict[str, float] = {}

    def note(name: str, started: float) -> None:
        found[name] = round(found.get(name, 0.0) + time.perf_counter() - started, 3)

    def run(work, *rest):
        started = time.perf_counter()
        try:
            return run_stream(work, *rest)
        finally:
            note(f"{work.label()}{' on the card' if hasattr(work, 'device_budget') else ''}", started)

    @contextlib.contextmanager
    def work(self, what, size):
        started = time.perf_counter()
        with in_memory(self, what, size):
            yield
        note(what, started)

    run_stream, in_memory = sessions.run_stream, Session.work_in_memory
    sessions.run_stream, Session.work_in_memory = run, work
    return found


def tell(began: float, what: str) -> None:
    """Where the script is."""
    print(f"{time.perf_counter() - began:6.1f} s  {what}", file=sys.stderr, flush=True)


def make(rows: int, length: int, rank: int) -> np.ndarray:
    """A tensor of rank (rank, rank, rank) with a little noise, slab by slab."""
    draws = np.random.default_rng(0)
    a, b, c = (draws.standard_normal((n, rank)).astype("f4") / math.sqrt(rank) for n in (rows, length, length))
    core = draws.standard_normal((rank, rank, rank)).astype("f4")
    plane = np.einsum("rst,js,kt->rjk", core, b, c, optimize=True)
    x = np.empty((rows, length, length), "f4")
    noise = np.float32(0.005 * plane.std()) * draws.standard_normal((16, length, length), dtype="f4")

    def make_slabs(start: int) -> None:
        part = x[start : start + 16]
        np.matmul(a[start : start + 16], plane.reshape(rank, -1), out=part.reshape(len(part), -1))
        part += noise[: len(part)]

    with blas_threads(1), ThreadPoolExecutor(16) as crew:
        list(crew.map(make_slabs, range(0, rows, 16)))
    return x


def measure_link(torch: object) -> float:
    """Bytes a second from page-locked memory to the card."""
    source = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    best = math.inf
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return (1 << 30) / best


def measure_products(torch: object) -> float:
    """Double-precision operations a second of a Gram matrix."""
    panel = torch.rand(65536, 1024, dtype=torch.float64, device="cuda")
    best = math.inf
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        panel.T @ panel
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * panel.numel() * 1024 / best


def sample_error(x: np.ndarray, made: object) -> float:
    """Relative error of eight slabs."""
    lost = norm = 0.0
    for start in range(0, len(x), max(1, len(x) // 8)):
        slab = x[start].astype(np.float64)
        lost += float(np.sum((np.asarray(made[start].compute(), np.float64) - slab) ** 2))
        norm += float(np.sum(slab**2))
    return math.sqrt(lost / norm)


if __name__ == "__main__":
    main()
