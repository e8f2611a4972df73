"""Hands that take plain memory to a device: threads that do nothing but fill page-locked pieces and send them.

All of them work at one chunk after another, each at every n-th piece of it, and never wait for a chunk to be computed.
They are apart from the workers, who do what a chunk needs in Python, for the sake of both: after a copy a processor's
caches are empty, so whatever Python a copying thread does costs many times as much, and the interpreter is held for
that long; a worker who never copies keeps his caches, and a hand needs the interpreter for a few calls a piece.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import itertools
import os
import queue
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from outsize.array.copy import copy_block
from outsize.array.device.base import Device, Shuttle
from outsize.array.store.base import Block
from outsize.engine.pinned import Pinned, lock_memory
from outsize.engine.pool import round_to_pages
from outsize.engine.threads import Threads

PIECE = 6 << 20
"""Bytes of a piece: long enough for the link and for the interpreter, which every piece needs, and short enough that all
pieces together stay in a processor's last cache, so that staging costs its memory one read and no write."""

_HANDS = 14
"""Hands at most: more only wait for memory and for the interpreter."""
_SPARE = 6
"""Pieces that are under way to the device while every hand fills one."""
_SHARE = 8
"""The part of the host's room that their pieces may take, at most: one in so many."""
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

    @classmethod
    def of(cls, room: int, *, alone: bool = False) -> Muster:
        """As many hands as there are processors for and pieces as long as is of use, in a part of the host's room; `alone`: one
        hand."""
        hands = 1 if alone else min(_HANDS, len(os.sched_getaffinity(0)))
        pieces = cls(hands).pieces
        return cls(hands, min(PIECE, max(_PAGE, room // (_SHARE * pieces) // _PAGE * _PAGE)))

    @property
    def pieces(self) -> int:
        """Pieces of all hands."""
        return self.hands + min(self.hands, _SPARE)

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
    """Blocks that all hands take to the device together."""

    def __init__(self, blocks: Sequence[tuple[Block, int]], hands: int) -> None:
        self.blocks = blocks
        """(block, where it goes)."""
        self.error: BaseException | None = None
        self._left = itertools.count(hands - 1, -1)
        self._done = threading.Lock()
        self._done.acquire()

    def finish(self) -> None:
        """A hand is through with its part."""
        if next(self._left) == 0:
            self._done.release()

    def wait(self) -> None:
        """Until all hands are; their first error is raised here."""
        with self._done:
            if self.error is not None:
                raise self.error


_Desk = queue.SimpleQueue[_Load | None]
_numbers = itertools.count()


_Place = tuple[Shuttle, int]
"""What sends a piece, and where the piece begins in the crew's memory."""


class Crew:
    """So many hands and their page-locked pieces, on a device whose memory is reserved.

    One that nobody closed, since Ctrl-C came in between, is dismissed as it is forgotten: its hands do not hold it."""

    def __init__(self, device: Device, muster: Muster) -> None:
        self._memory, self._number = lock_memory(muster.nbytes), next(_numbers)
        self._desks: list[_Desk] = [queue.SimpleQueue() for _ in range(muster.hands)]
        places = collections.deque((device.shuttle(), number * muster.piece) for number in range(muster.pieces))
        lives = [
            functools.partial(_work, desk, hand, muster, self._memory, places) for hand, desk in enumerate(self._desks)
        ]
        self._threads = Threads("outsize-hand", lives)
        self._dismiss = weakref.finalize(self, _dismiss, self._number, self._desks)

    def start(self) -> None:
        """Let the hands begin; `close` is due from here on, also where this fails."""
        _turns.shorten(self._number)
        self._threads.start()

    def carry(self, blocks: Sequence[tuple[Block, int]]) -> None:
        """Send blocks to their offsets, on the lane `in`; the last pieces may still be under way when this returns."""
        load = _Load(blocks, len(self._desks))
        for desk in self._desks:
            desk.put(load)
        load.wait()

    def close(self) -> None:
        """Wait for the hands; nothing is under way any more."""
        try:
            self._dismiss()
            self._threads.wait()
        except BaseException:  # Ctrl-C: hands that go on would fill and send memory that is somebody else's by then
            self._threads.wait()
            raise
        finally:
            self._memory.close()


def _dismiss(number: int, desks: list[_Desk]) -> None:
    """A crew's hands go home after what they have been given."""
    for desk in desks:
        desk.put(None)
    _turns.restore(number)


def _work(desk: _Desk, hand: int, muster: Muster, memory: Pinned, places: collections.deque[_Place]) -> None:
    """The life of a hand: it takes the piece that was sent longest ago, and fills it again when its copy has been made."""
    start = memory.array.ctypes.data
    np.seterr(all="ignore")
    while (load := desk.get()) is not None:
        try:
            for block, offset in load.blocks:
                for before, length, source in pieces(block, muster.piece, hand, muster.hands):
                    shuttle, begin = place = places.popleft()
                    address = start + begin
                    try:
                        shuttle.wait()
                        fill(address, length, source)
                        shuttle.send(address, length, offset + before)
                    finally:
                        places.append(place)
        except BaseException as error:
            load.error = load.error or error
        load.finish()


def pieces(block: Block, limit: int, first: int = 0, step: int = 1) -> Iterator[tuple[int, int, int | Block]]:
    """(bytes before it, its bytes in native order, its address or the part) of every `step`-th piece of a block, from the
    `first` on.

    A block that lies in one stretch is told by addresses, without an array for every piece."""
    if block.flags.c_contiguous and block.dtype.isnative:
        source, total = block.ctypes.data, block.nbytes
        for low in range(first * limit, total, step * limit):
            yield low, min(limit, total - low), source + low
        return
    for before, part in itertools.islice(cut(block, limit), first, None, step):
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
