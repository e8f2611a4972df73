"""What all passes share: how they are sized, and what they tell the plan.

In: nodes to make, where to put them, stores that earlier passes left, a budget. A pass is sized by trying a list of
manners, from generous (many workers, large buffers) to the barest (one worker, one granule), and taking the first
whose exact peak is inside the budget. The barest one's peak is the smallest budget that works.
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from outsize.array.graph.frame import Frame
from outsize.array.graph.node import Node
from outsize.array.kernels.blas import NOTHING
from outsize.array.passes.tiling import Box, Grid
from outsize.array.store.base import Buffer, Region, Sink, Store, region_shape
from outsize.array.tuning import Tuning
from outsize.core.memory import HOST, Part
from outsize.core.noun import Known
from outsize.core.plan import Level, Peak, Step
from outsize.engine.pool import cores, round_to_pages


@dataclass(frozen=True, slots=True)
class Manner:
    """How generously a pass is run."""

    workers: int
    """Threads."""
    chunk: int
    """Bytes of buffer of each, unless the smallest piece needs more."""
    bare: bool = False
    """True for the barest: smallest tiles, one of everything."""


def manners(chunk: int, room: int = 0) -> list[Manner]:
    """From generous to bare; the last but one splits what there is."""
    most = max(2, min(8, cores() + 2))
    rows = [(most, chunk), (most, chunk // 2), (most, chunk // 4), (2, chunk // 4), (2, chunk // 16), (1, chunk // 16)]
    rows += [(1, chunk // 64), (1, room // 3), (1, room // 12)]
    return [*(Manner(workers, each) for workers, each in rows), Manner(1, 0, bare=True)]


Progress = Callable[[int], None]
"""Called with the bytes that were moved."""


class Pass(abc.ABC):
    """One pass. After `size` it can be described and run."""

    ordered = False
    ahead = 0
    rereads = False
    """True where reading sources again and again is the nature of the work, so that it is no reason to look further."""
    locks = (False, False)
    """Whether workers' buffers and slots are page-locked, for a device to copy by itself."""
    device_peak = 0
    """Bytes it reserves on a device."""
    shared_bytes = 0
    """Host memory that it takes for all workers together, from `begin` to `end`."""
    packing = NOTHING
    """What BLAS takes in it for its own buffers, a call and a thread."""
    packed_before = 0
    """What BLAS has taken in earlier passes, and keeps."""

    def __init__(self, outputs: tuple[tuple[Node, Sink], ...], bindings: Mapping[Node, Store], tuning: Tuning) -> None:
        self.outputs = outputs
        self.bindings = bindings
        self.tuning = tuning
        self.workers = self.slots = 1
        self.worker_bytes = self.slot_bytes = self.outside_bytes = 0
        self.grid = Grid((), ())
        self.chunk: Box = ()
        self.progress: Progress = lambda moved: None

    @abc.abstractmethod
    def label(self) -> str:
        """What it does, in a few words."""

    @abc.abstractmethod
    def shape_up(self, manner: Manner, room: int) -> bool:
        """Choose tiles and chunks for this manner inside `room` bytes; False where it does not fit."""

    @property
    def peak(self) -> int:
        """Bytes it holds by itself."""
        slots, buffers = self.slots * self.slot_bytes, self.workers * self.worker_bytes
        return slots + buffers + self.workers * self.outside_bytes + self.shared_bytes + self.packed

    @property
    def threads(self) -> int:
        """Threads of BLAS: the cores that workers leave."""
        return max(1, cores() // self.workers)

    @property
    def packed(self) -> int:
        """What BLAS's own buffers take at the end of the pass."""
        return max(self.packed_before, self.packing.total(self.workers, self.threads))

    @property
    def locked(self) -> int:
        """Bytes of them that are page-locked."""
        buffers, slots = self.workers * self.worker_bytes, self.slots * self.slot_bytes
        return buffers * self.locks[0] + slots * self.locks[1] + self.shared_bytes

    def take_stock(self, frame: Frame, slot: int) -> None:
        """Fix the sizes of buffers, rounded as the pool rounds them."""
        self.worker_bytes, self.outside_bytes = round_to_pages(frame.peak), frame.outside
        self.packing = frame.packing
        self.slot_bytes = round_to_pages(slot)

    def size(self, room: int) -> bool:
        """Find the most generous manner that fits and reads little more than once; else, of those that fit, the one that
        reads the least. False, with the barest chosen, where none fits."""
        fitting: list[tuple[int, int, Manner, float]] = []
        for manner in self.manners(max(room, 0)):
            for share in (1.0,) if manner.bare else self.tuning.shares:
                if not self.shape_up(manner, int(room * share)):
                    break
                if self.peak > room:
                    continue
                reads = 0 if self.rereads else self.reads()
                if reads <= self.tuning.reread * self._sources():
                    return True
                fitting.append((reads, len(fitting), manner, share))
                break
        if fitting:
            _, _, manner, share = min(fitting, key=lambda row: row[:2])
            self.shape_up(manner, int(room * share))
        return bool(fitting)

    def _sources(self) -> int:
        """Bytes of every source, once."""
        stores = {id(store): store for store, _ in self.probe_all().reads}
        return sum(math.prod(store.shape) * store.dtype.itemsize for store in stores.values())

    def manners(self, room: int) -> list[Manner]:
        """What `size` tries."""
        return manners(self.tuning.chunk, room)

    def holds(self, frame: Frame, buffer: int) -> bool:
        """True where a chunk that was measured fits a worker's buffer."""
        return frame.peak + frame.outside + frame.packing.total(1, 1) <= buffer

    def begin(self) -> None:  # noqa: B027  (most passes need nothing)
        """Before the first tile."""

    def end(self) -> None:  # noqa: B027  (most passes leave nothing)
        """After the last tile, or an error."""

    def levels(self) -> tuple[Level, ...]:
        """Traffic per level of the machine, where a device takes part."""
        return ()

    def smallest(self) -> int:
        """Peak of the barest manner."""
        self.shape_up(self.manners(0)[-1], 0)
        return self.peak

    def floor(self) -> int | None:
        """Fewest bytes any schedule could move: every source once, the output once."""
        return min(self._sources(), self.reads()) + self.writes()

    def writes(self) -> int:
        """Bytes that it will write."""
        return sum(sink.traffic(tuple((0, n) for n in sink.shape)) for _, sink in self.outputs)

    @abc.abstractmethod
    def volume(self) -> int:
        """What the calls of `progress` add up to."""

    @abc.abstractmethod
    def probe(self, region: Region) -> Frame:
        """A dry run of one chunk."""

    def kinds(self) -> Iterator[tuple[Region, int]]:
        """One chunk of each kind and how many there are."""
        for tile, number in self.grid.kinds():
            for chunk, times in Grid(region_shape(tile), self.chunk).kinds():
                yield tuple((a + s, b + s) for (a, b), (s, _) in zip(chunk, tile, strict=True)), number * times

    def probe_all(self) -> Frame:
        """A dry frame that has seen one chunk of each kind."""
        total = self.frame()
        for region, _ in self.kinds():
            frame = self.probe(region)
            total.peak, total.outside = max(total.peak, frame.peak), max(total.outside, frame.outside)
            total.reads += frame.reads
            total.pack(frame.packing)
        return total

    def reads(self) -> int:
        """Bytes that it will read, for the chosen tiles."""
        return sum(traffic(self.probe(region)) * number for region, number in self.kinds())

    def frame(self) -> Frame:
        """A dry frame."""
        return Frame(None, self.bindings, self.tuning)

    def step(self, resident: tuple[Part, ...]) -> Step:
        """This pass as a step of a plan; `resident` is what else is held meanwhile."""
        parts = [Part(name=f"{self.slots} tiles of the output", bytes=self.slots * self.slot_bytes, known=Known.EXACT)]
        parts.append(
            Part(name=f"{self.workers} workers' buffers", bytes=self.workers * self.worker_bytes, known=Known.EXACT)
        )
        parts.append(Part(name="what workers share", bytes=self.shared_bytes, known=Known.EXACT))
        parts.append(Part(name="temporaries of calls", bytes=self.workers * self.outside_bytes, known=Known.BOUND))
        parts.append(Part(name="buffers of BLAS", bytes=self.packed, known=Known.BOUND))
        parts += resident
        held = self.peak + sum(part.bytes for part in resident)
        return Step(
            name=self.label(), peaks=(Peak(pool=HOST, bytes=held, known=Known.BOUND),),
            parts=tuple(part for part in parts if part.bytes), read=self.reads(), written=self.writes(), floor=self.floor(),
            tiles=max(1, len(self.grid)), tile=self.grid.box, notes=self.notes(), levels=self.levels(),
        )  # fmt: skip

    def notes(self) -> tuple[str, ...]:
        """Choices worth knowing."""
        return ()

    # What the engine calls

    def tiles(self) -> Iterable[Region]:
        """Tiles in order."""
        return self.grid

    def context(self, buffer: Buffer) -> Frame:
        """A frame on a worker's buffer."""
        return Frame(buffer, self.bindings, self.tuning)

    @abc.abstractmethod
    def chunks(self, tile: Region) -> Iterator[Region]:
        """Chunks of a tile."""

    @abc.abstractmethod
    def open(self, tile: Region, slot: Buffer) -> Any:
        """The state of a tile."""

    @abc.abstractmethod
    def load(self, tile: Region, chunk: Region, state: Any, frame: Frame) -> Any:
        """Read and compute a chunk."""

    def detach(self, payload: Any) -> Any:
        """A copy of a payload, for passes that allow chunks to wait."""
        return payload

    @abc.abstractmethod
    def fold(self, tile: Region, chunk: Region, state: Any, payload: Any) -> None:
        """Bring it into the state."""

    def pieces(self, tile: Region, state: Any) -> Iterable[Region]:
        """Parts of the tile that may be written at once; none where closing it writes it."""
        return ()

    def write(self, tile: Region, state: Any, piece: Region) -> None:
        """Write a part of the tile."""
        raise AssertionError(piece)

    @abc.abstractmethod
    def close(self, tile: Region, state: Any) -> None:
        """Write what is not written yet, and tell of it."""


def traffic(frame: Frame) -> int:
    """Bytes of everything a dry frame has read."""
    return sum(store.traffic(region) for store, region in frame.reads)


def inside(region: Region, outer: Region) -> tuple[slice, ...]:
    """A region as an index into the block of an outer one."""
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(region, outer, strict=True))


def split(buffer: Buffer, *sizes: int) -> list[Buffer]:
    """Consecutive pieces of a buffer."""
    edges = itertools.accumulate(sizes, initial=0)
    return [buffer[low:high] for low, high in itertools.pairwise(edges)]
