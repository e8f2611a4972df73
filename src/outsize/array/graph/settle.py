"""Which nodes are written out once instead of being made again for every reader.

In: a graph as the user built it. Out: the same graph with `Settled` nodes in it, or the graph itself where none is wanted.
A node is made region by region inside the pass that reads it. That is cheapest for a chain, but a node whose readers want
different regions (`roll(v, 1) + roll(v, -1)`) is made once a reader, and in a loop of such steps this doubles with every
round. And every node that is not part of a fused chain is one call deeper. So a node is settled where it would be made more
than `MOST` times, or where calls would be nested more than `DEEPEST` deep. Each pass is then small, and their number grows
with the graph and no faster.
"""

from __future__ import annotations

import math
from collections import defaultdict

from outsize.array.graph.barrier import Reduce, Settled
from outsize.array.graph.elementwise import Elementwise
from outsize.array.graph.local import Graph, Once, Together, rebuild
from outsize.array.graph.node import Node, walk
from outsize.array.graph.rearrange import Affine, Concat, Reshape, Take, Wrap

MOST = 4
"""Times that a node is made anew before it is written out: a pass over a disk costs about as much as so many operations."""
DEEPEST = 32
"""Nested evaluations: each is up to six Python calls, and Python allows 1000 in all, the user's own among them."""

_MOVED = (Affine, Concat, Reshape, Take, Wrap)
"""Nodes that only move elements: it is what they move that is worth keeping."""

Times = dict[int, float]
"""Whose evaluation makes a node -> how many times, in wholes of the node."""


def settle(root: Graph) -> Graph:
    """The graph with a `Settled` above every node that is better written out."""
    order = walk(root)
    chosen = _choose(order)
    if not chosen:
        return root

    def change(node: Node, made: Node) -> Node:
        return Settled(shape=node.shape, dtype=node.dtype, inputs=(made,)) if id(node) in chosen else made

    made: Graph = rebuild(order, change)
    return made


def _choose(order: list[Node]) -> set[int]:
    """The nodes to settle. Readers are looked at before what they read."""
    root = order[-1]
    inlined: dict[int, Times] = {}
    """By which fused chains a node is computed as one of their steps."""
    read: dict[int, Times] = defaultdict(dict)
    """By whom a node is evaluated as a block of its own."""
    depth: dict[int, int] = defaultdict(int)
    chosen: set[int] = set()
    tops = {id(child) for child in root.inputs} if isinstance(root, Together) else set()
    read[id(root)][id(root)] = 1.0
    for node in reversed(order):
        times, deep = inlined.pop(id(node), {}), depth.pop(id(node), 0)
        if id(node) in read:
            found = read.pop(id(node)).values()
            times = {**times, id(node): max(found) if isinstance(node, Once) else sum(found)}
        if node.barrier or node is root or id(node) in tops or not node.inputs:
            anew = node.barrier
        else:
            often = sum(times.values()) > MOST and not isinstance(node, _MOVED)
            anew = often or deep > DEEPEST
            if anew:
                chosen.add(id(node))
        if anew:  # a pass of its own
            times, deep = {id(node): 1.0}, 0
        for child in node.inputs:
            if isinstance(node, Elementwise) and isinstance(child, Elementwise) and child.shape == node.shape:
                known = inlined.get(id(child))
                inlined[id(child)] = times if known is None or known is times else {**known, **times}
                depth[id(child)] = max(depth[id(child)], deep)
                continue
            depth[id(child)] = max(depth[id(child)], deep + 1)
            part = _part(node, child)
            if isinstance(node, Reduce) and node.barrier:  # reductions of one node share one pass over it
                times = {0: 1.0}
            for reader, often_read in times.items():
                read[id(child)][reader] = max(read[id(child)].get(reader, 0.0), often_read * part)
    return chosen


def _part(node: Node, child: Node) -> float:
    """How much of a child is made for the whole of a node."""
    size = math.prod(child.shape)
    if isinstance(node, Affine):
        touched = math.prod(1 if to is None else (node.shape[to] - 1) * abs(step) + 1 for to, _, step in node.axes)
        return max(0, min(size, touched)) / max(1, size)
    if isinstance(node, Wrap) or (isinstance(node, Take) and child is node.inputs[0]):
        return math.prod(node.shape) / max(1, size)
    return 1.0
