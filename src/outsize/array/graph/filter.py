"""Results whose length depends on data: counted when they are asked for, made when they are read.

In: a flat mask, and a flat array beside it. Out: the array's elements where the mask is true. How many there are in each
block of the mask is counted in one pass, so the length is known, and any part of the result is made from the blocks that
hold it. `Search` finds where elements belong in a sorted array: a piece of that array at a time, the places add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.array.graph import build as make
from outsize.array.graph.elementwise import Scalar, operation
from outsize.array.graph.frame import phantom
from outsize.array.graph.node import Memory, Node
from outsize.array.store.base import Block, Region, region_shape
from outsize.array.tuning import current


@dataclass(frozen=True, eq=False, kw_only=True)
class Tally(Node):
    """How many elements of each block are true."""

    block: int
    """Elements of a block; the last is shorter."""

    called = "count"

    def stands_for(self) -> int:
        return self.block

    def evaluate(self, region: Region, frame: Memory, out: Block | None) -> Block:
        (first, last), mask = region[0], self.inputs[0]
        low, high = first * self.block, min(mask.shape[0], last * self.block)
        result = frame.array((last - first,), self.dtype)
        values = frame.evaluate(mask, ((low, high),))
        frame.reserve(1 << 17)
        if not frame.dry:
            for place in range(last - first):
                result[place] = np.count_nonzero(values[place * self.block : (place + 1) * self.block])
        return result


@dataclass(frozen=True, eq=False, kw_only=True)
class Filtered(Node):
    """The elements of the second input where the first is true."""

    ends: Block
    """How many elements come before each block, and all."""
    block: int
    """Elements of a block."""

    called = "filter"

    def evaluate(self, region: Region, frame: Memory, out: Block | None) -> Block:
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
            mask, values = (frame.evaluate(child, part) for child in self.inputs)
            base = int(self.ends[number])
            low, high = max(start, base), min(stop, int(self.ends[number + 1]))
            result[low - start : high - start] = values[mask][low - base : high - base]
            frame.release(mark)
        return result

    def _measure(self, blocks: list[int], result: Block, frame: Memory) -> Block:
        """One block stands for all; they may lie less luckily in their stores."""
        mark, loose = frame.mark(), frame.loose
        frame.loose = True
        with frame.repeated(max(1, len(blocks))):
            for child in self.inputs:
                frame.evaluate(child, ((0, min(self.inputs[0].shape[0], self.block)),))
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


@dataclass(frozen=True, eq=False, kw_only=True)
class Search(Node):
    """Where elements of the second input belong in the first, which is sorted."""

    side: str
    """'left' or 'right' of equal elements."""
    piece: int
    """Elements of the sorted array that are read at a time."""

    greedy = True
    called = "searchsorted"

    def evaluate(self, region: Region, frame: Memory, out: Block | None) -> Block:
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
