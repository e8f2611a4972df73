"""A crew that takes plain memory to a device: hands that do nothing but fill page-locked pieces, and one who sends them.

A chunk is cut into jobs; whoever of the hands is free takes the next one and a free piece, fills it, and hands it to the
sender, who gives it to the device's copy lane and, when it has arrived, back to the hands. Nobody waits for a chunk to be
computed. They are apart from the workers, who do what a chunk needs in Python, and from one another for the same reason:
after a copy a processor's caches are empty, so whatever Python or driver a copying thread does costs many times as much,
with the interpreter held for that long. A hand asks for it once a piece; all calls of the driver are the sender's, and so
is all asking whether copies have been made.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import itertools
import queue
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from outsize.array.device.base import Device, Shuttle
from outsize.array.kernels.copies import copy_block
from outsize.array.store.base import Block
from outsize.array.tuning import Tuning
from outsize.engine.pinned import lock_memory
from outsize.engine.pool import cores, round_to_pages
from outsize.engine.threads import Threads

_PAGE = 4096
_TURN = 1e-4
"""Seconds that a thread may keep the interpreter while hands want it. Python's own 5 ms are the time of a whole chunk on the
link: an H200 was given 34 to 45 GB/s of plain memory with those, and 52 with this."""


@dataclass(frozen=True, slots=True)
class Muster:
    """A crew as a plan sees it."""

    hands: int = 0
    """Threads."""
    piece: int = 0
    """Bytes of each of their pieces."""
    spare: int = Tuning().stage_spare
    """Pieces that are under way while every hand fills one, at most."""

    @classmethod
    def of(cls, room: int, tuning: Tuning, *, alone: bool = False) -> Muster:
        """As many hands as there are processors for and pieces as long as is of use, in a part of the host's room; `alone`: one
        hand."""
        hands = 1 if alone else min(tuning.stage_threads, cores())
        pieces = cls(hands, spare=tuning.stage_spare).pieces
        piece = max(_PAGE, room // (tuning.stage_share * pieces) // _PAGE * _PAGE)
        return cls(hands, min(tuning.stage_piece, piece), tuning.stage_spare)

    @property
    def pieces(self) -> int:
        """Pieces of all hands."""
        return self.hands + min(self.hands, self.spare)

    @property
    def nbytes(self) -> int:
        """Page-locked bytes of all pieces."""
        return round_to_pages(self.pieces * self.piece)


class _Turns:
    """Python's switch interval: short while a crew is at work, as the program had it otherwise."""

    def __init__(self) -> None:
        self._lock, self._before = threading.Lock(), 0.0
        self._crews: set[int] = set()

    def shorten(self, crew: int) -> None:
        """A crew begins."""
        with self._lock:
            if not self._crews:
                self._before = sys.getswitchinterval()
            self._crews.add(crew)
            sys.setswitchinterval(min(_TURN, self._before))

    def restore(self, crew: int) -> None:
        """A crew ends, if it has begun."""
        with self._lock:
            if crew in self._crews:
                self._crews.remove(crew)
                if not self._crews:
                    sys.setswitchinterval(self._before)


_turns = _Turns()


class _Load:
    """Blocks that the crew takes to the device together."""

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
_Place = tuple[Shuttle, int]
"""What sends a piece, and the address of the piece."""
_numbers = itertools.count()


class _Dock:
    """Where a crew hands on: jobs to hands, filled pieces to the sender, and pieces that have arrived back to hands."""

    def __init__(self, device: Device, muster: Muster, pause: float) -> None:
        self.memory, self.hands, self.pause = lock_memory(muster.nbytes), muster.hands, pause
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        """None: a hand goes home."""
        self.filled: queue.SimpleQueue[tuple[_Place, _Job] | None] = queue.SimpleQueue()
        """None: a hand has gone."""
        self.free: queue.SimpleQueue[_Place] = queue.SimpleQueue()
        start = self.memory.array.ctypes.data
        for number in range(muster.pieces):
            self.free.put((device.shuttle(), start + number * muster.piece))

    def dismiss(self, number: int) -> None:
        """The crew goes home after what it has been given."""
        for _ in range(self.hands):
            self.jobs.put(None)
        _turns.restore(number)


class Crew:
    """So many hands, one who sends, and their page-locked pieces, on a device whose memory is reserved.

    One that nobody closed, since Ctrl-C came in between, is dismissed as it is forgotten: its threads do not hold it."""

    def __init__(self, device: Device, muster: Muster, pause: float = Tuning().stage_pause) -> None:
        self._dock, self._piece, self._number = _Dock(device, muster, pause), muster.piece, next(_numbers)
        lives = [functools.partial(_send, self._dock), *[functools.partial(_fill, self._dock)] * muster.hands]
        self._threads = Threads("outsize-hand", lives)
        self._dismiss = weakref.finalize(self, self._dock.dismiss, self._number)

    def start(self) -> None:
        """Let them begin; `close` is due from here on, also where this fails."""
        _turns.shorten(self._number)
        try:
            self._threads.start()
        except BaseException:  # the sender does not wait for hands that never came
            for _ in range(self._dock.hands):
                self._dock.filled.put(None)
            raise

    def carry(self, blocks: Sequence[tuple[Block, int]]) -> None:
        """Send blocks to their offsets, on the lane `in`; the last pieces may still be under way when this returns."""
        parts = [
            (offset + before, length, source)
            for block, offset in blocks
            for before, length, source in pieces(block, self._piece)
        ]
        if not parts:
            return
        load = _Load(blocks, len(parts))
        for part in parts:
            self._dock.jobs.put((load, *part))
        load.wait()

    def close(self) -> None:
        """Wait for all of them; nothing is filled or sent any more."""
        try:
            self._dismiss()
            self._threads.wait()
        except BaseException:  # Ctrl-C: hands that go on would fill and send memory that is somebody else's by then
            self._threads.wait()
            raise
        finally:
            self._dock.memory.close()


def _fill(dock: _Dock) -> None:
    """The life of a hand: it fills the piece that was sent longest ago."""
    np.seterr(all="ignore")
    while (job := dock.jobs.get()) is not None:
        load, _, length, source = job
        place = dock.free.get()
        try:
            fill(place[1], length, source)
        except BaseException as error:
            load.error = load.error or error
        dock.filled.put((place, job))
    dock.filled.put(None)


def _send(dock: _Dock) -> None:
    """The life of the sender: pieces are sent as they are filled, and are free again when their copies have been made."""
    under_way: collections.deque[_Place] = collections.deque()
    failed: BaseException | None = None
    hands = dock.hands
    while hands:
        while under_way:
            try:
                if not under_way[0][0].come():
                    break
            except BaseException as failure:
                failed = failure
            dock.free.put(under_way.popleft())
        try:
            item = dock.filled.get(block=not under_way)
        except (
            queue.Empty
        ):  # asked, with pauses: a `get` with so short a timeout may wait for ever, in Python up to 3.12
            time.sleep(dock.pause)
            continue
        if item is None:
            hands -= 1
            continue
        (shuttle, address), (load, offset, length, _) = item
        error = load.error or failed
        try:
            if error is None:
                shuttle.send(address, length, offset)
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
