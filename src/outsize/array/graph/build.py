"""Makes nodes from what users write: operands, axes, indices, reductions, products. Every shape and dtype is worked
out here."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.array.graph.barrier import Contract, Reduce, Scan
from outsize.array.graph.elementwise import CAST, Operation, Scalar, broadcast_shapes, make_elementwise
from outsize.array.graph.node import Fill, Node, Source
from outsize.array.graph.rearrange import Concat, Reshape, Take, make_affine
from outsize.array.store.base import Store
from outsize.array.store.formats.memory import MemoryStore
from outsize.array.store.options import as_numpy
from outsize.core.errors import InputError

Axes = tuple[tuple[int | None, int, int], ...]


def source(store: Store) -> Source:
    return Source(shape=store.shape, dtype=store.dtype, store=store)


def constant(value: Any) -> Node:
    """The node of an array in memory."""
    return source(MemoryStore(np.asarray(value)))


def apply(op: Operation, *operands: Node | Scalar) -> Node:
    """An elementwise operation; one of scalars alone is a 0-d array."""
    if not any(isinstance(operand, Node) for operand in operands):
        operands = tuple(constant(o.value) if isinstance(o, Scalar) else o for o in operands)
    return make_elementwise(op, operands)


def cast(node: Node, dtype: Any) -> Node:
    target = as_numpy(dtype)
    return node if target == node.dtype else make_elementwise(CAST, (node,), target)


class AxisError(InputError, IndexError):
    """An axis that does not exist; as in NumPy both a wrong value and a wrong index."""


def whole(what: str, number: Any) -> int:
    """A whole number, or an `InputError` that says what is one."""
    try:
        return operator.index(number)
    except TypeError:
        raise InputError(f"{what} is a whole number, not {number!r}") from None


def axis_index(axis: Any, ndim: int) -> int:
    """A non-negative axis number."""
    number = whole("an axis", axis)
    if not -ndim <= number < ndim:
        raise AxisError(f"axis {number} does not exist in an array of {ndim} dimensions")
    return number % ndim


def axis_tuple(axis: Any, ndim: int) -> tuple[int, ...]:
    """All axes for None, else the given ones, sorted."""
    if axis is None:
        return tuple(range(ndim))
    axes = tuple(axis_index(a, ndim) for a in (axis if isinstance(axis, tuple | list) else (axis,)))
    if len(set(axes)) != len(axes):
        raise InputError(f"axis {axis} names an axis twice")
    return tuple(sorted(axes))


def permute(node: Node, axes: Sequence[int]) -> Node:
    """Axes in another order."""
    order = [axis_index(a, node.ndim) for a in axes]
    if sorted(order) != list(range(node.ndim)):
        raise InputError(f"axes {tuple(axes)} are not an order of {node.ndim} axes")
    place = {axis: rank for rank, axis in enumerate(order)}
    return make_affine(node, tuple(node.shape[a] for a in order), tuple((place[a], 0, 1) for a in range(node.ndim)))


def drop_axes(node: Node, axes: Sequence[int]) -> Node:
    """Without axes of length 1."""
    for axis in axes:
        if node.shape[axis] != 1:
            raise InputError(f"axis {axis} has length {node.shape[axis]}: only axes of length 1 can be dropped")
    return index(node, tuple(0 if axis in axes else slice(None) for axis in range(node.ndim)))


def insert_axes(node: Node, axes: Sequence[int]) -> Node:
    """With new axes of length 1 at these places of the result."""
    return index(node, tuple(None if place in axes else slice(None) for place in range(node.ndim + len(axes))))


def broadcast_to(node: Node, shape: tuple[int, ...]) -> Node:
    """Repeated along axes of length 1."""
    if broadcast_shapes(node.shape, shape) != tuple(shape):
        raise InputError(f"an array of shape {node.shape} cannot be broadcast to {tuple(shape)}")
    lead = len(shape) - node.ndim
    axes: Axes = tuple(
        (axis + lead, 0, 1) if length == shape[axis + lead] else (None, 0, 0) for axis, length in enumerate(node.shape)
    )
    return make_affine(node, tuple(shape), axes)


def index(node: Node, key: Any) -> Node:
    """node[key] for whole numbers, slices, None and Ellipsis: a view."""
    parts = expand_ellipsis(list(key) if isinstance(key, tuple) else [key], node)
    axes: list[tuple[int | None, int, int]] = []
    shape: list[int] = []
    for part in parts:
        if part is None:
            shape.append(1)
            continue
        axis = len(axes)
        length = node.shape[axis]
        if isinstance(part, slice):
            start, _, step = part.indices(length)
            count = len(range(*part.indices(length)))
            axes.append((len(shape), start if count else 0, step))
            shape.append(count)
        else:
            axes.append((None, whole_index(part, length, axis), 0))
    return make_affine(node, tuple(shape), tuple(axes))


def expand_ellipsis(parts: list[Any], node: Node) -> list[Any]:
    """The parts of a key, one for each axis."""
    used = sum(part is not None and part is not Ellipsis for part in parts)
    if used > node.ndim:
        raise InputError(f"{used} indices for an array of {node.ndim} dimensions")
    places = [place for place, part in enumerate(parts) if part is Ellipsis]
    if len(places) > 1:
        raise InputError("an index has at most one '...'")
    place = places[0] if places else len(parts)
    return [*parts[:place], *[slice(None)] * (node.ndim - used), *parts[place + 1 :]]


def whole_index(part: Any, length: int, axis: int) -> int:
    """An index along an axis, from its start."""
    number = operator.index(part)
    if not -length <= number < length:
        raise IndexError(f"index {number} is outside axis {axis} of length {length}")
    return number % length


@dataclass(frozen=True, slots=True)
class Indices:
    """Whole numbers that choose along an axis, before they are held against its length."""

    node: Node
    """The numbers, one-dimensional."""
    low: int
    high: int
    rising: bool

    def check(self, length: int, axis: int) -> None:
        """An `IndexError` where one is outside of an axis."""
        if self.node.shape[0] and not -length <= self.low <= self.high < length:
            blamed = self.low if self.low < -length else self.high
            raise IndexError(f"index {blamed} is outside axis {axis} of length {length}")


def known_indices(numbers: Any, node: Node | None = None) -> Indices:
    """The indices in a NumPy array, or in a node that holds the same."""
    if numbers.dtype == bool:
        numbers = np.flatnonzero(numbers)
    if numbers.size == 0:
        return Indices(constant(np.zeros(0, np.int64)), 0, 0, True)
    if numbers.dtype.kind not in "iu":
        raise InputError(f"indices are whole numbers, not {numbers.dtype}")
    low, high = int(numbers.min()), int(numbers.max())
    rising = low >= 0 and bool((numbers[1:] >= numbers[:-1]).all())
    return Indices(constant(numbers.copy()) if node is None else node, low, high, rising)


def take(node: Node, indices: Any, axis: int) -> Node:
    """Chosen indices along an axis; a mask chooses where it is true."""
    length = node.shape[axis]
    if not isinstance(indices, Indices):
        numbers = np.asarray(indices)
        if numbers.dtype == bool and numbers.size != length:
            raise IndexError(f"a mask of {numbers.size} does not match axis {axis} of length {length}")
        indices = known_indices(numbers)
    indices.check(length, axis)
    low, high = (0, length - 1) if indices.low < 0 else (indices.low, indices.high)
    shape = (*node.shape[:axis], indices.node.shape[0], *node.shape[axis + 1 :])
    inputs = (node, indices.node)
    return Take(shape=shape, dtype=node.dtype, inputs=inputs, axis=axis, low=low, high=high, rising=indices.rising)


def reshape(node: Node, shape: Any) -> Node:
    """The same elements in C order; one length may be -1."""
    lengths = [operator.index(shape)] if isinstance(shape, int | np.integer) else [operator.index(n) for n in shape]
    size = math.prod(node.shape)
    if lengths.count(-1) == 1:
        rest = math.prod(n for n in lengths if n != -1)
        if rest == 0 or size % rest:
            raise InputError(f"{size} elements of shape {node.shape} do not make {tuple(lengths)}")
        lengths[lengths.index(-1)] = size // rest
    if math.prod(lengths) != size or any(n < 0 for n in lengths):
        raise InputError(f"{size} elements of shape {node.shape} do not make {tuple(lengths)}")
    target = tuple(lengths)
    if target == node.shape:
        return node
    kept_from = [a for a, n in enumerate(node.shape) if n != 1]
    kept_to = [a for a, n in enumerate(target) if n != 1]
    if [node.shape[a] for a in kept_from] == [target[a] for a in kept_to]:  # only axes of length 1 come or go: a view
        match = dict(zip(kept_from, kept_to, strict=True))
        return make_affine(node, target, tuple((match.get(a), 0, 1 if a in match else 0) for a in range(node.ndim)))
    below = node.inputs[0] if isinstance(node, Reshape) else node
    return Reshape(shape=target, dtype=node.dtype, inputs=(below,))


def concat(nodes: Sequence[Node], axis: int | None) -> Node:
    """One after another; dtypes are promoted as NumPy does."""
    if not nodes:
        raise InputError("concat needs at least one array")
    if axis is None:
        nodes, axis = [reshape(node, (-1,)) for node in nodes], 0
    axis = axis_index(axis, nodes[0].ndim)
    rests = {(*n.shape[:axis], *n.shape[axis + 1 :]) for n in nodes}
    if len(rests) > 1 or len({n.ndim for n in nodes}) > 1:
        raise InputError(f"shapes {[n.shape for n in nodes]} differ outside axis {axis}")
    dtype = np.result_type(*(n.dtype for n in nodes))
    parts = tuple(cast(node, dtype) for node in nodes)
    shape = list(nodes[0].shape)
    shape[axis] = sum(n.shape[axis] for n in nodes)
    return parts[0] if len(parts) == 1 else Concat(shape=tuple(shape), dtype=dtype, inputs=parts, axis=axis)


def fill(shape: tuple[int, ...], value: Any, dtype: Any) -> Node:
    return Fill(shape=shape, dtype=np.dtype(dtype), value=value)


def _working(name: str, given: np.dtype[Any], result: np.dtype[Any]) -> np.dtype[Any]:
    """dtype of the accumulator: float64 above float32 and float16, NumPy's own result otherwise."""
    if name in ("any", "all"):
        return np.dtype(bool)
    if name in ("min", "max"):
        return given.newbyteorder("=")
    if name not in ("sum", "prod", "mean", "var", "std", "argmin", "argmax"):
        raise AssertionError(f"{name} has no rule for the dtype of its accumulator")
    base = result if name in ("sum", "prod") else np.result_type(given, np.float64)
    if base.kind == "f" and base.itemsize < 8:
        return np.dtype(np.float64)
    if base.kind == "c" and base.itemsize < 16:
        return np.dtype(np.complex128)
    return np.dtype(base)


@functools.lru_cache(1024)
def _numpys_dtype(name: str, given: np.dtype[Any]) -> np.dtype[Any]:
    """dtype of NumPy's own reduction."""
    return np.asarray(getattr(np, name)(np.zeros(1, given))).dtype


def reduce(name: str, node: Node, axis: Any, keepdims: bool = False, dtype: Any = None, ddof: float = 0) -> Node:
    """A reduction, its dtype as NumPy would have it."""
    axes = axis_tuple(axis, node.ndim)
    count = math.prod(node.shape[a] for a in axes)
    if name in ("min", "max", "argmin", "argmax") and count == 0:
        raise InputError(f"{name} of no elements (shape {node.shape}, axis {axis}) has no value")
    if name in ("argmin", "argmax") and axis is not None and len(axes) != 1:
        raise InputError(f"{name} works along one axis or over all of them")
    result = _numpys_dtype(name, node.dtype)
    if dtype is not None and result != dtype:  # elements are cast before they are added or multiplied, as NumPy's
        result = np.dtype(dtype)
        node = cast(node, result)
    working = _working(name, node.dtype, result)
    shape = tuple(1 if a in axes else n for a, n in enumerate(node.shape))
    made: Node = Reduce(shape=shape, dtype=result, inputs=(node,), name=name, axes=axes, working=working, ddof=ddof)
    return made if keepdims else drop_axes(made, axes)


def scan(ufunc: np.ufunc, node: Node, axis: Any, dtype: Any = None) -> Node:
    """A running sum or product."""
    if axis is None:
        node, axis = reshape(node, (-1,)), 0
    axis = axis_index(axis, node.ndim)
    result = np.asarray(np.sum(np.zeros(1, node.dtype))).dtype
    if dtype is not None and result != dtype:
        result = np.dtype(dtype)
        node = cast(node, result)
    working = _working("sum", node.dtype, result)
    return Scan(shape=node.shape, dtype=result, inputs=(node,), ufunc=ufunc, axis=axis, working=working)


def contract(a: Node, b: Node, batch: int, summed: int) -> Node:
    """The canonical product: see `Contract`."""
    dtype = np.matmul(np.zeros((1, 1), a.dtype), np.zeros((1, 1), b.dtype)).dtype
    m = a.ndim - batch - summed
    if a.shape[:batch] != b.shape[:batch] or a.shape[batch + m :] != b.shape[batch : batch + summed]:
        raise InputError(f"shapes {a.shape} and {b.shape} do not match for a product")
    shape = (*a.shape[: batch + m], *b.shape[batch + summed :])
    if 0 in a.shape or 0 in b.shape:  # sums of nothing
        return fill(shape, 0, dtype)
    return Contract(shape=shape, dtype=dtype, inputs=(a, b), batch=batch, summed=summed)


def matmul(a: Node, b: Node) -> Node:
    """NumPy's @: matrices in the last two axes, the rest broadcast; vectors are promoted and demoted."""
    if a.ndim == 0 or b.ndim == 0:
        raise InputError("@ needs arrays of at least one dimension: use * for scalars")
    left, right = a.ndim == 1, b.ndim == 1
    a = insert_axes(a, (0,)) if left else a
    b = insert_axes(b, (1,)) if right else b
    if a.shape[-1] != b.shape[-2]:
        raise InputError(
            f"shapes {a.shape} and {b.shape} do not match: {a.shape[-1]} columns against {b.shape[-2]} rows"
        )
    lead = broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = broadcast_to(a, (*lead, *a.shape[-2:])), broadcast_to(b, (*lead, *b.shape[-2:]))
    result = contract(a, b, len(lead), 1)
    drop = ([result.ndim - 2] if left else []) + ([result.ndim - 1] if right else [])
    return drop_axes(result, drop) if drop else result
