"""A pass over one domain: everything that rides on one read is reduced in it, or written region by region, each into its own
sink.

The domain (the inputs' common shape) is cut into tiles along the axes that are kept, so that a tile's state is
complete when its last chunk has been folded; within a tile chunks run over everything. Reductions over different axes
share a read as long as their states are small enough to be held whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.array.graph.barrier import Reduce, Select
from outsize.array.graph.fold import count, fold
from outsize.array.graph.frame import Frame
from outsize.array.graph.node import Node
from outsize.array.kernels.accumulators import KINDS, Accumulator, States, finish, make_accumulator
from outsize.array.passes.base import ANY, Effort, Job, Pass, Room, Sized, inside
from outsize.array.passes.tiling import Box, Grid, balance, center, grow, inner_grid, page_box
from outsize.array.store.base import Block, Buffer, Region, Sink, Store, region_shape, round_up
from outsize.array.tuning import Tuning
from outsize.engine.pool import within_pages


@dataclass(slots=True)
class _State:
    states: dict[int, States]
    """Accumulator's number -> its arrays."""
    slot: Buffer


class ReducePass(Pass):
    """Makes reductions of inputs that have one shape, and nodes of that shape (riders), which are written chunk by chunk."""

    ordered = True

    def __init__(self, outputs: Sequence[tuple[Node, Sink]], bindings: Mapping[Node, Store], tuning: Tuning) -> None:
        super().__init__(tuple(outputs), bindings, tuning)
        self.nodes = [node for node, _ in outputs if isinstance(node, Reduce) and node.barrier]
        self.riders = [(place, node, sink) for place, (node, sink) in enumerate(outputs) if node not in self.nodes]
        """(number of the output, node, sink)."""
        self.domain = self.nodes[0].inputs[0].shape if self.nodes else self.riders[0][1].shape
        self.accumulators: list[tuple[Node, Accumulator]] = []
        self.others: dict[int, tuple[Node, ...]] = {}
        self.used: list[int] = []
        self._number_accumulators()
        self.lanes: frozenset[int] = frozenset()
        """Axes along which a chunk must be whole."""

    @property
    def free(self) -> tuple[int, ...]:
        """Axes along which tiles may be cut."""
        axes = {node.axes for node in self.nodes}
        reduced = set().union(*axes) if len(axes) == 1 and not self.riders else set(range(len(self.domain)))
        return tuple(axis for axis in range(len(self.domain)) if axis not in reduced | self.lanes)

    def _number_accumulators(self) -> None:
        plain = [node for node in self.nodes if not isinstance(node, Select)]
        wanting = {(id(n.inputs[0]), n.axes) for n in plain if KINDS[n.name] == "moments"}
        numbers: dict[tuple[Any, ...], int] = {}
        for node in self.nodes:
            if isinstance(node, Select):
                if (id(node.rule),) not in numbers:
                    numbers[(id(node.rule),)] = len(self.accumulators)
                    self.others[len(self.accumulators)] = node.inputs[1:]
                    self.accumulators.append((node.inputs[0], node.rule))
                self.used.append(numbers[(id(node.rule),)])
                continue
            key_input = (id(node.inputs[0]), node.axes)
            kind = "moments" if node.name == "mean" and key_input in wanting else KINDS[node.name]
            working = node.working
            if kind == "moments" and node.name == "mean":
                working = next(n.working for n in plain if KINDS[n.name] == "moments" and n.axes == node.axes)
            key = (*key_input, kind, working.str)
            if key not in numbers:
                numbers[key] = len(self.accumulators)
                source = node.inputs[0]
                made = make_accumulator(kind, node.axes, source.shape, source.dtype, working)
                self.accumulators.append((source, made))
            self.used.append(numbers[key])

    def label(self) -> str:
        names = sorted({node.name for node in self.nodes})
        written = [f"write {node.label()}" for _, node, _ in self.riders]
        reduced = [f"{' and '.join(names)} of {self.nodes[0].inputs[0].label()}"] if names else []
        return ", ".join([*reduced, *written])

    def measure(self, region: Region, frame: Frame) -> None:
        self._evaluate(region, frame)

    def _evaluate(self, region: Region, frame: Frame, job: Job | None = None) -> dict[int, States]:
        """The partials of a chunk; each input's slices feed all its accumulators. A dry frame only counts, without a job."""
        shape = region_shape(region)
        partials: dict[int, States] = {}
        groups: dict[int, list[int]] = {}
        for number, (source, accumulator) in enumerate(self.accumulators):
            partials[number] = [frame.array(accumulator.kept(shape), dtype) for dtype in accumulator.dtypes()]
            groups.setdefault(id(source), []).append(number)
        extra = 0
        for numbers in groups.values():
            source = self.accumulators[numbers[0]][0]
            takers = [(self.accumulators[n][1], partials[n], self._rows(n, region, frame)) for n in numbers]
            extra += fold(source, region, takers, frame)
        frame.reserve(frame.outside + extra)
        for place, node, sink in self.riders:
            self._write_rider(node, sink if job is None else job.sinks[place], region, frame)
        return partials

    def _write_rider(self, node: Node, sink: Sink, region: Region, frame: Frame) -> None:
        """A chunk of a result, made of what was read for the others and written at once."""
        memory, scratch = frame.bytes(sink.room(region)), frame.bytes(sink.extent(region))
        if frame.dry:
            node.evaluate(region, frame, sink.sketch(region))
            return
        target = sink.lay(region, memory)
        block = node.evaluate(region, frame, target)
        if block is not target:
            frame.copy(target, block)
        sink.write(region, target, scratch)

    def _rows(self, number: int, region: Region, frame: Frame) -> list[Block]:
        """What earlier reductions found for the lanes of a chunk."""
        rows = self.others.get(number, ())
        if not rows:
            return []
        axes = self.accumulators[number][1].axes
        lanes = [(0, 1) if axis in axes else span for axis, span in enumerate(region[:-1])]
        return [frame.evaluate(node, (*lanes, (0, node.shape[-1]))) for node in rows]

    def _state_bytes(self, tile: Box) -> int:
        return sum(
            round_up(math.prod(acc.kept(tile)) * dtype.itemsize)
            for _, acc in self.accumulators
            for dtype in acc.dtypes()
        ) + max((self._finish_bytes(tile, node, sink) for node, sink in self.outputs if node in self.nodes), default=0)

    def _finish_bytes(self, tile: Box, node: Node, sink: Sink) -> int:
        kept = tuple(node.shape[axis] if axis in node.axes else n for axis, n in enumerate(tile))  # type: ignore[attr-defined]
        region = center(node.shape, kept)
        return sink.room(region) + sink.extent(region) + 2 * math.prod(kept) * 16

    def fit(self, effort: Effort, room: Room, there: int = ANY) -> Sized | None:
        domain = self.domain
        ones = tuple(1 if axis in self.free else max(1, n) for axis, n in enumerate(domain))
        element = self._grain()
        page = page_box(domain, element, None, self._bytes(element))
        if effort.bare:
            tile = tuple(max(one, step) for one, step in zip(ones, page, strict=True))
            return self._settle(tile, page, 1, 1, room)
        whole = tuple(max(1, n) for n in domain)
        size = math.prod(domain) * max((s.dtype.itemsize for s, _ in self.accumulators), default=1)
        if size <= self.tuning.small:
            frame = self.probe_box(domain, whole)
            if self.holds(frame, room.host - self._state_bytes(whole), there):
                return self._settle(whole, whole, 1, 1, room)
        one = self.probe_box(domain, page)  # where a table is most of it, single elements would spare nothing
        least = one.peak + one.outside
        buffer = self.buffer(least, effort, room)
        if effort.workers == 1 and least > effort.chunk:  # a part of a chunk is read by reading all of it
            buffer = max(buffer, within_pages(max(0, min(2 * least, room.host - self._state_bytes(whole)))))
        allowed = room.host - effort.workers * buffer
        slots = 1
        tile = whole
        if self.free and self._state_bytes(whole) > min(allowed // 2, 4 * buffer):
            slots = min(2, effort.workers)
            tile = self._choose_tile(min(allowed // slots, 2 * buffer))
        if self._state_bytes(tile) > allowed // slots:
            return None

        def fits(box: Box) -> bool:
            whole = all(step <= length for step, length in zip(box, tile, strict=True))
            return whole and self.holds(self.probe_box(domain, box), buffer, there)

        chunk, _ = grow(domain, element, self._seconds, fits, self._bytes, self.tuning, self.tuning.largest)
        slots = min(slots, max(1, len(Grid(domain, tile))))
        chunk = balance(tile, tuple(max(g, step // g * g) for step, g in zip(chunk, element, strict=True)), element)
        sized = self._settle(tile, chunk, effort.workers, slots, room)
        return self._on_grid(sized, effort, room)

    def _on_grid(self, sized: Sized, effort: Effort, room: Room) -> Sized:
        """With chunks cut where those of sources are cut, if less is read so."""
        grains = [[1] for _ in self.domain]
        for store, _ in self.probe_box(self.domain, sized.chunk).reads:
            if store.shape == self.domain:
                grains = [[*grain, max(1, n)] for grain, n in zip(grains, store.granule, strict=True)]
        steps = [math.lcm(own, *grain) for own, grain in zip(self._grain(), grains, strict=True)]
        chunk = tuple(
            size // step * step or (min(step, length) if step <= 2 * size else size)
            for size, step, length in zip(sized.chunk, steps, self.domain, strict=True)
        )
        if chunk == sized.chunk or math.prod(steps) == 1:
            return sized
        other = self._settle(sized.grid.box, chunk, effort.workers, sized.slots, room)
        return other if other.peak <= max(sized.peak, room.host) and self.cost(other) < self.cost(sized) else sized

    def _grain(self) -> Box:
        """The smallest chunk: of what riders' sinks write in one piece, the least that is whole for all."""
        grains = self._together([sink for _, _, sink in self.riders])
        return tuple(max(1, n) if axis in self.lanes else grains[axis] for axis, n in enumerate(self.domain))

    def _choose_tile(self, allowed: int) -> Box:
        """Cut the kept axes, slowest first, until the state fits."""
        tile = [max(1, n) for n in self.domain]
        for axis in self.free:
            while tile[axis] > 1 and self._state_bytes(tuple(tile)) > allowed:
                tile[axis] = -(-tile[axis] // 2)
        plain = balance(self.domain, tuple(tile), tuple(1 for _ in tile))
        grains = zip(tile, self._granules(), strict=True)
        whole = tuple(max(grain, step // grain * grain) for step, grain in grains)  # no two share a chunk of an output
        return whole if self._state_bytes(whole) <= allowed else plain

    def _granules(self) -> Box:
        """Along each axis, what outputs write in one piece."""
        grains = self._together([sink for node, sink in self.outputs if node in self.nodes])
        return tuple(grain if axis in self.free else 1 for axis, grain in enumerate(grains))

    def _together(self, sinks: list[Sink]) -> Box:
        """The least that is whole for all of these."""
        grains = (math.lcm(1, *(max(1, sink.granule[axis]) for sink in sinks)) for axis in range(len(self.domain)))
        return tuple(min(grain, max(1, n)) for grain, n in zip(grains, self.domain, strict=True))

    def _seconds(self, box: Box) -> float:
        return self.wait(self.probe_box(self.domain, box))

    def _bytes(self, box: Box) -> int:
        sizes = [source.dtype.itemsize for source, _ in self.accumulators]
        return math.prod(box) * max(sizes + [node.dtype.itemsize for _, node, _ in self.riders])

    def _settle(self, tile: Box, chunk: Box, workers: int, slots: int, room: Room) -> Sized:
        grid = Grid(self.domain, tile)
        workers = max(1, min(workers, sum(n * len(Grid(region_shape(r), chunk)) for r, n in grid.kinds())))
        partial = sum(
            math.prod(acc.kept(chunk)) * dtype.itemsize for _, acc in self.accumulators for dtype in acc.dtypes()
        )
        ahead = self.tuning.ahead if partial <= self.tuning.light_partial and workers > 1 else 0
        slot = self._state_bytes(tile)
        return self.settle(grid, chunk, workers, slots, slot, room, ahead=ahead, waiting=ahead * partial)

    def volume(self) -> int:
        return self._bytes(self.domain)

    def tiles(self, sized: Sized) -> Iterator[Region]:
        """At least one tile, also where the reduced axes are empty: the result is then the identity."""
        if math.prod(self.domain) == 0:
            counts = [1 if axis not in self.free else n for axis, n in enumerate(sized.grid.counts)]
            if math.prod(counts):
                yield tuple((0, n) for n in self.domain)
            return
        yield from sized.grid

    def chunks(self, job: Job, tile: Region) -> Iterator[Region]:
        if math.prod(region_shape(tile)) == 0:
            yield tile
            return
        yield from inner_grid(tile, job.sized.chunk)

    def cut(self, sized: Sized, tile: Region, pieces: int) -> list[Region]:
        """Slabs of whole chunks, along the axis that has the most of them."""
        if math.prod(region_shape(tile)) == 0:
            return []
        counts = Grid(region_shape(tile), sized.chunk).counts
        axis = max(range(len(counts)), key=lambda axis: (counts[axis], -axis), default=None)
        if axis is None or counts[axis] < 2:
            return []
        start, stop = tile[axis]
        step = sized.chunk[axis] * -(-counts[axis] // max(1, pieces))
        cuts = [(low, min(stop, low + step)) for low in range(start, stop, step)]
        return [(*tile[:axis], span, *tile[axis + 1 :]) for span in cuts]

    def partial(self, state: _State) -> list[Block]:
        return [array for number in range(len(self.accumulators)) for array in state.states[number]]

    def join(self, job: Job, outer: Region, part: Region, state: _State, blocks: list[Block]) -> None:
        """A part is a large chunk: what it has come to is that chunk's partial."""
        left, payload = iter(blocks), {}
        for number, (_, accumulator) in enumerate(self.accumulators):
            payload[number] = [next(left) for _ in accumulator.dtypes()]
        self.fold(job, outer, part, state, payload)

    def join_bytes(self, sized: Sized) -> int:
        """Moments are joined in several temporaries."""
        return 10 * sized.slot_bytes

    def open(self, job: Job, tile: Region, slot: Buffer) -> _State:
        frame = Frame(slot, {}, self.tuning)
        states: dict[int, States] = {}
        for number, (_, accumulator) in enumerate(self.accumulators):
            kept = accumulator.kept(region_shape(tile))
            states[number] = [frame.array(kept, dtype) for dtype in accumulator.dtypes()]
            accumulator.start(states[number])
        return _State(states, slot[frame.position :])

    def load(self, job: Job, tile: Region, chunk: Region, state: _State, frame: Frame) -> dict[int, States] | None:
        if math.prod(region_shape(chunk)) == 0:
            return None
        frame.reset()
        return self._evaluate(chunk, frame, job)

    def detach(self, payload: dict[int, States] | None) -> dict[int, States] | None:
        return payload and {number: [array.copy() for array in arrays] for number, arrays in payload.items()}

    def fold(self, job: Job, tile: Region, chunk: Region, state: _State, payload: dict[int, States] | None) -> None:
        if payload is None:
            return
        shape = region_shape(chunk)
        for number, (_, accumulator) in enumerate(self.accumulators):
            place = tuple(
                slice(0, 1) if axis in accumulator.axes else part for axis, part in enumerate(inside(chunk, tile))
            )
            views = [array[(*place, ...)] for array in state.states[number]]
            if accumulator.takes_over and all(shape[axis] == self.domain[axis] for axis in accumulator.axes):
                for view, partial in zip(views, payload[number], strict=True):  # nothing else is folded into these
                    np.copyto(view, partial)
                continue
            accumulator.combine(views, payload[number], count(accumulator, shape))
        job.progress(self._bytes(shape))

    def close(self, job: Job, tile: Region, state: _State) -> None:
        reduced = [sink for (node, _), sink in zip(self.outputs, job.sinks, strict=True) if node in self.nodes]
        for node, sink, number in zip(self.nodes, reduced, self.used, strict=True):
            region = tuple((0, node.shape[axis]) if axis in node.axes else span for axis, span in enumerate(tile))
            room = sink.room(region)
            block = sink.lay(region, state.slot[:room])
            number_each = math.prod(self.domain[axis] for axis in node.axes)
            if isinstance(node, Select):
                node.rule.finish(node.name, state.states[number], block)
            else:
                finish(node.name, state.states[number], number_each, node.ddof, block)
            sink.write(region, block, state.slot[room:])
