"""Sorting within lanes: along an axis whose lanes each fit in the budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from outsize.array import make
from outsize.array.array import Array
from outsize.array.barrier import Lane, Settled
from outsize.array.graph import Node
from outsize.array.store.base import Block

_LARGE = 32 << 20
"""Bytes from which lanes that lie across an array's rows are first turned along them, in a pass of its own."""


def _lane(name: str, x: Array, axis: int, function: Callable[[Block, int], Block], dtype: Any, memory: float) -> Array:
    """A function of whole lanes along an axis."""
    node: Node = x.node
    last = node.ndim - 1
    turn = axis != last and node.nbytes > _LARGE
    order = [*(a for a in range(node.ndim) if a != axis), axis]
    if turn:
        turned = make.permute(node, order)
        node, axis = Settled(shape=turned.shape, dtype=turned.dtype, inputs=(turned,)), last
    along = axis
    lane: Node = Lane(
        shape=node.shape, dtype=np.dtype(dtype), inputs=(node,), function=lambda block: function(block, along), name=name,
        axis=along, memory=memory,
    )  # fmt: skip
    return Array(make.permute(lane, [order.index(a) for a in range(node.ndim)]) if turn else lane)


def sort(x: Array, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Array:
    """Sorted along an axis; one lane along it has to fit in the budget."""
    place = make.axis_index(axis, x.ndim)
    kind: Any = "stable" if stable else None

    def function(block: Block, axis: int) -> Block:
        found = np.sort(block, axis=axis, kind=kind)
        return np.flip(found, axis) if descending else found

    return _lane(f"sort{' descending' if descending else ''}", x, place, function, x.dtype.newbyteorder("="), 2.5)


def argsort(x: Array, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Array:
    """Indices that sort along an axis; one lane along it has to fit in the budget."""
    place = make.axis_index(axis, x.ndim)
    kind: Any = "stable" if stable else None

    def function(block: Block, axis: int) -> Block:
        if not descending:
            return np.argsort(block, axis=axis, kind=kind)
        last = block.shape[axis] - 1
        found: Block = last - np.flip(np.argsort(np.flip(block, axis), axis=axis, kind=kind), axis)
        return found

    memory = 2.5 + 3 * 8 / x.dtype.itemsize
    return _lane(f"argsort{' descending' if descending else ''}", x, place, function, np.int64, memory)
