"""The same pass with a device: a chunk crosses the link once, is widened there, and is projected or squared.

In: a node, a mode, a kernel of `projection` or `sampling`, a device. Out: what the host's pass gives. What a device makes of a
chunk comes back with the sums that tell what is lost; they are taken in the chunks' order. A chunk that the device cannot settle
(it loses too much, or is not finite) is folded by the processor, and a basis that grew there is sent again: chunks that were
made with the one before are made anew. So every run gives the same bits.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outsize.array.device.base import DeviceBudget, array_bytes, reserved
from outsize.array.device.passes import device_efforts
from outsize.array.device.transfer.pipeline import Parcel, Pipeline, load, settled
from outsize.array.device.transfer.staging import Staging, staging_threads
from outsize.array.graph.frame import Frame
from outsize.array.graph.node import Node
from outsize.array.passes.base import ANY, Effort, Job, Room, Sized
from outsize.array.passes.tiling import Box, Grid
from outsize.array.store.base import Block, Region, region_shape, whole
from outsize.array.tuning import Tuning
from outsize.core.plan import Level
from outsize.core.units import format_bytes
from outsize.engine.pool import cores
from outsize.factor.algorithms.fibers import Fibers
from outsize.factor.algorithms.projection import Projection
from outsize.factor.algorithms.sampling import Gram
from outsize.factor.algorithms.stream import Kernel, StreamPass

_TINY = 1e-290
"""Squares below this may have lost what they are of: the processor looks."""


def can_stream(kernel: Kernel, node: Node, device: DeviceBudget) -> bool:
    """True where the device can do what the kernel does with these data."""
    kernels = device.device.kernels
    known = isinstance(kernel, Gram) or (isinstance(kernel, Projection) and not kernel.direct)
    char = node.dtype.newbyteorder("=").char
    return known and {char, "D" if node.dtype.kind == "c" else "d"} <= kernels.dtypes


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedThere(Sized):
    """A pass with its sizes on host and device."""

    device_slots: int
    """Chunks on the device at once."""
    device_slot_bytes: int
    """Bytes of the device for each."""
    staging: Staging
    """The staging threads that carry what the device does not reach."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A pass on an open device."""

    pipeline: Pipeline
    """The way of a chunk through the device."""
    direct: bool | None
    """Whether chunks are sent from where they lie, where that is settled."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A chunk that has been on the device."""

    parcel: Parcel
    """Its data, as they lie on the host."""
    made: Block
    """What the device made of it."""
    sums: Block
    """Squares of the chunk, and of what was made."""
    version: int
    """Which basis it was made with."""


class _Work(abc.ABC):
    """What a device does for a kernel."""

    def __init__(self, device: DeviceBudget, working: np.dtype[Any]) -> None:
        self.device, self.working = device.device, working
        self.sent = self.there = 0
        """How often what all chunks need was sent, and has arrived."""

    @property
    @abc.abstractmethod
    def kernel(self) -> Any:
        """The kernel."""

    @property
    @abc.abstractmethod
    def kept(self) -> int:
        """Bytes on the device for all chunks, at its beginning."""

    @abc.abstractmethod
    def shape(self, chunk: tuple[int, ...]) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Shape and dtype of what comes back for a chunk."""

    @abc.abstractmethod
    def needs(self, chunk: tuple[int, ...]) -> int:
        """Bytes on the device for a chunk beside itself, in double precision, and what comes back."""

    def send(self) -> None:  # noqa: B027  (a Gram matrix needs nothing)
        """Send what all chunks need."""

    @abc.abstractmethod
    def make(self, rows: Any, chunk: tuple[int, ...], out: Any, place: int) -> Any:
        """Fill `out` from the fibres of a chunk; the array whose squares are kept. `place` is where free memory begins."""

    def write(self, region: Region, made: Block) -> None:  # noqa: B027
        """Put what came back in its place; several chunks at once."""

    @abc.abstractmethod
    def take(self, made: Block, sums: Block, size: int) -> bool:
        """The next chunk, of so many elements, in order; False where it is the processor's."""


class _Project(_Work):
    """y = B^H x, with its squares."""

    def __init__(self, kernel: Projection, device: DeviceBudget) -> None:
        super().__init__(device, kernel.basis.dtype)
        self._kernel = kernel

    @property
    def kernel(self) -> Projection:
        return self._kernel

    @property
    def kept(self) -> int:
        return sum(array_bytes(basis.shape, self.working) for _, basis in self._kernel.bases)

    def shape(self, chunk: tuple[int, ...]) -> tuple[tuple[int, ...], np.dtype[Any]]:
        return region_shape(self._kernel.made(whole(chunk))), self._kernel.target.dtype

    def needs(self, chunk: tuple[int, ...]) -> int:
        total, left = 0, math.prod(chunk)
        for number, (_, basis) in enumerate(self._kernel.bases):
            total += array_bytes((left,), self.working) if number else 0
            left = left // basis.shape[0] * basis.shape[1]
            total += array_bytes((left,), self.working)
        return total

    def send(self) -> None:
        """The basis follows what was made with the one before; its number changes last, so that none is said to be newer than
        it is."""
        self.sent += 1
        number, bases = self.sent, [basis.conj().copy() for _, basis in self._kernel.bases]  # it may grow on its way

        def upload() -> None:
            for there, basis in zip(self._bases(), bases, strict=True):
                self.device.kernels.upload(there, basis)
            self.there = number

        self.device.submit("work", upload)

    def _bases(self) -> list[Any]:
        """On the device."""
        sizes = [array_bytes(basis.shape, self.working) for _, basis in self._kernel.bases]
        starts = itertools.accumulate(sizes, initial=0)
        return [
            self.device.view(at, basis.shape, self.working)
            for at, (_, basis) in zip(starts, self._kernel.bases, strict=False)
        ]

    def make(self, rows: Any, chunk: tuple[int, ...], out: Any, place: int) -> Any:
        device, kernels = self.device, self.device.kernels
        lengths, axes = list(chunk), list(range(len(chunk)))
        for (axis, basis), there in zip(self._kernel.bases, self._bases(), strict=True):
            turn = [number for number in axes if number != axis] + [axis]
            count = math.prod(lengths) // lengths[axis]
            if rows is None:
                found = device.view(place, tuple(lengths[number] for number in axes), self.working)
                place += array_bytes(found.shape, self.working)
                laid = device.view(place, tuple(lengths[number] for number in turn), self.working)
                kernels.cast(laid, kernels.turn(found, tuple(axes.index(number) for number in turn)))
                rows = device.view(place, (count, lengths[axis]), self.working)
                place += array_bytes(laid.shape, self.working)
            kernels.multiply(device.view(place, (count, basis.shape[1]), self.working), rows, there, False, False)
            axes, rows, lengths[axis] = turn, None, basis.shape[1]
        laid = device.view(place, tuple(lengths[number] for number in axes), self.working)
        kernels.cast(out, kernels.turn(laid, tuple(axes.index(number) for number in range(len(chunk)))))
        return place, math.prod(lengths)

    def write(self, region: Region, made: Block) -> None:
        self._kernel.target.write(self._kernel.made(region), made)

    def take(self, made: Block, sums: Block, size: int) -> bool:
        return self._kernel.take(float(sums[0]), float(sums[1]), size)


class _Square(_Work):
    """The Gram matrix of a chunk."""

    def __init__(self, kernel: Gram, device: DeviceBudget) -> None:
        super().__init__(device, kernel.total.dtype)
        self._kernel = kernel

    @property
    def kernel(self) -> Gram:
        return self._kernel

    @property
    def kept(self) -> int:
        return 0

    def shape(self, chunk: tuple[int, ...]) -> tuple[tuple[int, ...], np.dtype[Any]]:
        return self._kernel.total.shape, self.working

    def needs(self, chunk: tuple[int, ...]) -> int:
        return array_bytes(chunk, self.working) if self.working.kind == "c" else 0

    def make(self, rows: Any, chunk: tuple[int, ...], out: Any, place: int) -> Any:
        kernels, other = self.device.kernels, rows
        if self.working.kind == "c":
            other = self.device.view(place, tuple(rows.shape), self.working)
            kernels.apply("conjugate", self.working, other, rows)
        kernels.multiply(out, kernels.turn(rows, (1, 0)), other, False, False)
        return None

    def take(self, made: Block, sums: Block, size: int) -> bool:
        self._kernel.norm2 += float(sums[0])
        self._kernel.total += made
        return True


class DeviceStreamPass(StreamPass):
    """Streams one node past a kernel whose products a device makes."""

    locks = (True, False)

    def __init__(self, node: Node, axis: int, kernel: Kernel, tuning: Tuning, device: DeviceBudget) -> None:
        super().__init__(node, axis, kernel, tuning)
        self.device_budget = device
        self.made_by: _Work
        if isinstance(kernel, Projection):
            self.whole, self.made_by = tuple(axis for axis, _ in kernel.bases), _Project(kernel, device)
        else:
            assert isinstance(kernel, Gram)
            self.made_by = _Square(kernel, device)

    def limit(self, room: Room) -> tuple[Room, int]:
        return self.device_budget.limit(room)

    def _settled(self) -> bool | None:
        return settled(self.node, {}, self.device_budget.device, self.tuning)

    def efforts(self, room: int) -> list[Effort]:
        idle = self._settled() is False  # workers neither read nor copy
        workers = self.tuning.device_slots if idle else max(2, min(self.tuning.device_workers, cores()))
        return device_efforts(workers, self.tuning.device_slot if idle else self.tuning.device_chunk, room)

    def fit(self, effort: Effort, room: Room, there: int = ANY) -> SizedThere | None:
        slots = min(self.tuning.device_slots, effort.workers)
        there = (self.device_budget.room - self.made_by.kept) // slots
        some = 0 if effort.bare else room.host
        staging = Staging() if self._settled() else Staging.choose(some, self.tuning, alone=effort.workers == 1)
        found = super().fit(effort, replace(room, host=room.host - staging.nbytes), there)
        if found is None:
            return None
        slots = min(slots, found.workers)
        scratch, each = self._scratch(found.chunk), self._slot(found.chunk)
        sized = found.extended(
            SizedThere, shared_bytes=staging.nbytes, device_bytes=self.made_by.kept + scratch + slots * each, device_slots=slots,
            device_slot_bytes=each, staging=staging,
        )  # fmt: skip
        return sized if effort.bare or sized.device_bytes <= self.device_budget.room else None

    def longest(self, effort: Effort, room: Room, *, reads: bool) -> int:
        """The processor must be able to fold one by itself."""
        return min(effort.chunk, room.host // 8)

    def beside(self, box: Box) -> int:
        """With the chunk that the processor folds by itself."""
        return super().beside(box) + math.prod(box) * self.working.itemsize

    def measure(self, region: Region, frame: Frame) -> None:
        shape = region_shape(region)
        load(self.node, region, frame, self.device_budget.device)
        self._returns(shape, frame)
        frame.device = self._slot(shape) + self._scratch(shape) // self.tuning.device_slots

    def _slot(self, chunk: tuple[int, ...]) -> int:
        """Bytes on the device for a chunk until what was made of it is on the host."""
        made = array_bytes(*self.made_by.shape(chunk)) + array_bytes((2,), np.dtype(np.float64))
        return array_bytes(chunk, self.node.dtype) + made

    def _scratch(self, chunk: tuple[int, ...]) -> int:
        """Bytes that all chunks share while they are worked on, one after another."""
        return array_bytes(chunk, self.working) + self.made_by.needs(chunk)

    def _returns(self, shape: tuple[int, ...], frame: Frame) -> tuple[Block, Block]:
        """Where on the host it comes back to."""
        return frame.array(*self.made_by.shape(shape)), frame.array((2,), np.dtype(np.float64))

    @contextlib.contextmanager
    def opened(self, sized: SizedThere) -> Iterator[Opened]:
        device = self.device_budget.device
        with (
            reserved(self.device_budget, sized.device_bytes),
            staging_threads(device, sized.staging, self.tuning.stage_pause) as stager,
        ):
            self.made_by.send()
            base = self.made_by.kept + self._scratch(sized.chunk)
            pipeline = Pipeline(device, base, sized.device_slot_bytes, sized.device_slots, stager)
            yield Opened(pipeline, self._settled())

    def load(self, job: Job, tile: Region, chunk: tuple[int, Region], state: None, frame: Frame) -> Any:
        frame.reset()
        parcel = load(self.node, chunk[1], frame, self.device_budget.device, job.opened.direct)
        return self._send(job, chunk[1], parcel, *self._returns(region_shape(chunk[1]), frame))

    def _send(self, job: Job, region: Region, parcel: Parcel, made: Block, sums: Block) -> Seen:
        versions: list[int] = []

        def work(arrays: list[Any], place: int) -> Iterable[tuple[Block, Any]]:
            versions.append(self.made_by.there)
            return self._compute(arrays[0], region_shape(region), place, made, sums)

        job.opened.pipeline.run([parcel], work)
        self.made_by.write(region, made)
        return Seen(parcel, made, sums, versions[0])

    def _compute(
        self, data: Any, shape: tuple[int, ...], place: int, made: Block, sums: Block
    ) -> list[tuple[Block, Any]]:
        """On the device: fibres as rows in double precision, what the kernel wants of them, and squares."""
        device, length = self.device_budget.device, shape[self.axis]
        others, wide = (*shape[: self.axis], *shape[self.axis + 1 :]), self.made_by.kept
        if self.axis == 0:
            laid = device.view(wide, shape, self.working)
            rows = device.kernels.turn(device.view(wide, (length, math.prod(others)), self.working), (1, 0))
        else:
            last = len(others)
            turned = device.view(wide, (*others, length), self.working)
            laid = device.kernels.turn(turned, (*range(self.axis), last, *range(self.axis, last)))
            rows = device.view(wide, (math.prod(others), length), self.working)
        device.kernels.cast(laid, data)
        out = device.view(place, made.shape, made.dtype)
        total = device.view(place + array_bytes(made.shape, made.dtype), sums.shape, sums.dtype)
        found = self.made_by.make(rows, shape, out, wide + array_bytes(shape, self.working))
        self._sum(total[0:1], wide, math.prod(shape))
        if found is not None:
            self._sum(total[1:2], *found)
        return [(made, out), (sums, total)]

    def _sum(self, out: Any, place: int, size: int) -> None:
        """Squares of an array in double precision, which are lost."""
        device, real = self.device_budget.device, np.dtype(np.float64)
        flat = device.view(place, (size * self.working.itemsize // real.itemsize,), real)
        device.kernels.apply("multiply", real, flat, flat, flat)
        device.kernels.reduce("add", out, flat, (0,))

    def fold(self, job: Job, tile: Region, chunk: tuple[int, Region], state: None, seen: Any) -> None:
        place, region = chunk
        size = math.prod(region_shape(region))
        if seen.version != self.made_by.sent:
            seen = self._send(job, region, seen.parcel, seen.made, seen.sums)
        block = seen.parcel.block.transpose(seen.parcel.back)
        clear = math.isfinite(seen.sums[0]) and (seen.sums[0] > _TINY or not block.any())
        if not clear or not self.made_by.take(seen.made, seen.sums, size):
            self._fold_here(place, region, block)
        job.progress(size * self.node.dtype.itemsize)
        self.saved(place + 1)

    def _fold_here(self, place: int, region: Region, block: Block) -> None:
        """By the processor, which says what is wrong with the data or lets the basis grow."""
        shape = region_shape(region)
        data: Block = np.empty(Fibers.shape(shape, self.axis), self.working)
        np.copyto(Fibers.lay(data, shape, self.axis), block)
        self.kernel.fold(place, region, Fibers(data))
        self.made_by.send()

    def levels(self, sized: Any) -> tuple[Level, ...]:
        rates, sent = self.device_budget.device.rates(), self.node.nbytes
        made, dtype = self.made_by.shape(sized.chunk)
        back = math.prod(made) * dtype.itemsize * len(Grid(self.node.shape, sized.chunk))
        rows = (
            ("disk", self.reads(sized) + self.writes(), self.floor(sized), self.tuning.disk_rate),
            ("link in", sent, sent, rates.link_in), ("link out", back, back, rates.link_out),
        )  # fmt: skip
        return tuple(Level(name=name, amount=n, floor=floor, rate=rate) for name, n, floor, rate in rows)

    def notes(self, sized: Any) -> tuple[str, ...]:
        way = f"through {sized.staging.threads} staging threads" if sized.staging.threads else "sent from where it lies"
        slots = f"{sized.device_slots} slots of {format_bytes(sized.device_slot_bytes)}"
        return (*super().notes(sized), f"on {self.device_budget.device.name}: {slots}, {way}")
