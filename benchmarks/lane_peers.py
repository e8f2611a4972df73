"""Peers on works that need all elements at once, whole lanes or the factors of a matrix.

In: the folder of the inputs, an empty folder for results. Each is written as its library's own documentation advises, with the
files in the form that it reads fastest, two threads and the same limit. A peer that has no such function has no row. Some of
these cannot stay inside the limit, because their library holds all elements at once; they are run all the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from data import SORTED_ROWS, part

Run = Callable[[str, str, str], None]
"""(folder of the inputs, folder for results, memory as in "750MB")."""
RANK, MORE, ITERATIONS = 20, 10, 2
"""Of the randomised SVD: as our own work has them."""


def _tall(data: str) -> Any:
    return np.load(f"{data}/tall.npy", mmap_mode="r")


def _rows(data: str) -> Any:
    """The rows that are sorted or transformed."""
    x = _tall(data)
    return x[: part(SORTED_ROWS, len(x))]


def _new(path: str, shape: tuple[int, ...], dtype: Any = "float32") -> Any:
    return np.lib.format.open_memmap(path, "w+", dtype, shape)


def _in_two(work: Callable[[int], Any], starts: Any) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, starts))


# Memory maps and NumPy's own functions


def memmap_sort(data: str, out: str, memory: str) -> None:
    source = _rows(data).reshape(-1)
    made = _new(f"{out}/s.npy", source.shape)
    made[:] = source
    made.sort()
    made.flush()


def memmap_median(data: str, out: str, memory: str) -> None:
    print(np.median(_rows(data)))


def memmap_unique(data: str, out: str, memory: str) -> None:
    np.save(f"{out}/u.npy", np.unique(np.load(f"{data}/whole.npy", mmap_mode="r")))


def memmap_rfft(data: str, out: str, memory: str) -> None:
    np.save(f"{out}/f.npy", np.fft.rfft(_rows(data), axis=0))


def memmap_qr(data: str, out: str, memory: str) -> None:
    q, r = np.linalg.qr(_tall(data))
    np.save(f"{out}/q.npy", q)
    np.save(f"{out}/r.npy", r)


# What a careful person writes by hand

_PIECE = 1 << 23
"""Elements of a table that are written at a time."""


def _block(memory: str) -> int:
    """Elements that are read at a time, in two threads: what is made of them takes some twenty times their bytes."""
    return 1 << max(16, (int(memory.removesuffix("MB")) * 10**6 // 240).bit_length() - 1)


def chunked_sort(data: str, out: str, memory: str) -> None:
    """Sorted runs, then ranges of values gathered from all runs, cut where a sample says."""
    block_size = _block(memory)
    source = _rows(data).reshape(-1)
    starts = range(0, source.size, block_size)
    runs = _new(f"{out}/runs.npy", source.shape)

    def run(start: int) -> Any:
        block = np.array(source[start : start + block_size])
        block.sort()
        runs[start : start + block_size] = block
        return block[:: max(1, block_size >> 12)]

    sample = np.sort(np.concatenate(_in_two(run, starts)))
    edges = sample[:: max(1, len(sample) // len(starts))][1:]
    cuts = [
        [0, *np.searchsorted(runs[start : start + block_size], edges), min(block_size, source.size - start)]
        for start in starts
    ]
    places = np.concatenate([[0], np.cumsum(np.diff(np.array(cuts), axis=1).sum(axis=0))])
    made = _new(f"{out}/s.npy", source.shape)

    def merge(number: int) -> None:
        parts = [runs[start + cut[number] : start + cut[number + 1]] for start, cut in zip(starts, cuts, strict=True)]
        block = np.concatenate(parts)
        block.sort()
        made[places[number] : places[number + 1]] = block

    _in_two(merge, range(len(edges) + 1))
    made.flush()


def chunked_median(data: str, out: str, memory: str) -> None:
    """Leading bits are counted, then the few elements in the middle are looked at. The numbers are known to be positive."""
    block_size = _block(memory)
    source = _rows(data).reshape(-1)

    def count(start: int) -> Any:
        bits = np.array(source[start : start + block_size]).view(np.uint32)
        return np.bincount((bits >> 16).astype(np.intp), minlength=1 << 16)

    before = np.cumsum(np.sum(_in_two(count, range(0, source.size, block_size)), axis=0))
    ranks = np.array([(source.size - 1) // 2, source.size // 2])
    low, high = np.searchsorted(before, ranks, side="right")

    def pick(start: int) -> Any:
        block = np.array(source[start : start + block_size])
        leading = block.view(np.uint32) >> 16
        return block[(leading >= low) & (leading <= high)]

    middle = np.sort(np.concatenate(_in_two(pick, range(0, source.size, block_size))))
    print(middle[ranks - (before[low - 1] if low else 0)].mean())


def chunked_unique(data: str, out: str, memory: str) -> None:
    """A mark for every number that may be there."""
    block_size = _block(memory)
    source = np.load(f"{data}/whole.npy", mmap_mode="r")
    starts = range(0, source.size, block_size)

    def ends(start: int) -> tuple[int, int]:
        block = np.array(source[start : start + block_size])
        return int(block.min()), int(block.max())

    found = _in_two(ends, starts)
    first, last = min(low for low, _ in found), max(high for _, high in found)
    marks = np.zeros(last - first + 1, bool)

    def mark(start: int) -> None:
        marks[source[start : start + block_size] - first] = True

    _in_two(mark, starts)
    made, place = _new(f"{out}/u.npy", (int(np.count_nonzero(marks)),), source.dtype), 0
    for low in range(0, marks.size, block_size):
        there = np.flatnonzero(marks[low : low + block_size]) + (low + first)
        made[place : place + len(there)] = there
        place += len(there)
    made.flush()


def chunked_rfft(data: str, out: str, memory: str) -> None:
    """Turned, transformed along its rows, turned back: three passes in long runs."""
    x = _rows(data)
    length = len(x) // 2 + 1
    turned = _new(f"{out}/turned.npy", x.shape[::-1])
    waves = _new(f"{out}/waves.npy", (x.shape[1], length), "complex64")
    made = _new(f"{out}/f.npy", (length, x.shape[1]), "complex64")

    def turn(start: int) -> None:
        turned[:, start : start + 32768] = x[start : start + 32768].T

    def transform(start: int) -> None:
        waves[start : start + 8] = np.fft.rfft(np.array(turned[start : start + 8]), axis=1)

    def back(start: int) -> None:
        made[start : start + 16384] = waves[:, start : start + 16384].T

    _in_two(turn, range(0, len(x), 32768))
    _in_two(transform, range(0, x.shape[1], 8))
    _in_two(back, range(0, length, 16384))
    made.flush()


def chunked_rsvd(data: str, out: str, memory: str) -> None:
    """Powers of x.T @ x on a few columns, each in one pass, then x in that basis."""
    x, rows = _tall(data), 16384
    basis = np.random.default_rng(0).normal(size=(x.shape[1], RANK + MORE)).astype("float32")
    for _ in range(ITERATIONS + 1):
        total = np.zeros(basis.shape)
        for start in range(0, len(x), rows):
            block = np.array(x[start : start + rows])
            total += block.T @ (block @ basis)
        basis = np.linalg.qr(total)[0].astype("float32")
    projected, gram = np.empty((len(x), basis.shape[1]), "float32"), np.zeros((basis.shape[1],) * 2)
    for start in range(0, len(x), rows):
        block = projected[start : start + rows] = np.array(x[start : start + rows]) @ basis
        gram += block.T @ block
    squares, right = np.linalg.eigh(gram)
    order = np.argsort(squares)[::-1][:RANK]
    s = np.sqrt(squares[order])
    np.save(f"{out}/s.npy", s.astype("float32"))
    np.save(f"{out}/v.npy", (basis @ right[:, order]).T.astype("float32"))
    u, turn = _new(f"{out}/u.npy", (len(x), RANK)), (right[:, order] / s).astype("float32")
    for start in range(0, len(x), rows):
        u[start : start + rows] = projected[start : start + rows] @ turn
    u.flush()


def chunked_qr(data: str, out: str, memory: str) -> None:
    """Blocks are factored, then their triangles (Demmel and others, 2012)."""
    x, rows = _tall(data), max(2048, _block(memory) // 256)
    starts = range(0, len(x), rows)
    made, triangles = _new(f"{out}/q.npy", x.shape), []
    for start in starts:
        made[start : start + rows], r = np.linalg.qr(np.array(x[start : start + rows]))
        triangles.append(r)
    heights = np.cumsum([len(r) for r in triangles])
    turns, r = np.linalg.qr(np.concatenate(triangles))
    for start, turn in zip(starts, np.split(turns, heights[:-1]), strict=True):
        made[start : start + rows] = np.array(made[start : start + rows, : len(turn)]) @ turn
    made.flush()
    np.save(f"{out}/r.npy", r)


# dask


class File:
    """A .npy file that dask reads a chunk at a time (it would copy a memory map whole) and stores into."""

    def __init__(self, path: str, shape: tuple[int, ...] | None = None, dtype: Any = "float32") -> None:
        self.path = path
        self.map = np.load(path, mmap_mode="r") if shape is None else _new(path, shape, dtype)
        self.shape, self.dtype, self.ndim = self.map.shape, self.map.dtype, self.map.ndim

    def __getitem__(self, key: Any) -> Any:
        return np.array(self.map[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.map[key] = value


def _dask(data: str, stem: str, chunks: Any) -> Any:
    import dask as library
    import dask.array as da

    library.config.set(scheduler="threads", num_workers=2)
    return da.from_array(File(f"{data}/{stem}.npy"), chunks=chunks)


def dask_sort(data: str, out: str, memory: str) -> None:
    """dask.array does not sort; dask.dataframe does, from and to Parquet."""
    import dask as library
    import dask.dataframe as dd

    Path(out, "tmp").mkdir()
    library.config.set(scheduler="threads", num_workers=2, temporary_directory=f"{out}/tmp")
    table = dd.read_parquet(f"{data}/parquet/sorted", split_row_groups=True)
    table.sort_values("v").to_parquet(f"{out}/s.parquet", compression=None)


def dask_median(data: str, out: str, memory: str) -> None:
    import dask.array as da

    x = _dask(data, "tall", (16384, 512))
    print(da.median(x[: part(SORTED_ROWS, len(x))].reshape(-1), axis=0).compute())


def dask_unique(data: str, out: str, memory: str) -> None:
    import dask.array as da

    np.save(f"{out}/u.npy", da.unique(_dask(data, "whole", _block(memory))).compute())


def dask_rfft(data: str, out: str, memory: str) -> None:
    """Its transform wants whole lanes: chunks of a few columns."""
    import dask.array as da

    x = _dask(data, "tall", (part(SORTED_ROWS, len(_tall(data))), 32))[: len(_rows(data))]
    made = da.fft.rfft(x, axis=0).astype("complex64")
    made.store(File(f"{out}/f.npy", made.shape, "complex64"), lock=False)


def dask_rsvd(data: str, out: str, memory: str) -> None:
    import dask.array as da

    x = _dask(data, "tall", (16384, 512))
    u, s, v = da.linalg.svd_compressed(x, RANK, n_power_iter=ITERATIONS, n_oversamples=MORE, seed=0)
    targets = [File(f"{out}/{name}.npy", each.shape) for name, each in (("u", u), ("s", s), ("v", v))]
    da.store([u, s, v], targets, lock=False)


def dask_qr(data: str, out: str, memory: str) -> None:
    import dask.array as da

    q, r = da.linalg.qr(_dask(data, "tall", (16384, 512)))
    da.store([q, r], [File(f"{out}/{name}.npy", each.shape) for name, each in (("q", q), ("r", r))], lock=False)


# cubed, whose results are zarr


def _cubed(data: str, out: str, memory: str, chunks: tuple[int, int]) -> tuple[Any, Any]:
    """(the array, what its work is run by)."""
    import cubed as library
    from cubed.runtime.create import create_executor

    spec = library.Spec(work_dir=f"{out}/work", allowed_mem=memory, reserved_mem="100MB")
    x = library.from_array(_tall(data), chunks=chunks, spec=spec, asarray=False)
    return x, create_executor("threads", {"max_workers": 2})


def cubed_rfft(data: str, out: str, memory: str) -> None:
    """Rechunked to whole lanes, which it does inside its memory, then a block at a time."""
    import cubed as library

    x, threads = _cubed(data, out, memory, (max(1024, _block(memory) // 256), 512))
    x = x[: part(SORTED_ROWS, len(_tall(data)))].rechunk((part(SORTED_ROWS, len(_tall(data))), 8))
    length = x.shape[0] // 2 + 1
    transform = functools.partial(np.fft.rfft, axis=0)
    chunks = ((length,), x.chunks[1])
    made = library.map_blocks(lambda block: transform(block).astype("complex64"), x, dtype="complex64", chunks=chunks)
    library.to_zarr(made, f"{out}/f.zarr", executor=threads)


def _balanced(data: str) -> int:
    """Rows of equal chunks that take about as much as the triangles of all chunks."""
    rows = len(_tall(data))
    return -(-rows // max(1, round((rows / 512) ** 0.5)))


def cubed_rsvd(data: str, out: str, memory: str) -> None:
    """It has no randomised SVD: all singular values of the tall matrix, of which the first are kept."""
    import cubed as library
    import cubed.array_api as xp

    x, threads = _cubed(data, out, memory, (_balanced(data), 512))
    u, s, v = xp.linalg.svd(x, full_matrices=False)
    targets = [f"{out}/{name}.zarr" for name in "usv"]
    library.store([u[:, :RANK], s[:RANK], v[:RANK]], targets, executor=threads)


def cubed_qr(data: str, out: str, memory: str) -> None:
    import cubed as library
    import cubed.array_api as xp

    x, threads = _cubed(data, out, memory, (_balanced(data), 512))
    q, r = xp.linalg.qr(x)
    library.store([q, r], [f"{out}/q.zarr", f"{out}/r.zarr"], executor=threads)


# DuckDB, whose files are tables


def _duckdb(data: str, out: str, memory: str) -> Any:
    import duckdb

    database = duckdb.connect(f"{data}/numbers.duckdb", read_only=True)
    database.execute(f"SET memory_limit='{memory}'; SET threads=2; SET temp_directory='{out}/tmp'")
    database.execute("SET preserve_insertion_order=false; SET enable_progress_bar=false")
    return database


def _to_parquet(query: str, target: str) -> str:
    return f"COPY ({query}) TO '{target}' (FORMAT parquet, COMPRESSION uncompressed)"


def duckdb_sort(data: str, out: str, memory: str) -> None:
    _duckdb(data, out, memory).execute(_to_parquet("SELECT v FROM tall ORDER BY v", f"{out}/s.parquet"))


def duckdb_median(data: str, out: str, memory: str) -> None:
    """`median(v)` holds every value; a sorted query goes to disk where memory ends."""
    import duckdb

    database = _duckdb(data, out, memory)
    try:
        print(database.execute("SELECT median(v) FROM tall").fetchone()[0])
    except duckdb.OutOfMemoryException:
        size = database.execute("SELECT count(*) FROM tall").fetchone()[0]
        first, number = (size - 1) // 2, 2 - size % 2
        query = f"SELECT avg(v) FROM (SELECT v FROM tall ORDER BY v LIMIT {number} OFFSET {first})"
        print(database.execute(query).fetchone()[0])


def duckdb_unique(data: str, out: str, memory: str) -> None:
    query = "SELECT DISTINCT v FROM whole ORDER BY v"
    _duckdb(data, out, memory).execute(_to_parquet(query, f"{out}/u.parquet"))


def make_tables(data: Path) -> None:
    """The same numbers as tables: DuckDB's own file, and Parquet for dask's."""
    import duckdb
    import pyarrow as pa
    import pyarrow.parquet as pq

    database, folder = data / "numbers.duckdb", data / "parquet" / "sorted"
    sources = {"tall": _rows(str(data)).reshape(-1), "whole": np.load(data / "whole.npy", mmap_mode="r")}
    if not database.exists():
        new = database.with_suffix(".part")
        new.unlink(missing_ok=True)
        with duckdb.connect(str(new)) as made:
            for name, source in sources.items():
                made.execute(f"CREATE TABLE {name} (v {'FLOAT' if name == 'tall' else 'INTEGER'})")
                for start in range(0, source.size, _PIECE):
                    made.register("piece", pa.table({"v": np.array(source[start : start + _PIECE])}))
                    made.execute(f"INSERT INTO {name} SELECT v FROM piece")
        new.rename(database)
    if not folder.exists():
        new = folder.with_suffix(".part")
        new.mkdir(parents=True, exist_ok=True)
        for number, start in enumerate(range(0, sources["tall"].size, _PIECE)):
            piece = pa.table({"v": np.array(sources["tall"][start : start + _PIECE])})
            pq.write_table(piece, new / f"{number:04}.parquet", compression="none")
        new.rename(folder)


RUNS: dict[str, dict[str, Run]] = {
    "memmap": {
        "sort": memmap_sort, "median": memmap_median, "unique": memmap_unique, "rfft": memmap_rfft, "qr": memmap_qr,
    },
    "chunked": {
        "sort": chunked_sort, "median": chunked_median, "unique": chunked_unique, "rfft": chunked_rfft, "rsvd": chunked_rsvd,
        "qr": chunked_qr,
    },
    "dask": {
        "sort": dask_sort, "median": dask_median, "unique": dask_unique, "rfft": dask_rfft, "rsvd": dask_rsvd, "qr": dask_qr,
    },
    "cubed": {"rfft": cubed_rfft, "rsvd": cubed_rsvd, "qr": cubed_qr},
    "duckdb": {"sort": duckdb_sort, "median": duckdb_median, "unique": duckdb_unique},
}  # fmt: skip
"""Peer -> work -> how it does it. blosc2 has none of these for files: its sort takes structured arrays, its QR and SVD are not
written."""
