"""`x[key]` and `x[key] = value` for every key that NumPy takes.

In: a node and a key of whole numbers, slices, None, `...`, arrays of indices and masks. Out: a node. Numbers and slices are a
view. The arrays of a key choose together: the axes that they stand for are made one, and their indices one list of places along
it. What is chosen is taken from there. What is replaced is laid over it: every place along the axis is looked up in the sorted
list, so that neither the array nor the list has to fit into memory.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.array.graph import build as make
from outsize.array.graph.elementwise import WHERE, Scalar, broadcast_shapes, operation
from outsize.array.graph.external_sort import places, sort_lanes
from outsize.array.graph.filter import Search, flat_mask, keep
from outsize.array.graph.node import Node, Range
from outsize.array.graph.overlay import Overlay
from outsize.array.graph.rearrange import Affine
from outsize.array.run.now import count, make_now
from outsize.array.run.results import compute_node
from outsize.array.store.base import Region
from outsize.array.tuning import current
from outsize.core.errors import InputError

_INT = np.dtype(np.int64)


@dataclass(frozen=True, slots=True)
class _Pick:
    """An array in a key."""

    axes: tuple[int, ...]
    """Axes of the view that it stands for, in order; a mask stands for as many as it has."""
    lengths: tuple[int, ...]
    indices: make.Indices
    """Places along these axes as one."""
    shape: tuple[int, ...]
    """Shape of the array; a mask has one axis of what it keeps."""
    mask: Node | None = None


@dataclass(frozen=True, slots=True)
class _Key:
    """A key taken apart."""

    view: tuple[Any, ...]
    """Its numbers, slices and None, with a whole slice for every axis of an array."""
    picks: tuple[_Pick, ...]
    apart: bool
    """True where its arrays stand apart: NumPy then puts their axes first."""


def indices_of(values: Any) -> make.Indices:
    """Whole numbers that choose: small ones held in memory, large ones in a scratch file of ours."""
    if isinstance(values, Node):
        flat = make.reshape(values, (-1,))
        if flat.dtype.kind not in "iu":
            raise InputError(f"indices are whole numbers, not {flat.dtype}")
        if flat.nbytes <= current().made_now:
            return make.known_indices(compute_node(flat))
        made = make_now(flat)
        low, high = (compute_node(make.reduce(name, made, None)) for name in ("min", "max"))
        return make.Indices(made, int(low), int(high), False)
    found = np.asarray(values).reshape(-1)
    found = found.astype(_INT) if found.size == 0 else found
    return make.known_indices(found, make_now(make.constant(found)) if found.nbytes > current().made_now else None)


def places_of(mask: Node) -> make.Indices:
    """Where a flat mask is true; they are counted now."""
    if mask.nbytes <= current().made_now:
        return make.known_indices(np.flatnonzero(compute_node(mask)))
    found = keep(Range(shape=mask.shape, dtype=_INT, start=0, step=1), mask, count(mask))
    return make.Indices(found, 0, max(0, mask.shape[0] - 1), True)


def get(node: Node, key: Any) -> Node:
    """node[key]."""
    parts = _take_apart(node, key)
    view = make.index(node, parts.view)
    if not parts.picks:
        return view
    merged, axis, _ = _merged(view, parts.picks)
    chosen, shape = _together(parts.picks)
    taken = make.take(merged, chosen, axis)
    found = make.reshape(taken, (*taken.shape[:axis], *shape, *taken.shape[axis + 1 :]))
    front = range(axis, axis + len(shape))
    return make.permute(found, (*front, *(a for a in range(found.ndim) if a not in front))) if parts.apart else found


def replaced(node: Node, key: Any, value: Node) -> Node:
    """node with node[key] = value; elsewhere it is as it was."""
    parts = _take_apart(node, key)
    view = make.index(node, parts.view)
    if parts.picks:
        new = make.cast(_scattered(view, parts, value), node.dtype)
    else:
        new = make.cast(make.broadcast_to(_fitted(value, view.ndim), view.shape), node.dtype)
    spans = _spans(node, parts.view)
    steps, shape = tuple((start, step) for start, step, _ in spans), tuple(number for _, _, number in spans)
    if 0 in shape:
        return node
    part = make.reshape(new, shape)
    if part.shape == node.shape and all(step == (0, 1) for step in steps):
        return part
    return Overlay(shape=node.shape, dtype=node.dtype, inputs=(node, part), steps=steps)


def _spans(node: Node, view: tuple[Any, ...]) -> list[tuple[int, int, int]]:
    """(start, step, how many) along each axis of an array, of the numbers and slices of a key."""
    found = []
    for axis, part in enumerate(part for part in view if part is not None):
        length = node.shape[axis]
        start = 0 if isinstance(part, slice) else make.whole_index(part, length, axis)
        whole = range(*part.indices(length)) if isinstance(part, slice) else range(start, start + 1)
        found.append((whole[0] if len(whole) else 0, whole.step, len(whole)))
    return found


def _fitted(value: Node, ndim: int) -> Node:
    """A value without the leading axes of length 1 that its target does not have, as NumPy assigns it."""
    extra = value.ndim - ndim
    return make.drop_axes(value, range(extra)) if extra > 0 and set(value.shape[:extra]) == {1} else value


def _take_apart(node: Node, key: Any) -> _Key:
    parts = list(key) if isinstance(key, tuple) else [key]
    parts = [_plain(part) for part in parts]
    axes = sum(0 if part is None or part is Ellipsis else _axes_of(part) for part in parts)
    if axes > node.ndim:
        raise make.AxisError(f"{axes} indices for an array of {node.ndim} dimensions")
    rest = [slice(None)] * (node.ndim - axes)
    dots = [place for place, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1:
        raise InputError("an index has at most one '...'")
    apart = _apart(parts)
    parts = [*parts[: dots[0]], *rest, *parts[dots[0] + 1 :]] if dots else [*parts, *rest]
    view: list[Any] = []
    picks: list[_Pick] = []
    axis = place = 0  # in the array, in the view
    for part in parts:
        if part is None or isinstance(part, slice | int):
            view.append(part)
            place += 0 if isinstance(part, int) else 1
            axis += part is not None
            continue
        under = _axes_of(part)
        view.extend([slice(None)] * under if under else [None])
        picks.append(_pick(part, node.shape[axis : axis + under], axis, place))
        place, axis = place + max(1, under), axis + under
    return _Key(tuple(view), tuple(picks), apart and bool(picks))


def _plain(part: Any) -> Any:
    """A part of a key: a number, a slice, None, `...`, or an array as NumPy's or as a node."""
    if part is None or part is Ellipsis or isinstance(part, slice | Node):
        if isinstance(part, Node) and not part.ndim and part.dtype != bool:
            return _number(compute_node(part)[()])
        return part
    if isinstance(part, list | range | np.ndarray | np.bool_ | bool):
        found = np.asarray(part)
        if found.dtype.hasobject:
            raise InputError(f"cannot index with {type(part).__name__} of objects: use whole numbers or a mask")
        return _number(found[()]) if not found.ndim and found.dtype != bool else found
    return _number(part)


def _number(part: Any) -> int:
    try:
        return operator.index(part)
    except TypeError:
        raise InputError(
            f"cannot index with {type(part).__name__}: use whole numbers, slices, None, ..., arrays of indices or a mask"
        ) from None


def _axes_of(part: Any) -> int:
    """How many axes a part of a key stands for."""
    return part.ndim if isinstance(part, np.ndarray | Node) and part.dtype == bool else 1


def _apart(parts: Sequence[Any]) -> bool:
    """True where arrays and whole numbers stand apart."""
    chosen = [not (part is None or part is Ellipsis or isinstance(part, slice)) for part in parts]
    return True in chosen and not all(chosen[chosen.index(True) : len(chosen) - chosen[::-1].index(True)])


def _pick(part: Any, lengths: tuple[int, ...], axis: int, place: int) -> _Pick:
    if part.dtype != bool:
        found = indices_of(part)
        found.check(lengths[0], axis)
        return _Pick((place,), lengths, found, part.shape)
    if not part.ndim:  # one True or False: a new axis that is kept or not
        truth = bool(compute_node(part) if isinstance(part, Node) else part)
        return _Pick((place,), (1,), make.known_indices(np.zeros(int(truth), _INT)), (int(truth),))
    if any(own not in (0, length) for own, length in zip(part.shape, lengths, strict=True)):
        raise IndexError(f"a mask of shape {part.shape} does not match an array of shape {lengths} at axis {axis}")
    mask: Node | None = flat_mask(part if isinstance(part, Node) else make.constant(part))
    assert mask is not None
    if mask.shape[0] != math.prod(lengths):  # shorter than the array, so empty
        mask, found = None, make.known_indices(np.zeros(0, _INT))
    else:
        found = places_of(mask)
    return _Pick(tuple(range(place, place + part.ndim)), lengths, found, found.node.shape, mask)


def _together(picks: tuple[_Pick, ...]) -> tuple[make.Indices, tuple[int, ...]]:
    """(places along all picked axes as one, the shape of what they choose)."""
    if len(picks) == 1:
        return picks[0].indices, picks[0].shape
    shape = broadcast_shapes(*(pick.shape for pick in picks))
    step, total = 1, None
    for pick in reversed(picks):
        length = math.prod(pick.lengths)
        flat = make.cast(_from_start(pick.indices, length), _INT)
        own = make.broadcast_to(make.reshape(flat, pick.shape), shape)
        own = make.apply(operation(np.multiply), own, Scalar(step)) if step != 1 else own
        total = own if total is None else make.apply(operation(np.add), total, own)
        step *= length
    assert total is not None
    flat = make.reshape(total, (-1,))
    if flat.nbytes <= current().made_now:
        return make.known_indices(compute_node(flat)), shape
    return make.Indices(flat, 0, max(0, step - 1), False), shape


def _from_start(indices: make.Indices, length: int) -> Node:
    """Places that all count from the start."""
    if indices.low >= 0:
        return indices.node
    node = make.cast(indices.node, _INT)
    below = make.apply(operation(np.less), node, Scalar(0))
    return make.apply(WHERE, below, make.apply(operation(np.add), node, Scalar(length)), node)


def _merged(view: Node, picks: tuple[_Pick, ...]) -> tuple[Node, int, tuple[int, ...]]:
    """(the view with all picked axes as one, which axis that is, the order in which the axes were laid)."""
    axes = [axis for pick in picks for axis in pick.axes]
    start = axes[0] if axes == list(range(axes[0], axes[0] + len(axes))) else 0
    rest = [axis for axis in range(view.ndim) if axis not in axes]
    order = (*rest[:start], *axes, *rest[start:])
    turned = make.permute(view, order)
    length = math.prod(view.shape[axis] for axis in axes)
    shape = (*turned.shape[:start], length, *turned.shape[start + len(axes) :])
    return make.reshape(turned, shape), start, order


def _scattered(view: Node, parts: _Key, value: Node) -> Node:
    """The view with a value at the chosen places; of equal places the last counts."""
    merged, axis, order = _merged(view, parts.picks)
    chosen, shape = _together(parts.picks)
    number, length = chosen.node.shape[0], merged.shape[axis]
    lead, tail = merged.shape[:axis], merged.shape[axis + 1 :]
    whole = (*shape, *lead, *tail) if parts.apart else (*lead, *shape, *tail)
    value = make.broadcast_to(make.cast(_fitted(value, len(whole)), view.dtype), whole)
    if not number or 0 in whole:
        return view
    mask = parts.picks[0].mask if len(parts.picks) == 1 else None
    spread = (slice(None), *[None] * len(tail))
    one = isinstance(value, Affine) and all(target is None for target, _, _ in value.axes)
    if mask is not None and value.ndim and one:
        hit, new = make.index(mask, spread), make.index(value, (0,) * value.ndim)
    else:
        if parts.apart:
            value = make.permute(value, (*range(len(shape), len(shape) + axis), *range(len(shape)),
                                         *range(len(shape) + axis, value.ndim)))  # fmt: skip
        new = make.reshape(value, (*lead, number, *tail))
        ordered, new = _in_order(chosen, length, new, axis)
        every = Range(shape=(length,), dtype=_INT, start=0, step=1)
        last = Search(shape=(length,), dtype=_INT, inputs=(ordered, every), side="right", piece=current().search_piece)
        at = make.apply(operation(np.maximum), make.apply(operation(np.subtract), last, Scalar(1)), Scalar(0))
        found = make.Indices(at, 0, number - 1, True)
        hit = make.index(make.apply(operation(np.equal), make.take(ordered, found, 0), every), spread)
        new = make.take(new, found, axis)
    laid = make.apply(WHERE, hit, new, merged)
    turned = make.reshape(laid, tuple(view.shape[a] for a in order))
    return make.permute(turned, [order.index(a) for a in range(view.ndim)])


def _in_order(chosen: make.Indices, length: int, new: Node, axis: int) -> tuple[Node, Node]:
    """(the places sorted, the new values in their order)."""
    flat = make.cast(_from_start(chosen, length), _INT)
    if chosen.rising:
        return flat, new
    if flat.nbytes <= current().made_now:
        numbers = compute_node(flat)
        order = np.argsort(numbers, kind="stable")
        return make.constant(numbers[order]), make.take(new, order, axis)
    flat = make_now(flat)
    by = make.Indices(make_now(sort_lanes(flat, carried=places(flat.shape))), 0, flat.shape[0] - 1, False)
    return make_now(sort_lanes(flat)), make.take(new, by, axis)


def region_of(key: Any, base: Node) -> Region:
    """The region of a store that a key names; only numbers and slices of step 1 name one."""
    parts = _take_apart(base, key)
    spans = _spans(base, parts.view)
    if parts.picks or any(step != 1 for _, step, _ in spans):
        raise InputError(
            "in-place writing takes whole numbers and slices of step 1, not other steps and lists of indices"
        )
    return tuple((start, start + number) for start, _, number in spans)
