"""Small work: NumPy, Outsize and dask on the same expressions, in microseconds, from 10 to 10 million elements.

    python benchmarks/small_work.py

Every number is the best of many calls in one process, the expression built anew in each: what a loop over small arrays pays.
`streamed` is Outsize when it is made to plan everything. dask is left out where it is not installed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import outsize
from outsize.array.tuning import current, use

WORKS: dict[str, Callable[[Any], Any]] = {
    "(x * 2 + 1).sum()": lambda x: (x * 2 + 1).sum(),
    "x - x.mean(axis=0)": lambda x: x - x.mean(axis=0),
    "x.T @ x": lambda x: x.T @ x,
}


def best(work: Callable[[], Any], seconds: float = 0.4) -> float:
    """Microseconds of the fastest call within some time."""
    work()
    least, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - begin)
    return least * 1e6


def main() -> None:
    """Print the table."""
    try:
        import dask
        import dask.array as da

        dask.config.set(scheduler="synchronous")  # the fastest for small work
    except ImportError:
        da = None
    print("| expression | elements | NumPy | Outsize | over NumPy | streamed | dask |\n|---|---|---|---|---|---|---|")
    for name, work in WORKS.items():
        for power in range(1, 8):
            row = measure(work, np.random.default_rng(0).random((10 ** (power - 1), 10)), da)
            print(
                f"| {name} | 10^{power} | {' | '.join('-' if cell is None else f'{cell:,.0f}' for cell in row)} |",
                flush=True,
            )


def measure(work: Callable[[Any], Any], a: Any, da: Any) -> tuple[float | None, ...]:
    """One row of the table."""
    x = outsize.open(a)
    plain, ours = best(lambda: work(a)), best(lambda: work(x).compute())
    with use(replace(current(), at_once=0)):
        streamed = best(lambda: work(x).compute())
    theirs = None if da is None else best(lambda: work(da.from_array(a, chunks=(1 << 16, 10))).compute())
    return plain, ours, ours - plain, streamed, theirs


if __name__ == "__main__":
    main()
