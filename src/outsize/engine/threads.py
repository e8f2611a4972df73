"""Threads that work through the tiles of a pass in order.

In: a `Work` (what to do with a tile and its chunks), a pool. Out: events. Workers take tiles in order, and the chunks
of a tile in order. Each worker has its own buffer for its chunk. A fixed number of slots hold the tiles in flight. So
the memory of a pass is known before it starts: workers x buffer + slots x slot. Reading, computing and writing
overlap, because workers are in different phases. Several workers write a large tile together. If the chunks of a tile
must be folded in order, each waits for its turn, and every run gives the same result.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from outsize.engine.pinned import Pinned, lock_memory
from outsize.engine.pool import MemoryPool, round_to_pages

Buffer = npt.NDArray[np.uint8]


class Work(Protocol):
    """One pass, as the threads see it."""

    workers: int
    """Threads at work."""
    slots: int
    """Tiles in flight."""
    worker_bytes: int
    """Buffer of a worker."""
    slot_bytes: int
    """Buffer of a slot."""
    outside_bytes: int
    """What a worker's calls may allocate by themselves."""
    ordered: bool
    """True where the chunks of a tile are folded in order, one at a time."""
    locks: tuple[bool, bool]
    """Whether workers' buffers and slots are page-locked."""
    ahead: int
    """How many loaded chunks may wait for their turn outside their worker's buffer; 0 where the worker itself waits."""

    def chunks(self, tile: Any) -> Iterable[Any]:
        """The chunks of a tile, in order; at least one."""

    def context(self, buffer: Buffer) -> Any:
        """What a worker keeps from chunk to chunk."""

    def open(self, tile: Any, slot: Buffer) -> Any:
        """The state of a tile, before its first chunk."""

    def load(self, tile: Any, chunk: Any, state: Any, context: Any) -> Any:
        """Read and compute a chunk; many at once."""

    def detach(self, payload: Any) -> Any:
        """A copy of a payload that does not need the worker's buffer."""

    def fold(self, tile: Any, chunk: Any, state: Any, payload: Any) -> None:
        """Fold a loaded chunk into the state; in order if the work is ordered."""

    def pieces(self, tile: Any, state: Any) -> Iterable[Any]:
        """After the last chunk of a tile: the pieces in which it is written; several workers may write at once."""

    def write(self, tile: Any, state: Any, piece: Any) -> None:
        """Write one of these pieces."""

    def close(self, tile: Any, state: Any) -> None:
        """After the last piece."""


class _Tile:
    """A tile in flight."""

    def __init__(self, tile: Any, state: Any, slot: Buffer) -> None:
        self.tile, self.state, self.slot = tile, state, slot
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
    def __init__(self, work: Work, tiles: Iterable[Any], slots: list[Buffer]) -> None:
        self.work = work
        self.change = threading.Condition()
        """Guards the slots and the writing, and signals every change in them."""
        self.slots = slots
        self.writing: deque[tuple[_Tile, Any]] = deque()
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self.items = self._items(tiles)

    def _items(self, tiles: Iterable[Any]) -> Iterator[tuple[_Tile, Any, int] | None]:
        """(tile in flight, chunk, its number); opens a tile when a slot is free. None if there is no chunk to take."""
        for tile in tiles:
            while not self.slots:
                yield None
            slot = self.slots.pop()
            flight = _Tile(tile, self.work.open(tile, slot), slot)
            previous: Any = None
            number = 0
            for chunk in self.work.chunks(tile):
                if number:
                    yield flight, previous, number - 1
                previous = chunk
                number += 1
                with flight.change:  # counted before its predecessor is handed out, so that the tile cannot close early
                    flight.pending += 1
            flight.all_taken = True
            yield flight, previous, number - 1
        while len(self.slots) < self.work.slots:
            yield None

    def work_through(self, buffer: Buffer) -> None:
        """The loop of a worker."""
        try:
            context = self.work.context(buffer)
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
        payload = work.load(flight.tile, chunk, flight.state, context)
        if not work.ordered:
            work.fold(flight.tile, chunk, flight.state, payload)
            last = self._count(flight, 1)
        elif work.ahead:
            last = self._fold_in_turn(flight, chunk, number, payload)
        else:
            self._wait_for_turn(flight, lambda: flight.turn == number)
            work.fold(flight.tile, chunk, flight.state, payload)
            last = self._count(flight, 1)
        if last:
            self._finish(flight)

    def _finish(self, flight: _Tile) -> None:
        """The last chunk is folded: write the tile, together with idle workers."""
        pieces = list(self.work.pieces(flight.tile, flight.state))
        flight.unwritten = len(pieces)
        if len(pieces) > 1:
            with self.change:
                self.writing.extend((flight, piece) for piece in pieces)
                self.change.notify_all()
            return
        for piece in pieces:
            self.work.write(flight.tile, flight.state, piece)
        self._close(flight)

    def _write(self, flight: _Tile, piece: Any) -> None:
        self.work.write(flight.tile, flight.state, piece)
        with flight.change:
            flight.unwritten -= 1
            last = flight.unwritten == 0
        if last:
            self._close(flight)

    def _close(self, flight: _Tile) -> None:
        self.work.close(flight.tile, flight.state)
        with self.change:
            self.slots.append(flight.slot)
            self.change.notify_all()

    def _count(self, flight: _Tile, folded: int) -> bool:
        """Count folded chunks; True after the last one."""
        with flight.change:
            flight.turn += folded
            flight.pending -= folded
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
        self._wait_for_turn(flight, lambda: number < flight.turn + self.work.ahead)
        with flight.change:
            if flight.folding or flight.turn != number:
                flight.waiting[number] = (chunk, self.work.detach(payload))
                if flight.folding or flight.turn not in flight.waiting:
                    return False
                chunk, payload = flight.waiting.pop(flight.turn)
            flight.folding = True
        while True:
            self.work.fold(flight.tile, chunk, flight.state, payload)
            last = self._count(flight, 1)
            with flight.change:
                if flight.turn not in flight.waiting:
                    flight.folding = False
                    return last
                chunk, payload = flight.waiting.pop(flight.turn)


def run_work(work: Work, tiles: Iterable[Any], pool: MemoryPool) -> None:
    """Work through the tiles; the first error of any worker is raised here, after all have stopped."""
    total = work.slots * work.slot_bytes + work.workers * work.worker_bytes
    locked: list[Pinned] = []
    run = _Run(work, tiles, _take(pool, work.slot_bytes, work.slots, work.locks[1], locked))
    buffers = _take(pool, work.worker_bytes, work.workers, work.locks[0], locked)
    pool.count(work.workers * work.outside_bytes)
    try:
        if work.workers == 1:
            run.work_through(buffers[0])
        else:
            _join(run, buffers)
        if run.error is not None:
            raise run.error
    finally:
        for memory in locked:
            memory.close()
        pool.give(total + work.workers * work.outside_bytes)


def _take(pool: MemoryPool, size: int, count: int, lock: bool, locked: list[Pinned]) -> list[Buffer]:
    """Buffers of one size, page-locked where that is wanted."""
    if not lock:
        return [pool.take(size) for _ in range(count)]
    pool.count(size * count)
    if round_to_pages(size * count) > size * count:
        made = [lock_memory(size) for _ in range(count)]
        locked += made
        return [memory.array for memory in made]
    locked.append(
        lock_memory(size * count)
    )  # at once, where that takes no more: the driver takes its time for every call
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
