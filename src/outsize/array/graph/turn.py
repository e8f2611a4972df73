"""Lanes that lie across the rows of an array: the array is first turned along them, in a pass of its own.

In: a graph. Out: the same graph with such arrays written out once, their lanes in one piece each, or the graph itself. Otherwise
every tile of lanes is read in crumbs, and where few lanes fit, the whole array is read once for each few. What moves less
depends on the budget, so a plan looks at both.
"""

from __future__ import annotations

import functools
from typing import TypeVar

from outsize.array.graph.barrier import Barrier, Lane, Select, Settled
from outsize.array.graph.build import permute
from outsize.array.graph.local import rebuild
from outsize.array.graph.node import Node, walk
from outsize.array.graph.rearrange import Affine, Reshape

Graph = TypeVar("Graph", bound=Node)


def turn_along(node: Node, axis: int) -> tuple[Node, list[int]]:
    """(a node with its axis last, written out so; the order of axes that turns a result back)."""
    order = [*(a for a in range(node.ndim) if a != axis), axis]
    return settled(permute(node, order)), [order.index(a) for a in range(node.ndim)]


def settled(node: Node) -> Node:
    """Written out before anything reads it."""
    return Settled(shape=node.shape, dtype=node.dtype, inputs=(node,))


def turn_lanes(root: Graph) -> Graph:
    """The graph with every array turned whose lanes lie across its rows."""
    order = walk(root)
    if not any(isinstance(node, Lane | Select) and _across(node) for node in order):
        return root

    def change(node: Node, made: Node) -> Node:
        if not isinstance(made, Lane | Select) or not _across(made):
            return made
        child, *others = made.inputs
        if isinstance(made, Select) or made.axis == made.ndim - 1:
            return made.with_inputs((_turned(child), *others))
        turned, back = turn_along(child, made.axis)
        last = made.ndim - 1
        shape = tuple(made.shape[axis] for axis in sorted(range(made.ndim), key=back.__getitem__))
        lane = Lane(
            shape=shape, dtype=made.dtype, inputs=(turned,), function=functools.partial(made.function, axis=last),
            name=made.name, axis=last, memory=made.memory, beside=made.beside, packing=made.packing, key=made.key,
            into=made.into,
        )  # fmt: skip
        return settled(permute(lane, back))

    changed: Graph = rebuild(order, change)
    return changed


def _across(node: Barrier) -> bool:
    """True where its lanes lie across the rows of what it reads."""
    child = node.inputs[0]
    if not node.nbytes or not child.nbytes:
        return False
    return (isinstance(node, Lane) and node.axis < node.ndim - 1) or _crossed(child) is not None


def _crossed(node: Node) -> Affine | None:
    """The order of axes, below shapes, that brings lanes together."""
    while isinstance(node, Reshape):
        node = node.inputs[0]
    if not isinstance(node, Affine):
        return None
    kept = [target for target, _, _ in node.axes if target is not None]
    return node if kept != sorted(kept) else None


def _turned(node: Node) -> Node:
    """With that order of axes written out."""
    return node.with_inputs((_turned(node.inputs[0]),)) if isinstance(node, Reshape) else settled(node)
