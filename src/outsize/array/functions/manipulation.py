"""Moving elements without changing them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from outsize.array.api.lazy import Array, apply, as_indices, as_node
from outsize.array.functions.elementwise import asarray
from outsize.array.graph import build as make
from outsize.array.graph.elementwise import WHERE, operation
from outsize.array.graph.elementwise import broadcast_shapes as _common_shape
from outsize.array.graph.node import Node, Range
from outsize.array.graph.rearrange import Concat, Wrap
from outsize.core.errors import InputError
from outsize.core.spec import parse_shape

__all__ = [
    "broadcast_arrays", "broadcast_shapes", "broadcast_to", "concat", "concatenate", "diff", "expand_dims", "flip",
    "matrix_transpose", "moveaxis", "pad", "permute_dims", "repeat", "reshape", "roll", "squeeze", "stack", "swapaxes", "take",
    "take_along_axis", "tile", "transpose", "unstack",
]  # fmt: skip


def reshape(x: Array, /, shape: Any, *, copy: bool | None = None) -> Array:
    """The same elements under another shape."""
    return x.reshape(shape)


def permute_dims(x: Array, /, axes: Sequence[int]) -> Array:
    """Axes in another order."""
    return Array(make.permute(x.node, axes))


def transpose(x: Array, axes: Sequence[int] | None = None) -> Array:
    """NumPy's spelling of `permute_dims`."""
    return x.T if axes is None else permute_dims(x, axes)


def matrix_transpose(x: Array, /) -> Array:
    """The last two axes swapped."""
    return x.mT


def swapaxes(x: Array, axis1: int, axis2: int) -> Array:
    """Two axes swapped."""
    order = list(range(x.ndim))
    one, two = make.axis_index(axis1, x.ndim), make.axis_index(axis2, x.ndim)
    order[one], order[two] = two, one
    return permute_dims(x, order)


def moveaxis(x: Array, source: Any, destination: Any, /) -> Array:
    """Axes moved to other places."""
    sources = [make.axis_index(a, x.ndim) for a in np.atleast_1d(source)]
    targets = [make.axis_index(a, x.ndim) for a in np.atleast_1d(destination)]
    order = [a for a in range(x.ndim) if a not in sources]
    for target, axis in sorted(zip(targets, sources, strict=True)):
        order.insert(target, axis)
    return permute_dims(x, order)


def expand_dims(x: Array, /, axis: Any = 0) -> Array:
    """A new axis of length 1."""
    axes = make.axis_tuple(axis, x.ndim + (len(axis) if isinstance(axis, tuple | list) else 1))
    return Array(make.insert_axes(x.node, axes))


def squeeze(x: Array, /, axis: Any = None) -> Array:
    """Without axes of length 1."""
    axes = [a for a, n in enumerate(x.shape) if n == 1] if axis is None else make.axis_tuple(axis, x.ndim)
    return Array(make.drop_axes(x.node, axes))


def broadcast_to(x: Any, /, shape: Any) -> Array:
    """Repeated along axes of length 1."""
    return Array(make.broadcast_to(asarray(x).node, parse_shape(shape)))


def broadcast_shapes(*shapes: Any) -> tuple[int, ...]:
    """The common shape of arrays of these shapes."""
    return _common_shape(*(parse_shape(shape) for shape in shapes))


def broadcast_arrays(*arrays: Any) -> tuple[Array, ...]:
    """All broadcast to their common shape."""
    found = [asarray(a) for a in arrays]
    shape = _common_shape(*(a.shape for a in found))
    return tuple(broadcast_to(a, shape) for a in found)


def concat(arrays: Sequence[Any], /, *, axis: int | None = 0) -> Array:
    """One after another."""
    return Array(make.concat([as_node(a) for a in arrays], axis))


def concatenate(arrays: Sequence[Any], axis: int | None = 0) -> Array:
    """NumPy's spelling of `concat`."""
    return concat(arrays, axis=axis)


def stack(arrays: Sequence[Any], /, *, axis: int = 0) -> Array:
    """One after another along a new axis."""
    return concat([expand_dims(asarray(a), axis=axis) for a in arrays], axis=axis)


def unstack(x: Array, /, *, axis: int = 0) -> tuple[Array, ...]:
    """The pieces along an axis."""
    place = make.axis_index(axis, x.ndim)
    return tuple(x[(slice(None),) * place + (i,)] for i in range(x.shape[place]))


def flip(x: Array, /, *, axis: Any = None) -> Array:
    """Reversed along axes."""
    axes = make.axis_tuple(axis, x.ndim)
    return x[tuple(slice(None, None, -1) if a in axes else slice(None) for a in range(x.ndim))]


def roll(x: Array, /, shift: Any, *, axis: Any = None) -> Array:
    """Shifted around."""
    if axis is None:
        return roll(x.reshape(-1), shift, axis=0).reshape(x.shape)
    shifts, axes = np.broadcast_arrays(np.atleast_1d(shift), np.atleast_1d(axis))
    node = x.node
    for amount, where_ in zip(shifts.tolist(), axes.tolist(), strict=True):
        place = make.axis_index(where_, x.ndim)
        if node.shape[place]:
            start = -amount % node.shape[place]
            node = Wrap(shape=node.shape, dtype=node.dtype, inputs=(node,), axis=place, shift=start)
    return Array(node)


def tile(x: Array, repetitions: Any, /) -> Array:
    """Repeated end to end."""
    reps = parse_shape(np.atleast_1d(repetitions).tolist())
    node = x.node
    if len(reps) > node.ndim:
        node = make.insert_axes(node, range(len(reps) - node.ndim))
    reps = (1,) * (node.ndim - len(reps)) + reps
    for axis, times in enumerate(reps):
        if times != 1:
            shape = (*node.shape[:axis], node.shape[axis] * times, *node.shape[axis + 1 :])
            node = Wrap(shape=shape, dtype=node.dtype, inputs=(node,), axis=axis)
    return Array(node)


def repeat(x: Array, repeats: Any, /, *, axis: int | None = None) -> Array:
    """Each element several times, or each as often as its own number says; those numbers are held in memory."""
    if axis is None:
        return repeat(x.reshape(-1), repeats, axis=0)
    place = make.axis_index(axis, x.ndim)
    counts = np.asarray(repeats)
    length = x.shape[place]
    if counts.dtype.kind not in "iub" or counts.shape not in ((), (1,), (length,)):
        raise InputError(
            f"repeat takes a whole number, or one for each of the {length} elements of axis {place}, not "
            f"{counts.dtype}{list(counts.shape)}"
        )
    if (counts < 0).any():
        raise InputError(f"nothing can be repeated {counts.min()} times: repeat takes whole numbers from 0 on")
    if counts.ndim:
        return take(x, np.repeat(np.arange(length), np.broadcast_to(counts, (length,))), axis=place)
    times = int(counts)
    wide = broadcast_to(expand_dims(x, axis=place + 1), (*x.shape[: place + 1], times, *x.shape[place + 1 :]))
    return wide.reshape((*x.shape[:place], length * times, *x.shape[place + 1 :]))


def take(x: Array, indices: Any, /, *, axis: int | None = None) -> Array:
    """Chosen indices along an axis, in any order and of any number; their shape takes the axis' place."""
    if axis is None:
        x, axis = x.reshape(-1), 0
    places, axis = indices if isinstance(indices, Array) else np.asarray(indices), make.axis_index(axis, x.ndim)
    taken = Array(make.take(x.node, as_indices(places.reshape(-1)), axis))
    return taken if places.ndim == 1 else taken.reshape((*x.shape[:axis], *places.shape, *x.shape[axis + 1 :]))


def take_along_axis(x: Any, indices: Any, /, *, axis: int | None = -1) -> Array:
    """Of each lane along an axis, the elements that its own indices choose; `argsort` gives such indices. The other axes
    broadcast."""
    array, chosen = asarray(x), asarray(indices)
    if axis is None:
        array, axis = array.reshape(-1), 0
    place = make.axis_index(axis, array.ndim)
    if chosen.ndim != array.ndim:
        raise InputError(f"take_along_axis needs indices of {array.ndim} dimensions, not of {chosen.ndim}")
    found = as_indices(chosen.reshape(-1))
    found.check(array.shape[place], axis)
    return gather(array, Array(make.reshape(found.node, chosen.shape)), place, found.low < 0)


def gather(x: Array, indices: Array, axis: int, negative: bool = False) -> Array:
    """`take_along_axis` with indices that are known to be inside."""
    lead, tail = x.shape[:axis], x.shape[axis + 1 :]
    shape = _common_shape((*lead, 1, *tail), (*indices.shape[:axis], 1, *indices.shape[axis + 1 :]))
    shape = (*shape[:axis], indices.shape[axis], *shape[axis + 1 :])
    if 0 in shape:
        return Array(make.fill(shape, 0, x.dtype))
    x = broadcast_to(x, (*shape[:axis], x.shape[axis], *shape[axis + 1 :]))
    places = broadcast_to(indices.astype(np.int64), shape)
    if negative:
        places = apply(WHERE, places < 0, places + x.shape[axis], places)
    places = places * math.prod(x.shape[axis + 1 :])
    step = 1
    for other in reversed(range(x.ndim)):  # where each lane begins among all elements
        if other != axis and shape[other] > 1:
            line = Array(Range(shape=(shape[other],), dtype=np.dtype(np.int64), start=0, step=step))
            places = places + line[(slice(None), *[None] * (x.ndim - 1 - other))]
        step *= x.shape[other]
    chosen = make.Indices(places.reshape(-1).node, 0, x.size - 1, False)
    return Array(make.take(x.reshape(-1).node, chosen, 0)).reshape(shape)


def diff(x: Any, /, *, axis: int = -1, n: int = 1, prepend: Any = None, append: Any = None) -> Array:
    """Differences of neighbours; `prepend` and `append` are put before and behind the array first."""
    array = asarray(x)
    if make.whole("the order of a difference", n) < 0:
        raise InputError(f"diff takes n of 0 or more, not {n}")
    place = make.axis_index(axis, array.ndim)
    edge = (*array.shape[:place], 1, *array.shape[place + 1 :])
    parts = [asarray(part) for part in (prepend, array, append) if part is not None]
    parts = [part if part.ndim else broadcast_to(part, edge) for part in parts]
    array = concat(parts, axis=place) if len(parts) > 1 else array
    lead = (slice(None),) * place
    for _ in range(n):
        high, low = array[(*lead, slice(1, None))], array[(*lead, slice(None, -1))]
        array = apply(operation(np.not_equal if array.dtype == bool else np.subtract), high, low)
    return array


def pad(x: Any, pad_width: Any, mode: str = "constant", constant_values: Any = 0, reflect_type: str = "even") -> Array:
    """A margin around the array: of one value (or of one for each side or each side of each axis), of the array's own elements
    (`edge`, `reflect`, `symmetric`, `wrap`), or of the `minimum`, `maximum`, `mean` or `median` along the axis."""
    array = asarray(x)
    if mode not in ("constant", "empty", *_MIRRORS, *_SUMMARIES) or reflect_type != "even":
        raise InputError(
            f"pad has no mode {mode!r} of type {reflect_type!r}: constant, {', '.join((*_MIRRORS, *_SUMMARIES))}"
        )
    try:
        widths, fills = (np.broadcast_to(np.asarray(given), (array.ndim, 2)) for given in (pad_width, constant_values))
    except ValueError:
        raise InputError(
            f"pad takes one width, a pair, or a pair for each of {array.ndim} axes, and values likewise, not {pad_width!r} "
            f"and {constant_values!r}"
        ) from None
    for axis, (before, after) in enumerate(map(parse_shape, widths.tolist())):
        if not before and not after:
            continue
        if not array.shape[axis] and mode not in ("constant", "empty"):
            raise InputError(f"axis {axis} has no elements to pad it with by {mode!r}")
        sides = [
            _margin(array, axis, mode, count, fill)
            for count, fill in ((-before, fills[axis, 0]), (after, fills[axis, 1]))
        ]
        shape = (*array.shape[:axis], array.shape[axis] + before + after, *array.shape[axis + 1 :])
        parts = (sides[0], array.node, sides[1])
        array = Array(Concat(shape=shape, dtype=array.dtype, inputs=parts, axis=axis))
    return array


_MIRRORS = ("edge", "reflect", "symmetric", "wrap")
_SUMMARIES = ("maximum", "mean", "median", "minimum")


def _margin(array: Array, axis: int, mode: str, count: int, fill: Any) -> Node:
    """The margin before an axis (of -count) or behind it."""
    length, number = array.shape[axis], abs(count)
    shape = (*array.shape[:axis], number, *array.shape[axis + 1 :])
    if mode in ("constant", "empty") or not number:
        return make.fill(shape, fill if mode == "constant" else 0, array.dtype)
    if mode in _SUMMARIES:
        found = {"minimum": array.min, "maximum": array.max, "mean": array.mean}.get(mode)
        if found is None:
            from outsize.array.functions.order_statistics import median

            one = median(array, axis, keepdims=True)
        else:
            one = found(axis, keepdims=True)
        whole = array.dtype.kind in "iu" and one.dtype.kind == "f"
        one = apply(operation(np.rint), one) if whole else one
        return make.broadcast_to(one.astype(array.dtype).node, shape)
    places = np.arange(count, 0) if count < 0 else np.arange(length, length + number)
    if mode == "edge":
        places = np.clip(places, 0, length - 1)
    elif mode == "wrap" or length == 1:
        places = places % length
    elif mode == "symmetric":
        places = places % (2 * length)
        places = np.where(places < length, places, 2 * length - 1 - places)
    else:
        places = places % (2 * length - 2)
        places = np.where(places < length, places, 2 * length - 2 - places)
    return make.take(array.node, places, axis)
