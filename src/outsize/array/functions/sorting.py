"""Sorting along an axis: lanes that are short in memory, longer ones in runs that are merged."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from outsize.array.api.lanes import in_lanes, turn_last
from outsize.array.api.lazy import Array
from outsize.array.functions.manipulation import flip
from outsize.array.graph import build as make
from outsize.array.graph.external_sort import places, sort_lanes
from outsize.array.store.base import Block
from outsize.array.tuning import current

__all__ = ["argsort", "sort"]

_LITTLE = 64 << 10
"""Bytes of NumPy's own."""


def _is_long(x: Array, axis: int) -> bool:
    return x.shape[axis] * x.dtype.itemsize > current().sorted_lane


def _lane(
    name: str, x: Array, axis: int, descending: bool, function: Callable[..., Block], dtype: Any, memory: float,
    beside: int = 0,
) -> Array:  # fmt: skip
    """A function of whole lanes along an axis; of longer ones, what `external` makes. `memory`, `beside`: as of a `Lane`."""
    if not _is_long(x, axis):
        named = f"{name}{' descending' if descending else ''}"
        return Array(
            in_lanes(
                x.node, axis, function, name=named, length=x.shape[axis], dtype=dtype, memory=memory, beside=beside
            )
        )  # fmt: skip
    node, _, back = turn_last(x.node, axis, always=True)
    native = make.cast(node, node.dtype.newbyteorder("="))
    lane = sort_lanes(native, carried=places(node.shape) if name == "argsort" else None)
    return Array(make.permute(lane, back) if back is not None else lane)


def sort(x: Array, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Array:
    """Sorted along an axis. A lane of up to 4 MiB is sorted in memory; a longer one is read twice and written twice."""
    place = make.axis_index(axis, x.ndim)
    function = functools.partial(_sorted, kind="stable" if stable else None, descending=descending)
    beside = 2 * x.shape[place] * x.dtype.itemsize + _LITTLE
    found = _lane("sort", x, place, descending, function, x.dtype.newbyteorder("="), 0.0, beside)
    return flip(found, axis=place) if descending and _is_long(x, place) else found


def _sorted(block: Block, axis: int, kind: Any, descending: bool) -> Block:
    block.sort(axis=axis, kind=kind)  # in place: NumPy takes a lane and what it is merged in
    return np.flip(block, axis) if descending else block


def argsort(x: Array, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Array:
    """Indices that sort along an axis, equal elements as they lie; lanes as for `sort`, with their indices beside them."""
    place = make.axis_index(axis, x.ndim)
    function = functools.partial(_argsorted, kind="stable" if stable else None, descending=descending)
    turn = descending and _is_long(x, place)
    memory = 2.5 + 3 * 8 / x.dtype.itemsize
    found = _lane("argsort", flip(x, axis=place) if turn else x, place, descending, function, np.int64, memory)
    return x.shape[place] - 1 - flip(found, axis=place) if turn else found


def _argsorted(block: Block, axis: int, kind: Any, descending: bool) -> Block:
    if not descending:
        return np.argsort(block, axis=axis, kind=kind)
    last = block.shape[axis] - 1
    found: Block = last - np.flip(np.argsort(np.flip(block, axis), axis=axis, kind=kind), axis)
    return found
