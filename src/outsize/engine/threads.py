"""Threads that work through the tiles of a pass in order.

In: a `Work` (what to do with a tile and its chunks), its sizes, a pool. Workers take tiles in order, and the chunks
of a tile in order. Each worker has its own buffer for its chunk. A fixed number of slots hold the tiles in flight. So
the memory of a pass is known before it starts: workers x buffer + slots x slot. Reading, computing and writing
overlap, because workers are in different phases. Several workers write a large tile together. If the chunks of a tile
must be folded in order, each waits for its turn, and every run gives the same result.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from outsize.engine.pinned import Pinned, lock_memory
from outsize.engine.pool import MemoryPool, round_to_pages

Buffer = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Threads of a pass, and their memory."""

    workers: int
    slots: int
    """Tiles in flight."""
    worker_bytes: int
    """Buffer of a worker."""
    slot_bytes: int
    """Buffer of a slot."""
    outside_bytes: int
    """What a worker's calls may allocate by themselves."""
    ahead: int = 0
    """How many loaded chunks may wait for their turn outside their worker's buffer; 0 where the worker itself waits."""


class Work(abc.ABC):
    """One pass, as the threads see it. `job` is whatever the caller of `run_work` gave."""

    ordered = False
    """True where the chunks of a tile are folded in order, one at a time."""
    locks = (False, False)
    """Whether workers' buffers and slots are page-locked, for a device to copy by itself."""

    @abc.abstractmethod
    def context(self, job: Any, buffer: Buffer) -> Any:
        """What a worker keeps from chunk to chunk."""

    @abc.abstractmethod
    def chunks(self, job: Any, tile: Any) -> Iterator[Any]:
        """The chunks of a tile, in order; at least one."""

    @abc.abstractmethod
    def open(self, job: Any, tile: Any, slot: Buffer) -> Any:
        """The state of a tile, before its first chunk."""

    @abc.abstractmethod
    def load(self, job: Any, tile: Any, chunk: Any, state: Any, context: Any) -> Any:
        """Read and compute a chunk; many at once."""

    def detach(self, payload: Any) -> Any:
        """A copy of a payload that does not need the worker's buffer, for work that allows chunks to wait."""
        return payload

    @abc.abstractmethod
    def fold(self, job: Any, tile: Any, chunk: Any, state: Any, payload: Any) -> None:
        """Fold a loaded chunk into the state; in order if the work is ordered."""

    def pieces(self, job: Any, tile: Any, state: Any) -> Iterable[Any]:
        """After the last chunk: the pieces in which a tile is written, by several workers; none where `close` writes it."""
        return ()

    def write(self, job: Any, tile: Any, state: Any, piece: Any) -> None:
        """Write one of these pieces."""
        raise AssertionError(piece)

    @abc.abstractmethod
    def close(self, job: Any, tile: Any, state: Any) -> None:
        """After the last piece: write what is not written yet, and tell of it."""


class _Tile:
    """A tile in flight."""

    def __init__(self, number: int, tile: Any, state: Any, slot: Buffer) -> None:
        self.number, self.tile, self.state, self.slot = number, tile, state, slot
        self.turn = 0
        self.pending = 0
        self.unwritten = 0
        self.all_taken = False
        self.waiting: dict[int, tuple[Any, Any]] = {}
        self.folding = False
        self.change = threading.Condition()


class _Stopped(Exception):
    """Another worker failed."""


class _Run:
    def __init__(
        self, work: Work, sizes: Sizes, job: Any, tiles: Iterable[tuple[int, Any]], slots: list[Buffer],
        closed: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.work, self.sizes, self.job, self.closed = work, sizes, job, closed
        self.change = threading.Condition()
        """Guards the slots and the writing, and signals every change in them."""
        self.slots = slots
        self.writing: deque[tuple[_Tile, Any]] = deque()
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self.items = self._items(tiles)

    def _items(self, tiles: Iterable[tuple[int, Any]]) -> Iterator[tuple[_Tile, Any, int] | None]:
        """(tile in flight, chunk, its number); opens a tile when a slot is free. None if there is no chunk to take."""
        for place, tile in tiles:
            while not self.slots:
                yield None
            slot = self.slots.pop()
            flight = _Tile(place, tile, self.work.open(self.job, tile, slot), slot)
            previous: Any = None
            number = 0
            for chunk in self.work.chunks(self.job, tile):
                if number:
                    yield flight, previous, number - 1
                previous = chunk
                number += 1
                with flight.change:  # counted before its predecessor is handed out, so that the tile cannot close early
                    flight.pending += 1
            flight.all_taken = True
            yield flight, previous, number - 1
        while len(self.slots) < self.sizes.slots:
            yield None

    def work_through(self, buffer: Buffer) -> None:
        """The loop of a worker."""
        try:
            context = self.work.context(self.job, buffer)
            while (job := self._next_job()) is not None:
                job(context)
        except _Stopped:
            pass
        except BaseException as error:
            self.fail(error)

    def _next_job(self) -> Callable[[Any], None] | None:
        """A piece to write, or else a chunk to load; None when all is done."""
        with self.change:
            while not self.stop.is_set():
                if self.writing:
                    flight, piece = self.writing.popleft()
                    return lambda context: self._write(flight, piece)
                for item in self.items:
                    if item is None:
                        break
                    return functools.partial(self._do, *item)
                else:
                    self.change.notify_all()
                    return None
                self.change.wait()
        raise _Stopped

    def fail(self, error: BaseException) -> None:
        """Remember the first error and wake everybody."""
        if self.error is None:
            self.error = error
        self.stop.set()
        with self.change:
            self.change.notify_all()

    def _do(self, flight: _Tile, chunk: Any, number: int, context: Any) -> None:
        work = self.work
        payload = work.load(self.job, flight.tile, chunk, flight.state, context)
        if work.ordered and self.sizes.ahead:
            last = self._fold_in_turn(flight, chunk, number, payload)
        else:
            if work.ordered:
                self._wait_for_turn(flight, lambda: flight.turn == number)
            work.fold(self.job, flight.tile, chunk, flight.state, payload)
            last = self._count(flight)
        if last:
            self._finish(flight)

    def _finish(self, flight: _Tile) -> None:
        """The last chunk is folded: write the tile, together with idle workers."""
        pieces = list(self.work.pieces(self.job, flight.tile, flight.state))
        flight.unwritten = len(pieces)
        if len(pieces) > 1:
            with self.change:
                self.writing.extend((flight, piece) for piece in pieces)
                self.change.notify_all()
            return
        for piece in pieces:
            self.work.write(self.job, flight.tile, flight.state, piece)
        self._close(flight)

    def _write(self, flight: _Tile, piece: Any) -> None:
        self.work.write(self.job, flight.tile, flight.state, piece)
        with flight.change:
            flight.unwritten -= 1
            last = flight.unwritten == 0
        if last:
            self._close(flight)

    def _close(self, flight: _Tile) -> None:
        self.work.close(self.job, flight.tile, flight.state)
        self.closed(flight.number)
        with self.change:
            self.slots.append(flight.slot)
            self.change.notify_all()

    def _count(self, flight: _Tile) -> bool:
        """Count a folded chunk; True after the last one."""
        with flight.change:
            flight.turn += 1
            flight.pending -= 1
            flight.change.notify_all()
            return flight.pending == 0 and flight.all_taken

    def _wait_for_turn(self, flight: _Tile, ready: Callable[[], bool]) -> None:
        with flight.change:
            while not ready():
                if self.stop.is_set():
                    raise _Stopped
                flight.change.wait(0.2)

    def _fold_in_turn(self, flight: _Tile, chunk: Any, number: int, payload: Any) -> bool:
        """Fold this chunk and those that waited for it. If it is not its turn, leave it for later and go on
        reading."""
        self._wait_for_turn(flight, lambda: number < flight.turn + self.sizes.ahead)
        with flight.change:
            if flight.folding or flight.turn != number:
                flight.waiting[number] = (chunk, self.work.detach(payload))
                if flight.folding or flight.turn not in flight.waiting:
                    return False
                chunk, payload = flight.waiting.pop(flight.turn)
            flight.folding = True
        while True:
            self.work.fold(self.job, flight.tile, chunk, flight.state, payload)
            last = self._count(flight)
            with flight.change:
                if flight.turn not in flight.waiting:
                    flight.folding = False
                    return last
                chunk, payload = flight.waiting.pop(flight.turn)


def run_work(
    work: Work, sizes: Sizes, job: Any, tiles: Iterable[tuple[int, Any]], pool: MemoryPool, closed: Callable[[int], None]
) -> None:  # fmt: skip
    """Work through numbered tiles; `closed` is told the number of each that is done. The first error of any worker is
    raised here, after all have stopped."""
    total = sizes.slots * sizes.slot_bytes + sizes.workers * sizes.worker_bytes
    locked: list[Pinned] = []
    slots = _take(pool, sizes.slot_bytes, sizes.slots, work.locks[1], locked)
    run = _Run(work, sizes, job, tiles, slots, closed)
    buffers = _take(pool, sizes.worker_bytes, sizes.workers, work.locks[0], locked)
    pool.count(sizes.workers * sizes.outside_bytes)
    try:
        if sizes.workers == 1:
            run.work_through(buffers[0])
        else:
            _join(run, buffers)
        if run.error is not None:
            raise run.error
    finally:
        for memory in locked:
            memory.close()
        pool.give(total + sizes.workers * sizes.outside_bytes)


def _take(pool: MemoryPool, size: int, count: int, lock: bool, locked: list[Pinned]) -> list[Buffer]:
    """Buffers of one size, page-locked where that is wanted."""
    if not lock:
        return [pool.take(size) for _ in range(count)]
    pool.count(size * count)
    if round_to_pages(size * count) > size * count:
        made = [lock_memory(size) for _ in range(count)]
        locked += made
        return [memory.array for memory in made]
    locked.append(lock_memory(size * count))  # at once, where that takes no more: every call costs the driver time
    return [locked[-1].array[number * size : (number + 1) * size] for number in range(count)]


class Threads:
    """Threads that are waited for even after Ctrl-C. Before Python 3.13, a `Thread.join` that Ctrl-C interrupts takes
    a running thread for one that has ended."""

    def __init__(self, name: str, lives: Iterable[Callable[[], None]]) -> None:
        self._threads = [
            threading.Thread(target=self._live, args=(number, life), name=name, daemon=True)
            for number, life in enumerate(lives)
        ]
        self._started: list[int] = []
        self._gone: set[int] = set()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    def _live(self, number: int, life: Callable[[], None]) -> None:
        try:
            life()
        finally:
            self._gone.add(number)
            self._bell.put(None)

    def start(self) -> None:
        """Start all of them; a thread whose start Ctrl-C interrupts is not waited for."""
        for number, thread in enumerate(self._threads):
            thread.start()
            self._started.append(number)

    def wait(self) -> None:
        """Wait until all started threads have ended."""
        while not self._gone.issuperset(self._started):
            with contextlib.suppress(queue.Empty):
                self._bell.get(timeout=0.1)
        for number in self._started:
            self._threads[number].join()


def _join(run: _Run, buffers: list[Buffer]) -> None:
    """Start the threads and wait for them. Ctrl-C stops the workers before it is raised."""
    ready = threading.Event()

    def live(buffer: Buffer) -> None:
        ready.wait()
        run.work_through(buffer)

    threads = Threads("outsize", [functools.partial(live, buffer) for buffer in buffers])
    try:
        threads.start()
        ready.set()
        threads.wait()
    except BaseException as error:  # also a thread that cannot be started: those that run end before files are closed
        run.fail(error)
        ready.set()  # a thread that was not counted finds nothing to do
        threads.wait()
