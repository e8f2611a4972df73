"""The memory of one worker: one buffer from the pool, handed out from its front and taken back in the reverse order.

In: a buffer, and the stores that finished passes left behind. Out: blocks inside the buffer. A dry frame has no
buffer: it hands out blocks that take no memory and records what would have been taken and read; that is how a plan
learns its exact peak and its reads.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from outsize.array.graph.compile import compile_program
from outsize.array.graph.elementwise import broadcast_region
from outsize.array.graph.node import Node, Source
from outsize.array.kernels.blas import NOTHING, Packing
from outsize.array.kernels.copies import copy_block
from outsize.array.kernels.fused import Program, lies_across, natural_order, run_program
from outsize.array.store.base import Block, Buffer, Region, Store, hollow, region_shape, round_up
from outsize.array.tuning import Tuning, current
from outsize.core.errors import OutOfMemory
from outsize.core.units import format_bytes

_EMPTY = np.empty(0, np.uint8)
_SMALL = 1 << 15
"""Elements of a block that is not worth turning."""


class Frame:
    """A stack of memory; dry where `buffer` is None."""

    at_once = False

    def __init__(
        self, buffer: Buffer | None, bindings: Mapping[Node, Store], tuning: Tuning | None = None,
        like: Frame | None = None,
    ) -> None:  # fmt: skip
        """`like` is a frame with the same bindings: what that has worked out of nodes need not be worked out again."""
        self.tuning = tuning or current()
        self.buffer = buffer
        self.dry = buffer is None
        self.bindings = bindings
        self.position = 0
        self.peak = 0
        """Most bytes of the buffer that were taken at once."""
        self.outside = 0
        """Most bytes that user functions and library calls may allocate by themselves."""
        self.packing = NOTHING
        """Most that BLAS takes for its own buffers, and keeps."""
        self.device = 0
        """Bytes of a device that the chunk takes, where one takes part."""
        self.reads: Counter[tuple[Store, Region]] = Counter()
        """What was read and how many times, recorded only when dry."""
        self.looks: Counter[Store] = Counter()
        """Bytes of arrays in memory that were looked at, recorded only when dry."""
        self._times = 1
        self.loose = False
        """Dry, and other regions of this shape may lie less luckily in their stores: reads are counted at their most."""
        self._memo: dict[tuple[int, Region], Block] = {}
        self._supposed: dict[tuple[Any, ...], tuple[int, int, Packing]] = {} if like is None else like._supposed
        self._programs: dict[Node, Program] = {} if like is None else like._programs
        self._windows: dict[int, list[tuple[Region, Block]]] = {}

    def renamed(self, stores: Mapping[Store, Store]) -> Frame:
        """What was measured, as if other stores had been read that take as much."""
        made = Frame(None, {}, self.tuning)
        made.peak, made.outside, made.packing, made.device = self.peak, self.outside, self.packing, self.device
        made.looks.update(self.looks)
        made.reads.update({(stores.get(store, store), region): n for (store, region), n in self.reads.items()})
        return made

    def reset(self) -> None:
        """Take everything back."""
        self.position = 0
        self._memo.clear()

    def mark(self) -> tuple[int, int]:
        """Remember this height, for `release`."""
        return self.position, len(self._memo)

    def release(self, mark: tuple[int, int]) -> None:
        """Take back what was handed out since the mark."""
        self.position, kept = mark
        while len(self._memo) > kept:
            self._memo.popitem()

    def bytes(self, size: int) -> Buffer:
        """`size` bytes that begin on a page."""
        start = self.position
        self.position = start + round_up(size)
        self.peak = max(self.peak, self.position)
        if self.buffer is None:
            return _EMPTY
        if self.position > self.buffer.nbytes:
            raise OutOfMemory(
                f"a chunk needs {format_bytes(self.position)} of memory and its plan foresaw {format_bytes(self.buffer.nbytes)}: "
                "this is a mistake in Outsize; please report it with the expression"
            )
        return self.buffer[start : start + size]

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Block:
        """An uninitialised block."""
        memory = self.bytes(math.prod(shape) * dtype.itemsize)
        if self.dry:
            return phantom(shape, dtype)
        return np.ndarray(shape, dtype, memory.data)

    def reserve(self, size: int) -> None:
        """Count memory that is not ours to hand out: what a user's function allocates."""
        self.outside = max(self.outside, size)

    def pack(self, packing: Packing) -> None:
        """Count what BLAS takes for its own buffers."""
        self.packing = self.packing.join(packing)

    def suppose(self, node: Node, region: Region, out: Block | None) -> None:
        """Count, when dry, the memory of a region that another part of the output would want; it is not read."""
        if not self.dry or 0 in region_shape(region):
            return
        key = (node, region, None if out is None else (out.dtype, out.strides))
        found = self._supposed.get(key)
        if found is None:  # once a region: joins of joins of joins would double the work at every level
            trial = Frame(None, self.bindings, self.tuning, self)
            trial.loose = True
            trial.evaluate(node, region, out)
            found = self._supposed[key] = trial.peak, trial.outside, trial.packing
        self.pack(found[2])
        self.peak, self.outside = max(self.peak, self.position + found[0]), max(self.outside, found[1])

    def read(self, store: Store, region: Region) -> Block:
        if store.resident:  # when dry too: what has to be packed shows in its strides
            block = store.read(region, _EMPTY)
            if not self.dry:
                return block
            self.looks[store] += self._times * block.nbytes
            if block.shape == region_shape(region):  # of nothing, a plan looks at what is not there
                return block
        if self.dry:
            self.bytes(store.most(region) if self.loose else store.extent(region))
            self.pack(Packing(*store.packing(region)))
            if not store.resident:
                self.count_read(store, region)
            return phantom(region_shape(region), store.dtype, store.order)
        return store.read(region, self.bytes(store.extent(region)))

    def count_read(self, store: Store, region: Region) -> None:
        """Note a read that is only planned."""
        self.reads[store, region] += self._times

    @contextlib.contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """What the block reads, when dry, stands for so many others that are like it."""
        before, self._times = self._times, self._times * times
        try:
            yield
        finally:
            self._times = before

    def copy(self, target: Block, block: Block) -> None:
        """Copy a block, with a cast where the dtypes differ."""
        if not self.dry:
            copy_block(target, block)

    def program(self, node: Node) -> Program:
        """The fused program of a node, compiled once."""
        found = self._programs.get(node)
        if found is None:
            found = self._programs[node] = compile_program(node, self.bindings, self.tuning.slice)
        return found

    def evaluate_chain(self, root: Node, region: Region, out: Block | None) -> Block:
        """The block of an elementwise node, by its fused program."""
        program = self.program(root)
        shape = region_shape(region)
        blocks = self.load_leaves(program, region)
        order = natural_order(blocks, shape)
        target = out
        if target is None or (lies_across(target, order, shape) and math.prod(shape) > _SMALL):
            turned = self.array(tuple(shape[axis] for axis in order), root.dtype)
            target = turned.transpose(sorted(range(len(order)), key=order.__getitem__)) if order else turned
        mark = self.mark()
        scratch = self.bytes(program.scratch(shape))
        if not self.dry:
            run_program(program, blocks, shape, target, scratch, ())
        self.release(mark)
        if out is not None and target is not out:
            self.copy(out, target)
            return out
        return target

    def load_leaves(self, program: Program, region: Region) -> list[Block]:
        """The blocks that a program reads for a region, each with all axes of the result."""
        blocks = []
        for leaf in program.leaves:
            block = self.evaluate(leaf, broadcast_region(region, leaf.shape))
            blocks.append(block[(None,) * (len(region) - block.ndim)] if block.ndim < len(region) else block)
        return blocks

    def evaluate(self, node: Node, region: Region, out: Block | None = None) -> Block:
        """The block of a node's region, made once however many users it has; in `out` where that is given."""
        if self.dry and 0 in node.shape:  # a plan asks for one element at least, and here is none
            return phantom(region_shape(region), node.dtype) if out is None else out
        key = (id(node), region)
        block = self._memo.get(key)
        if block is None and id(node) in self._windows:
            block = self._inside_window(node, region)
        if block is None:
            store = self.bindings.get(node)
            block = node.evaluate(region, self, out) if store is None else self.read(store, region)
            if out is not None and block is out:
                return out
            self._memo[key] = block
        if out is not None:
            self.copy(out, block)
            return out
        return block

    @contextlib.contextmanager
    def look_into(self, node: Node, region: Region) -> Iterator[None]:
        """Read at once what a region of a node reads: meanwhile parts of that are views of it."""
        trace, before = _Trace(self), self._windows
        trace.evaluate(node, region)
        self._windows = dict(before)
        for leaf, wide in trace.found.values():
            self._windows.setdefault(id(leaf), []).append((wide, self.evaluate(leaf, wide)))
        try:
            yield
        finally:
            self._windows = before

    def _inside_window(self, node: Node, region: Region) -> Block | None:
        for wide, block in self._windows[id(node)]:
            if all(low <= a and b <= high for (a, b), (low, high) in zip(region, wide, strict=True)):
                place: Any = tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(region, wide, strict=True))
                return block[place] if place else block
        return None

    def fill(self, out: Block, node: Node, region: Region) -> None:
        """A node's region into a block; what making it took is taken back."""
        mark = self.mark()
        self.evaluate(node, region, out)
        self.release(mark)


class _Trace(Frame):
    """A dry frame that notes which regions of stored arrays are wanted."""

    def __init__(self, frame: Frame) -> None:
        super().__init__(None, frame.bindings, frame.tuning, frame)
        self.found: dict[tuple[int, Region], tuple[Node, Region]] = {}

    def evaluate(self, node: Node, region: Region, out: Block | None = None) -> Block:
        if node in self.bindings or isinstance(node, Source):
            self.found[id(node), region] = node, region
            return phantom(region_shape(region), node.dtype)
        return super().evaluate(node, region, out)


def phantom(shape: tuple[int, ...], dtype: np.dtype[Any], order: tuple[int, ...] | None = None) -> Block:
    """A hollow block that lies in C order, or in another."""
    strides = [0] * len(shape)
    step = dtype.itemsize
    for axis in reversed(order or range(len(shape))):
        strides[axis] = step
        step *= shape[axis]
    return hollow(shape, tuple(strides), dtype)
