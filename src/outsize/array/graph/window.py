"""User functions on blocks: `map_blocks`, and `map_overlap`, which gives each block its neighbours' edges.

The function is a stranger: what it allocates is outside our buffers. So it declares a memory factor (bytes it may hold
beside its input, as a multiple of that input), the plan counts it, and without one the call is refused.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from outsize.array.graph.elementwise import broadcast_region
from outsize.array.graph.frame import Frame, phantom
from outsize.array.graph.node import Node
from outsize.array.graph.rearrange import Wrap
from outsize.array.store.base import Block, Region, region_shape
from outsize.core.errors import InputError

BOUNDARIES = ("none", "reflect", "nearest", "constant", "periodic")
"""What may lie outside the array. `reflect` repeats the edge element, as in SciPy."""


class Blocks(Node):
    """function(block of each input) -> block of the same shape as the region."""

    function: Callable[..., Any]
    memory: float
    """Bytes it may allocate, as a multiple of its inputs' bytes."""

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        blocks = [frame.evaluate(child, broadcast_region(region, child.shape)) for child in self.inputs]
        frame.reserve(math.ceil(self.memory * sum(block.nbytes for block in blocks)))
        return _call(self.function, blocks, region_shape(region), self.dtype, frame)

    def detail(self) -> tuple[Any, ...]:
        return (_identity(self.function),)

    def label(self) -> str:
        return f"map_blocks({getattr(self.function, '__name__', 'function')})"


class Window(Node):
    """function(block with `depth` more elements on every side) -> block of that shape, its margin dropped."""

    function: Callable[..., Any]
    memory: float
    """Bytes it may allocate, as a multiple of its input's bytes."""
    depth: tuple[int, ...]
    """Elements of margin on each side of each axis."""
    boundary: str
    """What lies outside the array: one of `BOUNDARIES`."""
    fill: Any = 0
    """The value outside where the boundary is `constant`."""

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        if math.prod(region_shape(region)) == 0:
            return np.empty(region_shape(region), self.dtype)
        child = self.inputs[0]
        wide = [(start - depth, stop + depth) for (start, stop), depth in zip(region, self.depth, strict=True)]
        inside = tuple((max(0, a), min(n, b)) for (a, b), n in zip(wide, child.shape, strict=True))
        edges = tuple((i[0] - w[0], w[1] - i[1]) for i, w in zip(inside, wide, strict=True))
        margins = self.depth
        if self.boundary == "none":
            padded = frame.evaluate(child, inside)
            margins = tuple(depth - before for depth, (before, _) in zip(self.depth, edges, strict=True))
        elif self.boundary == "periodic":
            padded = self._wrap(tuple(wide), frame)
        else:
            padded = self._pad(inside, edges, frame)
        frame.reserve(math.ceil(self.memory * padded.nbytes))
        result = _call(self.function, [padded], padded.shape, self.dtype, frame)
        return result[tuple(slice(m, m + n) for m, n in zip(margins, region_shape(region), strict=True))]

    def _pad(self, inside: Region, edges: tuple[tuple[int, int], ...], frame: Frame) -> Block:
        """The inside with its outside made up; margins never reach beyond one array length, which the maker checks."""
        block = frame.evaluate(self.inputs[0], inside)
        if not any(before or after for before, after in edges):
            return block
        shape = tuple(n + a + b for n, (a, b) in zip(block.shape, edges, strict=True))
        padded = frame.array(shape, block.dtype)
        if frame.dry:
            return padded
        padded[tuple(slice(a, a + n) for n, (a, _) in zip(block.shape, edges, strict=True))] = block
        for axis, (before, after) in enumerate(edges):
            lead = (slice(None),) * axis
            end = shape[axis] - after
            for target, source in _reflections(self.boundary, before, end, shape[axis]):
                padded[(*lead, target)] = self.fill if source is None else padded[(*lead, source)]
        return padded

    def _wrap(self, wide: Region, frame: Frame) -> Block:
        """The region with the array repeated around it."""
        node = self.inputs[0]
        for axis, ((start, stop), length) in enumerate(zip(wide, node.shape, strict=True)):
            if start < 0 or stop > length:
                shape = (*node.shape[:axis], stop - start, *node.shape[axis + 1 :])
                node = Wrap(shape=shape, dtype=node.dtype, inputs=(node,), axis=axis, shift=start)
        final = tuple(
            (0, stop - start) if start < 0 or stop > length else (start, stop)
            for (start, stop), length in zip(wide, self.inputs[0].shape, strict=True)
        )
        block = frame.array(region_shape(final), node.dtype)
        frame.fill(block, node, final)
        return block

    def detail(self) -> tuple[Any, ...]:
        return (_identity(self.function), self.depth, self.boundary, _identity(self.fill))

    def label(self) -> str:
        return f"map_overlap({getattr(self.function, '__name__', 'function')})"


def _reflections(boundary: str, before: int, end: int, total: int) -> list[tuple[slice, slice | None]]:
    """(margin, where its values come from) pairs along one axis whose true data lies in [before, end)."""
    if boundary == "constant":
        return [(slice(0, before), None), (slice(end, total), None)]
    if boundary == "nearest":
        return [(slice(0, before), slice(before, before + 1)), (slice(end, total), slice(end - 1, end))]
    stop = end - (total - end) - 1
    after = slice(end - 1, stop if stop >= 0 else None, -1)
    return [(slice(0, before), slice(2 * before - 1, before - 1, -1)), (slice(end, total), after)]


def _call(
    function: Callable[..., Any], blocks: list[Block], shape: tuple[int, ...], dtype: np.dtype[Any], frame: Frame
) -> Block:
    if frame.dry:
        return phantom(shape, dtype)
    result = np.asarray(function(*blocks))
    if result.shape != shape:
        raise InputError(
            f"the function returned a block of shape {result.shape} for one of {shape}: it must keep the shape"
        )
    return result.astype(dtype, copy=False)


_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), np.generic, np.dtype)
"""Values whose text tells all of them."""
_SHORT = 1 << 20
"""Bytes of an array that is told by its contents."""


def _identity(value: Any, around: tuple[int, ...] = ()) -> Any:
    """What tells a function from others: its name and code, and what it was given beforehand. Where all of that is plain, it is
    told alike in another run; any other object is only itself, so that an unfinished save with one begins anew."""
    if id(value) in around:  # a function that calls itself
        return "itself"
    tell = functools.partial(_identity, around=(*around, id(value)))
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, types.CodeType):
        return value.co_code.hex(), value.co_names, *map(tell, value.co_consts)
    if isinstance(value, types.FunctionType):
        given = (value.__code__, value.__defaults__, value.__kwdefaults__, *(value.__closure__ or ()))
        return value.__module__, value.__qualname__, *map(tell, given)
    if isinstance(value, types.CellType):
        with contextlib.suppress(ValueError):  # an empty one is only itself: it may be filled later
            return tell(value.cell_contents)
    if isinstance(value, types.MethodType):
        return tell(value.__func__), tell(value.__self__)
    if isinstance(value, functools.partial):
        return tell(value.func), tell(value.args), tell(value.keywords)
    if isinstance(value, tuple | list):
        return type(value).__name__, *map(tell, value)
    if isinstance(value, dict):
        return tuple((tell(name), tell(entry)) for name, entry in value.items())
    if isinstance(value, types.BuiltinFunctionType):
        return value.__name__, tell(value.__self__)
    if isinstance(value, np.ufunc | types.ModuleType):
        return type(value).__name__, value.__name__
    if isinstance(value, np.ndarray) and value.nbytes <= _SHORT and not value.dtype.hasobject:
        return value.dtype.str, value.shape, hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest()
    return type(value).__qualname__, id(value)
