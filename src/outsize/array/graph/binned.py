"""Counts of values by bin, a row for each block of elements; their sum is a histogram. And which whole numbers there are.

In: a flat array, and weights beside it where there are any. Out: counts, a row for each block. A sum over the rows rides on
the same read, so the rows are never there all at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from outsize.array.graph import build as make
from outsize.array.graph.frame import Frame
from outsize.array.graph.node import Node
from outsize.array.store.base import Block, Region, region_shape
from outsize.array.tuning import current

_PIECE = 1 << 16
"""Elements that are counted at a time."""
_AT_WORK = 64
"""Bytes that counting takes for each of them."""


class Binned(Node):
    """count(values, weights or None) -> the counts of all bins, for each block."""

    count: Callable[[Block, Block | None], Block]
    """Counts one piece."""
    block: int
    """Elements of a block; the last is shorter."""
    key: tuple[Any, ...]
    """What the counting function was made of."""

    called = "count by bin"

    def stands_for(self) -> int:
        return max(self.dtype.itemsize, self.block * self.inputs[0].dtype.itemsize // max(1, self.shape[1]))

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        (first, last), (left, right) = region
        size = self.inputs[0].shape[0]
        result = frame.array(region_shape(region), self.dtype) if out is None else out
        frame.reserve(_PIECE * _AT_WORK + 4 * self.shape[1] * self.dtype.itemsize + 4096)
        if not frame.dry:
            result[...] = 0
        for row in range(first, min(last, first + 1) if frame.dry else last):
            mark = frame.mark()
            part = ((row * self.block, min(size, (row + 1) * self.block)),)
            with frame.repeated(last - first if frame.dry else 1):
                blocks = [frame.evaluate(child, part) for child in self.inputs]
            for low in range(0, 0 if frame.dry else blocks[0].size, _PIECE):
                pieces = [block[low : low + _PIECE] for block in blocks]
                result[row - first] += self.count(pieces[0], pieces[1] if pieces[1:] else None)[left:right]
            frame.release(mark)
        return result

    def detail(self) -> tuple[Any, ...]:
        return (self.block, self.shape, self.key)


def count_bins(
    node: Node, weights: Node | None, bins: int, count: Callable[[Block, Block | None], Block], key: tuple[Any, ...]
) -> Node:
    """How many elements of a flat array are in each bin, or the sum of their weights."""
    block = max(current().filter_block, 4 * bins)
    element = np.dtype(np.int64) if weights is None else np.result_type(weights.dtype, np.float64)
    inputs = (node,) if weights is None else (node, weights)
    rows = -(-node.shape[0] // block)
    made = Binned(shape=(rows, bins), dtype=element, inputs=inputs, count=count, block=block, key=key)
    return make.reduce("sum", made, 0)


class Present(Node):
    """Marks the whole numbers that each block of a flat array has, in memory that all blocks share: they only ever set what
    others may set too. What it gives says nothing."""

    marks: Block
    """A mark for each number from `first` on."""
    first: int
    """The smallest number."""
    block: int
    """Elements of a block; the last is shorter."""

    called = "find which there are"

    def stands_for(self) -> int:
        return self.block * self.inputs[0].dtype.itemsize

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        (first, last), child = region[0], self.inputs[0]
        result = frame.array(region_shape(region), self.dtype) if out is None else out
        values = frame.evaluate(child, ((first * self.block, min(child.shape[0], last * self.block)),))
        frame.reserve(3 * 8 * _PIECE + 4096)
        if not frame.dry:
            wide = np.uint64 if child.dtype.kind == "u" else np.int64
            for low in range(0, values.size, _PIECE):
                places = values[low : low + _PIECE].astype(wide)
                places -= wide(self.first)
                self.marks[places.view(np.int64)] = True
            result[...] = 0
        return result

    def detail(self) -> tuple[Any, ...]:
        return (id(self.marks), self.first, self.block)


def mark_present(node: Node, first: int, marks: Block) -> Node:
    """Sets `marks` for the whole numbers of a flat array that lie from `first` on, when it is computed."""
    block = current().filter_block
    rows = -(-node.shape[0] // block)
    made = Present(shape=(rows,), dtype=np.dtype(np.int64), inputs=(node,), marks=marks, first=first, block=block)
    return make.reduce("sum", made, None)
