"""The map and reduction passes on a device: the same tiles, chunks and results, a chunk's work done there.

Leaves of a chain (whatever is not elementwise: files, transpositions, joins) are made on the host into page-locked
memory; the chain and the reduction run on the device. Partial results of chunks come back and are folded on the host in
the chunks' order, as on the processor. Sums and moments are accumulated in the same wide dtypes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outsize.array.device.base import DeviceBudget, array_bytes, padded
from outsize.array.device.lower import DeviceRegisters, Lowered, Refused, Trivial, lower, slice_elements
from outsize.array.device.transfer.pipeline import Parcel, Pipeline, load, parcel_bytes, settled
from outsize.array.device.transfer.staging import Staging, staging_threads
from outsize.array.graph.barrier import Reduce
from outsize.array.graph.compile import compile_program
from outsize.array.graph.elementwise import Elementwise, broadcast_region
from outsize.array.graph.fold import count
from outsize.array.graph.frame import Frame
from outsize.array.graph.node import Node
from outsize.array.kernels.accumulators import Accumulator, ArgExtreme, Fold, Moments, States
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
        self.chains, self.leaves = {}, []
        for root in roots:
            if id(root) in self.chains:
                continue
            chain = lower(compile_program(root, bindings, self.tuning.slice), self.device_budget.device.kernels)
            self.chains[id(root)] = chain
            for leaf, moved in zip(chain.program.leaves, chain.moved, strict=True):
                if moved and not any(leaf is known for known in self.leaves):
                    self.leaves.append(leaf)

    def scratch(self, elements: int) -> int:
        """Bytes that all chunks share on the device: registers of the chain, a slice as it is reduced, what it is reduced to."""
        most = max(chain.registers(elements) for chain in self.chains.values())
        return most + padded(elements * self.wide) + padded(min(elements, self.results) * self.wide)

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
        """Every leaf's block of a region."""
        return [load(leaf, region, frame, self.device_budget.device, known.get(id(leaf))) for leaf in self.leaves]

    def arrays_of(self, chain: Lowered, arrays: list[Any]) -> list[Any]:
        """What was sent, in the order of a chain's leaves."""
        numbers = {id(leaf): number for number, leaf in enumerate(self.leaves)}
        return [arrays[numbers[id(leaf)]] if moved else None
                for leaf, moved in zip(chain.program.leaves, chain.moved, strict=True)]  # fmt: skip

    def levels(self, sized: Any) -> tuple[Level, ...]:
        rates = self.device_budget.device.rates()
        chunks = self.kinds(sized.grid, sized.chunk)
        into = sum(n * math.prod(region_shape(broadcast_region(region, leaf.shape))) * leaf.dtype.itemsize
                   for region, n in chunks for leaf in self.leaves)  # fmt: skip
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
        sent = sum(parcel_bytes(leaf, region) for leaf in self.leaves)
        frame.device = sent + array_bytes(region_shape(region), self.node.dtype)

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
        chain, registers = self.chains[id(self.node)], job.opened.registers[id(self.node)]

        def work(arrays: list[Any], place: int) -> Iterable[tuple[Block, Any]]:
            out = self.device_budget.device.view(place, shape, landing.dtype)
            ins = self.arrays_of(chain, arrays)
            for index, part in cut_slices(shape, registers.elements):
                registers.value(ins, index, part, out[index] if index else out)
            return [(landing, out)]

        job.opened.pipeline.run(parcels, work)
        if landing is not target:
            frame.copy(target, landing)


_PLACES = np.dtype(np.int64)
"""dtype of indices."""
_TRUTHS = {"or": "maximum", "and": "minimum"}
"""Kind of fold of truths -> what a device does with bytes."""


def _dtype_there(accumulator: Accumulator) -> np.dtype[Any]:
    """dtype in which a device accumulates: integers wrap alike with and without sign, truths are bytes; extremes are looked for
    in what they are of."""
    working = (accumulator.dtype if isinstance(accumulator, ArgExtreme) else accumulator.working).newbyteorder("=")
    others: dict[str, np.dtype[Any]] = {"?": np.dtype(np.uint8), "L": np.dtype(np.int64)}
    return others.get(working.char, working)


class DeviceReducePass(OnDevice, ReducePass):
    """Makes reductions."""

    def __init__(
        self, outputs: Sequence[tuple[Reduce, Sink]], bindings: Mapping[Node, Store], tuning: Tuning, allowed: DeviceBudget
    ) -> None:  # fmt: skip
        super().__init__(outputs, bindings, tuning)
        self.device_budget = allowed
        for source, accumulator in self.accumulators:
            self._check(source, accumulator)
        self._gather([source for source, _ in self.accumulators], bindings)
        self.wide = max(_dtype_there(accumulator).itemsize for _, accumulator in self.accumulators)
        self.results = max(math.prod(accumulator.kept(self.domain)) for _, accumulator in self.accumulators)
        lanes = [self.domain[one.axes[0]] for _, one in self.accumulators if isinstance(one, ArgExtreme)]
        self.longest = max(lanes, default=0)

    def _check(self, source: Node, accumulator: Accumulator) -> None:
        kernels = self.device_budget.device.kernels
        if math.prod(self.domain) == 0 or not accumulator.axes:
            raise Trivial("nothing is reduced")
        kind, working = accumulator.kind if isinstance(accumulator, Fold) else "", accumulator.working
        several, extreme = len(accumulator.axes) > 1 and not accumulator.flat, kind in ("minimum", "maximum")
        where = isinstance(accumulator, ArgExtreme)
        extreme, working = extreme or where, accumulator.dtype if where else working
        for what, found in (
            ("indices of extremes over several axes", where and len(accumulator.axes) > 1),
            ("extremes of complex numbers", extreme and working.kind == "c"),
            (
                "extremes of uint64",
                extreme and working.char == "L",
            ),  # held as int64, which wraps sums alike and no order
            ("moments of complex numbers", isinstance(accumulator, Moments) and working.kind == "c"),
            ("products over several axes", kind == "multiply" and several),
        ):
            if found:
                raise Refused(f"{what} are found by the processor")
        if not where and not {_TRUTHS.get(fold, fold) for fold in accumulator.device_kinds or ("",)} <= kernels.folds:
            raise Refused("it has no rule for a device")
        if _dtype_there(accumulator).char not in kernels.dtypes:
            raise Refused(f"{kernels.name} does not accumulate in {accumulator.working.name}")

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
            array_bytes(accumulator.kept(shape), _dtype_there(accumulator)) * (len(accumulator.device_kinds) or 1)
            + (array_bytes(accumulator.kept(shape), _PLACES) if isinstance(accumulator, ArgExtreme) else 0)
            for _, accumulator in self.accumulators
        )
        frame.device = held + sum(parcel_bytes(leaf, region) for leaf in self.leaves)
        if job is not None:
            opened: Opened = job.opened
            opened.pipeline.run(
                parcels, lambda arrays, place: self._reduce(opened.registers, arrays, place, shape, partials)
            )
            for number, (_, accumulator) in enumerate(self.accumulators):
                if isinstance(accumulator, ArgExtreme):
                    partials[number][1] += region[accumulator.axes[0]][0]
        return partials

    def _reduce(
        self, registers: Mapping[int, DeviceRegisters], arrays: list[Any], place: int, shape: tuple[int, ...],
        partials: dict[int, States],
    ) -> Iterable[tuple[Block, Any]]:  # fmt: skip
        """All reductions of a chunk that lies on the device."""
        returns = []
        for number, (source, accumulator) in enumerate(self.accumulators):
            chain = self.chains[id(source)]
            ins = self.arrays_of(chain, arrays)
            dtype = _dtype_there(accumulator)
            kept = accumulator.kept(shape)
            total = self.device_budget.device.view(place, kept, dtype)
            place += array_bytes(kept, dtype)
            if isinstance(accumulator, ArgExtreme):
                where = self.device_budget.device.view(place, kept, _PLACES)
                place += array_bytes(kept, _PLACES)
                self._find(registers[id(source)], accumulator, ins, shape, total, where)
                returns += [(partials[number][0].view(dtype), total), (partials[number][1], where)]
                continue
            if isinstance(accumulator, Fold):
                self._fold(registers[id(source)], accumulator, ins, shape, total, None)
                returns.append((partials[number][0].view(dtype), total))
                continue
            squares = self.device_budget.device.view(place, kept, dtype)
            place += array_bytes(kept, dtype)
            self._fold(registers[id(source)], accumulator, ins, shape, total, None)
            each = float(count(accumulator, shape))
            self.device_budget.device.kernels.apply("divide", dtype, total, total, each)
            self._fold(registers[id(source)], accumulator, ins, shape, squares, total)
            returns += [(partials[number][1], total), (partials[number][2], squares)]
        return returns

    def _fold(
        self, registers: DeviceRegisters, accumulator: Accumulator, ins: list[Any], shape: tuple[int, ...], total: Any,
        mean: Any,
    ) -> None:  # fmt: skip
        """Reduce slice by slice into `total`; squares of deviations where a mean is given."""
        kernels, device, elements = self.device_budget.device.kernels, self.device_budget.device, registers.elements
        fold = accumulator.device_kinds[0]
        kind = _TRUTHS.get(fold, fold)
        dtype, axes = _dtype_there(accumulator), accumulator.axes
        base = max(chain.registers(elements) for chain in self.chains.values())
        for index, part in cut_slices(shape, elements):
            value = registers.value(ins, index, part)
            places = tuple(slice(0, 1) if axis in axes else span for axis, span in enumerate(index))
            wide = device.view(base, tuple(value.shape), dtype)
            if fold in _TRUTHS:
                truths = np.dtype(bool)
                kernels.apply("not_equal", truths, device.view(base, tuple(value.shape), truths), value, 0)
            else:
                kernels.cast(wide, value)
            if mean is not None:
                kernels.apply("subtract", dtype, wide, wide, mean[places])
                kernels.apply("multiply", dtype, wide, wide, wide)
            if all(index[axis].start == 0 for axis in axes):
                self._reduce_slice(kind, total[places], wide, axes)
                continue
            reduced = device.view(base + padded(elements * dtype.itemsize), accumulator.kept(part), dtype)
            self._reduce_slice(kind, reduced, wide, axes)
            kernels.apply(kind, dtype, total[places], total[places], reduced)

    def _find(
        self, registers: DeviceRegisters, accumulator: ArgExtreme, ins: list[Any], shape: tuple[int, ...], total: Any,
        where: Any,
    ) -> None:  # fmt: skip
        """Extremes and their places, in slices that are whole along the axis."""
        kernels, device, axis = self.device_budget.device.kernels, self.device_budget.device, accumulator.axes[0]
        dtype, elements = _dtype_there(accumulator), registers.elements
        base = max(chain.registers(elements) for chain in self.chains.values())
        others = (*shape[:axis], *shape[axis + 1 :])
        for cut, part in cut_slices(others, max(1, elements // shape[axis])):
            index = (*cut[:axis], slice(0, shape[axis]), *cut[axis:])
            value = registers.value(ins, index, (*part[:axis], shape[axis], *part[axis:]))
            wide = device.view(base, tuple(value.shape), dtype)
            kernels.cast(wide, value)
            places = (*cut[:axis], slice(0, 1), *cut[axis:])
            kernels.arg(accumulator.kind, where[places], wide, axis)
            self._reduce_slice("minimum" if accumulator.kind == "argmin" else "maximum", total[places], wide, (axis,))

    def _reduce_slice(self, kind: str, out: Any, value: Any, axes: tuple[int, ...]) -> None:
        if kind == "multiply" and len(axes) > 1:  # over everything: one long axis
            out, value, axes = out.reshape(1), value.reshape(-1), (0,)
        self.device_budget.device.kernels.reduce(kind, out, value, axes)
