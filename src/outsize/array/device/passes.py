"""The map and reduction passes on a device: the same tiles, chunks and results, a chunk's work done there.

Leaves of a chain (whatever is not elementwise: files, transpositions, joins) are made on the host into page-locked
memory; the chain, the short lanes that it reads and the reduction run on the device. Partial results of chunks come back and
are folded on the host in the chunks' order, as on the processor. Sums and moments are accumulated in the same wide dtypes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outsize.array.device.base import DeviceBudget, array_bytes, padded
from outsize.array.device.folding import Folding, check_fold, dtype_there
from outsize.array.device.local_work import LocalWork
from outsize.array.device.lower import DeviceRegisters, Lowered, Trivial, slice_elements
from outsize.array.device.transfer.pipeline import Parcel, Pipeline, load, settled
from outsize.array.device.transfer.staging import Staging, staging_threads
from outsize.array.graph.barrier import Reduce
from outsize.array.graph.elementwise import Elementwise
from outsize.array.graph.frame import Frame
from outsize.array.graph.node import Node
from outsize.array.kernels.accumulators import ArgExtreme, Fold, States
from outsize.array.kernels.fused import cut_slices
from outsize.array.passes.base import ANY, BARE, Effort, Job, Pass, Room, Sized, inside
from outsize.array.passes.map import MapPass
from outsize.array.passes.reduction import ReducePass
from outsize.array.passes.tiling import Box
from outsize.array.store.base import Block, Region, Sink, Store, region_shape
from outsize.array.store.formats.memory import MemorySink
from outsize.array.tuning import Tuning
from outsize.core.plan import Level
from outsize.core.units import format_bytes
from outsize.engine.pool import cores

_NOTHING = np.empty(0, np.uint8)


def device_efforts(workers: int, chunk: int, room: int) -> list[Effort]:
    """From generous to bare, as of any pass, with the long copies a link wants."""
    few = max(2, workers // 2)
    rows = [(workers, chunk), (workers, chunk // 2), (few, chunk // 2), (few, chunk // 8), (2, chunk // 16)]
    rows += [(2, chunk // 64), (1, chunk // 256), (1, room // 3), (1, room // 12)]
    return [*(Effort(count, each) for count, each in rows), BARE]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedOnDevice(Sized):
    """A pass with its sizes on host and device."""

    device_slots: int
    """Chunks on the device at once."""
    device_slot_bytes: int
    """Bytes of the device for each."""
    elements: int
    """Elements of a register."""
    staging: Staging
    """The staging threads that carry what the device does not reach."""
    known: Mapping[int, bool]
    """id of a leaf -> whether it is sent from where it lies, where that is settled: the run holds to it, since there may be no
    staging threads, and does not ask about every block."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A pass on an open device."""

    pipeline: Pipeline
    """The way of a chunk through the device."""
    registers: Mapping[int, DeviceRegisters]
    """id of an input -> the registers of its chain."""


class OnDevice(Pass):
    """What passes on a device share: slots and registers there, counted before they are used."""

    device_budget: DeviceBudget
    chains: dict[int, Lowered]
    """id of an input -> its chain."""
    leaves: list[Node]
    """Everything that is sent, each once."""
    wide = 0
    """Bytes of an element while it is reduced."""
    results = 0
    """Elements of a reduction's results, at most."""
    longest = 0
    """Elements of the longest lane that a slice must hold whole."""
    locks = (True, False)

    def _gather(self, roots: Sequence[Node], bindings: Mapping[Node, Store]) -> None:
        self.local = LocalWork(self.device_budget.device, bindings, self.tuning)
        for root in roots:
            self.local.add(root)
        self.chains, self.leaves, self.lanes = self.local.chains, self.local.leaves, self.local.lanes
        made = self.local.accumulators.values()
        self.wide = max((dtype_there(accumulator).itemsize for accumulator in made), default=0)
        self.results = max((math.prod(accumulator.kept(roots[0].shape)) for accumulator in made), default=0)

    def _behind(self, elements: int) -> int:
        """Bytes of the registers of any chain."""
        return max(chain.registers(elements) for chain in self.chains.values())

    def scratch(self, elements: int) -> int:
        """Bytes that all chunks share on the device: registers of the chain, a slice as it is reduced, what it is reduced to."""
        return self._behind(elements) + padded(elements * self.wide) + padded(min(elements, self.results) * self.wide)

    def _slice(self) -> int:
        """Elements of a slice: few long ones, since every kernel needs the interpreter."""
        each, room = sum(chain.registers(1 << 12) for chain in self.chains.values()) >> 12, self.device_budget.room
        most = self.tuning.device_slice
        apart = slice_elements(room, most, each + self.wide, padded(self.results * self.wide))
        return max(apart, slice_elements(room, most, each + 2 * self.wide))

    def limit(self, room: Room) -> tuple[Room, int]:
        return self.device_budget.limit(room)

    def efforts(self, room: int) -> list[Effort]:
        return device_efforts(max(2, min(self.tuning.device_workers, cores())), self.tuning.device_chunk, room)

    def fit(self, effort: Effort, room: Room, there: int = ANY) -> SizedOnDevice | None:
        elements = max(256 if effort.bare else self._slice(), self.longest)
        slots = min(self.tuning.device_slots, effort.workers)
        there = min((self.device_budget.room - self.scratch(elements)) // slots, self.tuning.device_slot)
        settled, some = self._settled(), 0 if effort.bare else room.host
        staging = Staging() if all(settled.values()) else Staging.choose(some, self.tuning, alone=effort.workers == 1)
        found = super().fit(effort, replace(room, host=room.host - staging.nbytes), there)  # type: ignore[safe-super]
        if found is None:
            return None
        slots = min(slots, found.workers)
        each = max((self.probe(r).device for r, _ in self.kinds(found.grid, found.chunk)), default=0)
        sized = found.extended(
            SizedOnDevice, shared_bytes=staging.nbytes, device_bytes=self.scratch(elements) + slots * each, device_slots=slots,
            device_slot_bytes=each, elements=elements, staging=staging,
            known={key: direct for key, direct in settled.items() if direct is not None},
        )  # fmt: skip
        return sized if effort.bare or sized.device_bytes <= self.device_budget.room else None

    def _settled(self) -> dict[int, bool | None]:
        return {id(leaf): settled(leaf, self.bindings, self.device_budget.device, self.tuning) for leaf in self.leaves}

    def _seconds(self, box: Box) -> float:
        """Disk time, and what sending a chunk costs whatever its size."""
        return super()._seconds(box) + self.tuning.send_seconds  # type: ignore[misc, no-any-return]

    @contextlib.contextmanager
    def opened(self, sized: SizedOnDevice) -> Iterator[Opened]:
        """The device is open; every array on it is let go of at the end, so that its memory goes back with the run."""
        device = self.device_budget.device
        base, registers = self.scratch(sized.elements), {}
        with staging_threads(device, sized.staging, self.tuning.stage_pause) as stager:
            for key, chain in self.chains.items():
                registers[key] = DeviceRegisters(chain, device, 0, sized.elements)
            try:
                yield Opened(Pipeline(device, base, sized.device_slot_bytes, sized.device_slots, stager), registers)
            finally:
                registers.clear()  # an error's traceback would keep arrays on the device alive

    def send(self, region: Region, frame: Frame, known: Mapping[int, bool]) -> list[Parcel]:
        """Every block that a region needs."""
        sent = self.local.parts(region).sent
        return [load(leaf, part, frame, self.device_budget.device, known.get(id(leaf))) for leaf, part in sent]

    def _sent(self, sized: Any) -> int:
        """Bytes over the link to the device."""
        return sum(n * math.prod(region_shape(part)) * leaf.dtype.itemsize
                   for region, n in self.kinds(sized.grid, sized.chunk)
                   for leaf, part in self.local.parts(region).sent)  # fmt: skip

    def cost(self, sized: Any) -> float:
        """What is read, and what could be read while the link is busy."""
        link = self.device_budget.device.rates().link_in
        return super().cost(sized) + self._sent(sized) * self.tuning.disk_rate / link

    def enough(self, sized: Any) -> float:
        """Everything sent little more than once is as good as less."""
        once, link = sum(leaf.nbytes for leaf in self.leaves), self.device_budget.device.rates().link_in
        return super().enough(sized) + self.tuning.reread * once * self.tuning.disk_rate / link

    def levels(self, sized: Any) -> tuple[Level, ...]:
        rates, into = self.device_budget.device.rates(), self._sent(sized)
        out = sum(node.nbytes for node, _ in self.outputs)
        operations = sum(len(chain.program.instructions) for chain in self.chains.values()) + 1
        touched, once = 2 * operations * into, sum(leaf.nbytes for leaf in self.leaves)
        rows = (
            ("disk", self.reads(sized) + self.writes(), self.floor(sized), self.tuning.disk_rate),
            ("link in", into, once, rates.link_in), ("link out", out, out, rates.link_out),
            ("device memory", touched, into + out, rates.memory),
        )  # fmt: skip
        return tuple(Level(name=name, amount=n, floor=floor, rate=rate) for name, n, floor, rate in rows)

    def notes(self, sized: Any) -> tuple[str, ...]:
        each = sized.device_slot_bytes
        direct = all(self.probe(region).peak < each // 2 for region, _ in self.kinds(sized.grid, sized.chunk))
        direct = direct and each > 0 and not sized.staging.threads
        way = "sent from where it lies" if direct else "through page-locked memory"
        way += f" by {sized.staging.threads} staging threads" if sized.staging.threads else ""
        return (
            *super().notes(sized),
            f"on {self.device_budget.device.name}: {sized.device_slots} slots of {format_bytes(each)}, {way}",
        )


class DeviceMapPass(OnDevice, MapPass):
    """Makes an elementwise chain into a sink."""

    def __init__(
        self, node: Node, sink: Sink, bindings: Mapping[Node, Store], tuning: Tuning, device_budget: DeviceBudget
    ) -> None:
        if not isinstance(node, Elementwise) or node in bindings:
            raise Trivial(f"{node.label()} only moves elements: the processor does that without crossing the link")
        super().__init__(node, sink, bindings, tuning)
        self.device_budget = device_budget
        self._gather([node], bindings)
        self.arrives = isinstance(sink, MemorySink) and device_budget.device.reaches(sink.array)
        """True where results can be brought straight to their place."""

    def measure(self, region: Region, frame: Frame) -> None:
        self.send(region, frame, {})
        if not self.arrives or not self._lands(self.sink.lay(region, _NOTHING)):
            frame.array(region_shape(region), self.node.dtype)
        frame.device = self.local.nbytes(region) + array_bytes(region_shape(region), self.node.dtype)

    def _lands(self, target: Block) -> bool:
        """True where a chunk can be brought straight to this place."""
        return self.arrives and target.flags.c_contiguous and target.dtype == self.node.dtype and target.dtype.isnative

    def load(self, job: Job, tile: Region, chunk: Region, state: Any, frame: Frame) -> None:
        frame.reset()
        target = state.block[inside(chunk, tile)] if tile else state.block
        shape = region_shape(chunk)
        if math.prod(shape) == 0:
            return
        parcels = self.send(chunk, frame, job.sized.known)
        landing = target if self._lands(target) else frame.array(shape, self.node.dtype.newbyteorder("="))
        registers = job.opened.registers[id(self.node)]

        def work(arrays: list[Any], place: int) -> Iterable[tuple[Block, Any]]:
            behind = self._behind(registers.elements)
            found, place = self.local.make(job.opened.registers, behind, arrays, place, chunk)
            out = self.device_budget.device.view(place, shape, landing.dtype)
            ins = self.local.leaves_of(self.node, chunk, found)
            for index, part in cut_slices(shape, registers.elements):
                registers.value(ins, index, part, out[index] if index else out)
            return [(landing, out)]

        job.opened.pipeline.run(parcels, work)
        if landing is not target:
            frame.copy(target, landing)


_PLACES = np.dtype(np.int64)
"""dtype of indices."""


class DeviceReducePass(OnDevice, ReducePass):
    """Makes reductions."""

    def __init__(
        self, outputs: Sequence[tuple[Reduce, Sink]], bindings: Mapping[Node, Store], tuning: Tuning, allowed: DeviceBudget
    ) -> None:  # fmt: skip
        super().__init__(outputs, bindings, tuning)
        self.device_budget = allowed
        for _, accumulator in self.accumulators:
            if math.prod(self.domain) == 0 or not accumulator.axes:
                raise Trivial("nothing is reduced")
            check_fold(accumulator, allowed.device)
        self._gather([source for source, _ in self.accumulators], bindings)
        self.wide = max(self.wide, *(dtype_there(one).itemsize for _, one in self.accumulators))
        self.results = max(self.results, *(math.prod(one.kept(self.domain)) for _, one in self.accumulators))
        lanes = [self.domain[one.axes[0]] for _, one in self.accumulators if isinstance(one, ArgExtreme)]
        self.longest = max(lanes, default=0)

    def efforts(self, room: int) -> list[Effort]:
        if all(direct is False for direct in self._settled().values()):  # workers neither read nor copy
            return device_efforts(self.tuning.device_slots, self.tuning.device_chunk, room)
        return super().efforts(room)

    def _evaluate(self, region: Region, frame: Frame, job: Job | None = None) -> dict[int, States]:
        shape = region_shape(region)
        partials = {
            number: [frame.array(accumulator.kept(shape), dtype) for dtype in accumulator.dtypes()]
            for number, (_, accumulator) in enumerate(self.accumulators)
        }
        parcels = self.send(region, frame, {} if job is None else job.sized.known)
        frame.reserve(frame.outside + sum(accumulator.temporaries(0, region) for _, accumulator in self.accumulators))
        held = sum(
            array_bytes(accumulator.kept(shape), dtype_there(accumulator)) * (len(accumulator.device_kinds) or 1)
            + (array_bytes(accumulator.kept(shape), _PLACES) if isinstance(accumulator, ArgExtreme) else 0)
            for _, accumulator in self.accumulators
        )
        frame.device = held + self.local.nbytes(region)
        if job is not None:
            opened: Opened = job.opened
            opened.pipeline.run(
                parcels, lambda arrays, place: self._reduce(opened.registers, arrays, place, region, partials)
            )
            for number, (_, accumulator) in enumerate(self.accumulators):
                if isinstance(accumulator, ArgExtreme):
                    partials[number][1] += region[accumulator.axes[0]][0]
        return partials

    def _reduce(
        self, registers: Mapping[int, DeviceRegisters], arrays: list[Any], place: int, region: Region,
        partials: dict[int, States],
    ) -> Iterable[tuple[Block, Any]]:  # fmt: skip
        """All reductions of a chunk that lies on the device."""
        device, shape = self.device_budget.device, region_shape(region)
        behind = self._behind(next(iter(registers.values())).elements)
        found, place = self.local.make(registers, behind, arrays, place, region)
        returns = []
        for number, (source, accumulator) in enumerate(self.accumulators):
            ins, dtype = self.local.leaves_of(source, region, found), dtype_there(accumulator)
            kept = accumulator.kept(shape)
            folding = Folding(device, registers[id(source)], behind)
            total = device.view(place, kept, dtype)
            place += array_bytes(kept, dtype)
            if isinstance(accumulator, ArgExtreme):
                where = device.view(place, kept, _PLACES)
                place += array_bytes(kept, _PLACES)
                folding.find(accumulator, ins, shape, total, where)
                returns += [(partials[number][0].view(dtype), total), (partials[number][1], where)]
            elif isinstance(accumulator, Fold):
                folding.fold(accumulator, ins, shape, total)
                returns.append((partials[number][0].view(dtype), total))
            else:
                squares = device.view(place, kept, dtype)
                place += array_bytes(kept, dtype)
                folding.moments(accumulator, ins, shape, total, squares)
                returns += [(partials[number][1], total), (partials[number][2], squares)]
        return returns
