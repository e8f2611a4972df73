"""Functions of whole lanes along an axis, wherever that axis lies.

In: a node, an axis, a function of blocks that are whole along it. Out: a node. Lanes that lie across the rows of a large
array are first turned along them, in a pass of its own: otherwise every lane would be read in crumbs. Of a smaller one the plan
decides that, which knows the budget (`graph/turn.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from outsize.array.graph import build as make
from outsize.array.graph.barrier import Lane
from outsize.array.graph.node import Node
from outsize.array.graph.turn import turn_along
from outsize.array.kernels.blas import NOTHING, Packing
from outsize.array.store.base import Block
from outsize.array.tuning import current


def turn_last(node: Node, axis: int, always: bool = False) -> tuple[Node, int, list[int] | None]:
    """(node, the axis in it, order of axes that turns a result back or None), the axis last where that pays in any budget."""
    last = node.ndim - 1
    if axis == last or not (always or node.nbytes > current().turned):
        return node, axis, None
    turned, back = turn_along(node, axis)
    return turned, last, back


def in_lanes(
    node: Node, axis: int, function: Callable[..., Block], *, name: str, length: int, dtype: Any, memory: float,
    beside: int = 0, packing: Packing = NOTHING, into: bool = False,
) -> Node:  # fmt: skip
    """function(block, axis=...) of whole lanes, each `length` long afterwards; `memory`, `beside`, `packing` and
    `into` as of a `Lane`."""
    node, along, back = turn_last(node, axis)
    lane = Lane(
        shape=(*node.shape[:along], length, *node.shape[along + 1 :]), dtype=np.dtype(dtype), inputs=(node,),
        function=functools.partial(function, axis=along), name=name, axis=along, memory=memory, beside=beside,
        packing=packing, into=into,
    )  # fmt: skip
    return make.permute(lane, back) if back is not None else lane
