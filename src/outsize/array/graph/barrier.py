"""Nodes that need more than a region at a time: each is made by a pass of its own and read from where that pass left
it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.array.graph.frame import phantom
from outsize.array.graph.node import Memory, Node
from outsize.array.kernels.blas import NOTHING, Packing
from outsize.array.kernels.ranks import Rule
from outsize.array.store.base import Block, Region


@dataclass(frozen=True, eq=False, kw_only=True)
class Barrier(Node):
    """Base of these nodes."""

    barrier = True

    def evaluate(self, region: Region, frame: Memory, out: Block | None) -> Block:
        raise AssertionError(f"{self.label()} is read before its pass has run")


@dataclass(frozen=True, eq=False, kw_only=True)
class Reduce(Barrier):
    """A reduction; reduced axes stay with length 1."""

    name: str
    """A key of `kernels.accumulators.FINISH`."""
    axes: tuple[int, ...]
    """Axes that are reduced."""
    working: np.dtype[Any]
    """dtype in which the result is accumulated."""
    ddof: float = 0
    """Degrees of freedom taken off the count, for var and std."""

    def detail(self) -> tuple[Any, ...]:
        return (self.name, self.axes, self.working.str, self.ddof)

    def label(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False, kw_only=True)
class Select(Reduce):
    """A reduction of the last axis to several elements of it; further inputs have a row for each lane."""

    rule: Rule
    """What is kept of a lane; nodes that share one ride together."""

    def detail(self) -> tuple[Any, ...]:
        return (self.name, *self.rule.detail(), self.shape)


@dataclass(frozen=True, eq=False, kw_only=True)
class Scan(Barrier):
    """A running sum or product along an axis."""

    ufunc: np.ufunc
    """`np.add` or `np.multiply`, ...: anything with `accumulate`."""
    axis: int
    """Along which axis."""
    working: np.dtype[Any]
    """dtype in which it is accumulated."""

    def detail(self) -> tuple[Any, ...]:
        return (self.ufunc.__name__, self.axis, self.working.str)

    def label(self) -> str:
        return f"cumulative {self.ufunc.__name__}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Contract(Barrier):
    """Sum over k of A[batch, m, k] * B[batch, k, n], where each letter stands for a number of axes."""

    batch: int
    """How many leading axes are shared."""
    summed: int
    """How many axes are summed over: the last of A, the first after the batch of B."""

    def detail(self) -> tuple[Any, ...]:
        return (self.batch, self.summed)

    def label(self) -> str:
        return "matrix product"


@dataclass(frozen=True, eq=False, kw_only=True)
class Lane(Barrier):
    """A function of whole lanes along one axis: sort, argsort, quantiles of rows."""

    function: Callable[[Block], Block]
    """Takes a block that is whole along the axis and returns one; may change its input."""
    name: str
    """What it is called."""
    axis: int
    """The axis that is never cut."""
    memory: float
    """Bytes it may allocate, as a multiple of its input."""
    beside: int = 0
    """Bytes it may allocate besides, however many lanes it is given."""
    packing: Packing = NOTHING
    """What BLAS takes for one call of it."""
    key: tuple[Any, ...] = ()
    """What the function was made of, where its name does not tell."""

    greedy = True

    def stands_for(self) -> int:
        child = self.inputs[0]
        lane = child.dtype.itemsize * child.shape[self.axis]
        return max(self.dtype.itemsize, lane // max(1, self.shape[self.axis]))

    def evaluate(self, region: Region, frame: Memory, out: Block | None) -> Block:
        child = self.inputs[0]
        wide = (*region[: self.axis], (0, child.shape[self.axis]), *region[self.axis + 1 :])
        block = frame.array(tuple(b - a for a, b in wide), child.dtype)
        mark = frame.mark()
        frame.evaluate(child, wide, block)
        frame.release(mark)
        frame.reserve(int(self.memory * block.nbytes) + self.beside + 4096)
        frame.pack(self.packing)
        if frame.dry:
            return phantom(tuple(b - a for a, b in region), self.dtype)
        return self.function(block)

    def detail(self) -> tuple[Any, ...]:
        return (self.name, self.axis, self.shape, self.key)

    def label(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False, kw_only=True)
class Settled(Barrier):
    """Its input, written out before anything reads it: what comes next would otherwise read it in crumbs."""

    def evaluate(self, region: Region, frame: Memory, out: Block | None) -> Block:
        return frame.evaluate(self.inputs[0], region, out)

    def detail(self) -> tuple[Any, ...]:
        return ()

    def label(self) -> str:
        return self.inputs[0].label()
