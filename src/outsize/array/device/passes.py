"""The device twins of the map and reduction passes: the same tiles, chunks and results, the work done on the device.

Leaves of a chain (whatever is not elementwise: files, transpositions, joins) are made on the host into page-locked
memory; the chain and the reduction run on the device. Partial results of chunks come back and are folded on the host in
the chunks' order, as on the processor. Sums and moments are accumulated in the same wide dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from outsize.array.device.base import array_bytes, padded
from outsize.array.device.lower import Lowered, Refused, Runner, Trivial, lower, slice_elements
from outsize.array.device.transfer.pipeline import Level, Parcel, Pipeline, load, parcel_bytes, settled
from outsize.array.device.transfer.staging import Crew, Muster
from outsize.array.graph.barrier import Reduce
from outsize.array.graph.elementwise import Elementwise
from outsize.array.graph.frame import Frame
from outsize.array.graph.node import Node
from outsize.array.kernels.accumulators import Accumulator, Fold, Moments, States, outside
from outsize.array.kernels.fused import compile_program
from outsize.array.passes.base import Manner, Pass, inside
from outsize.array.passes.map import MapPass
from outsize.array.passes.reduction import ReducePass
from outsize.array.passes.tiling import Box
from outsize.array.store.base import Block, Region, Sink, Store, region_shape
from outsize.array.store.formats.memory import MemorySink
from outsize.array.tuning import Tuning
from outsize.core.plan import Level as PlanLevel
from outsize.core.units import format_bytes
from outsize.engine.pool import cores

_NOTHING = np.empty(0, np.uint8)


def device_manners(workers: int, chunk: int, room: int) -> list[Manner]:
    """From generous to bare, as of any pass, with the long copies a link wants."""
    few = max(2, workers // 2)
    rows = [(workers, chunk), (workers, chunk // 2), (few, chunk // 2), (few, chunk // 8), (2, chunk // 16)]
    rows += [(2, chunk // 64), (1, chunk // 256), (1, room // 3), (1, room // 12)]
    return [*(Manner(count, each) for count, each in rows), Manner(1, 0, bare=True)]


class OnDevice(Pass):
    """What the twins share: slots and registers on a device, counted before they are used."""

    level: Level
    chains: dict[int, Lowered]
    """id of an input -> its chain."""
    leaves: list[Node]
    """Everything that is sent, each once."""
    device_slots = 1
    elements = 256
    slot_device_bytes = 0
    wide = 0
    """Bytes of an element while it is reduced."""
    results = 0
    """Elements of a reduction's results, at most."""
    muster = Muster()
    """The hands that carry what the device does not reach."""
    known: Mapping[int, bool] = {}
    """id of a leaf -> whether it is sent from where it lies, where that is settled: the run holds to it, since there may be no
    hands, and does not ask about every block."""
    pipeline: Pipeline | None = None
    locks = (True, False)

    def _gather(self, roots: Sequence[Node], bindings: Mapping[Node, Store]) -> None:
        self.chains, self.leaves = {}, []
        for root in roots:
            if id(root) in self.chains:
                continue
            chain = lower(compile_program(root, bindings, self.tuning.slice), self.level.device.kernels)
            self.chains[id(root)] = chain
            for leaf, moved in zip(chain.program.leaves, chain.moved, strict=True):
                if moved and not any(leaf is known for known in self.leaves):
                    self.leaves.append(leaf)

    def scratch(self) -> int:
        """Bytes that all chunks share on the device: registers of the chain, a slice as it is reduced, what it is reduced to."""
        most = max(chain.registers(self.elements) for chain in self.chains.values())
        return most + padded(self.elements * self.wide) + padded(min(self.elements, self.results) * self.wide)

    def _slice(self) -> int:
        """Elements of a slice: few long ones, since every kernel needs the interpreter."""
        each, room = sum(chain.registers(1 << 12) for chain in self.chains.values()) >> 12, self.level.room
        most = self.tuning.device_slice
        apart = slice_elements(room, most, each + self.wide, padded(self.results * self.wide))
        return max(apart, slice_elements(room, most, each + 2 * self.wide))

    def manners(self, room: int) -> list[Manner]:
        return device_manners(max(2, min(self.tuning.device_workers, cores())), self.tuning.device_chunk, room)

    def holds(self, frame: Frame, buffer: int) -> bool:
        room = (self.level.room - self.scratch()) // self.device_slots
        return super().holds(frame, buffer) and frame.device <= min(room, self.tuning.device_slot)

    def shape_up(self, manner: Manner, room: int) -> bool:
        self.elements = 256 if manner.bare else self._slice()
        self.device_slots = min(self.tuning.device_slots, manner.workers)
        self._engage(manner, room)
        done = super().shape_up(manner, room - self.shared_bytes)  # type: ignore[safe-super]
        if not done:
            return False
        self.device_slots = min(self.device_slots, self.workers)
        self.slot_device_bytes = max((self.probe(r).device for r, _ in self.kinds()), default=0)
        return manner.bare or self.device_peak <= self.level.room

    def _engage(self, manner: Manner, room: int) -> None:
        """Choose hands."""
        found = self._settled()
        self.known = {key: direct for key, direct in found.items() if direct is not None}
        some = 0 if manner.bare else room
        self.muster = Muster() if all(found.values()) else Muster.of(some, self.tuning, alone=manner.workers == 1)
        self.shared_bytes = self.muster.nbytes

    def _settled(self) -> dict[int, bool | None]:
        return {id(leaf): settled(leaf, self.bindings, self.level.device, self.tuning) for leaf in self.leaves}

    def size(self, room: int) -> bool:
        return super().size(self.level.lockable(room)) and self.device_peak <= self.level.room

    def _seconds(self, box: Box) -> float:
        """Disk time, and what sending a chunk costs whatever its size."""
        return super()._seconds(box) + self.tuning.send_seconds  # type: ignore[misc, no-any-return]

    @property
    def device_peak(self) -> int:  # type: ignore[override]
        """Bytes that this pass reserves on the device."""
        return self.scratch() + self.device_slots * self.slot_device_bytes

    def begin(self) -> None:
        """Before the first chunk; the device is open."""
        device = self.level.device
        crew = Crew(device, self.muster, self.tuning.stage_pause) if self.muster.hands else None
        self.pipeline = Pipeline(device, self.scratch(), self.slot_device_bytes, self.device_slots, crew)
        if crew is not None:
            crew.start()
        self.runners = {key: Runner(chain, device, 0, self.elements) for key, chain in self.chains.items()}

    def end(self) -> None:
        """Let go of every array on the device, so that its memory goes back with the run."""
        self.runners = {}
        if self.pipeline is not None and self.pipeline.crew is not None:
            self.pipeline.crew.close()
        self.pipeline = None

    def send(self, region: Region, frame: Frame) -> list[Parcel]:
        """Every leaf's block of a region."""
        return [load(leaf, region, frame, self.level.device, self.known.get(id(leaf))) for leaf in self.leaves]

    def arrays_of(self, chain: Lowered, arrays: list[Any]) -> list[Any]:
        """What was sent, in the order of a chain's leaves."""
        numbers = {id(leaf): number for number, leaf in enumerate(self.leaves)}
        return [arrays[numbers[id(leaf)]] if moved else None
                for leaf, moved in zip(chain.program.leaves, chain.moved, strict=True)]  # fmt: skip

    def link_in(self) -> int:
        """Bytes sent over the link in all."""
        return sum(n * sum(_exact(leaf, region) for leaf in self.leaves) for region, n in self.kinds())

    def levels(self) -> tuple[PlanLevel, ...]:
        rates = self.level.device.rates()
        into, out = self.link_in(), self.link_out()
        operations = sum(len(chain.steps) for chain in self.chains.values()) + 1
        touched = 2 * operations * into
        rows = (
            ("disk", self.reads() + self.writes(), self.floor(), self.tuning.disk_rate),
            ("link in", into, self.least_in(), rates.link_in),
            ("link out", out, out, rates.link_out), ("device memory", touched, into + out, rates.memory),
        )  # fmt: skip
        return tuple(PlanLevel(name=name, amount=n, floor=floor, rate=rate) for name, n, floor, rate in rows)

    def least_in(self) -> int:
        """Every leaf once."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def link_out(self) -> int:
        """Bytes brought back over the link in all."""
        return sum(node.nbytes for node, _ in self.outputs)

    def notes(self) -> tuple[str, ...]:
        direct = all(self.probe(region).peak < self.slot_device_bytes // 2 for region, _ in self.kinds())
        direct = direct and self.slot_device_bytes > 0 and not self.muster.hands
        way = "sent from where it lies" if direct else "through page-locked memory"
        way += f" by {self.muster.hands} hands" if self.muster.hands else ""
        return (
            *super().notes(),
            f"on {self.level.device.name}: {self.device_slots} slots of {format_bytes(self.slot_device_bytes)}, {way}",
        )


def _exact(leaf: Node, region: Region) -> int:
    shape = region_shape(region)
    return (
        math.prod(min(n, m) for n, m in zip(leaf.shape, shape[len(shape) - leaf.ndim :], strict=True))
        * leaf.dtype.itemsize
    )


class DeviceMapPass(OnDevice, MapPass):
    """Makes an elementwise chain into a sink."""

    def __init__(self, node: Node, sink: Sink, bindings: Mapping[Node, Store], tuning: Tuning, level: Level) -> None:
        if not isinstance(node, Elementwise) or node in bindings:
            raise Trivial(f"{node.label()} only moves elements: the processor does that without crossing the link")
        super().__init__(node, sink, bindings, tuning)
        self.level = level
        self._gather([node], bindings)
        self.arrives = isinstance(sink, MemorySink) and level.device.reaches(sink.array)
        """True where results can be brought straight to their place."""

    def probe(self, region: Region) -> Frame:
        found = self._probes.get(region)
        if found is None:
            found = self._probes[region] = self.frame()
            self.send(region, found)
            if not self.arrives or not self._lands(self.sink.lay(region, _NOTHING)):
                found.array(region_shape(region), self.node.dtype)
            sent = sum(parcel_bytes(leaf, region) for leaf in self.leaves)
            found.device = sent + array_bytes(region_shape(region), self.node.dtype)
        return found

    def _lands(self, target: Block) -> bool:
        """True where a chunk can be brought straight to this place."""
        return self.arrives and target.flags.c_contiguous and target.dtype == self.node.dtype and target.dtype.isnative

    def load(self, tile: Region, chunk: Region, state: Any, frame: Frame) -> None:
        frame.reset()
        target = state.block[inside(chunk, tile)] if tile else state.block
        shape = region_shape(chunk)
        if math.prod(shape) == 0:
            return
        parcels = self.send(chunk, frame)
        landing = target if self._lands(target) else frame.array(shape, self.node.dtype.newbyteorder("="))
        chain, runner = self.chains[id(self.node)], self.runners[id(self.node)]

        def work(arrays: list[Any], place: int) -> Iterable[tuple[Block, Any]]:
            out = self.level.device.view(place, shape, landing.dtype)
            ins = self.arrays_of(chain, arrays)
            for index, part in runner.slices(shape):
                runner.value(ins, index, part, out[index] if index else out)
            return [(landing, out)]

        assert self.pipeline is not None
        self.pipeline.run(parcels, work)
        if landing is not target:
            frame.copy(target, landing)


_TWINS = {
    "add": "add",
    "multiply": "multiply",
    "minimum": "minimum",
    "maximum": "maximum",
    "or": "maximum",
    "and": "minimum",
}
"""Kind of fold -> what a device does."""


def _dtype_there(accumulator: Accumulator) -> np.dtype[Any]:
    """dtype in which a device accumulates: integers wrap alike with and without sign, truths are bytes."""
    working = accumulator.working.newbyteorder("=")
    twins: dict[str, np.dtype[Any]] = {"?": np.dtype(np.uint8), "L": np.dtype(np.int64)}
    return twins.get(working.char, working)


class DeviceReducePass(OnDevice, ReducePass):
    """Makes reductions."""

    def __init__(
        self, outputs: Sequence[tuple[Reduce, Sink]], bindings: Mapping[Node, Store], tuning: Tuning, level: Level
    ) -> None:
        super().__init__(outputs, bindings, tuning)
        self.level = level
        for source, accumulator in self.accumulators:
            self._check(source, accumulator)
        self._gather([source for source, _ in self.accumulators], bindings)
        self.wide = max(_dtype_there(accumulator).itemsize for _, accumulator in self.accumulators)
        self.results = max(math.prod(accumulator.kept(self.domain)) for _, accumulator in self.accumulators)

    def _check(self, source: Node, accumulator: Accumulator) -> None:
        kernels = self.level.device.kernels
        if math.prod(self.domain) == 0 or not accumulator.axes:
            raise Trivial("nothing is reduced")
        if not isinstance(accumulator, Fold | Moments):
            raise Refused("indices of extremes are found by the processor")
        if isinstance(accumulator, Fold) and accumulator.kind in ("minimum", "maximum"):
            if accumulator.working.kind == "c":
                raise Refused("extremes of complex numbers are found by the processor")
            if accumulator.working.char == "L":  # it would be held as int64, which wraps sums alike and no order
                raise Refused("extremes of uint64 are found by the processor")
        if isinstance(accumulator, Moments) and accumulator.working.kind == "c":
            raise Refused("moments of complex numbers are found by the processor")
        if isinstance(accumulator, Fold) and accumulator.kind == "multiply" and not self._one_axis(accumulator):
            raise Refused("products over several axes are found by the processor")
        if _dtype_there(accumulator).char not in kernels.dtypes:
            raise Refused(f"{kernels.name} does not accumulate in {accumulator.working.name}")

    def manners(self, room: int) -> list[Manner]:
        if all(direct is False for direct in self._settled().values()):  # workers neither read nor copy
            return device_manners(self.tuning.device_slots, self.tuning.device_chunk, room)
        return super().manners(room)

    def _one_axis(self, accumulator: Accumulator) -> bool:
        return accumulator.flat or len(accumulator.axes) == 1

    def probe(self, region: Region) -> Frame:
        found = self._probes.get(region)
        if found is None:
            found = self._probes[region] = self.frame()
            self._evaluate(region, found)
        return found

    def _evaluate(self, region: Region, frame: Frame) -> dict[int, States]:
        shape = region_shape(region)
        partials = {
            number: [frame.array(accumulator.kept(shape), dtype) for dtype in accumulator.dtypes()]
            for number, (_, accumulator) in enumerate(self.accumulators)
        }
        parcels = self.send(region, frame)
        frame.reserve(frame.outside + sum(outside(accumulator, 0, region) for _, accumulator in self.accumulators))
        held = sum(
            array_bytes(accumulator.kept(shape), _dtype_there(accumulator)) * (1 + isinstance(accumulator, Moments))
            for _, accumulator in self.accumulators
        )
        frame.device = held + sum(parcel_bytes(leaf, region) for leaf in self.leaves)
        if not frame.dry:
            assert self.pipeline is not None
            self.pipeline.run(parcels, lambda arrays, place: self._reduce(arrays, place, shape, partials))
        return partials

    def _reduce(
        self, arrays: list[Any], place: int, shape: tuple[int, ...], partials: dict[int, States]
    ) -> Iterable[tuple[Block, Any]]:
        """All reductions of a chunk that lies on the device."""
        returns = []
        for number, (source, accumulator) in enumerate(self.accumulators):
            chain = self.chains[id(source)]
            ins = self.arrays_of(chain, arrays)
            dtype = _dtype_there(accumulator)
            kept = accumulator.kept(shape)
            total = self.level.device.view(place, kept, dtype)
            place += array_bytes(kept, dtype)
            if isinstance(accumulator, Fold):
                self._fold(source, accumulator, ins, shape, total, None)
                returns.append((partials[number][0].view(dtype), total))
                continue
            squares = self.level.device.view(place, kept, dtype)
            place += array_bytes(kept, dtype)
            self._fold(source, accumulator, ins, shape, total, None)
            self.level.device.kernels.divide(total, self._count(accumulator, shape))
            self._fold(source, accumulator, ins, shape, squares, total)
            returns += [(partials[number][1], total), (partials[number][2], squares)]
        return returns

    def _fold(
        self, source: Node, accumulator: Accumulator, ins: list[Any], shape: tuple[int, ...], total: Any, mean: Any
    ) -> None:
        """Reduce slice by slice into `total`; squares of deviations where a mean is given."""
        runner, kernels, device = self.runners[id(source)], self.level.device.kernels, self.level.device
        kind = accumulator.kind if isinstance(accumulator, Fold) else "add"
        dtype, axes = _dtype_there(accumulator), accumulator.axes
        base = max(chain.registers(self.elements) for chain in self.chains.values())
        for index, part in runner.slices(shape):
            value = runner.value(ins, index, part)
            places = tuple(slice(0, 1) if axis in axes else span for axis, span in enumerate(index))
            wide = device.view(base, tuple(value.shape), dtype)
            if mean is not None:
                kernels.cast(wide, value)
                kernels.deviate(wide, wide, mean[places])
            elif kind in ("or", "and"):
                kernels.truth(wide, value)
            else:
                kernels.cast(wide, value)
            if all(index[axis].start == 0 for axis in axes):
                self._reduce_slice(_TWINS[kind], total[places], wide, axes)
                continue
            reduced = device.view(base + padded(self.elements * dtype.itemsize), accumulator.kept(part), dtype)
            self._reduce_slice(_TWINS[kind], reduced, wide, axes)
            kernels.combine(_TWINS[kind], total[places], reduced)

    def _reduce_slice(self, kind: str, out: Any, value: Any, axes: tuple[int, ...]) -> None:
        if kind == "multiply" and len(axes) > 1:  # over everything: one long axis
            out, value, axes = out.reshape(1), value.reshape(-1), (0,)
        self.level.device.kernels.reduce(kind, out, value, axes)
