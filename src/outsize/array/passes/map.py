"""A pass that makes a node region by region: fused elementwise chains, rearrangements, windows, lanes.

A tile of the output is laid out as the sink likes it; chunks of it are evaluated straight into it, each small enough
to stay in the cache and shaped after how the sources lie; a full tile is written. Where reading and writing agree a
tile is one chunk; for a transposition tiles are as large as the budget allows and chunks are long reads within them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from outsize.array.graph.barrier import Lane
from outsize.array.graph.external_sort import Runs, index_of
from outsize.array.graph.frame import Frame
from outsize.array.graph.node import Node, walk
from outsize.array.memo import remembered
from outsize.array.passes.base import ANY, Effort, Job, Pass, Room, Sized, inside, split
from outsize.array.passes.tiling import Box, Grid, balance, center, grow, page_box, write_seconds
from outsize.array.store.base import Block, Buffer, Region, Sink, Store, region_shape
from outsize.array.tuning import Tuning


@dataclass(slots=True)
class State:
    """A tile under way."""

    block: Block
    scratch: Buffer


class MapPass(Pass):
    """Makes one node into one sink."""

    def __init__(self, node: Node, sink: Sink, bindings: Mapping[Node, Store], tuning: Tuning) -> None:
        super().__init__(((node, sink),), bindings, tuning)
        self.node, self.sink = node, sink
        self.churn = node.beside if isinstance(node, Lane) else 0
        self.lanes = frozenset({node.axis} if isinstance(node, Lane) else ())
        """Axes along which a chunk must be whole."""

    def label(self) -> str:
        return f"write {self.node.label()}" if self.sink.partial else f"compute {self.node.label()}"

    def measure(self, region: Region, frame: Frame) -> None:
        self.node.evaluate(region, frame, self.sink.sketch(region))

    def _smallest_box(self) -> Box:
        """One granule of the sink, or a page; whole lanes where the node must not be cut."""
        lengths = enumerate(zip(self.sink.granule, self.node.shape, strict=True))
        least = tuple(max(1, n if axis in self.lanes else min(grain, n)) for axis, (grain, n) in lengths)
        return page_box(self.node.shape, least, self.sink.order, self.node.stands_for())

    @remembered
    def _slot(self, box: Box) -> int:
        region = center(self.node.shape, box)
        return self.sink.room(region) + self.sink.extent(region)

    def fit(self, effort: Effort, room: Room, there: int = ANY) -> Sized | None:
        shape, least = self.node.shape, self._smallest_box()
        if effort.bare:
            return self._settle(least, least, 1, 1, room)
        whole = tuple(max(1, length) for length in shape)
        if self._light(whole, room.host, there):
            return self._settle(whole, whole, 1, 1, room)
        one = self.probe_box(shape, least)
        buffer = self.buffer(one.peak + one.outside + one.packing.total(1, 1), effort, room)
        if self.node.greedy:  # lanes across a file's rows are read many at a time, or the file is read many times
            buffer = max(buffer, room.host // (2 * effort.workers))
        slots, tile, most = 0, None, self.tuning.largest
        if self.tuning.spread:  # where workers of a cluster share the tiles, each is to have some
            share = self.node.nbytes // (self.tuning.tasks * self.tuning.spread)
            most = min(most, max(self.tuning.least_box, share))
        for number in sorted({effort.workers, min(2, effort.workers)}, reverse=True):  # fewer slots, larger tiles
            allowed = (room.host - effort.workers * buffer) // number
            if self._slot(least) > allowed:
                continue
            slots = number

            def fits(box: Box, allowed: int = allowed) -> bool:
                return self._slot(box) <= allowed

            tile, starved = grow(shape, least, self._seconds, fits, self._bytes, self.tuning, most)
            if not starved:
                break
        if tile is None:
            return None
        tile = balance(shape, tile, least)
        chunk = self._choose_chunk(tile, least, buffer, there)
        if chunk != tile and math.prod(tile) * self.node.dtype.itemsize <= 2 * effort.chunk:
            tile = chunk if self._slot(chunk) >= self._slot(tile) // 4 and self._aligned(chunk, tile) else tile
        return self._settle(tile, chunk, effort.workers, min(slots, max(1, len(Grid(shape, tile)))), room)

    def _aligned(self, chunk: Box, tile: Box) -> bool:
        """True where cutting the tile at the chunk only cuts its slowest axis, so that runs stay whole."""
        cut = [axis for axis in range(len(tile)) if chunk[axis] != tile[axis]]
        order = self.sink.order or tuple(range(len(tile)))
        first = next((axis for axis in order if tile[axis] > 1), None)
        return first is not None and cut == [first] and chunk[first] % self._smallest_box()[first] == 0

    def _light(self, whole: Box, room: int, there: int) -> bool:
        if self.node.nbytes > self.tuning.small or math.prod(self.node.shape) == 0:
            return math.prod(self.node.shape) == 0
        frame = self.probe_box(self.node.shape, whole)
        return self.holds(frame, min(room, 4 * self.tuning.small) - self._slot(whole), there)

    def _bytes(self, box: Box) -> int:
        return math.prod(box) * self.node.dtype.itemsize

    @remembered
    def _seconds(self, box: Box) -> float:
        region = center(self.node.shape, box)
        return self.wait(self.probe_box(self.node.shape, box)) + write_seconds(self.sink, region, self.tuning)

    def _choose_chunk(self, tile: Box, least: Box, buffer: int, there: int) -> Box:
        """The part of a tile that one worker reads at once. It is grown from what the sink writes, or from one element: where a
        source lies across the sink, whole rows of the sink would be read in short pieces."""
        shape = self.node.shape

        def fits(box: Box) -> bool:
            return self.holds(self.probe_box(shape, box), buffer, there)

        if fits(tile):
            return tile

        def seconds(box: Box, transfer: float | None = None) -> float:
            return self.wait(self.probe_box(shape, box), transfer)

        def each(box: Box, transfer: float | None = None) -> float:
            return seconds(box, transfer) / math.prod(box)

        def grown(start: Box) -> Box:
            return balance(tile, grow(tile, start, seconds, fits, self._bytes, self.tuning)[0], start)

        box = grown(least)
        if each(box) <= 2 * each(box, 0.0):  # transfers are long: their bytes take longer than their beginnings
            return box
        boxes = (box, grown(tuple(n if axis in self.lanes else 1 for axis, n in enumerate(shape))))
        most = self.tuning.reread * min(each(one, 0.0) for one in boxes)
        return min((one for one in boxes if each(one, 0.0) <= most), key=each)

    def _settle(self, tile: Box, chunk: Box, workers: int, slots: int, room: Room) -> Sized:
        grid = Grid(self.node.shape, tile)
        kinds = list(grid.kinds())
        pieces = sum(n * len(Grid(region_shape(r), chunk)) for r, n in kinds)
        regions = [region for region, _ in kinds] or [tuple((0, 0) for _ in tile)]
        slot = max(self.sink.room(region) + self.sink.extent(region) for region in regions)
        node, more = self.node, {}
        if isinstance(node, Lane) and node.inputs[0].shape[node.axis] * node.dtype.itemsize <= self.tuning.alone:
            more["threads"] = 1
        return self.settle(grid, chunk, max(1, min(workers, pieces)), slots, slot, room, **more)

    def volume(self) -> int:
        return self.node.nbytes

    def open(self, job: Job, tile: Region, slot: Buffer) -> State:
        room = job.sink.room(tile)
        place, scratch = split(slot, room, slot.nbytes - room)
        return State(job.sink.lay(tile, place), scratch)

    def load(self, job: Job, tile: Region, chunk: Region, state: State, frame: Frame) -> None:
        frame.reset()
        target = state.block[inside(chunk, tile)] if tile else state.block
        block = self.node.evaluate(chunk, frame, target)
        if block is not target:
            frame.copy(target, block)

    def fold(self, job: Job, tile: Region, chunk: Region, state: State, payload: None) -> None:
        """Nothing: chunks are evaluated into their place."""

    def pieces(self, job: Job, tile: Region, state: State) -> Iterable[Region]:
        return list(job.sink.pieces(tile))

    def write(self, job: Job, tile: Region, state: State, piece: Region) -> None:
        job.sink.write(piece, state.block[inside(piece, tile)] if tile else state.block, state.scratch)

    def close(self, job: Job, tile: Region, state: State) -> None:
        job.progress(state.block.nbytes)

    def notes(self, sized: Any) -> tuple[str, ...]:
        functions = sorted({node.label() for node in walk(self.node) if node.label().startswith("map_")})
        return tuple(f"{name} is trusted to keep to its declared memory" for name in functions)


class RunsPass(MapPass):
    """Makes the sorted runs of lanes: one run is one tile, and every so many-th element of it is kept for the merge."""

    node: Runs

    def fit(self, effort: Effort, room: Room, there: int = ANY) -> Sized:
        box: Box = (*(1 for _ in self.node.shape[:-1]), self.node.run)
        return self._settle(box, box, effort.workers, effort.workers, room)

    def load(self, job: Job, tile: Region, chunk: Region, state: State, frame: Frame) -> None:
        super().load(job, tile, chunk, state, frame)
        store = getattr(job.sink, "reader", None)
        if store is not None:
            kept = state.block.reshape(-1)[:: self.node.step]
            index_of(store, self.node).keep(tile, (kept["value"] if self.node.dtype.names else kept).copy())
