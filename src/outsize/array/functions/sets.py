"""Sets and places: what there is, how often, and where. Their lengths depend on data, so the counting runs at the call,
inside the current budget; what they return is lazy again."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from outsize.array.api.lazy import Array, as_indices
from outsize.array.functions.elementwise import asarray
from outsize.array.functions.manipulation import broadcast_to, concat, stack
from outsize.array.functions.sorting import argsort, sort
from outsize.array.graph import build as make
from outsize.array.graph.barrier import Barrier
from outsize.array.graph.binned import mark_present
from outsize.array.graph.external_sort import sort_lanes
from outsize.array.graph.filter import Search, first_of_equal, flat_mask, keep
from outsize.array.graph.node import Node, Range, walk
from outsize.array.plan.prepare import keep_count, resolve_budget
from outsize.array.run.now import count, make_now
from outsize.array.run.results import compute_node, compute_nodes
from outsize.array.tuning import current
from outsize.core.errors import InputError
from outsize.core.events import default_listener

__all__ = [
    "argwhere", "isin", "nonzero", "searchsorted", "unique", "unique_all", "unique_counts", "unique_inverse",
    "unique_values",
]  # fmt: skip


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
        raise InputError("nonzero needs an array of at least one dimension")
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


def _distinct(
    x: Any, *, index: bool = False, inverse: bool = False, counts: bool = False, equal_nan: bool = False
) -> list[Array]:
    """The distinct elements in order; then, where asked for: where each is first, which of them every element is, how often each
    is there. Sorted (in scratch where they are many) and counted now."""
    flat = Array(make.reshape(asarray(x).node, (-1,)))
    if not (index or inverse or counts) and (marked := _marked(flat.node)) is not None:
        return [marked]
    # first the order: it needs the largest budget, and says so
    order = make_now(argsort(flat).node) if index or inverse else None
    values = Array(make_now(sort(flat).node))
    first = first_of_equal(values.node, equal_nan)
    ends = count(first)

    def firsts(of: Node) -> Array:
        return Array(keep(of, first, ends))

    parts = [firsts(values.node)]
    if index and order is not None:
        parts.append(firsts(order))
    if inverse and order is not None:
        back = _places(0)
        if flat.size:  # the number of each element's kind, brought back to where the elements were
            kind = Array(make.scan(np.add, Array(first).astype(np.int64).node, 0)) - 1
            back = sort_lanes(order, carried=kind.node)
        parts.append(Array(make.reshape(back, asarray(x).shape)))
    if counts:
        start = firsts(_places(flat.size))
        parts.append(concat([start, asarray(np.array([flat.size]))])[1:] - start if flat.size else start)
    return parts


def _marked(flat: Node) -> Array | None:
    """The distinct elements of whole numbers that lie near each other: a mark for each that may be there, which is one read
    beside that of the smallest and largest. None where marks would take more than the numbers, or than a third of the budget."""
    room = min(flat.nbytes, (resolve_budget(None).host or 0) // 3)
    if flat.dtype.kind not in "iu" or flat.nbytes <= current().made_now or current().spread:
        return None
    if any(isinstance(node, Barrier) for node in walk(flat)):
        return None  # it is read twice, and should not be made twice
    low, high = np.iinfo(flat.dtype).min, np.iinfo(flat.dtype).max
    if high - low >= room:
        array = Array(flat)
        ends = compute_nodes([array.min().node, array.max().node], None, default_listener())
        low, high = (int(end) for end in ends)
    if high - low >= room:
        return None
    marks = np.zeros(high - low + 1, bool)
    keep_count(marks)
    compute_node(mark_present(flat, low, marks), None, default_listener())
    mask = make.constant(marks)
    found = Array(keep(_places(marks.size), mask, count(mask))).astype(flat.dtype)
    return found + np.asarray(low, flat.dtype)


def unique_values(x: Any, /) -> Array:
    """The distinct elements in order; every NaN is its own. Sorted (in scratch where they are many) and counted now."""
    return _distinct(x)[0]


def unique_counts(x: Any, /) -> _Counts:
    """The distinct elements and how often each is there."""
    return _Counts(*_distinct(x, counts=True))


def unique_inverse(x: Any, /) -> _Inverse:
    """The distinct elements, and for every element which of them it is."""
    return _Inverse(*_distinct(x, inverse=True))


def unique_all(x: Any, /) -> _All:
    """The distinct elements, where each is first, which of them every element is, and how often each is there."""
    return _All(*_distinct(x, index=True, inverse=True, counts=True))


def unique(
    x: Any, /, return_index: bool = False, return_inverse: bool = False, return_counts: bool = False,
    axis: None = None, *, equal_nan: bool = True,
) -> Array | tuple[Array, ...]:  # fmt: skip
    """NumPy's `unique` of all elements: NaNs are one unless `equal_nan=False`; the array, or a tuple with what is asked."""
    if axis is not None:
        raise InputError(f"unique looks at all elements and has no axis={axis}: give it one column at a time")
    parts = _distinct(x, index=return_index, inverse=return_inverse, counts=return_counts, equal_nan=equal_nan)
    return parts[0] if len(parts) == 1 else tuple(parts)


def isin(x1: Any, x2: Any, /, *, invert: bool = False, assume_unique: bool = False, kind: Any = None) -> Array:
    """True where an element of `x1` is one of `x2`; NaN is none. `x2` is sorted now, in scratch where it is large.

    `assume_unique` and `kind` are NumPy's; nothing depends on them here."""
    wanted, others = asarray(x1), asarray(x2).reshape(-1)
    if not others.size:
        found = asarray(np.zeros((), bool))
        return broadcast_to(~found if invert else found, wanted.shape)
    dtype = np.result_type(_weak(x1, wanted), _weak(x2, others)).newbyteorder("=")
    ordered = Array(make_now(sort(others.astype(dtype)).node))
    wanted = wanted.astype(dtype)
    inside = (searchsorted(ordered, wanted, side="right") > searchsorted(ordered, wanted)) & (wanted == wanted)
    return ~inside if invert else inside


def _weak(given: Any, made: Array) -> Any:
    return given if isinstance(given, int | float | complex) else made.dtype


def searchsorted(x1: Any, x2: Any, /, side: str = "left", sorter: Any = None) -> Array:
    """Where the elements of `x2` belong in the sorted, one-dimensional `x1`, before or after equal ones.

    Both may be larger than the budget; `x1` is read once for each tile of the result. `sorter` are indices that sort `x1`.
    """
    ordered, wanted = asarray(x1), asarray(x2)
    if ordered.ndim != 1 or side not in ("left", "right"):
        raise InputError(f"searchsorted takes one dimension and 'left' or 'right', not {ordered.ndim} and {side!r}")
    dtype = np.result_type(ordered.dtype, wanted.dtype).newbyteorder("=")
    node = ordered.node if sorter is None else make.take(ordered.node, as_indices(asarray(sorter)), 0)
    inputs = (make.cast(node, dtype), make.cast(wanted.node, dtype))
    piece = current().search_piece
    return Array(Search(shape=wanted.shape, dtype=np.dtype(np.int64), inputs=inputs, side=side, piece=piece))
