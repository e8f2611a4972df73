"""What host memory has no room for: stretches of a file in the scratch folder, and the lane that reaches them.

In: bytes to keep, page by page. Out: `Stretch`es, which stand where host memory would; `ShelfLane` is any lane that takes
them too. The file has no name any more once it is open, so it vanishes with the process, and it has its blocks before
anything is moved, so that a full disk is met then. Steps read and write it directly, past the page cache, by a few threads
through a few page-locked pieces of memory, beside what is computed. Between steps a stretch has a window, a map of the
file for whoever saves, loads or looks; the kernel takes its pages back when it wants them, and no step uses it.
"""

from __future__ import annotations

import mmap
import os
import queue
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from outsize.array.store.base import ALIGNMENT, round_up
from outsize.array.store.io.file import AlignedFile
from outsize.model.fitting.move.mover import Lane, Mark
from outsize.model.fitting.move.pinned_blocks import Block

READERS = 4
"""Pieces that are read at once."""
WRITERS = 3
"""Pieces that are written at once; a step that is faster than the disk waits for one of them."""
PIECE = 16 * 2**20
"""Bytes of one transfer at most."""
SAMPLE = 64 * 2**20
"""Bytes that are written and read to learn the rate of a disk."""

Key = tuple[str, int]
"""(weights, state or gradients; id of the parameter)."""


class Stretch:
    """Bytes of the file that begin on a page."""

    __slots__ = ("_map", "_shelf", "size", "start")

    def __init__(self, shelf: Shelf, start: int, size: int) -> None:
        self._shelf = shelf
        self.start = start
        self.size = size
        self._map: Any = None

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """A tensor on the window."""
        import math

        import torch

        if self._map is None:
            self._map = self._shelf.open_window(self)
        return torch.frombuffer(self._map, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)

    def load(self) -> Block:
        """The bytes in memory of their own."""
        block = Block(round_up(self.size))
        self._shelf.file.read(self.start, self.size, block.array)
        return block

    def let_go(self) -> None:
        """The window's pages, if it has any, are the kernel's."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)


class Slot:
    """A piece of memory through which bytes pass."""

    def __init__(self, size: int) -> None:
        self.block = Block(size)
        self.used: Mark = None
        """Passes when the device has taken what was in it."""


class Shelf:
    """The file, and who reads and writes it."""

    def __init__(self, folder: str, piece: int) -> None:
        os.makedirs(folder, exist_ok=True)
        handle, path = tempfile.mkstemp(dir=folder, prefix="outsize-fit-")
        os.close(handle)
        self.file = AlignedFile(path, writable=True)
        os.unlink(path)
        self.file.path = folder
        self.piece = piece
        """Bytes of one transfer."""
        self.looked = False
        """Somebody has used the windows since the last step."""
        self.stays = ""
        """Why it cannot come back into memory at the end, empty where it can."""
        self._stretches: dict[Key, Stretch] = {}
        self._end = 0
        self._in: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        self._out: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        self._slots = [Slot(piece) for _ in range(READERS + WRITERS)]
        for number, slot in enumerate(self._slots):
            (self._in if number < READERS else self._out).put(slot)
        self._readers = ThreadPoolExecutor(READERS, "outsize-read")
        self._writers = ThreadPoolExecutor(WRITERS, "outsize-write")

    def reserve(self, wanted: dict[Key, int]) -> None:
        """Room for all of them, or a `StoreError`."""
        for key, size in wanted.items():
            if key not in self._stretches:
                self._stretches[key] = Stretch(self, self._end, size)
                self._end += round_up(size)
        self.file.allocate(self._end)

    def stretch(self, kind: str, parameter: Any) -> Stretch:
        """What was reserved."""
        return self._stretches[kind, id(parameter)]

    def open_window(self, stretch: Stretch) -> Any:
        """A map of some bytes."""
        return mmap.mmap(self.file._buffered, round_up(stretch.size), offset=stretch.start)

    def settle(self) -> None:
        """What was written through windows is in the file, and their pages are nobody's."""
        if self.looked:
            self.looked = False
            for stretch in self._stretches.values():
                stretch.let_go()
            self.file.sync()
            os.posix_fadvise(self.file._buffered, 0, 0, os.POSIX_FADV_DONTNEED)

    # transfers

    def cut(self, size: int) -> Iterator[tuple[int, int]]:
        """(first, last) byte of the pieces of so many bytes."""
        for first in range(0, size, self.piece):
            yield first, min(size, first + self.piece)

    def read(self, place: int, size: int, use: Callable[[Slot], Mark], sync: Callable[[Mark], None]) -> Future[Mark]:
        """Read a piece; `use(slot)` starts to take it out of the slot, and gives the mark of that."""

        def work() -> Mark:
            slot = self._in.get()
            try:
                sync(slot.used)
                self.file.read(place, size, slot.block.array)
                slot.used = use(slot)
                return slot.used
            finally:
                self._in.put(slot)

        return self._readers.submit(work)

    def write(
        self, place: int, size: int, fill: Callable[[Slot], Mark], sync: Callable[[Mark], None]
    ) -> tuple[Mark, Future[None]]:
        """Fill a slot now and write it once what fills it has ended; gives the mark of the filling."""
        slot = self._out.get()
        try:
            mark = fill(slot)
        except BaseException:
            self._out.put(slot)
            raise

        def work() -> None:
            try:
                sync(mark)
                self.file.write(place, slot.block.array[: round_up(size)], slot.block.array[:0])
            finally:
                self._out.put(slot)

        return mark, self._writers.submit(work)

    def put(self, stretch: Stretch, parts: list[tuple[int, Any]]) -> None:
        """Write tensors of host memory at their offsets in a stretch; they are there when this returns."""
        import torch

        rows = [(at, tensor.detach().contiguous().reshape(-1).view(torch.uint8)) for at, tensor in parts]
        writes = []
        for first, last in self.cut(stretch.size):

            def fill(slot: Slot, first: int = first, last: int = last) -> Mark:
                for at, flat in rows:
                    low, high = max(first, at), min(last, at + flat.numel())
                    if low < high:
                        slot.block.bytes[low - first : high - first].copy_(flat[low - at : high - at])

            writes.append(self.write(stretch.start + first, last - first, fill, lambda mark: None)[1])
        wait(writes)
        for write in writes:
            write.result()

    def close(self) -> None:
        """No more transfers; windows stay what they are for as long as somebody has them."""
        for pool in (self._readers, self._writers):
            pool.shutdown()
        for slot in self._slots:
            slot.block.unlock()
        self.file.close()


class Coming:
    """The mark of bytes of which some have to be read first."""

    __slots__ = ("reads",)

    def __init__(self, reads: list[Mark]) -> None:
        self.reads = reads
        """Reads that give a mark, and marks."""


class ShelfLane:
    """A lane on whose host side some bytes are on the shelf."""

    def __init__(self, lane: Lane, shelf: Shelf) -> None:
        self.device = lane.device
        self.real = lane.real
        self.empty = lane.empty
        self.mark = lane.mark
        self._lane = lane
        self._shelf = shelf
        self._reads: list[Future[Mark]] = []
        self._writes: list[Future[None]] = []

    def bring(self, into: Any, source: Any, after: Iterable[Mark] = ()) -> Mark:
        """From memory as ever; from the shelf as soon as it is read."""
        if not isinstance(source, Stretch):
            return self._lane.bring(into, source, self._here(after))
        waits = list(after)

        def use(there: Any) -> Callable[[Slot], Mark]:
            return lambda slot: self._lane.bring(there, slot.block.bytes[: there.numel()], self._here(waits))

        shelf, sync = self._shelf, self._lane.sync
        reads = [shelf.read(source.start + a, b - a, use(into[a:b]), sync) for a, b in shelf.cut(source.size)]
        self._reads = [*(read for read in self._reads if not read.done()), *reads]
        return Coming([*reads])

    def send(self, into: Any, source: Any, hold: bool = False) -> Mark:
        """To memory as ever; to the shelf through its slots. The mark passes when the source may be used again."""
        if not isinstance(into, Stretch):
            return self._lane.send(into, source, hold)
        self._check([write for write in self._writes if write.done()])

        def fill(part: Any) -> Callable[[Slot], Mark]:
            return lambda slot: self._lane.send(slot.block.bytes[: part.numel()], part, hold)

        mark = None
        for a, b in self._shelf.cut(into.size):
            mark, write = self._shelf.write(into.start + a, b - a, fill(source[a:b]), self._lane.sync)
            self._writes.append(write)
        return mark

    def join(self, marks: list[Mark]) -> Mark:
        """Reads end in any order."""
        return Coming([read for mark in marks for read in (mark.reads if isinstance(mark, Coming) else (mark,))])

    def _here(self, marks: Iterable[Mark]) -> list[Mark]:
        """Marks of the lane itself: what has to be read first is read."""
        found = []
        for mark in marks:
            for one in mark.reads if isinstance(mark, Coming) else (mark,):
                found.append(one.result() if isinstance(one, Future) else one)
        return found

    def wait(self, mark: Mark) -> None:
        """As the lane does, once it is read."""
        for one in self._here([mark]):
            self._lane.wait(one)

    def sync(self, mark: Mark) -> None:
        """As the lane does, once it is read."""
        for one in self._here([mark]):
            self._lane.sync(one)

    def drain(self) -> None:
        """Nothing is under way, neither to the device nor to the shelf; a `StoreError` where something was not written."""
        wait(self._reads)  # whoever wanted them hears of a failure
        self._reads = []
        self._lane.drain()
        wait(self._writes)
        self._check(list(self._writes))

    def _check(self, writes: list[Future[None]]) -> None:
        self._writes = [write for write in self._writes if write not in writes]
        for write in writes:
            write.result()


def measure_disk(folder: str, piece: int, most: int) -> tuple[float, float]:
    """Bytes a second that are read and written in a folder, in pieces; `most` bytes are written to learn it."""
    shelf = Shelf(folder, piece)
    try:
        size = min(SAMPLE, most)
        shelf.reserve({("sample", 0): size})
        pieces = list(shelf.cut(size))
        for slot in shelf._slots:
            slot.block.bytes.random_()  # zeros may never reach a disk
        start = time.perf_counter()
        wait([shelf.write(a, b - a, lambda slot: None, lambda mark: None)[1] for a, b in pieces])
        middle = time.perf_counter()
        wait([shelf.read(a, b - a, lambda slot: None, lambda mark: None) for a, b in pieces])
        return size / (time.perf_counter() - middle), size / (middle - start)
    finally:
        shelf.close()


def piece_of(room: int) -> int:
    """Bytes of a piece where all of them together may take `room`."""
    step = 2**21 if room >= (READERS + WRITERS) * 2**21 else ALIGNMENT  # memory comes in huge pages from there on
    return max(ALIGNMENT, min(PIECE, room // (READERS + WRITERS)) // step * step)
