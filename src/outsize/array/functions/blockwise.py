"""User functions on blocks, with or without their neighbours' edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from outsize.array.api.lazy import Array, as_node
from outsize.array.graph.elementwise import broadcast_shapes
from outsize.array.graph.window import BOUNDARIES, Blocks, Window
from outsize.core.errors import InputError

__all__ = ["map_blocks", "map_overlap"]


def map_blocks(function: Callable[..., Any], *arrays: Any, memory: float | None = None, dtype: Any = None) -> Array:
    """function(blocks) -> a block of the same shape, for blocks of any shape the plan likes.

    `memory` is what the function may allocate, as a multiple of its inputs' bytes: 2 for one temporary and the result.
    """
    nodes = tuple(as_node(a) for a in arrays)
    _refuse_unknown("map_blocks", memory)
    shape = broadcast_shapes(*(n.shape for n in nodes))
    element = np.dtype(dtype) if dtype is not None else np.result_type(*(n.dtype for n in nodes))
    return Array(Blocks(shape=shape, dtype=element, inputs=nodes, function=function, memory=memory or 0))


def map_overlap(
    function: Callable[..., Any], x: Any, /, *, depth: Any, boundary: str = "reflect", fill: Any = 0,
    memory: float | None = None, dtype: Any = None,
) -> Array:  # fmt: skip
    """function(block with `depth` neighbours on every side) -> a block of that shape; the margins are cut off again.

    `boundary` is what lies outside: `reflect` (edge element repeated), `nearest`, `constant` (`fill`), `periodic`, or
    `none` (nothing: edge blocks are smaller). `memory` as in `map_blocks`.
    """
    node = as_node(x)
    _refuse_unknown("map_overlap", memory)
    depths = (int(depth),) * node.ndim if isinstance(depth, int | np.integer) else tuple(depth)
    if boundary not in BOUNDARIES:
        raise InputError(f"boundary {boundary!r} is not one of {', '.join(BOUNDARIES)}")
    if len(depths) != node.ndim or any(d < 0 for d in depths):
        raise InputError(f"depth {depth!r} does not give one non-negative number for each of {node.ndim} axes")
    for axis, (d, n) in enumerate(zip(depths, node.shape, strict=True)):
        if d > n and boundary in ("reflect", "periodic"):
            raise InputError(f"depth {d} along axis {axis} is more than its length {n}")
    element = np.dtype(dtype) if dtype is not None else node.dtype
    return Array(
        Window(shape=node.shape, dtype=element, inputs=(node,), function=function, memory=memory or 0, depth=depths,
               boundary=boundary, fill=fill)
    )  # fmt: skip


def _refuse_unknown(name: str, memory: float | None) -> None:
    if memory is None:
        raise InputError(
            f"{name} needs memory=: the bytes your function may allocate as a multiple of its input's (2 is one temporary and "
            "the result); without it the budget cannot be kept"
        )
