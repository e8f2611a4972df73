"""The graph: small frozen nodes with a concrete shape and dtype, and how each makes any region of itself.

In: nodes, regions, memory. Out: blocks. A node says how to make a region of itself from regions of its
inputs, taking every byte it needs from a `Frame`; a frame that is only measuring hands out nothing, so the same lines
that run the work also measure it, and a node without such a rule cannot exist. Nodes that need more than a region at a
time (reductions, scans, products, sorts: the barriers) are made by passes and bound to a store before anything reads
them.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, dataclass_transform

import numpy as np

from outsize.array.store.base import Block, Region, Store, region_shape
from outsize.core.errors import InputError

if TYPE_CHECKING:
    from outsize.array.graph.frame import Frame

Shape = tuple[int, ...]

_MOST = 2**63 - 1
"""Elements that an array can have, and that one axis can."""


@dataclass_transform(eq_default=False, kw_only_default=True, frozen_default=True)
@dataclass(frozen=True, eq=False, kw_only=True)
class Node:
    """One operation."""

    shape: Shape
    """Lengths of the axes."""
    dtype: np.dtype[Any]
    inputs: tuple[Node, ...] = field(default=(), repr=False)

    greedy = False
    """True where small regions would be read in crumbs, so that workers' buffers are as large as there is room."""
    called = ""
    """Words for plans and messages, where the class has others than its name."""

    def __post_init__(self) -> None:
        size = math.prod(self.shape)
        if size > _MOST or (size == 0 and max(self.shape) > _MOST):
            raise InputError(
                f"an array of shape {self.shape} has more elements than 64 bits count: ask for less than 2**63, along every axis "
                "and in all"
            )

    @property
    def barrier(self) -> bool:
        """True where it cannot be made a region at a time."""
        return False

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole result."""
        return math.prod(self.shape) * self.dtype.itemsize

    def stands_for(self) -> int:
        """Bytes of input that an element of the result is made of, where they are many more than its own."""
        return self.dtype.itemsize

    def __init_subclass__(cls) -> None:
        """Every kind of node is a frozen dataclass, and none without a rule can exist. (An abstract base class would say so
        too, and make every `isinstance` slow.)"""
        assert cls.evaluate is not Node.evaluate, f"{cls.__name__} has no rule that makes a region of it"
        dataclass(frozen=True, eq=False, kw_only=True)(cls)

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        """The block of a region: written into `out` where that is given and convenient, else wherever it lies."""
        raise AssertionError(self)

    def detail(self) -> tuple[Any, ...]:
        """What tells this node from others of its class with the same shape, dtype and inputs: its other fields, if their text
        tells all of them."""
        return tuple(getattr(self, one.name) for one in fields(self)[_FIELDS:])

    def label(self) -> str:
        """A few words for plans and messages: what its class or it itself is called."""
        return self.called or getattr(self, "name", "") or type(self).__name__.lower()

    def with_inputs(self, inputs: tuple[Node, ...]) -> Node:
        """The same operation on other nodes of the same shapes and dtypes."""
        return replace(self, inputs=inputs)

    def alone(self) -> Node:
        """The same operation without its inputs, which `with_inputs` gives it again."""
        return replace(self, inputs=())


_FIELDS = len(fields(Node))
"""Fields that every node has."""


class Source(Node):
    """An array in a store."""

    store: Store

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        return frame.read(self.store, region)

    def detail(self) -> tuple[Any, ...]:
        return (id(self.store),)

    def label(self) -> str:
        return os.path.basename(self.store.name.rstrip("/")) or self.store.name


class Fill(Node):
    """One value everywhere."""

    value: Any

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        return np.broadcast_to(np.asarray(self.value, self.dtype), region_shape(region))

    def detail(self) -> tuple[Any, ...]:
        return (np.asarray(self.value, self.dtype).tobytes(), self.shape, self.dtype.str)


class Range(Node):
    """start + i * step along its only axis."""

    start: Any
    step: Any

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        block = frame.array(region_shape(region), self.dtype) if out is None else out
        if not frame.dry:
            first, stop = region[0]
            for low in range(first, stop, 1 << 16):
                high = min(stop, low + (1 << 16))
                steps = np.arange(low, high)
                made = self.start + steps * self.step
                block[low - first : high - first] = made.astype(self.dtype, copy=False)  # `block` may be wider
        return block

    def detail(self) -> tuple[Any, ...]:
        ends = [np.asarray(value) for value in (self.start, self.step)]
        return (*((end.dtype.str, end.tobytes()) for end in ends), self.shape, self.dtype.str)


def structure(node: Node, known: dict[int, str]) -> str:
    """A digest of a graph: equal for equal work on the same stores."""
    for each in walk(node):
        if id(each) not in known:
            parts = [type(each).__name__, str(each.shape), each.dtype.str, repr(each.detail())]
            parts += [known[id(child)] for child in each.inputs]
            known[id(each)] = hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
    return known[id(node)]


def walk(*roots: Node) -> list[Node]:
    """Every node once, inputs before users."""
    seen: set[int] = set()
    order: list[Node] = []
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(node.inputs))
    return order


def nodes_below(starts: Iterable[Node], ends: Callable[[Node], bool]) -> Iterator[Node]:
    """Every node below some, each once, down to those where the way ends."""
    seen: set[int] = set()
    stack = list(starts)
    while stack:
        node = stack.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            stack.extend(() if ends(node) else node.inputs)


def held_by_stores(root: Node) -> dict[str, int]:
    """What stores keep in memory while they are open, by name."""
    stores = {node.store for node in walk(root) if isinstance(node, Source)}
    return {store.name: store.holds for store in stores if store.holds}


def take_apart(root: Node) -> list[tuple[Node, tuple[int, ...]]]:
    """A graph as a list, for pickle, which would go down a deep one by recursion: (node alone, places of its inputs)."""
    order = walk(root)
    places = {id(node): place for place, node in enumerate(order)}
    return [(node.alone(), tuple(places[id(child)] for child in node.inputs)) for node in order]


def put_together(parts: list[tuple[Node, tuple[int, ...]]]) -> Node:
    """The root of a graph that was taken apart."""
    made: list[Node] = []
    for node, inputs in parts:
        made.append(node.with_inputs(tuple(made[place] for place in inputs)))
    return made[-1]
