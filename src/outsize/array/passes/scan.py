"""A pass for running sums and products: chunks go along the axis in order, each takes up where the last one stopped.

Tiles are cut along all other axes. Their state is the carry, and memory to write a chunk from. Floats are accumulated in
float64, a chunk at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from outsize.array.graph.barrier import Scan
from outsize.array.graph.frame import Frame
from outsize.array.graph.node import Node
from outsize.array.passes.base import ANY, Effort, Job, Pass, Room, Sized, inside
from outsize.array.passes.tiling import Box, Grid, balance, center, grow, page_box, write_seconds
from outsize.array.store.base import Block, Buffer, Region, Sink, Store, region_shape, round_up
from outsize.array.tuning import Tuning


class ScanPass(Pass):
    """Makes one scan."""

    ordered = True

    def __init__(self, node: Scan, sink: Sink, bindings: Mapping[Node, Store], tuning: Tuning) -> None:
        super().__init__(((node, sink),), bindings, tuning)
        self.node, self.sink = node, sink

    def label(self) -> str:
        return self.node.label()

    def measure(self, region: Region, frame: Frame) -> None:
        self._load(region, frame)
        kept = math.prod(self._kept(region_shape(region))) * self.node.working.itemsize
        frame.reserve(frame.outside + 2 * kept)

    def _load(self, region: Region, frame: Frame) -> Block:
        block = frame.array(region_shape(region), self.node.working)
        mark = frame.mark()
        frame.evaluate(self.node.inputs[0], region, block)
        frame.release(mark)
        return block

    def _kept(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(1 if axis == self.node.axis else n for axis, n in enumerate(shape))

    def _slot(self, tile: Box, chunk: Box) -> int:
        region = center(self.node.shape, chunk)
        carry = math.prod(self._kept(tile)) * self.node.working.itemsize
        return round_up(carry) + self.sink.room(region) + self.sink.extent(region)

    def fit(self, effort: Effort, room: Room, there: int = ANY) -> Sized:
        shape = self.node.shape
        least = tuple(max(1, min(g, n)) for g, n in zip(self.sink.granule, shape, strict=True))
        least = page_box(shape, least, self.sink.order, self.node.dtype.itemsize)
        if effort.bare:
            return self._settle(effort, least, room)

        def fits(box: Box) -> bool:
            frame = self.probe_box(shape, box)
            return frame.peak + frame.outside <= effort.chunk

        def seconds(box: Box) -> float:
            return self.wait(self.probe_box(shape, box)) + write_seconds(self.sink, center(shape, box), self.tuning)

        item = self.node.dtype.itemsize
        chunk, _ = grow(shape, least, seconds, fits, lambda box: math.prod(box) * item, self.tuning)
        return self._settle(effort, balance(shape, chunk, least), room)

    def _settle(self, effort: Effort, chunk: Box, room: Room) -> Sized:
        shape = self.node.shape
        tile = tuple(max(1, n) if axis == self.node.axis else chunk[axis] for axis, n in enumerate(shape))
        grid = Grid(shape, tile)
        workers = min(effort.workers, max(1, len(Grid(shape, chunk))))
        slots = min(workers, max(1, len(grid)))
        slot = max(self._slot(tile, region_shape(r)) for r, _ in self.kinds(grid, chunk)) if len(grid) else 0
        return self.settle(grid, chunk, workers, slots, slot, room)

    def kinds(self, grid: Grid, chunk: Box) -> Iterator[tuple[Region, int]]:
        return Grid(self.node.shape, chunk).kinds()

    def volume(self) -> int:
        return self.node.nbytes

    def open(self, job: Job, tile: Region, slot: Buffer) -> tuple[Block, Buffer]:
        kept = self._kept(region_shape(tile))
        size = round_up(math.prod(kept) * self.node.working.itemsize)
        return np.ndarray(kept, self.node.working, slot.data), slot[size:]

    def load(self, job: Job, tile: Region, chunk: Region, state: Any, frame: Frame) -> Block:
        frame.reset()
        block = self._load(chunk, frame)
        self.node.ufunc.accumulate(block, axis=self.node.axis, out=block)
        return block

    def fold(self, job: Job, tile: Region, chunk: Region, state: Any, payload: Any) -> None:
        across = tuple(slice(0, 1) if axis == self.node.axis else part for axis, part in enumerate(inside(chunk, tile)))
        carries, rest = state
        carry = carries[across]
        if chunk[self.node.axis][0] > 0:
            self.node.ufunc(payload, carry, out=payload)
        last = (slice(None),) * self.node.axis + (slice(-1, None),)
        carry[...] = payload[last]
        room = job.sink.room(chunk)
        block = job.sink.lay(chunk, rest[:room])
        np.copyto(block, payload, casting="unsafe")
        job.sink.write(chunk, block, rest[room:])
        job.progress(block.nbytes)

    def close(self, job: Job, tile: Region, state: Any) -> None:
        """Nothing: chunks were written as they came."""
