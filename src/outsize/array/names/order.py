"""Sorting within lanes: along an axis whose lanes each fit in the budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from outsize.array import make
from outsize.array.array import Array
from outsize.array.barrier import Lane
from outsize.array.graph import Node
from outsize.array.store.base import Block


def _lane(name: str, x: Array, axis: int, function: Callable[[Block], Block], dtype: Any, memory: float) -> Array:
    place = make.axis_index(axis, x.ndim)
    node: Node = x.node
    return Array(
        Lane(shape=node.shape, dtype=np.dtype(dtype), inputs=(node,), function=function, name=name, axis=place,
             memory=memory)
    )  # fmt: skip


def sort(x: Array, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Array:
    """Sorted along an axis; one lane along it has to fit in the budget."""
    place = make.axis_index(axis, x.ndim)
    kind: Any = "stable" if stable else None

    def function(block: Block) -> Block:
        found = np.sort(block, axis=place, kind=kind)
        return np.flip(found, place) if descending else found

    return _lane(f"sort{' descending' if descending else ''}", x, place, function, x.dtype.newbyteorder("="), 2.5)


def argsort(x: Array, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Array:
    """Indices that sort along an axis; one lane along it has to fit in the budget."""
    place = make.axis_index(axis, x.ndim)
    kind: Any = "stable" if stable else None

    def function(block: Block) -> Block:
        if not descending:
            return np.argsort(block, axis=place, kind=kind)
        last = block.shape[place] - 1
        found: Block = last - np.flip(np.argsort(np.flip(block, place), axis=place, kind=kind), place)
        return found

    memory = 2.5 + 3 * 8 / x.dtype.itemsize
    return _lane(f"argsort{' descending' if descending else ''}", x, place, function, np.int64, memory)
