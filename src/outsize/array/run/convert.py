"""An array rewritten in another dtype or format, with what that cost, in one pass over the data.

In: whatever `open_store` opens, a dtype, a target. Out: a `Conversion`. The pass is the engine's own: it reads the
source through `MeasuredStore`, which casts and measures, and writes to the target's sink, or to one that keeps
nothing when the cost is only to be known. An interrupted conversion starts over, since numbers about half of the data
would mislead.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from dataclasses import replace
from typing import Any

import numpy as np

from outsize.array.graph.node import Source
from outsize.array.kernels.precision import MeasuredStore
from outsize.array.plan.prepare import prepare, run_prepared
from outsize.array.run.cluster import on_one_worker
from outsize.array.run.distribute import is_shared
from outsize.array.run.results import refuse_overlap, write_all
from outsize.array.store.base import Block, Buffer, Region, Sink, Store
from outsize.array.store.io.addresses import is_remote
from outsize.array.store.io.chunks import choose_chunks
from outsize.array.store.io.narrow_floats import stored_as
from outsize.array.store.io.partial import hold
from outsize.array.store.options import as_numpy, split_key
from outsize.array.store.registry import describe_sink, is_bfloat16, open_store
from outsize.core.errors import InputError
from outsize.core.events import Listener
from outsize.core.outcomes.conversion import Conversion, Precision
from outsize.core.units import KiB
from outsize.engine.cluster import current_cluster

_GRANULE = 32 * KiB
"""Bytes of the smallest piece that is measured by itself."""
_LARGEST = {"float16": 65504.0, "bfloat16": 3.39e38, "float32": 3.4028235e38}


def convert(
    source: Any, target: str | os.PathLike[str] | None, dtype: Any = None, *, budget: int | str | None = None,
    chunks: Any = None, compress: bool = True, listener: Listener | None = None, **options: Any,
) -> Conversion:  # fmt: skip
    """Rewrite an array as `dtype` (its own by default) into `target`; with `target=None` only measure what it would
    cost.

    `options` are those of `outsize.open`: key, shape, dtype of raw binary as `raw_dtype`, offset, order, missing.
    """
    if current_cluster() is not None:
        source, target = _reachable(source), None if target is None else _reachable(target)
        if target is not None and not _is_shared(source, target, chunks=chunks, compress=compress, **options):
            made: Conversion = on_one_worker(
                convert, budget, source, target, dtype, chunks=chunks, compress=compress, **options
            )
            return replace(made, notes=(*made.notes, "converted by one worker of the cluster"))
    store = open_store(source, **_raw(options))
    began = time.perf_counter()
    narrow = dtype is not None and is_bfloat16(dtype)
    wanted = np.dtype(np.float32) if narrow else store.dtype if dtype is None else as_numpy(dtype)
    _check_kinds(store, wanted)
    measured = MeasuredStore(store, wanted, bfloat16=narrow)
    root = Source(shape=measured.shape, dtype=measured.dtype, store=measured)
    path = "" if target is None else split_key(os.fspath(target), None)[0]
    if path:
        refuse_overlap(root, path)
    with hold(path) if path else contextlib.nullcontext():
        sink = Nowhere(store.shape, wanted) if target is None else describe_sink(
            target, store.shape, "bfloat16" if narrow else wanted, chunks=chunks, compress=compress
        )  # fmt: skip
        prepared = prepare(root, sink, budget, name=f"convert {measured.name}")
        run_prepared(prepared, lambda work: write_all(work, listener)[0].close())
    store.close()
    elements, (before, size) = math.prod(store.shape), stored_as(store)
    name = "bfloat16" if narrow else wanted.name
    cost = measured.meter.read()
    return Conversion(
        source=store.name, target=None if target is None else os.fspath(target), shape=store.shape,
        dtype_before=before, dtype_after=name, bytes_before=elements * size,
        bytes_after=elements * (2 if narrow else wanted.itemsize), precision=cost, budget=prepared.budget.host or 0,
        seconds=time.perf_counter() - began, notes=(*_notes(cost, name), *((store.note,) if store.note else ())),
        plan=prepared.plan,
    )  # fmt: skip


def _reachable(path: Any) -> str:
    """A path as workers have it."""
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"a {type(path).__name__} lies in this process, which no worker reaches: give a path")
    return str(path) if is_remote(str(path)) else os.path.abspath(path)


def _is_shared(source: str, target: str, *, chunks: Any, compress: bool, **options: Any) -> bool:
    """True where several workers may write the target at once."""
    with contextlib.closing(open_store(source, **_raw(options))) as store:
        return is_shared(describe_sink(target, store.shape, store.dtype, chunks=chunks, compress=compress))


def _raw(options: dict[str, Any]) -> dict[str, Any]:
    """The options of `outsize.open`."""
    return {"dtype" if name == "raw_dtype" else name: value for name, value in options.items()}


def _check_kinds(store: Store, wanted: np.dtype[Any]) -> None:
    for dtype in (store.dtype, wanted):
        if dtype.kind not in "biufc":
            raise InputError(f"{store.name}: {store.dtype} cannot be converted to {wanted}: both must be numbers")
    if store.dtype.kind == "c" and wanted.kind != "c":
        raise InputError(
            f"{store.name} is {store.dtype}; as {wanted} it would lose its imaginary part: take .real first"
        )


def _notes(cost: Precision, name: str) -> list[str]:
    notes = []
    if cost.overflowed and cost.largest is not None:
        limit = f", {name} ends at {_LARGEST[name]:.4g}" if name in _LARGEST else ""
        wider = name == "float16" and cost.largest < _LARGEST["bfloat16"]
        better = ": bfloat16 has the range of float32" if wider else ""
        notes.append(f"the largest magnitude is {cost.largest:.4g}{limit}{better}")
    if cost.flushed and cost.smallest is not None and name in _LARGEST:
        notes.append(f"the smallest magnitude above zero is {cost.smallest:.4g}: scaling the values up would keep it")
    return notes


class Nowhere(Sink):
    """A sink that keeps nothing: for passes whose only result is what they measured."""

    partial = ""
    shared = True

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.name, self.shape, self.dtype = "nowhere", shape, dtype
        self.granule = choose_chunks(shape, dtype.itemsize, _GRANULE)

    def extent(self, region: Region) -> int:
        return 0

    def write(self, region: Region, block: Block, buffer: Buffer) -> None:
        """Nothing."""

    def traffic(self, region: Region) -> int:
        return 0

    def commit(self) -> Store:
        """An array of nothing stands for it."""
        from outsize.array.store.formats.memory import MemoryStore

        return MemoryStore(np.empty(0, self.dtype), self.name)
