"""Arrays to be filled: in memory, page-locked memory, or a file, open for writing in place."""

from __future__ import annotations

import math
import os
import weakref
from typing import Any

import numpy as np

from outsize.array.api.lazy import Array
from outsize.array.graph import build as make
from outsize.array.plan.prepare import resolve_budget
from outsize.array.run.now import remove, scratch_file
from outsize.array.store.base import block_in
from outsize.array.store.formats.memory import MemoryStore
from outsize.array.store.options import as_numpy
from outsize.array.store.registry import create_sink, open_store
from outsize.core.errors import BudgetError
from outsize.core.spec import parse_shape
from outsize.core.units import format_bytes
from outsize.engine.pinned import lock_memory
from outsize.engine.pool import make_buffer


def empty(
    shape: Any, dtype: Any = "float32", path: str | os.PathLike[str] | None = None, *, pinned: bool = False
) -> Array:
    """A new array, open for writing: `x[a:b] = ...`, or `x.tiles(write=True)`.

    With a path it is that file. Without one it lies in memory where half of the budget holds it, else in a scratch file
    that goes with the array. `pinned=True` locks its memory, so that a device reads and writes it where it lies.

    >>> x = outsize.empty((3075200, 512), "float32")
    """
    lengths, element = parse_shape(shape), as_numpy(dtype)
    size = math.prod(lengths) * element.itemsize
    if path is not None:
        return _in_file(os.fspath(path), lengths, element)
    budget = resolve_budget(None)
    if size <= (budget.host or 0) // 2 or pinned:
        return _in_memory(lengths, element, size, budget.host or 0, pinned)
    name = scratch_file(budget.scratch)
    made = _in_file(name, lengths, element)
    weakref.finalize(made.node, remove, name)
    return made


def _in_file(path: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    create_sink(path, shape, dtype).commit().close()
    return Array(make.source(open_store(path, mode="r+")))


def _in_memory(shape: tuple[int, ...], dtype: np.dtype[Any], size: int, budget: int, pinned: bool) -> Array:
    if size > budget:
        raise BudgetError(
            f"{format_bytes(size)} of page-locked memory are more than the budget of {format_bytes(budget)}",
            needed=size, budget=budget, culprit="outsize.empty",
        )  # fmt: skip
    memory = lock_memory(size) if pinned else None
    buffer = make_buffer(size) if memory is None else memory.array
    store = MemoryStore(block_in(buffer, shape, dtype), writable=True)
    if memory is not None:
        weakref.finalize(store, memory.close)
    return Array(make.source(store))
