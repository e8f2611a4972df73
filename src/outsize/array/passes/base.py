"""What all passes share: a pass says what is made, a sized pass how, and a job what exists while it runs.

In: nodes to make, the sinks they go to, the stores that earlier passes leave, a room in bytes. `size` tries a list of
efforts, from generous (many workers, large buffers) to the barest (one worker, one granule), and takes the first whose
exact peak is inside the room. The barest one's peak is the smallest budget that works. Out: a `Sized`, a frozen value that
the plan describes and the run obeys. A `Pass` does not change after it was made: it has the rules by which its kind is
sized and computed, and what they need of the run comes in as a `Job`.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np

from outsize.array.graph.frame import Frame
from outsize.array.graph.node import Node
from outsize.array.memo import remembered
from outsize.array.passes.tiling import Box, Grid, center, inner_grid, read_seconds
from outsize.array.store.base import Block, Buffer, Region, Sink, Store, region_shape, whole
from outsize.array.tuning import Tuning
from outsize.core.memory import HOST, Part
from outsize.core.noun import Known
from outsize.core.plan import Level, Peak, Step
from outsize.engine.pool import cores, round_to_pages
from outsize.engine.threads import Sizes, Work

Progress = Callable[[int], None]
"""Called with the bytes that were moved."""

ANY = 1 << 62
"""Bytes of a device, where none takes part."""


Kind = TypeVar("Kind", bound="Sized")


@dataclass(frozen=True, slots=True)
class Effort:
    """How generously a pass is sized."""

    workers: int
    chunk: int
    """Bytes of buffer of each, unless the smallest piece needs more."""
    bare: bool = False
    """True for the barest: smallest tiles, one of everything."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a pass may hold."""

    host: int
    """Bytes of host memory."""
    packed: int = 0
    """Bytes of it that BLAS has taken in earlier passes, and keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized(Sizes):
    """A pass with all its sizes."""

    work: Sizable
    grid: Grid
    chunk: Box
    """The part of a tile that one worker makes at once."""
    packed: int
    """What BLAS's own buffers take at the end of the pass."""
    threads: int
    """Threads of BLAS."""
    shared_bytes: int = 0
    """Host memory that all workers take together."""
    device_bytes: int = 0
    """Bytes that it reserves on a device."""

    @property
    def peak(self) -> int:
        """Bytes of host memory that it holds by itself."""
        slots, buffers = self.slots * self.slot_bytes, self.workers * self.worker_bytes
        return slots + buffers + self.workers * self.outside_bytes + self.shared_bytes + self.packed

    @property
    def locked(self) -> int:
        """Bytes of it that are page-locked."""
        buffers, slots = self.workers * self.worker_bytes, self.slots * self.slot_bytes
        return buffers * self.work.locks[0] + slots * self.work.locks[1] + self.shared_bytes

    def sizes(self) -> dict[str, Any]:
        """All but the pass, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "work"}

    def extended(self, kind: type[Kind], **more: Any) -> Kind:
        """The same with more sizes, or others."""
        return kind(work=self.work, **self.sizes() | more)

    def step(self, resident: tuple[Part, ...]) -> Step:
        """This pass as a step of a plan; `resident` is what else is held meanwhile."""
        rows = (
            (f"{self.slots} tiles of the output", self.slots * self.slot_bytes, Known.EXACT),
            (f"{self.workers} workers' buffers", self.workers * self.worker_bytes, Known.EXACT),
            ("what workers share", self.shared_bytes, Known.EXACT),
            ("temporaries of calls", self.workers * self.outside_bytes, Known.BOUND),
            ("buffers of BLAS", self.packed, Known.BOUND),
        )
        parts = (*(Part(name=name, bytes=size, known=known) for name, size, known in rows), *resident)
        held, work = self.peak + sum(part.bytes for part in resident), self.work
        return Step(
            name=work.label(), peaks=(Peak(pool=HOST, bytes=held, known=Known.BOUND),),
            parts=tuple(part for part in parts if part.bytes), read=work.reads(self), written=work.writes(),
            floor=work.floor(self), tiles=max(1, len(self.grid)), tile=self.grid.box, shape=self.grid.shape,
            notes=(*work.notes(self), *work.rereads_of(self)),
            levels=work.levels(self),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """A sized pass while it runs."""

    sized: Any
    """The `Sized` of the pass's kind."""
    sinks: tuple[Any, ...]
    """Where its outputs go, in their order: as they exist now."""
    bindings: Mapping[Node, Store]
    """What earlier passes left: as it exists now."""
    progress: Progress
    opened: Any = None
    """What `Pass.opened` gave."""

    @property
    def sink(self) -> Any:
        """Where the only output goes."""
        return self.sinks[0]


class Sizable(abc.ABC):
    """Work on nodes that is sized in chunks before it runs."""

    rereads = False
    """True where reading sources again and again is the nature of the work, so that it is no reason to look further."""
    overlap = 1
    """The reading of an effort after the first must cost so many times less than the first's to be taken."""
    locks = (False, False)
    """Whether workers' buffers and slots are page-locked, for a device to copy by itself."""
    churn = 0
    """Bytes that its calls allocate and free again and again; the plan counts them for every worker."""

    def __init__(self, outputs: tuple[tuple[Node, Sink], ...], bindings: Mapping[Node, Store], tuning: Tuning) -> None:
        self.outputs = outputs
        """(node, the description of the sink that it goes to)."""
        self.bindings = bindings
        """Descriptions of what earlier passes leave."""
        self.tuning = tuning
        self._first = Frame(None, bindings, tuning)
        """What all frames of the pass share: programs of its nodes."""
        self._like: tuple[Sizable, Mapping[Store, Store]] | None = None

    @abc.abstractmethod
    def label(self) -> str:
        """What it does, in a few words."""

    @abc.abstractmethod
    def fit(self, effort: Effort, room: Room, there: int = ANY) -> Any:
        """Its `Sized` for this effort, in tiles and chunks that aim at the room; None where they cannot. A chunk may take
        `there` bytes of a device."""

    def limit(self, room: Room) -> tuple[Room, int]:
        """What of a room it may take, and how many bytes of a device."""
        return room, ANY

    def efforts(self, room: int) -> list[Effort]:
        """What `size` tries, from generous to bare; the last but one splits what there is."""
        most, chunk = max(2, min(8, cores() + 2)), self.tuning.chunk
        rows = [(most, chunk), (most, chunk // 2), (most, chunk // 4), (2, chunk // 4), (2, chunk // 16)]
        rows += [(1, chunk // 16), (1, chunk // 64), (1, room // 3), (1, room // 12)]
        return [*(Effort(workers, each) for workers, each in rows), BARE]

    def settle(self, grid: Grid, chunk: Box, workers: int, slots: int, slot: int, room: Room, **more: Any) -> Sized:
        """The sizes that tiles and chunks lead to: one chunk of each kind is measured."""
        threads = more.pop("threads", max(1, cores() // workers))
        frame = self.probe_all(grid, chunk)
        return Sized(
            work=self, grid=grid, chunk=chunk, workers=workers, slots=slots, worker_bytes=round_to_pages(frame.peak),
            slot_bytes=round_to_pages(slot), outside_bytes=frame.outside + more.pop("waiting", 0), threads=threads,
            packed=max(room.packed, frame.packing.total(workers, threads)), **more,
        )  # fmt: skip

    def holds(self, frame: Frame, buffer: int, there: int) -> bool:
        """True where a chunk that was measured fits a worker's buffer, and its place on a device."""
        return frame.peak + frame.outside + frame.packing.total(1, 1) <= buffer and frame.device <= there

    def buffer(self, least: int, effort: Effort, room: Room) -> int:
        """Bytes of a worker's buffer whose smallest piece needs `least`. Where that is much, it is a chunk that is decoded whole,
        and what it takes to keep all of it is no more."""
        if least <= effort.chunk:
            return effort.chunk
        return max(least, min(2 * least, room.host // (2 * effort.workers)))

    @abc.abstractmethod
    def measure(self, region: Region, frame: Frame) -> None:
        """A dry run of one chunk."""

    @remembered
    def probe(self, region: Region) -> Frame:
        """A dry frame that has seen one chunk; each is measured once."""
        if self._like is not None:
            return self._like[0].probe(region).renamed(self._like[1])
        found = self.frame()
        self.measure(region, found)
        return found

    def measure_like(self, other: Sizable, stores: Mapping[Store, Store]) -> None:
        """Take what is measured from a pass that does the same, with other stores that take as much in place of some."""
        self._like = other, stores

    @remembered
    def probe_box(self, shape: tuple[int, ...], box: Box) -> Frame:
        """A dry frame that has seen a box of a shape, away from the edges."""
        return self.probe(center(shape, box))

    @remembered
    def wait(self, frame: Frame, transfer: float | None = None) -> float:
        """Disk time of what a dry frame has read."""
        return read_seconds(frame.reads, self.tuning, transfer)

    def kinds(self, grid: Grid, chunk: Box) -> Iterator[tuple[Region, int]]:
        """One chunk of each kind and how many there are."""
        for tile, number in grid.kinds():
            for part, times in Grid(region_shape(tile), chunk).kinds():
                yield tuple([(a + s, b + s) for (a, b), (s, _) in zip(part, tile, strict=True)]), number * times

    @remembered
    def probe_kinds(self, grid: Grid, chunk: Box) -> list[tuple[Frame, int]]:
        """A dry frame of each kind of chunk, and how many there are."""
        return [(self.probe(region), number) for region, number in self.kinds(grid, chunk)]

    def probe_all(self, grid: Grid, chunk: Box) -> Frame:
        """A dry frame that has seen one chunk of each kind."""
        total = self.frame()
        for frame, _ in self.probe_kinds(grid, chunk):
            total.peak, total.outside = max(total.peak, frame.peak), max(total.outside, frame.outside)
            total.reads.update(frame.reads)
            total.pack(frame.packing)
        return total

    def frame(self) -> Frame:
        """A dry frame."""
        return Frame(None, self.bindings, self.tuning, self._first)

    # What the plan says of it

    def frames(self, sized: Any) -> list[tuple[Frame, int]]:
        """Dry frames that have seen all that it reads, and how many times each."""
        return self.probe_kinds(sized.grid, sized.chunk)

    def sources(self, sized: Sized) -> int:
        """Bytes of every source, once."""
        stores = {store for frame, _ in self.frames(sized) for store, _ in frame.reads}
        return sum(math.prod(store.shape) * store.dtype.itemsize for store in stores)

    def cost(self, sized: Sized) -> float:
        """Bytes that it will read, and those that could be read while transfers begin: each worker waits for its own."""
        each = self.tuning.transfer * self.tuning.disk_rate / sized.workers
        moved, seeks = self._loaded(sized)
        return moved + each * seeks

    def _loaded(self, sized: Any) -> tuple[int, int]:
        """(bytes, transfers) of all that is read."""
        loads = [(number, *self._load_of(frame)) for frame, number in self.frames(sized)]
        return sum(number * moved for number, moved, _ in loads), sum(number * seeks for number, _, seeks in loads)

    @remembered
    def _load_of(self, frame: Frame) -> tuple[int, int]:
        """(bytes, transfers) of what a dry frame has read."""
        return traffic(frame), sum(times * store.seeks(region) for (store, region), times in frame.reads.items())

    def enough(self, sized: Sized) -> float:
        """A cost that is as good as less."""
        return self.tuning.reread * self.sources(sized)

    def reads(self, sized: Any) -> int:
        return self._loaded(sized)[0]

    def rereads_of(self, sized: Any) -> list[str]:
        """A note on every source of which a large part of the traffic is reading it again."""
        moved: Counter[Store] = Counter()
        for frame, number in self.frames(sized):
            for (store, region), times in frame.reads.items():
                moved[store] += number * times * store.traffic(region)
        once = {store: store.traffic(whole(store.shape)) for store in moved}
        again = [store for store in moved if moved[store] - once[store] > moved.total() // 4]
        return [f"reads {os.path.basename(store.name.rstrip('/'))} {moved[store] / once[store]:,.1f} times: "
                "a larger budget reads it less often" for store in again]  # fmt: skip

    def writes(self) -> int:
        return sum(sink.traffic(tuple((0, n) for n in sink.shape)) for _, sink in self.outputs)

    def floor(self, sized: Any) -> int | None:
        """Fewest bytes any schedule could move: every source once, the output once."""
        return min(self.sources(sized), self.reads(sized)) + self.writes()

    def levels(self, sized: Any) -> tuple[Level, ...]:
        """Traffic per level of the machine, where a device takes part."""
        return ()

    def notes(self, sized: Any) -> tuple[str, ...]:
        """Choices worth knowing."""
        return ()


class Pass(Sizable, Work):
    """One kind of pass over one set of nodes: what the run calls."""

    @contextlib.contextmanager
    def opened(self, sized: Any) -> Iterator[Any]:
        """What the whole pass needs besides buffers, from before its first tile to after its last one."""
        yield None

    @abc.abstractmethod
    def volume(self) -> int:
        """What the calls of `progress` add up to."""

    def tiles(self, sized: Sized) -> Iterable[Region]:
        return sized.grid

    def chunks(self, job: Job, tile: Region) -> Iterator[Region]:
        return inner_grid(tile, job.sized.chunk)

    # What lets several workers of a cluster make one tile: parts of it are folded apart, and joined in order

    def cut(self, sized: Any, tile: Region, pieces: int) -> list[Region]:
        """About so many parts of a tile, in order; none where it must be made by one worker."""
        return []

    def open_part(self, job: Job, part: Region, slot: Buffer) -> Any:
        """The state of a part, before its first chunk."""
        return self.open(job, self.tile_of(part), slot)

    def part_chunks(self, job: Job, part: Region) -> Iterator[Region]:
        """The chunks of a part, in order."""
        return self.chunks(job, part)

    def partial(self, state: Any) -> list[Block]:
        """What a part has come to."""
        raise AssertionError(state)

    def join(self, job: Job, outer: Region, part: Region, state: Any, blocks: list[Block]) -> None:
        """Fold what a part has come to into the state of a larger part, or of the tile; in order."""
        raise AssertionError(part)

    def tile_of(self, part: Region) -> Region:
        """What `load` and `fold` are told as the tile of a part's chunks."""
        return part

    def join_bytes(self, sized: Any) -> int:
        """What joining holds at most."""
        return 2 * int(sized.slot_bytes)

    def context(self, job: Job, buffer: Buffer) -> Frame:
        np.seterr(all="ignore")  # a thread starts with NumPy's defaults, which would warn where the caller's call did
        return Frame(buffer, job.bindings, self.tuning, self._first)


BARE = Effort(1, 0, bare=True)


def size(work: Sizable, room: Room) -> tuple[Sized, bool]:
    """The most generous sizes that fit the room and read little more than once, in long reads. Else, of those that fit and
    read little more than the fewest bytes, the ones whose reading costs the least. False, with the barest, where none fit."""
    room, there = work.limit(room)
    fitting: list[tuple[int, float, Sized]] = []
    for effort in work.efforts(max(room.host, 0)):
        for share in (1.0,) if effort.bare else work.tuning.shares:
            sized = work.fit(effort, replace(room, host=int(room.host * share)))
            if sized is None:
                break
            if sized.peak > room.host or sized.device_bytes > there:
                continue
            cost = 0 if work.rereads else work.cost(sized)
            if cost <= work.enough(sized):
                return sized, True
            weight = work.overlap if fitting else 1
            fitting.append((work.reads(sized) * weight, cost * weight, sized))
            break
    if fitting:
        most = work.tuning.reread * min(row[0] for row in fitting)
        return min((row for row in fitting if row[0] <= most), key=lambda row: row[1])[2], True
    return size_barely(work, room.packed), False


def size_barely(work: Sizable, packed: int) -> Sized:
    """The smallest sizes there are."""
    sized: Sized = work.fit(BARE, Room(0, packed))
    return sized


def traffic(frame: Frame) -> int:
    """Bytes of everything a dry frame has read."""
    return sum(times * store.traffic(region) for (store, region), times in frame.reads.items())


def inside(region: Region, outer: Region) -> tuple[slice, ...]:
    """A region as an index into the block of an outer one."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(region, outer, strict=True))


def split(buffer: Buffer, *sizes: int) -> list[Buffer]:
    """Consecutive pieces of a buffer."""
    edges = itertools.accumulate(sizes, initial=0)
    return [buffer[low:high] for low, high in itertools.pairwise(edges)]
