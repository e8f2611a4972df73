"""Sets and places: what there is, how often, and where. Their lengths depend on data, so the counting runs at the call,
inside the current budget; what they return is lazy again."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from outsize.array.api.elementwise import asarray
from outsize.array.api.lazy import Array, as_indices
from outsize.array.api.manipulation import concat, stack
from outsize.array.api.sorting import argsort, sort
from outsize.array.graph import build as make
from outsize.array.graph.external_sort import sort_lanes
from outsize.array.graph.filter import Search, flat_mask, keep
from outsize.array.graph.node import Node, Range
from outsize.array.run.count import count
from outsize.array.run.now import make_now
from outsize.core.errors import InputError

__all__ = [
    "argwhere", "nonzero", "searchsorted", "unique", "unique_all", "unique_counts", "unique_inverse",
    "unique_values",
]  # fmt: skip

_PIECE = 1 << 18
"""Elements of a sorted array that are searched at a time."""


class _Counts(NamedTuple):
    values: Array
    counts: Array


class _Inverse(NamedTuple):
    values: Array
    inverse_indices: Array


class _All(NamedTuple):
    values: Array
    indices: Array
    inverse_indices: Array
    counts: Array


def _places(length: int) -> Node:
    return Range(shape=(length,), dtype=np.dtype(np.int64), start=0, step=1)


def nonzero(x: Any, /) -> tuple[Array, ...]:
    """The indices of all elements that are not zero, an array for each axis. They are counted at the call, in one pass."""
    array = asarray(x)
    if not array.ndim:
        raise InputError("nonzero needs at least one dimension: a 0-d array is zero or it is not")
    mask = flat_mask(array.node)
    flat = Array(keep(_places(array.size), mask, count(mask)))
    found = []
    for axis, length in enumerate(array.shape):
        inner = math.prod(array.shape[axis + 1 :])
        found.append(flat // max(1, inner) % max(1, length) if axis else flat // max(1, inner))
    return tuple(found)


def argwhere(x: Any, /) -> Array:
    """The indices of all elements that are not zero, a row for each."""
    return stack(list(nonzero(x)), axis=1)


class _Sorted:
    """The elements in order, which of them are the first of their kind, and how many these are."""

    def __init__(self, x: Any, equal_nan: bool, *, order: bool) -> None:
        flat = Array(make.reshape(asarray(x).node, (-1,)))
        self.length = flat.size
        self.order = (
            Array(make_now(argsort(flat).node)) if order else None
        )  # first: it needs the largest budget, and says so
        self.values = Array(make_now(sort(flat).node))
        self.first = _first(self.values, equal_nan)
        self.ends = count(self.first.node)

    def firsts(self, of: Node) -> Array:
        return Array(keep(of, self.first.node, self.ends))

    def counts(self) -> Array:
        start = self.firsts(_places(self.length))
        return concat([start, asarray(np.array([self.length]))])[1:] - start if self.length else start

    def inverse(self, shape: tuple[int, ...]) -> Array:
        """The number of each element's kind, brought back to where the elements were."""
        assert self.order is not None
        if not self.length:
            return Array(make.reshape(_places(0), shape))
        kind = Array(make.scan(np.add, self.first.astype(np.int64).node, 0)) - 1
        return Array(make.reshape(sort_lanes(self.order.node, carried=kind.node), shape))


def _first(ordered: Array, equal_nan: bool) -> Array:
    if ordered.size < 2:
        return asarray(np.ones(ordered.shape, bool))
    differs = ordered[1:] != ordered[:-1]
    if equal_nan and ordered.dtype.kind in "fc":
        differs = differs & ((ordered[1:] == ordered[1:]) | (ordered[:-1] == ordered[:-1]))
    return concat([asarray(np.ones(1, bool)), differs], axis=0)


def unique_values(x: Any, /) -> Array:
    """The distinct elements in order; every NaN is its own. Sorted (in scratch where they are many) and counted now."""
    found = _Sorted(x, False, order=False)
    return found.firsts(found.values.node)


def unique_counts(x: Any, /) -> _Counts:
    """The distinct elements and how often each is there."""
    found = _Sorted(x, False, order=False)
    return _Counts(found.firsts(found.values.node), found.counts())


def unique_inverse(x: Any, /) -> _Inverse:
    """The distinct elements, and for every element which of them it is."""
    found = _Sorted(x, False, order=True)
    return _Inverse(found.firsts(found.values.node), found.inverse(asarray(x).shape))


def unique_all(x: Any, /) -> _All:
    """The distinct elements, where each is first, which of them every element is, and how often each is there."""
    found = _Sorted(x, False, order=True)
    assert found.order is not None
    first = found.firsts(found.order.node)
    return _All(found.firsts(found.values.node), first, found.inverse(asarray(x).shape), found.counts())


def unique(
    x: Any, /, return_index: bool = False, return_inverse: bool = False, return_counts: bool = False,
    axis: None = None, *, equal_nan: bool = True,
) -> Array | tuple[Array, ...]:  # fmt: skip
    """NumPy's `unique` of all elements: NaNs are one unless `equal_nan=False`; the array, or a tuple with what is asked."""
    if axis is not None:
        raise InputError(f"unique is of all elements, not of the rows along axis {axis}: give it one column at a time")
    found = _Sorted(x, equal_nan, order=return_index or return_inverse)
    parts = [found.firsts(found.values.node)]
    if return_index and found.order is not None:
        parts.append(found.firsts(found.order.node))
    if return_inverse:
        parts.append(found.inverse(asarray(x).shape))
    if return_counts:
        parts.append(found.counts())
    return parts[0] if len(parts) == 1 else tuple(parts)


def searchsorted(x1: Any, x2: Any, /, side: str = "left", sorter: Any = None) -> Array:
    """Where the elements of `x2` belong in the sorted, one-dimensional `x1`, before or after equal ones.

    Both may be larger than the budget; `x1` is read once for each tile of the result. `sorter` are indices that sort `x1`.
    """
    ordered, wanted = asarray(x1), asarray(x2)
    if ordered.ndim != 1 or side not in ("left", "right"):
        raise InputError(f"searchsorted takes one dimension and 'left' or 'right', not {ordered.ndim} and {side!r}")
    dtype = np.result_type(ordered.dtype, wanted.dtype).newbyteorder("=")
    node = ordered.node if sorter is None else make.take(ordered.node, as_indices(sorter), 0)
    inputs = (make.cast(node, dtype), make.cast(wanted.node, dtype))
    return Array(Search(shape=wanted.shape, dtype=np.dtype(np.int64), inputs=inputs, side=side, piece=_PIECE))
