"""dask.array and cubed on a cluster of Dask or Ray that is there, for `cluster.py`: one work, written to a zarr array.

python benchmarks/cluster_peers.py dask|cubed WORK FOLDER ADDRESS LIMIT TARGET

On Ray, dask.array runs by `ray.util.dask`, Ray's own scheduler for it, and cubed by its executor for Ray.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np


class File:
    """A .npy file as `dask.array.from_array` likes it: opened by the worker that reads."""

    def __init__(self, path: str) -> None:
        self.path = path
        array = np.load(path, mmap_mode="r")
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim

    def __getitem__(self, key: Any) -> Any:
        return np.array(np.load(self.path, mmap_mode="r")[key])


@contextlib.contextmanager
def on_engine(address: str) -> Iterator[None]:
    """Dask's collections run there."""
    if address.startswith("tcp"):
        from distributed import Client

        with Client(address):
            yield
        return
    import dask
    import ray
    from ray.util.dask import ray_dask_get

    ray.init(address=address.removeprefix("ray+"), log_to_driver=False, logging_level="ERROR")
    with dask.config.set(scheduler=ray_dask_get):
        yield


def by_dask(work: str, folder: str, address: str, limit: int, target: str) -> None:
    import dask
    import dask.array as da

    with on_engine(address), dask.config.set({"array.chunk-size": f"{limit // 12}B"}):
        tall, a, b = (da.from_array(File(f"{folder}/{name}.npy"), chunks="auto") for name in ("tall", "a", "b"))
        made = {
            "z-score": lambda: (tall - tall.mean(axis=0)) / tall.std(axis=0),
            "product": lambda: a @ b,
            "transpose": lambda: tall.T,
            "median": lambda: da.median(tall, axis=0),
        }.get(work)
        if made is None:
            raise SystemExit(f"dask.array has no {work}")
        made().rechunk().to_zarr(target, overwrite=True)


def cubed_executor(address: str) -> Any:
    if not address.startswith("tcp"):
        import ray
        from cubed.runtime.executors.ray import RayExecutor

        ray.init(address=address.removeprefix("ray+"), log_to_driver=False, logging_level="ERROR")
        return RayExecutor()
    from cubed.runtime.executors import dask as dask_executor
    from cubed.runtime.executors.dask import DaskExecutor

    dask_executor.check_runtime_memory = lambda spec, client: None  # it sees no workers in this version of distributed
    return DaskExecutor(compute_kwargs={"address": address})


def by_cubed(work: str, folder: str, address: str, limit: int, target: str) -> None:
    import cubed
    import cubed.array_api as cp

    executor = cubed_executor(address)
    spec = cubed.Spec(f"{folder}/cubed", allowed_mem=limit * 4 // 5, reserved_mem="150MB", executor=executor)
    side = int((limit // 24 / 4) ** 0.5)
    opened = [
        cubed.from_array(File(f"{folder}/{name}.npy"), chunks=chunks, spec=spec)
        for name, chunks in (("tall", (limit // 24 // 2048, 512)), ("a", (side, side)), ("b", (side, side)))
    ]
    tall, a, b = opened
    made = {
        "z-score": lambda: (tall - cp.mean(tall, axis=0)) / cp.std(tall, axis=0),
        "product": lambda: a @ b,
        "transpose": lambda: cp.matrix_transpose(tall),
    }.get(work)
    if made is None:
        raise SystemExit(f"cubed has no {work}")
    cubed.to_zarr(made(), target, executor=executor)


if __name__ == "__main__":
    peer, name, data, where, size, out = sys.argv[1:]
    {"dask": by_dask, "cubed": by_cubed}[peer](name, data, where, int(size), out)
