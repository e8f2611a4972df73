"""The graph: small frozen nodes with a concrete shape and dtype, and how each makes any region of itself.

In: nodes, regions, memory. Out: blocks. A node says how to make a region of itself from regions of its
inputs, taking every byte it needs from a frame (`Memory`); a frame that is only measuring hands out nothing, so the same lines
that run the work also measure it, and a node without such a rule cannot exist. Nodes that need more than a region at a
time (reductions, scans, products, sorts: the barriers) are made by passes and bound to a store before anything reads
them.
"""

from __future__ import annotations

import abc
import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from outsize.array.kernels.blas import Packing
from outsize.array.store.base import Block, Buffer, Region, Store, region_shape
from outsize.core.errors import InputError

Shape = tuple[int, ...]

_MOST = 2**63 - 1
"""Elements that an array can have, and that one axis can."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Node(abc.ABC):
    """One operation."""

    shape: Shape
    """Lengths of the axes."""
    dtype: np.dtype[Any]
    """Element type."""
    inputs: tuple[Node, ...] = field(default=(), repr=False)
    """What it reads."""

    barrier = False
    """True where it cannot be made a region at a time."""
    greedy = False
    """True where small regions would be read in crumbs, so that workers' buffers are as large as there is room."""

    def __post_init__(self) -> None:
        if math.prod(self.shape) > _MOST or any(length > _MOST for length in self.shape):
            raise InputError(
                f"an array of shape {self.shape} has more elements than 64 bits count: ask for less than 2**63, along every axis "
                "and in all"
            )

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole result."""
        return math.prod(self.shape) * self.dtype.itemsize

    def stands_for(self) -> int:
        """Bytes of input that an element of the result is made of, where they are many more than its own."""
        return self.dtype.itemsize

    @abc.abstractmethod
    def evaluate(self, region: Region, frame: Memory, out: Block | None) -> Block:
        """The block of a region: written into `out` where that is given and convenient, else wherever it lies."""

    @abc.abstractmethod
    def detail(self) -> tuple[Any, ...]:
        """What tells this node from others of its class with the same inputs; hashable or printable."""

    def label(self) -> str:
        """A few words for plans and messages."""
        return type(self).__name__.lower()

    def with_inputs(self, inputs: tuple[Node, ...]) -> Node:
        """The same operation on other nodes of the same shapes and dtypes."""
        return replace(self, inputs=inputs)


class Memory(Protocol):
    """What a node asks of the frame that it is made in. `Frame` in `frame.py` is it, and says what each method does."""

    dry: bool
    """True where it only measures."""
    loose: bool
    """True where it measures for other regions of the same shape too."""
    outside: int
    """Most bytes that user functions and library calls may allocate by themselves."""
    reads: list[tuple[Store, Region]]
    """What was read, recorded only when dry."""
    bindings: Mapping[Node, Store]
    """What finished passes left behind."""

    def mark(self) -> tuple[int, int]: ...
    def release(self, mark: tuple[int, int]) -> None: ...
    def bytes(self, size: int) -> Buffer: ...
    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Block: ...
    def reserve(self, size: int) -> None: ...
    def pack(self, packing: Packing) -> None: ...
    def suppose(self, node: Node, region: Region, out: Block | None) -> None: ...
    def read(self, store: Store, region: Region) -> Block: ...
    def evaluate_chain(self, root: Node, region: Region, out: Block | None) -> Block: ...
    def evaluate(self, node: Node, region: Region, out: Block | None = None) -> Block: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class Source(Node):
    """An array in a store."""

    store: Store
    """Where it lies."""

    def evaluate(self, region: Region, frame: Memory, out: Block | None) -> Block:
        return frame.read(self.store, region)

    def detail(self) -> tuple[Any, ...]:
        return (id(self.store),)

    def label(self) -> str:
        return os.path.basename(self.store.name.rstrip("/")) or self.store.name


@dataclass(frozen=True, eq=False, kw_only=True)
class Fill(Node):
    """One value everywhere."""

    value: Any
    """The value."""

    def evaluate(self, region: Region, frame: Memory, out: Block | None) -> Block:
        return np.broadcast_to(np.asarray(self.value, self.dtype), region_shape(region))

    def detail(self) -> tuple[Any, ...]:
        return (np.asarray(self.value, self.dtype).tobytes(), self.shape, self.dtype.str)


@dataclass(frozen=True, eq=False, kw_only=True)
class Range(Node):
    """start + i * step along its only axis."""

    start: Any
    """First value."""
    step: Any
    """From one value to the next."""

    def evaluate(self, region: Region, frame: Memory, out: Block | None) -> Block:
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


def walk(root: Node) -> list[Node]:
    """Every node once, inputs before users."""
    seen: set[int] = set()
    order: list[Node] = []
    stack = [(root, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(node.inputs))
    return order
