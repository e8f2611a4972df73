"""Nodes that need more than a region at a time: each is made by a pass of its own and read from where that pass left it.

Those that need whole lanes (reductions, scans, sorts of rows) can also be made region by region, where lanes are short: they
are then `local`, and ride in the pass that reads them. `local.py` decides which.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from outsize.array.graph.fold import fold, load
from outsize.array.graph.frame import Frame, phantom
from outsize.array.graph.node import Node
from outsize.array.kernels.accumulators import KINDS, finish, make_accumulator
from outsize.array.kernels.blas import NOTHING, Packing
from outsize.array.kernels.ranks import Rule
from outsize.array.store.base import Block, Region, region_shape
from outsize.array.tuning import Tuning


class Barrier(Node):
    """Base of these nodes."""

    local: bool = False
    """True where it is made inside the pass that reads it: whole lanes of its input are there."""

    @property
    def barrier(self) -> bool:
        return not self.local

    @property
    def lane(self) -> tuple[int, ...]:
        """Axes of the first input that must be whole for a region of it; none where no region is enough."""
        return ()

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        raise AssertionError(f"{self.label()} is read before its pass has run")

    def across(self, region: Region) -> Region:
        """The region of the input that is whole along the lanes."""
        lengths = self.inputs[0].shape
        return tuple((0, lengths[axis]) if axis in self.lane else span for axis, span in enumerate(region))


class Reduce(Barrier):
    """A reduction; reduced axes stay with length 1."""

    name: str
    """A key of `kernels.accumulators.FINISH`."""
    axes: tuple[int, ...]
    working: np.dtype[Any]
    """dtype in which the result is accumulated."""
    ddof: float = 0
    """Degrees of freedom taken off the count, for var and std."""

    @property
    def lane(self) -> tuple[int, ...]:
        return self.axes

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        if not (self.local or frame.at_once):
            return super().evaluate(region, frame, out)
        child, wide = self.inputs[0], self.across(region)
        accumulator = make_accumulator(KINDS[self.name], self.axes, child.shape, child.dtype, self.working)
        load(child, wide, [accumulator], frame)
        result = frame.array(region_shape(region), self.dtype) if out is None else out
        mark = frame.mark()
        partial = [frame.array(accumulator.kept(region_shape(wide)), dtype) for dtype in accumulator.dtypes()]
        frame.reserve(fold(child, wide, [(accumulator, partial, ())], frame) + 2 * result.size * 16 + 4096)
        if not frame.dry:
            count = math.prod(child.shape[axis] for axis in self.axes)
            finish(self.name, partial, count, self.ddof, result)
        frame.release(mark)
        return result


class Select(Reduce):
    """A reduction of the last axis to several elements of it; further inputs have a row for each lane."""

    rule: Rule
    """What is kept of a lane; nodes that share one ride together."""

    @property
    def lane(self) -> tuple[int, ...]:
        return ()

    def detail(self) -> tuple[Any, ...]:
        return (self.name, *self.rule.detail(), self.shape)


class Scan(Barrier):
    """A running sum or product along an axis."""

    ufunc: np.ufunc
    """`np.add` or `np.multiply`, ...: anything with `accumulate`."""
    axis: int
    working: np.dtype[Any]
    """dtype in which it is accumulated."""

    @property
    def lane(self) -> tuple[int, ...]:
        return (self.axis,)

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        if not (self.local or frame.at_once):
            return super().evaluate(region, frame, out)
        start, stop = region[self.axis]
        wide = (*region[: self.axis], (0, stop), *region[self.axis + 1 :])
        block = frame.evaluate(self.inputs[0], wide)
        result = frame.array(region_shape(region), self.dtype) if out is None else out
        mark = frame.mark()
        work = frame.array(region_shape(wide), self.working)
        frame.copy(work, block)
        frame.reserve(2 * work.nbytes // max(1, stop) + 4096)
        if not frame.dry:
            self.ufunc.accumulate(work, axis=self.axis, out=work)
        frame.copy(result, work[(*(slice(None),) * self.axis, slice(start, stop))])
        frame.release(mark)
        return result

    def label(self) -> str:
        return f"cumulative {self.ufunc.__name__}"


class Contract(Barrier):
    """Sum over k of A[batch, m, k] * B[batch, k, n], where each letter stands for a number of axes."""

    batch: int
    """How many leading axes are shared."""
    summed: int
    """How many axes are summed over: the last of A, the first after the batch of B."""

    called = "matrix product"

    def widens(self, tuning: Tuning) -> bool:
        """True where so many narrow numbers are summed that it is done in wide ones."""
        a = self.inputs[0]
        return self.dtype.char in "fF" and math.prod(a.shape[a.ndim - self.summed :]) > tuning.long_sum

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        if not frame.at_once:
            return super().evaluate(region, frame, out)
        wide = {"e": np.float32, "f": np.float64, "F": np.complex128}
        a, b = (frame.evaluate(child, tuple((0, n) for n in child.shape)) for child in self.inputs)
        summed = a.shape[a.ndim - self.summed :]
        if self.dtype.char == "e" or self.widens(frame.tuning):
            a, b = (block.astype(wide[self.dtype.char]) for block in (a, b))
        batch, rows = a.shape[: self.batch], a.shape[self.batch : a.ndim - self.summed]
        left = a.reshape((*batch, math.prod(rows), math.prod(summed)))
        right = b.reshape((*batch, math.prod(summed), -1 if b.size else math.prod(b.shape[self.batch + self.summed :])))
        product: Block = np.matmul(left, right)
        return product.astype(self.dtype, copy=False).reshape(self.shape)


class Lane(Barrier):
    """A function of whole lanes along one axis: sort, argsort, quantiles of rows."""

    function: Callable[..., Block]
    """Takes a block that is whole along the axis and returns one; may change its input."""
    name: str
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
    into: bool = False
    """True where the function takes `out`, memory for its result: what it would allocate itself costs fresh pages every time."""

    greedy = True

    def stands_for(self) -> int:
        child = self.inputs[0]
        lane = child.dtype.itemsize * child.shape[self.axis]
        return max(self.dtype.itemsize, lane // max(1, self.shape[self.axis]))

    @property
    def lane(self) -> tuple[int, ...]:
        return (self.axis,)

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        if self.local or frame.at_once:
            return self._evaluate_beside(region, frame, out)
        child, wide = self.inputs[0], self.across(region)
        block = frame.array(region_shape(wide), child.dtype)
        frame.fill(block, child, wide)
        frame.reserve(int(self.memory * block.nbytes) + self.beside + 4096)
        frame.pack(self.packing)
        if frame.dry:
            return phantom(region_shape(region), self.dtype)
        if self.into and out is not None and out.dtype == self.dtype:
            return self.function(block, out=out)
        return self.function(block)

    def _evaluate_beside(self, region: Region, frame: Frame, out: Block | None) -> Block:
        """A part of the lanes, beside others that read the same: what was read stays, and nothing outside of the frame does."""
        wide, (start, stop) = self.across(region), region[self.axis]
        read = frame.evaluate(self.inputs[0], wide)
        result = frame.array(region_shape(region), self.dtype) if out is None else out
        mark = frame.mark()
        block = frame.array(read.shape, read.dtype)
        frame.copy(block, read)
        frame.reserve(int(self.memory * block.nbytes) + self.beside + 4096)
        frame.pack(self.packing)
        if not frame.dry:
            frame.copy(result, self.function(block)[(*(slice(None),) * self.axis, slice(start, stop))])
        frame.release(mark)
        return result

    def detail(self) -> tuple[Any, ...]:
        return (self.name, self.axis, self.shape, self.key)


class Settled(Barrier):
    """Its input, written out before anything reads it: what comes next would otherwise read it in crumbs."""

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        return frame.evaluate(self.inputs[0], region, out)

    def label(self) -> str:
        return self.inputs[0].label()
