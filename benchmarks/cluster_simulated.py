"""The simulator beside real runs of 2 and 4 workers on Dask.

    python benchmarks/cluster_simulated.py

The processors of one machine are no cluster: four workers on two cores share them. So each worker has a link of its own that is
slower than its processor: a function that sleeps for the bytes of its block, one block at a time in a process. What is compared
is what the simulator models: how the tasks of a plan are handed out, what each costs, how parts are joined.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client, LocalCluster

import outsize
import outsize.array as xp

LINK = 24e6
"""Bytes a second that come through the slow function."""
_lock = threading.Lock()


def slow(block: Any) -> Any:
    with _lock:
        time.sleep(block.nbytes / LINK)
    return block


WORKS = {
    "mean of columns": lambda x: slowed(x).mean(axis=0),
    "elementwise": lambda x: slowed(x) * 2 + 1,
    "gram": lambda x: slowed(x).T @ xp.ones((x.shape[0], 1), dtype="float32"),
}
READ = {"mean of columns": 1.0, "elementwise": 0.5, "gram": 1.0}
"""Part of the traffic of a work that goes through the link: what is written does not."""


def slowed(x: Any) -> Any:
    return xp.map_blocks(slow, x, memory=1)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="outsize-simulated-") as name:
        folder = Path(name)
        np.save(folder / "x.npy", np.ones((600_000, 128), np.float32))
        x = outsize.open(folder / "x.npy")
        for workers in (2, 4):
            with (
                LocalCluster(
                    n_workers=workers, threads_per_worker=1, memory_limit="600MiB", dashboard_address=":0"
                ) as made,
                Client(made, set_as_default=False) as client,
                outsize.cluster(client),
            ):
                x[:10].save(folder / "warm.npy", budget="64MiB")
                for title, work in WORKS.items():
                    real = min(timed(work(x), folder) for _ in range(2))
                    paper = outsize.cluster.simulate(
                        work(x), "z.npy", workers=workers, memory="64MiB", link=LINK / READ[title], begin=0.1
                    )
                    print(f"{title:16} {workers} workers: measured {real:6.2f} s, simulated {paper.seconds:6.2f} s, "
                          f"{paper.seconds / real - 1:+.0%}", flush=True)  # fmt: skip


def timed(work: Any, folder: Path) -> float:
    began = time.perf_counter()
    work.save(folder / "z.npy", budget="64MiB")
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
