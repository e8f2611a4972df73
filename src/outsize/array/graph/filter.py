"""Results whose length depends on data: counted when they are asked for, made when they are read.

In: a flat mask, and a flat array beside it. Out: the array's elements where the mask is true. How many there are in each
block of the mask is counted in one pass, so the length is known, and any part of the result is made from the blocks that
hold it. `Search` finds where elements belong in a sorted array: a piece of that array at a time, the places add up.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from outsize.array.graph import build as make
from outsize.array.graph.elementwise import Scalar, operation
from outsize.array.graph.frame import Frame, phantom
from outsize.array.graph.node import Node
from outsize.array.store.base import Block, Region, region_shape
from outsize.array.tuning import current


class Tally(Node):
    """How many elements of each block are true."""

    block: int
    """Elements of a block; the last is shorter."""

    called = "count"

    def stands_for(self) -> int:
        return self.block

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        (first, last), mask = region[0], self.inputs[0]
        low, high = first * self.block, min(mask.shape[0], last * self.block)
        result = frame.array((last - first,), self.dtype)
        values = frame.evaluate(mask, ((low, high),))
        frame.reserve(1 << 17)
        if not frame.dry:
            for place in range(last - first):
                result[place] = np.count_nonzero(values[place * self.block : (place + 1) * self.block])
        return result


class First(Node):
    """True where an element of a sorted array is not equal to the one before it."""

    equal_nan: bool
    """True where one NaN is like another."""

    called = "first of equal"

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        return self.both(region, frame)[0]

    def both(self, region: Region, frame: Frame) -> tuple[Block, Block]:
        """The mask of a region, and the elements."""
        (start, stop), child = region[0], self.inputs[0]
        before = min(1, start)
        ahead = 1 if frame.dry and not before else 0  # all but the first region read one element more
        values = frame.evaluate(child, ((start - before, min(child.shape[0], stop + ahead)),))
        mask = frame.array((stop - start,), self.dtype)
        frame.reserve((2 * values.size if self.equal_nan and values.dtype.kind in "fc" else 0) + 4096)
        if frame.dry:
            return mask, phantom(mask.shape, child.dtype)
        mask[: 1 - before] = True
        np.not_equal(values[1:], values[:-1], out=mask[1 - before :])
        if self.equal_nan and values.dtype.kind in "fc":
            mask[1 - before :] &= (values[1:] == values[1:]) | (values[:-1] == values[:-1])
        return mask, values[before:]

    def detail(self) -> tuple[Any, ...]:
        return (self.equal_nan,)


def first_of_equal(values: Node, equal_nan: bool) -> Node:
    """Where each kind of element of a sorted array begins."""
    return First(shape=values.shape, dtype=np.dtype(bool), inputs=(values,), equal_nan=equal_nan)


class Filtered(Node):
    """The elements of the second input where the first is true."""

    ends: Block
    """How many elements come before each block, and all."""
    block: int

    called = "filter"

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        (start, stop), length = region[0], self.inputs[0].shape[0]
        result = frame.array(region_shape(region), self.dtype) if out is None else out
        first, last = int(np.searchsorted(self.ends, start, "right")) - 1, int(np.searchsorted(self.ends, stop, "left"))
        last = min(last, len(self.ends) - 1)  # of nothing, a plan asks for one element at least
        frame.reserve(self.block * (self.dtype.itemsize + 8))
        blocks = [number for number in range(first, last) if self.ends[number] < self.ends[number + 1]]
        if frame.dry:
            return self._measure(blocks, result, frame)
        for number in blocks if start < stop else ():
            mark = frame.mark()
            part = ((number * self.block, min(length, (number + 1) * self.block)),)
            mask, values = self._read(part, frame)
            base = int(self.ends[number])
            low, high = max(start, base), min(stop, int(self.ends[number + 1]))
            result[low - start : high - start] = values[mask][low - base : high - base]
            frame.release(mark)
        return result

    def _read(self, part: Region, frame: Frame) -> tuple[Block, Block]:
        """A block of the mask and of the elements; both from one read where the mask tells equal neighbours apart."""
        mask, values = self.inputs
        if isinstance(mask, First) and mask.inputs[0] is values:
            return mask.both(part, frame)
        return frame.evaluate(mask, part), frame.evaluate(values, part)

    def _measure(self, blocks: list[int], result: Block, frame: Frame) -> Block:
        """One block stands for all; they may lie less luckily in their stores."""
        mark, loose = frame.mark(), frame.loose
        frame.loose = True
        with frame.repeated(max(1, len(blocks))):
            self._read(((0, min(self.inputs[0].shape[0], self.block)),), frame)
        frame.loose = loose
        frame.release(mark)
        return phantom(result.shape, self.dtype)

    def detail(self) -> tuple[Any, ...]:
        return (self.block, self.shape)


def tally(mask: Node) -> Node:
    """How many elements of each block of a flat mask are true."""
    block = current().filter_block
    return Tally(shape=(-(-mask.shape[0] // block),), dtype=np.dtype(np.int64), inputs=(mask,), block=block)


def keep(values: Node, mask: Node, ends: Block) -> Node:
    """The flat values where the flat mask, counted before, is true."""
    block = current().filter_block
    return Filtered(shape=(int(ends[-1]),), dtype=values.dtype, inputs=(mask, values), ends=ends, block=block)


def flat_mask(node: Node) -> Node:
    """Where a node is not zero, flat."""
    if node.dtype.kind != "b":
        node = make.apply(operation(np.not_equal), node, Scalar(0))
    return make.reshape(node, (-1,))


class Search(Node):
    """Where elements of the second input belong in the first, which is sorted."""

    side: str
    """'left' or 'right' of equal elements."""
    piece: int
    """Elements of the sorted array that are read at a time."""

    greedy = True
    called = "searchsorted"

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        ordered, wanted = self.inputs
        result = frame.array(region_shape(region), self.dtype)
        values = frame.evaluate(wanted, region)
        frame.reserve(3 * values.size * max(8, values.dtype.itemsize) + 4096)
        if not frame.dry:
            result[...] = 0
        for low in range(0, ordered.shape[0], self.piece):
            mark = frame.mark()
            part = frame.evaluate(ordered, ((low, min(ordered.shape[0], low + self.piece)),))
            if not frame.dry:
                result += np.searchsorted(part, values, side=self.side)  # type: ignore[call-overload]
            frame.release(mark)
        return result
