"""Moving elements without changing them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outsize.array.api.elementwise import asarray
from outsize.array.api.lazy import Array, _as_node, apply, as_indices
from outsize.array.graph import build as make
from outsize.array.graph.elementwise import broadcast_shapes, operation
from outsize.array.graph.rearrange import Concat, Wrap
from outsize.core.errors import InputError
from outsize.core.spec import parse_shape

__all__ = [
    "broadcast_arrays", "broadcast_to", "concat", "concatenate", "diff", "expand_dims", "flip", "matrix_transpose",
    "moveaxis", "pad", "permute_dims", "repeat", "reshape", "roll", "squeeze", "stack", "swapaxes", "take", "tile",
    "transpose", "unstack",
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


def broadcast_arrays(*arrays: Any) -> list[Array]:
    """All broadcast to their common shape."""
    found = [asarray(a) for a in arrays]
    shape = broadcast_shapes(*(a.shape for a in found))
    return [broadcast_to(a, shape) for a in found]


def concat(arrays: Sequence[Any], /, *, axis: int | None = 0) -> Array:
    """One after another."""
    return Array(make.concat([_as_node(a) for a in arrays], axis))


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


def diff(x: Array, /, *, axis: int = -1, n: int = 1) -> Array:
    """Differences of neighbours."""
    if make.whole("the order of a difference", n) < 0:
        raise InputError(f"a difference of order {n} is none: give 0 or more")
    place = make.axis_index(axis, x.ndim)
    lead = (slice(None),) * place
    for _ in range(n):
        high, low = x[(*lead, slice(1, None))], x[(*lead, slice(None, -1))]
        x = apply(operation(np.not_equal if x.dtype == bool else np.subtract), high, low)
    return x


def pad(x: Array, pad_width: Any, mode: str = "constant", constant_values: Any = 0) -> Array:
    """A margin around the array: of one value, or of one for each side or each side of each axis."""
    if mode != "constant":
        raise InputError(f"pad mode {mode!r} has no rule here: use 'constant', or map_overlap with a boundary")
    node = x.node
    try:
        widths, fills = (np.broadcast_to(np.asarray(given), (x.ndim, 2)) for given in (pad_width, constant_values))
    except ValueError:
        raise InputError(
            f"pad takes one width, a pair, or a pair for each of {x.ndim} axes, and values likewise, not {pad_width!r} "
            f"and {constant_values!r}"
        ) from None
    for axis, (before, after) in enumerate(map(parse_shape, widths.tolist())):
        edges = [(*node.shape[:axis], n, *node.shape[axis + 1 :]) for n in (before, after)]
        parts = (make.fill(edges[0], fills[axis, 0], node.dtype), node, make.fill(edges[1], fills[axis, 1], node.dtype))
        shape = (*node.shape[:axis], node.shape[axis] + before + after, *node.shape[axis + 1 :])
        node = Concat(shape=shape, dtype=node.dtype, inputs=parts, axis=axis)
    return Array(node)
