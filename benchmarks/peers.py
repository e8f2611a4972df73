"""Peers on one work, each as its own documentation advises: `python peers.py PEER WORK DATA OUT MEMORY`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from data import COSINE_ROWS
from lane_peers import RUNS, File


def _map(data: str, stem: str) -> Any:
    return np.load(f"{data}/{stem}.npy", mmap_mode="r")


def _new(path: str, shape: tuple[int, ...]) -> Any:
    return np.lib.format.open_memmap(path, "w+", "float32", shape)


def numpy_memmap(work: str, data: str, out: str, memory: str) -> None:
    """The plain expression on memory maps."""
    if work == "matmul":
        a, b = _map(data, "a"), _map(data, "b")
        np.matmul(a, b, out=_new(f"{out}/c.npy", (len(a), b.shape[1])))
        return
    x = _map(data, "tall")
    if work == "sum":
        print(x.sum(dtype="float64"))
    elif work == "expression":
        print(np.mean(np.sqrt(np.abs(np.sin(x) * x + 2))))
    elif work == "normalise":
        mean, std = x.mean(axis=0), x.std(axis=0)
        _new(f"{out}/z.npy", x.shape)[:] = (x - mean) / std
    elif work == "transpose":
        _new(f"{out}/t.npy", x.shape[::-1])[:] = x.T


def numpy_chunked(work: str, data: str, out: str, memory: str) -> None:
    """What a careful person writes by hand: memory maps and a loop over blocks."""
    if work == "matmul":
        a, b, edge = _map(data, "a"), _map(data, "b"), 4096
        c = _new(f"{out}/c.npy", (len(a), b.shape[1]))
        for i in range(0, len(a), edge):
            for j in range(0, b.shape[1], edge):
                total = np.zeros(c[i : i + edge, j : j + edge].shape, "float32")
                for k in range(0, len(b), edge):
                    total += np.array(a[i : i + edge, k : k + edge]) @ np.array(b[k : k + edge, j : j + edge])
                c[i : i + edge, j : j + edge] = total
        c.flush()
        return
    x, rows = _map(data, "tall"), 16384 if work in ROWWISE else 65536
    blocks = range(0, len(x), rows)
    if work in ROWWISE:
        _chunked_rows(work, x, rows, out)
        return
    if work == "sum":
        print(sum(x[i : i + rows].sum(dtype="float64") for i in blocks))
    elif work == "expression":
        print(
            sum(np.sqrt(np.abs(np.sin(b) * b + 2)).sum(dtype="float64") for b in (x[i : i + rows] for i in blocks))
            / x.size
        )
    elif work == "normalise":
        total, squares = np.zeros(x.shape[1]), np.zeros(x.shape[1])
        for i in blocks:
            block = x[i : i + rows].astype("float64")
            total += block.sum(axis=0)
            squares += (block * block).sum(axis=0)
        mean = total / len(x)
        std = np.sqrt(squares / len(x) - mean**2).astype("float32")
        z, mean = _new(f"{out}/z.npy", x.shape), mean.astype("float32")
        for i in blocks:
            z[i : i + rows] = (x[i : i + rows] - mean) / std
        z.flush()
    elif work == "transpose":
        t = _new(f"{out}/t.npy", x.shape[::-1])
        for i in blocks:
            t[:, i : i + rows] = x[i : i + rows].T
        t.flush()


ROWWISE = ("softmax", "layernorm", "cosine", "argmax", "three", "zscore-512", "zscore-2048", "zscore-8192")
"""Works on rows, and several results; a z-score is `normalise` under several limits."""


def _softmax(m: Any, x: Any) -> Any:
    grown = m.exp(x - x.max(axis=1, keepdims=True))
    return grown / grown.sum(axis=1, keepdims=True)


def _layernorm(m: Any, x: Any) -> Any:
    return (x - x.mean(axis=1, keepdims=True)) / m.sqrt(x.var(axis=1, keepdims=True) + np.float32(1e-5))


def _unit(m: Any, x: Any) -> Any:
    return x / m.sqrt((x * x).sum(axis=1, keepdims=True))


def _chunked_rows(work: str, x: Any, rows: int, out: str) -> None:
    """Blocks of rows that are read, computed and written by hand."""
    blocks = range(0, len(x), rows)
    if work.startswith("zscore"):
        total, squares = np.zeros(x.shape[1]), np.zeros(x.shape[1])
        for i in blocks:
            block = np.array(x[i : i + rows])
            total += block.sum(axis=0, dtype="float64")
            squares += np.einsum("ij,ij->j", block, block, dtype="float64")
        mean = total / len(x)
        std = np.sqrt(squares / len(x) - mean**2).astype("float32")
        z, mean = _new(f"{out}/z.npy", x.shape), mean.astype("float32")
        for i in blocks:
            z[i : i + rows] = (x[i : i + rows] - mean) / std
        z.flush()
    elif work in ("softmax", "layernorm"):
        made = _new(f"{out}/{work[0]}.npy", x.shape)
        for i in blocks:
            made[i : i + rows] = (_softmax if work == "softmax" else _layernorm)(np, np.array(x[i : i + rows]))
        made.flush()
    elif work == "cosine":
        x, rows = x[:COSINE_ROWS], 4096
        other = _unit(np, np.array(x[:4096])).T.copy()
        made = _new(f"{out}/c.npy", (len(x), 4096))
        for i in range(0, len(x), rows):
            made[i : i + rows] = _unit(np, np.array(x[i : i + rows])) @ other
        made.flush()
    elif work == "argmax":
        np.save(f"{out}/i.npy", np.concatenate([x[i : i + rows].argmax(axis=1) for i in blocks]))
    elif work == "three":
        total, largest, roots = np.zeros(x.shape[1]), [], _new(f"{out}/q.npy", x.shape)
        for i in blocks:
            block = np.array(x[i : i + rows])
            total += block.sum(axis=0, dtype="float64")
            largest.append(block.max(axis=1))
            np.sqrt(block, out=roots[i : i + rows])
        np.save(f"{out}/m.npy", (total / len(x)).astype("float32"))
        np.save(f"{out}/r.npy", np.concatenate(largest))
        roots.flush()


def dask(work: str, data: str, out: str, memory: str) -> None:
    """dask.array on threads."""
    import dask as library
    import dask.array as da

    library.config.set(scheduler="threads", num_workers=2)
    if work == "matmul":
        a, b = (da.from_array(File(f"{data}/{n}.npy"), chunks=(2048, 2048)) for n in "ab")
        (a @ b).store(File(f"{out}/c.npy", (a.shape[0], b.shape[1])), lock=False)
        return
    x = da.from_array(File(f"{data}/tall.npy"), chunks=(16384, 512))
    if work == "sum":
        print(x.sum(dtype="float64").compute())
    elif work == "expression":
        print(da.sqrt(da.abs(da.sin(x) * x + 2)).mean().compute())
    elif work == "normalise":
        ((x - x.mean(axis=0)) / x.std(axis=0)).store(File(f"{out}/z.npy", x.shape), lock=False)
    elif work == "transpose":
        x.T.store(File(f"{out}/t.npy", x.shape[::-1]), lock=False)
    elif work.startswith("zscore"):
        ((x - x.mean(axis=0)) / x.std(axis=0)).store(File(f"{out}/z.npy", x.shape), lock=False)
    elif work in ("softmax", "layernorm"):
        made = (_softmax if work == "softmax" else _layernorm)(da, x)
        made.store(File(f"{out}/{work[0]}.npy", x.shape), lock=False)
    elif work == "cosine":
        unit = _unit(da, x[:COSINE_ROWS].rechunk((4096, 512)))
        (unit @ unit[:4096].T).store(File(f"{out}/c.npy", (COSINE_ROWS, 4096)), lock=False)
    elif work == "argmax":
        np.save(f"{out}/i.npy", x.argmax(axis=1).compute())
    elif work == "three":
        targets = [
            File(f"{out}/{name}.npy", shape) for name, shape in (("m", (512,)), ("r", x.shape[:1]), ("q", x.shape))
        ]
        da.store([x.mean(axis=0), x.max(axis=1), da.sqrt(x)], targets, lock=False)


def cubed(work: str, data: str, out: str, memory: str) -> None:
    """cubed on threads; its results are zarr."""
    import cubed as library
    import cubed.array_api as xp
    from cubed.runtime.create import create_executor

    spec = library.Spec(work_dir=f"{out}/work", allowed_mem=memory, reserved_mem="100MB")
    threads = create_executor("threads", {"max_workers": 2})

    def load(stem: str, chunks: tuple[int, int]) -> Any:
        return library.from_array(_map(data, stem), chunks=chunks, spec=spec, asarray=False)

    if work == "matmul":
        product = load("a", (2048, 2048)) @ load("b", (2048, 2048))
        library.to_zarr(product, f"{out}/c.zarr", executor=threads)
        return
    x = load("tall", (8192 if work == "normalise" else 16384, 512))
    if work == "sum":
        print(xp.sum(x, dtype=xp.float64).compute(executor=threads))
    elif work == "expression":
        two = xp.asarray(2.0, dtype=xp.float32, spec=spec)
        print(xp.mean(xp.sqrt(xp.abs(xp.sin(x) * x + two))).compute(executor=threads))
    elif work == "normalise":
        library.to_zarr((x - xp.mean(x, axis=0)) / xp.std(x, axis=0), f"{out}/z.zarr", executor=threads)
    elif work == "transpose":
        library.to_zarr(xp.permute_dims(x, (1, 0)), f"{out}/t.zarr", executor=threads)
    elif work.startswith("zscore"):
        library.to_zarr((x - xp.mean(x, axis=0)) / xp.std(x, axis=0), f"{out}/z.zarr", executor=threads)
    elif work == "softmax":
        grown = xp.exp(x - xp.max(x, axis=1, keepdims=True))
        library.to_zarr(grown / xp.sum(grown, axis=1, keepdims=True), f"{out}/s.zarr", executor=threads)
    elif work == "layernorm":
        mean, spread = (f(x, axis=1, keepdims=True) for f in (xp.mean, xp.var))
        little = xp.asarray(1e-5, dtype=xp.float32, spec=spec)
        library.to_zarr((x - mean) / xp.sqrt(spread + little), f"{out}/l.zarr", executor=threads)
    elif work == "cosine":
        x = load("tall", (4096, 512))[:COSINE_ROWS]
        unit = x / xp.sqrt(xp.sum(x * x, axis=1, keepdims=True))
        library.to_zarr(unit @ xp.permute_dims(unit[:4096], (1, 0)), f"{out}/c.zarr", executor=threads)
    elif work == "argmax":
        library.to_zarr(xp.argmax(x, axis=1), f"{out}/i.zarr", executor=threads)
    elif work == "three":
        results = [xp.mean(x, axis=0), xp.max(x, axis=1), xp.sqrt(x)]
        library.store(results, [f"{out}/{name}.zarr" for name in "mrq"], executor=threads)


def blosc2(work: str, data: str, out: str, memory: str) -> None:
    """blosc2's lazy expressions on its own files."""
    import blosc2 as library

    def load(stem: str) -> Any:
        return library.open(f"{data}/blosc2/{stem}.b2nd", mode="r")

    if work == "matmul":
        library.matmul(load("a"), load("b"), urlpath=f"{out}/c.b2nd", mode="w")
        return
    x = load("tall")
    if work == "sum":
        print(library.sum(x, dtype=np.float64))
    elif work == "expression":
        print(library.mean(library.sqrt(library.abs(library.sin(x) * x + 2))))
    elif work == "normalise":
        z = (x - library.mean(x, axis=0)) / library.std(x, axis=0)
        z.compute(urlpath=f"{out}/z.b2nd", mode="w")
    elif work == "transpose":
        library.permute_dims(x, (1, 0), urlpath=f"{out}/t.b2nd", mode="w")
    elif work.startswith("zscore"):
        ((x - library.mean(x, axis=0)) / library.std(x, axis=0)).compute(urlpath=f"{out}/z.b2nd", mode="w")
    elif work in ("softmax", "layernorm"):
        made = _blosc2_softmax(library, x) if work == "softmax" else _blosc2_layernorm(library, x)
        made.compute(urlpath=f"{out}/{work[0]}.b2nd", mode="w")
    elif work == "cosine":
        x = x[:COSINE_ROWS]
        unit = x / np.sqrt((x * x).sum(axis=1, keepdims=True))
        library.matmul(
            library.asarray(unit), library.asarray(unit[:4096].T.copy()), urlpath=f"{out}/c.b2nd", mode="w"
        )  # fmt: skip
    elif work == "argmax":
        np.save(f"{out}/i.npy", library.argmax(x, axis=1)[:])
    elif work == "three":
        np.save(f"{out}/m.npy", library.mean(x, axis=0)[:])
        np.save(f"{out}/r.npy", library.max(x, axis=1)[:])
        library.sqrt(x).compute(urlpath=f"{out}/q.b2nd", mode="w")


def _blosc2_softmax(library: Any, x: Any) -> Any:
    grown = library.exp(x - library.max(x, axis=1, keepdims=True))
    return grown / library.sum(grown, axis=1, keepdims=True)


def _blosc2_layernorm(library: Any, x: Any) -> Any:
    mean, spread = (f(x, axis=1, keepdims=True) for f in (library.mean, library.var))
    return (x - mean) / library.sqrt(spread + 1e-5)


PEERS: dict[str, Callable[[str, str, str, str], None]] = {
    "memmap": numpy_memmap, "chunked": numpy_chunked, "dask": dask, "cubed": cubed, "blosc2": blosc2,
}  # fmt: skip
"""Name -> the peer, on works that are read region by region."""
BASIC = ("sum", "expression", "normalise", "matmul", "transpose")
CAN: dict[str, tuple[str, ...]] = {
    peer: (
        *(BASIC if peer in PEERS else ()),
        *(ROWWISE if peer in PEERS and peer != "memmap" else ()),
        *RUNS.get(peer, ()),
    )
    for peer in (*PEERS, *RUNS)
}
"""Peer -> works that it is written for."""

if __name__ == "__main__":
    peer, work, *rest = sys.argv[1:6]
    if work in RUNS.get(peer, ()):
        RUNS[peer][work](*rest)
    elif work in CAN[peer]:
        PEERS[peer](work, *rest)
    else:
        sys.exit(f"{peer} is not written for {work}")
