"""Which reductions, scans and sorts ride in the pass that reads them, because its tiles can hold whole lanes.

In: a graph. Out: the same graph in which such nodes are `local`, or the graph itself. Softmax along rows, written plainly, is a
largest element, a sum and a division: three passes over a file, each of which waits for the one before. A row is short, so one
visit can do all three: the tile that is written is whole along the rows, and what the rows need is made beside it. A lane is
worth that where it is short, and where a reader has the same data at hand (of a reduction) or would read back what was written
(of a scan or a sort).

`Once` keeps what a local node and another reader both want, so that it is made once a region. `Rows` cuts a region along an
axis that no lane crosses, so that everything above one read happens while it is in the cache.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from outsize.array.graph.barrier import Barrier, Contract, Lane, Reduce, Scan
from outsize.array.graph.elementwise import Elementwise
from outsize.array.graph.frame import Frame
from outsize.array.graph.node import Fill, Node, Range, Source, structure, walk
from outsize.array.graph.rearrange import Affine, base_of_turn, only_reshapes
from outsize.array.store.base import Block, Region, region_shape

_DEEP = 8
"""Reductions of lanes in lanes in lanes that a chunk on a device has places for."""


class Once(Node):
    """Its input, made once a region for several readers."""

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        return frame.evaluate(self.inputs[0], region)

    def label(self) -> str:
        return self.inputs[0].label()


class Together(Barrier):
    """Several results that are wanted at once: the top of a graph, which nothing makes."""

    @staticmethod
    def of(roots: Sequence[Node]) -> Together:
        return Together(shape=(), dtype=roots[0].dtype, inputs=tuple(roots))


Graph = TypeVar("Graph", bound=Node)


class Rows(Node):
    """Its input, a few indices of one axis at a time."""

    axis: int
    """An axis that no lane crosses."""
    width: int
    """Bytes of the widest node below, for each index of that axis."""

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        child, (start, stop) = self.inputs[0], region[self.axis]
        step = max(1, frame.tuning.slice // max(1, self.width))
        if stop - start <= step:
            return frame.evaluate(child, region, out)
        block = frame.array(region_shape(region), self.dtype) if out is None else out
        lead = (slice(None),) * self.axis
        cuts = range(start, stop, step)
        with frame.look_into(child, region):
            for low in {cuts[0], cuts[-1]} if frame.dry else cuts:
                high = min(stop, low + step)
                part = (*region[: self.axis], (low, high), *region[self.axis + 1 :])
                frame.fill(block[(*lead, slice(low - start, high - start))], child, part)
        return block

    def stands_for(self) -> int:
        return self.inputs[0].stands_for()

    def label(self) -> str:
        return self.inputs[0].label()


def unify(root: Graph) -> Graph:
    """The graph with equal nodes as one."""
    digests: dict[int, str] = {}
    structure(root, digests)
    first: dict[str, Node] = {}
    unified: Graph = rebuild(walk(root), lambda node, made: first.setdefault(digests[id(node)], made))
    return unified


def rebuild(order: list[Node], change: Any) -> Any:
    """The graph with every node as `change(node, itself on changed inputs)` has it."""
    made: dict[int, Node] = {}
    for node in order:
        inputs = tuple(made[id(child)] for child in node.inputs)
        same = all(new is old for new, old in zip(inputs, node.inputs, strict=True))
        made[id(node)] = change(node, node if same else node.with_inputs(inputs))
    return made[id(order[-1])]


def make_local(root: Graph, longest: int, device: Callable[[Reduce], bool] | None = None) -> Graph:
    """The graph with its short-laned nodes local, where that can spare a pass; `longest` is the bytes of such a lane at most. Of
    a device, `device` says which reductions it can make; no others are local there."""
    order = walk(root)
    if not any(isinstance(node, Reduce | Scan | Lane) for node in order):
        return root
    readers: dict[int, list[Node]] = defaultdict(list)
    for node in order:
        for child in {id(child): child for child in node.inputs}.values():
            readers[id(child)].append(node)
    seen = _Seen(order)
    chosen = {
        id(node) for node in order
        if isinstance(node, Reduce | Scan | Lane) and _is_short(node, longest) and _pays(node, root, readers, seen)
        and (device is None or (isinstance(node, Reduce) and device(node) and _stays(node, root, readers)))
    }  # fmt: skip
    if device is not None:
        chosen = _not_too_deep(order, chosen)
    if not chosen:
        return root
    kept = {
        id(child) for node in order if id(node) in chosen for child in node.inputs[:1]
        if isinstance(child, Elementwise) and len(readers[id(child)]) > 1 and device is None
    }  # fmt: skip

    def change(node: Node, made: Node) -> Node:
        if id(node) in chosen:
            return replace(made, local=True)  # type: ignore[call-arg]
        return Once(shape=made.shape, dtype=made.dtype, inputs=(made,)) if id(node) in kept else made

    made: Graph = rebuild(order, change)
    return made


def _is_short(node: Barrier, longest: int) -> bool:
    child = node.inputs[0]
    lane = math.prod(child.shape[axis] for axis in node.lane) * max(child.dtype.itemsize, node.dtype.itemsize)
    return bool(node.lane) and 0 < lane <= longest and 0 not in child.shape


class _Seen:
    """Which stored arrays are below each node: all of them, and those that no reduction stands before. A set is the bits of a
    number, so that a graph of any size is gone through once."""

    def __init__(self, order: list[Node]) -> None:
        self.all: dict[int, int] = {}
        self.plainly: dict[int, int] = {}
        number = 0
        for node in order:
            below = [(self.all[id(child)], self.plainly[id(child)]) for child in node.inputs]
            everything, plain = 0, 0
            for one, other in below:
                everything, plain = everything | one, plain | other
            if isinstance(node, Source):
                everything, number = 1 << number, number + 1
                plain = everything
            self.all[id(node)], self.plainly[id(node)] = everything, 0 if isinstance(node, Reduce) else plain


def _pays(node: Node, root: Node, readers: dict[int, list[Node]], seen: _Seen) -> bool:
    """True where a reader of a reduction has the same data at hand; where all that read a scan or a sort go through it once."""
    tops = root.inputs if isinstance(root, Together) else (root,)
    if any(node is top or (isinstance(top, Affine) and top.inputs[0] is node) for top in tops):
        return False
    reads_again, beside, stack, known = False, False, list(readers[id(node)]), {id(node)}
    while stack:
        reader = stack.pop()
        if isinstance(reader, Reduce | Scan | Lane):
            beside = beside or not isinstance(reader, Reduce)
            continue
        if isinstance(reader, Contract | Together):
            reads_again = reads_again or isinstance(reader, Contract)
            continue
        if not isinstance(reader, Elementwise | Affine):
            return False
        others = [child for child in reader.inputs if id(child) not in known]
        beside = beside or any(seen.plainly[id(child)] & seen.all[id(node)] for child in others)
        if id(reader) not in known:
            known.add(id(reader))
            stack.extend(readers[id(reader)])
    return beside if isinstance(node, Reduce) else not reads_again


def _stays(node: Node, root: Node, readers: dict[int, list[Node]]) -> bool:
    """True where all that read a reduction have the shape of its input once lanes are whole again: chunks of that shape, on a
    device, then have everything that they need."""
    domain, stack, known = node.inputs[0].shape, list(readers[id(node)]), {id(node)}
    while stack:
        reader = stack.pop()
        if isinstance(reader, Reduce):
            if reader.inputs[0].shape != domain:
                return False
        elif isinstance(reader, Contract):
            chains = [base_of_turn(child) or child for child in reader.inputs]
            mine = [chain for chain in chains if id(chain) in known]
            if len(domain) != 2 or not all(isinstance(one, Elementwise) and one.shape == domain for one in mine):
                return False
        elif base_of_turn(reader) is not None and all(isinstance(one, Contract) for one in readers[id(reader)]):
            stack.extend(readers[id(reader)])
        elif isinstance(reader, Together):
            if any(
                id(top) in known and not (isinstance(top, Elementwise) and top.shape == domain) for top in root.inputs
            ):
                return False
        elif not isinstance(reader, Elementwise) and not (isinstance(reader, Affine) and only_reshapes(reader)):
            return False
        elif id(reader) not in known:
            known.add(id(reader))
            stack.extend(readers[id(reader)])
    return True


def _not_too_deep(order: list[Node], chosen: set[int]) -> set[int]:
    """Those that are made of few others in turn: a chunk on a device has a place for each."""
    depth: dict[int, int] = {}
    for node in order:
        below = max((depth[id(child)] for child in node.inputs), default=0)
        depth[id(node)] = below + (id(node) in chosen)
        if id(node) in chosen and depth[id(node)] > _DEEP:
            chosen = chosen - {id(node)}
            depth[id(node)] = 0
        elif node.barrier and id(node) not in chosen:
            depth[id(node)] = 0
    return chosen


def cut_rows(root: Graph) -> Graph:
    """The graph with `Rows` at the top of whatever holds local nodes: below every barrier, and so below the top."""
    order = walk(root)
    inside = {id(node): False for node in order}
    for node in order:
        if not node.barrier:
            local = isinstance(node, Barrier)
            inside[id(node)] = local or any(inside[id(child)] for child in node.inputs)
    if not any(inside.values()):
        return root

    rows: dict[int, Node] = {}

    def cut(node: Node, was: Node) -> Node:
        if inside[id(was)] and id(node) not in rows:
            rows[id(node)] = _in_rows(node)
        return rows.get(id(node), node)

    def change(node: Node, made: Node) -> Node:
        if not node.barrier:
            return made
        inputs = tuple(cut(child, was) for child, was in zip(made.inputs, node.inputs, strict=True))
        return made.with_inputs(inputs)

    made: Graph = rebuild(order, change)
    return made


def _in_rows(node: Node) -> Node:
    axis = _free_axis(node)
    if axis is None:
        return node
    # each by its own indices of that axis
    cut = [(one, way[axis]) for one, way in _below(node, tuple(range(node.ndim)))]
    width = max(one.nbytes // max(1, one.shape[place]) for one, place in cut if place is not None)
    return Rows(shape=node.shape, dtype=node.dtype, inputs=(node,), axis=axis, width=width)


Way = tuple[int | None, ...]
"""For each axis of the node at the top, the axis of a node below that is cut with it; None where that is whole for every part."""


def _below(top: Node, way: Way) -> Iterator[tuple[Node, Way]]:
    """Every node that is made with the node at the top, by every way that leads to it."""
    stack, known = [(top, way)], set()
    while stack:
        node, way = stack.pop()
        if (id(node), way) in known:
            continue
        known.add((id(node), way))
        yield node, way
        if node.barrier:
            continue
        for child in node.inputs:
            stack.append((child, _step(node, child, way)))


def _step(node: Node, child: Node, way: Way) -> Way:
    if isinstance(node, Affine):
        back = {target: axis for axis, (target, _, step) in enumerate(node.axes) if target is not None and step}
    elif isinstance(node, Barrier):
        back = {axis: axis for axis in range(child.ndim) if axis not in node.lane}
    else:
        lead = node.ndim - child.ndim
        back = {axis + lead: axis for axis, length in enumerate(child.shape) if length == node.shape[axis + lead]}
    return tuple(None if axis is None else back.get(axis) for axis in way)


_CLEAN = (Elementwise, Affine, Barrier, Once, Source, Fill, Range)
"""Nodes of which a part is made of a part of what the whole is made of."""


def _free_axis(top: Node) -> int | None:
    """The slowest axis that can be cut without making a lane twice; None where there is none, or a node below reads in other
    ways than its part of the whole."""
    free = set(range(top.ndim))
    for node, way in _below(top, tuple(range(top.ndim))):
        if not isinstance(node, _CLEAN) or (
            isinstance(node, Affine) and any(abs(step) > 1 for _, _, step in node.axes)
        ):
            return None
        if isinstance(node, Barrier) and not node.barrier:
            free -= {axis for axis in free if way[axis] is None or way[axis] in node.lane}
    return next((axis for axis in sorted(free) if top.shape[axis] > 1), None)
