"""One pass over a tensor, chunk by chunk in a fixed order: threads read ahead, one kernel folds.

In: a node, the mode whose fibres stay whole, a kernel, the room. Out: a sized pass, which a plan describes and `run_stream`
obeys. It is a pass of the array room: chunks are read by its aligned direct reader into buffers of its pool, and what a chunk
takes is measured by the lines that make it. Every run folds in the same order, so it gives the same bits, also when
it is taken up in the middle.
"""

from __future__ import annotations

import abc
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from outsize.array.graph.frame import Frame
from outsize.array.graph.node import Node, Source
from outsize.array.kernels.blas import Packing, blas_threads
from outsize.array.passes.base import ANY, BARE, Effort, Job, Pass, Room, Sized, size
from outsize.array.passes.tiling import Box, Grid, balance, center, grow, read_seconds
from outsize.array.store.base import Buffer, Region, region_shape
from outsize.array.tuning import Tuning
from outsize.core.events import Advanced, Finished, Listener, Started
from outsize.engine.heap import lean_heap, trim_heap
from outsize.engine.pool import MemoryPool, cores
from outsize.engine.threads import run_work
from outsize.factor.algorithms.fibers import Fibers

_SIDE = 64
"""Fibres that lie side by side in the smallest chunk."""
_SAMPLES = 16
"""Chunks, where only some are read."""
_LITTLE = 256 << 10
"""Bytes of small arrays and Python objects that a fold makes, whatever the chunk."""


class Kernel(abc.ABC):
    """What is done with one chunk after another."""

    name: str
    """What it does, in a few words."""
    written = 0
    """Bytes it writes to disk in all."""

    @abc.abstractmethod
    def held(self, chunk: tuple[int, ...]) -> int:
        """Bytes of what it keeps from chunk to chunk, and of what it makes while it folds one of this shape."""

    @abc.abstractmethod
    def packing(self, chunk: tuple[int, ...]) -> Packing:
        """What BLAS takes while it folds."""

    @abc.abstractmethod
    def fold(self, number: int, region: Region, fibers: Fibers) -> None:
        """Take the next chunk; its fibres may be overwritten."""

    @abc.abstractmethod
    def state(self) -> dict[str, Any]:
        """Arrays and numbers from which it can go on."""

    @abc.abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""

    def flush(self) -> None:  # noqa: B027  (most have all of it in their state)
        """Bring to disk what the state does not have in it."""

    def begin(self) -> None:  # noqa: B027  (most write nothing)
        """On a worker that folds a part: open what is written."""

    def end(self) -> None:  # noqa: B027
        """Let go of it."""

    def sums(self) -> dict[str, Any]:
        """What a part of the chunks comes to."""
        return self.state()

    @abc.abstractmethod
    def join(self, sums: dict[str, Any]) -> None:
        """Add what the part that follows comes to."""


class StreamPass(Pass):
    """Streams one node past a kernel; the mode `axis` is never cut."""

    ordered = True

    def __init__(self, node: Node, axis: int, kernel: Kernel, tuning: Tuning, sample: int | None = None) -> None:
        """With `sample`, a few chunks of about so many elements, which lie evenly, are all that is read."""
        super().__init__((), {}, tuning)
        self.node, self.axis, self.kernel, self.sample = node, axis, kernel, sample
        self.whole: tuple[int, ...] = (axis,)
        """Modes that are not cut."""
        self.working = np.dtype(np.complex128 if node.dtype.kind == "c" else np.float64)
        self.start = 0
        """Chunks that an earlier run has folded."""
        self.stop = sys.maxsize
        """The first chunk that is left to others."""
        self.saved: Callable[[int], None] = lambda done: None
        """Told how many chunks are folded, after each."""

    def label(self) -> str:
        return self.kernel.name

    def measure(self, region: Region, frame: Frame) -> None:
        self._make(region, frame)

    def _make(self, region: Region, frame: Frame) -> Fibers:
        shape = region_shape(region)
        block = frame.evaluate(self.node, region)
        data = frame.array(Fibers.shape(shape, self.axis), self.working)
        if not frame.dry:
            frame.copy(Fibers.lay(data, shape, self.axis), block)
        return Fibers(data)

    def efforts(self, room: int) -> list[Effort]:
        many = max(2, min(8, cores() // 2))  # they widen and turn what one kernel folds
        rows = [(many, room // (2 * many)), (2, room // 4), (2, room // 8), (2, room // 16), (1, room // 8)]
        rows += [(1, room // 32), (1, room // 128)]
        return [*(Effort(workers, each) for workers, each in rows), BARE]

    def fit(self, effort: Effort, room: Room, there: int = ANY) -> Sized | None:
        shape, item, single = self.node.shape, self.node.dtype.itemsize, self._single()
        if effort.bare:
            return self._settle(single, 1, room)
        one = self.probe(center(shape, single))
        buffer = max(effort.chunk, one.peak + one.outside)

        def fits(box: Box) -> bool:
            return self.holds(self.probe(center(shape, box)), buffer, there)

        def seconds(box: Box) -> float:
            return read_seconds(self.probe(center(shape, box)).reads, self.tuning)

        most = self.longest(effort, room, reads=bool(one.reads))
        box, _ = grow(shape, single, seconds, fits, lambda b: math.prod(b) * item, self.tuning, most)
        return self._settle(balance(shape, box, single), effort.workers, room)

    def longest(self, effort: Effort, room: Room, *, reads: bool) -> int:
        """Bytes of a chunk at most."""
        most = self.tuning.largest if reads else self.tuning.chunk // 2
        return most if self.sample is None else min(most, self.sample * self.node.dtype.itemsize)

    def beside(self, box: Box) -> int:
        """Bytes of what a fold of such a chunk keeps and makes."""
        return self.kernel.held(box) + _LITTLE

    def _single(self) -> Box:
        """The fewest fibres that are worth a read: a few that lie side by side."""
        shape = self.node.shape
        box = [n if axis in self.whole else 1 for axis, n in enumerate(shape)]
        store = self.node.store if isinstance(self.node, Source) else None
        fastest = (store.order or range(len(shape)))[-1] if store is not None else len(shape) - 1
        if fastest not in self.whole:
            box[fastest] = max(1, min(shape[fastest], _SIDE))
        return tuple(max(1, n) for n in box)

    def _settle(self, box: Box, workers: int, room: Room) -> Sized:
        shape = self.node.shape
        grid = Grid(shape, tuple(max(1, n) for n in shape))
        workers = max(1, min(workers, len(Grid(shape, box))))
        sized = self.settle(grid, box, workers, 1, self.beside(box), room)
        alone = self.sample is not None  # little work: threads would wait for each other
        threads = 1 if alone else max(1, min(cores(), room.host // self.tuning.thread_room))
        packed = self.kernel.packing(box).total(1, threads)
        return replace(sized, threads=threads, packed=max(room.packed, sized.packed, packed))

    def picked(self, sized: Sized) -> list[int]:
        """The numbers of the chunks that are taken: all, or some that lie evenly."""
        total = len(Grid(self.node.shape, sized.chunk))
        if self.sample is None or total <= _SAMPLES:
            return list(range(total))
        return sorted({int((place + 0.5) * total / _SAMPLES) for place in range(_SAMPLES)})

    def share(self, sized: Sized) -> float:
        """The part of all chunks that is taken."""
        return len(self.picked(sized)) / max(1, len(Grid(self.node.shape, sized.chunk)))

    def reads(self, sized: Any) -> int:
        return int(super().reads(sized) * self.share(sized))

    def writes(self) -> int:
        return self.kernel.written

    def volume(self) -> int:
        return max(1, self.node.nbytes)

    def chunks(self, job: Job, tile: Region) -> Iterator[Any]:
        grid = Grid(self.node.shape, job.sized.chunk)
        for place, number in enumerate(self.picked(job.sized)):
            if self.start <= place < self.stop:
                yield place, region_at(grid, number)

    def open(self, job: Job, tile: Region, slot: Buffer) -> None:
        """The kernel is the state."""

    def load(self, job: Job, tile: Region, chunk: tuple[int, Region], state: None, frame: Frame) -> Fibers:
        frame.reset()
        return self._make(chunk[1], frame)

    def fold(self, job: Job, tile: Region, chunk: tuple[int, Region], state: None, payload: Fibers) -> None:
        place, region = chunk
        self.kernel.fold(place, region, payload)
        job.progress(math.prod(region_shape(region)) * self.node.dtype.itemsize)
        self.saved(place + 1)

    def close(self, job: Job, tile: Region, state: None) -> None:
        """Nothing is left to write."""


def region_at(grid: Grid, number: int) -> Region:
    """The box of a grid with this number."""
    index = []
    for count in reversed(grid.counts):
        number, place = divmod(number, count)
        index.append(place)
    return grid.region(tuple(reversed(index)))


def size_stream(work: StreamPass, room: int, packed: int) -> Sized:
    """The pass with its sizes, the barest where none fits; `packed` is what BLAS has kept from earlier passes."""
    return size(work, Room(room, packed))[0]


def run_stream(work: StreamPass, sized: Sized, room: int, listener: Listener | None, place: tuple[int, int]) -> float:
    """Run a sized pass inside a pool of `room` bytes; the seconds it took."""
    began, told, name = time.perf_counter(), 0, work.label()
    total = int(work.volume() * work.share(sized))
    picked = work.picked(sized)
    done = int(total * work.start / max(1, len(picked)))
    if listener is not None:
        listener(Started(step=name, index=place[0], steps=place[1], bytes=total, done=done))

    def moved(amount: int) -> None:
        nonlocal told
        told += amount
        if listener is not None:
            listener(Advanced(step=name, bytes=amount))

    pool = MemoryPool(max(room, sized.peak))
    pool.count(sized.packed)
    if work.start < len(picked):
        kept = replace(sized, slot_bytes=0)  # the kernel's arrays are its own; they are counted, not handed out
        pool.count(sized.slot_bytes + sized.shared_bytes)
        with np.errstate(all="ignore"), lean_heap(), blas_threads(sized.threads), work.opened(sized) as opened:
            job = Job(sized, (), {}, moved, opened)
            run_work(work, kept, job, [(0, tuple((0, n) for n in work.node.shape))], pool, lambda number: None)
        trim_heap()
    seconds = time.perf_counter() - began
    if listener is not None:
        listener(Finished(step=name, seconds=seconds))
    return seconds
