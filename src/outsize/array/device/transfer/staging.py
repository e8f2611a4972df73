"""Takes plain memory to a device through page-locked memory, which the device can copy from by itself.

In: blocks of host memory and where they go. Out: copies on the device's stream `in`. Staging threads do nothing but fill
page-locked pieces, and one more thread, the sender, sends them. A block is cut into jobs. A staging thread takes the next
job and a free piece, fills it, and gives it to the sender; the sender gives it to the device, and when the copy has been
made the piece is free again. Nobody waits for a chunk to be computed. Staging threads are apart from the workers, who run
Python, and from the sender for the same reason: after a copy a processor's caches are empty, so that Python or the driver
costs a copying thread many times as much, and it holds the interpreter for that long. So a staging thread needs the
interpreter once a piece, and all calls of the driver are the sender's.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import itertools
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from outsize.array.device.base import Copier, Device
from outsize.array.kernels.copies import copy_block
from outsize.array.store.base import Block
from outsize.array.tuning import Tuning
from outsize.engine.pinned import lock_memory
from outsize.engine.pool import cores, round_to_pages
from outsize.engine.threads import Threads

_PAGE = 4096
_TURN = 1e-4
"""Seconds that a thread may keep the interpreter while staging threads want it. Python's own 5 ms are the time of a
whole chunk on the link: an H200 was given 34 to 45 GB/s of plain memory with those, and 52 with this."""


@dataclass(frozen=True, slots=True)
class Staging:
    """Staging as a plan sees it."""

    threads: int = 0
    piece: int = 0
    """Bytes of each of their pieces."""
    spare: int = Tuning().stage_spare
    """Pieces that are under way while every thread fills one, at most."""

    @classmethod
    def choose(cls, room: int, tuning: Tuning, *, alone: bool = False) -> Staging:
        """As many threads as there are processors for and pieces as long as is of use, in a part of the host's room; `alone`: one
        thread."""
        threads = 1 if alone else min(tuning.stage_threads, cores())
        pieces = cls(threads, spare=tuning.stage_spare).pieces
        piece = max(_PAGE, room // (tuning.stage_share * pieces) // _PAGE * _PAGE)
        return cls(threads, min(tuning.stage_piece, piece), tuning.stage_spare)

    @property
    def pieces(self) -> int:
        """Pieces of all threads."""
        return self.threads + min(self.threads, self.spare)

    @property
    def nbytes(self) -> int:
        """Page-locked bytes of all pieces."""
        return round_to_pages(self.pieces * self.piece)


class _Turns:
    """Python's switch interval: short while a stager is at work, as the program had it otherwise."""

    def __init__(self) -> None:
        self._lock, self._before = threading.Lock(), 0.0
        self._stagers: set[int] = set()

    def shorten(self, stager: int) -> None:
        """A stager begins."""
        with self._lock:
            if not self._stagers:
                self._before = sys.getswitchinterval()
            self._stagers.add(stager)
            sys.setswitchinterval(min(_TURN, self._before))

    def restore(self, stager: int) -> None:
        """A stager ends, if it has begun."""
        with self._lock:
            if stager in self._stagers:
                self._stagers.remove(stager)
                if not self._stagers:
                    sys.setswitchinterval(self._before)


_turns = _Turns()


class _Load:
    """Blocks that the stager takes to the device together."""

    def __init__(self, blocks: Sequence[tuple[Block, int]], count: int) -> None:
        self.blocks = blocks
        """(block, where it goes): jobs know addresses, and memory is somebody's as long as he is known."""
        self.error: BaseException | None = None
        self._left = count
        self._done = threading.Lock()
        self._done.acquire()

    def finish(self, error: BaseException | None) -> None:
        """One of its pieces is through; only the sender says so."""
        self.error = self.error or error
        self._left -= 1
        if not self._left:
            self._done.release()

    def wait(self) -> None:
        """Until all of them are; their first error is raised here."""
        with self._done:
            if self.error is not None:
                raise self.error


_Job = tuple[_Load, int, int, int | Block]
"""What a piece is of, where it goes, its bytes in native order, its address or the part."""
_Place = tuple[Copier, int]
"""What sends a piece, and the address of the piece."""
_numbers = itertools.count()


class _Queues:
    """The queues of a stager: jobs, filled pieces, and free ones."""

    def __init__(self, device: Device, staging: Staging, pause: float) -> None:
        self.memory, self.threads, self.pause = lock_memory(staging.nbytes), staging.threads, pause
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        """None: a staging thread ends."""
        self.filled: queue.SimpleQueue[tuple[_Place, _Job] | None] = queue.SimpleQueue()
        """None: a staging thread has ended."""
        self.free: queue.SimpleQueue[_Place] = queue.SimpleQueue()
        start = self.memory.array.ctypes.data
        for number in range(staging.pieces):
            self.free.put((device.copier(), start + number * staging.piece))

    def end(self, number: int) -> None:
        """The threads end after what they have been given."""
        for _ in range(self.threads):
            self.jobs.put(None)
        _turns.restore(number)


class Stager:
    """Staging threads, the sender, and their page-locked pieces, on a device whose memory is reserved.

    One that nobody closed, since Ctrl-C came in between, is ended as it is forgotten: its threads do not hold it."""

    def __init__(self, device: Device, staging: Staging, pause: float = Tuning().stage_pause) -> None:
        self._queues, self._piece, self._number = _Queues(device, staging, pause), staging.piece, next(_numbers)
        lives = [functools.partial(_send, self._queues), *[functools.partial(_fill, self._queues)] * staging.threads]
        self._threads = Threads("outsize-staging", lives)
        self._end = weakref.finalize(self, self._queues.end, self._number)

    def start(self) -> None:
        """Let them begin; `close` is due from here on, also where this fails."""
        _turns.shorten(self._number)
        try:
            self._threads.start()
        except BaseException:  # the sender does not wait for threads that never came
            for _ in range(self._queues.threads):
                self._queues.filled.put(None)
            raise

    def carry(self, blocks: Sequence[tuple[Block, int]]) -> None:
        """Send blocks to their offsets, on the stream `in`; the last pieces may still be under way when this returns."""
        self.begin(blocks)()

    def begin(self, blocks: Sequence[tuple[Block, int]]) -> Callable[[], None]:
        """Have blocks sent while the caller goes on; what this returns waits until all their pieces are on the stream."""
        parts = [(offset, *part) for block, offset in blocks for part in pieces(block, self._piece)]
        if not parts:
            return lambda: None
        load = _Load(blocks, len(parts))
        for offset, before, length, source in parts:
            self._queues.jobs.put((load, offset + before, length, source))
        return load.wait

    def close(self) -> None:
        """Wait for all of them; nothing is filled or sent any more."""
        try:
            self._end()
            self._threads.wait()
        except BaseException:  # Ctrl-C: threads that go on would fill and send memory that is somebody else's by then
            self._threads.wait()
            raise
        finally:
            self._queues.memory.close()


@contextlib.contextmanager
def staging_threads(device: Device, staging: Staging, pause: float) -> Iterator[Stager | None]:
    """A stager at work, None where the plan has none."""
    if not staging.threads:
        yield None
        return
    stager = Stager(device, staging, pause)
    try:
        stager.start()
        yield stager
    finally:
        stager.close()


def _fill(queues: _Queues) -> None:
    """The life of a staging thread: it fills the piece that was sent longest ago."""
    np.seterr(all="ignore")
    while (job := queues.jobs.get()) is not None:
        load, _, length, source = job
        place = queues.free.get()
        try:
            fill(place[1], length, source)
        except BaseException as error:
            load.error = load.error or error
        queues.filled.put((place, job))
    queues.filled.put(None)


def _send(queues: _Queues) -> None:
    """The life of the sender: pieces are sent as they are filled, and are free again when their copies have been made."""
    under_way: collections.deque[_Place] = collections.deque()
    failed: BaseException | None = None
    threads = queues.threads
    while threads:
        while under_way:
            try:
                if not under_way[0][0].come():
                    break
            except BaseException as failure:
                failed = failure
            queues.free.put(under_way.popleft())
        try:
            item = queues.filled.get(block=not under_way)
        except queue.Empty:  # no short timeout for `get`: with one it may wait for ever, in Python up to 3.12
            time.sleep(queues.pause)
            continue
        if item is None:
            threads -= 1
            continue
        (copier, address), (load, offset, length, _) = item
        error = load.error or failed
        try:
            if error is None:
                copier.send(address, length, offset)
        except BaseException as refusal:
            error = refusal
        under_way.append(item[0])
        load.finish(error)


def pieces(block: Block, limit: int) -> Iterator[tuple[int, int, int | Block]]:
    """(bytes before it, its bytes in native order, its address or the part) of every piece of a block.

    A block that lies in one stretch is told by addresses, without an array for every piece."""
    if block.flags.c_contiguous and block.dtype.isnative:
        source, total = block.ctypes.data, block.nbytes
        for low in range(0, total, limit):
            yield low, min(limit, total - low), source + low
        return
    for before, part in cut(block, limit):
        yield before * block.itemsize, part.nbytes, part


def fill(address: int, length: int, source: int | Block) -> None:
    """Copy a piece to an address, in native bytes."""
    if isinstance(source, int):
        ctypes.memmove(address, source, length)
        return
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))
    copy_block(memory.view(source.dtype.newbyteorder("=")).reshape(source.shape), source)


def cut(block: Block, limit: int) -> Iterator[tuple[int, Block]]:
    """(elements before it, part) of a block in C order, in parts of at most `limit` bytes that are whole in it."""
    if block.nbytes <= limit or block.size == 1:
        yield 0, block
        return
    if block.flags.c_contiguous:
        flat, step = block.reshape(-1), max(1, limit // block.itemsize)
        yield from ((low, flat[low : low + step]) for low in range(0, flat.size, step))
        return
    inner = block.size // block.shape[0]
    step = max(1, limit // max(1, inner * block.itemsize))
    for low in range(0, block.shape[0], step):
        for before, part in cut(block[low : low + step] if step > 1 else block[low], limit):
            yield low * inner + before, part
