"""A file in the scratch folder for what memory has no room for, and the mover that reaches it.

In: bytes to keep. Out: `Stretch`es of the file, which stand where host memory would; `FileMover` is any mover that takes them
too. The file has no name any more once it is open, so it vanishes with the process. Where it is opened with a size of
pieces, it is read and written directly, past the page cache, by a few threads through a few page-locked pieces of memory, beside
what is computed, and it has its blocks before anything is moved, so that a full disk is met then. Where it is not, bytes go
from memory to the file and back in the call. Between steps a stretch has a window, a map of the file for whoever saves, loads
or looks; the kernel takes its pages back when it wants them, and no step uses it.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import queue
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from outsize.array.store.base import ALIGNMENT, round_up
from outsize.array.store.io.file import AlignedFile
from outsize.core.errors import StoreError
from outsize.core.units import format_bytes
from outsize.model.fitting.move.locked_memory import Block
from outsize.model.fitting.move.mover import Landed, Mark, Mover

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

    __slots__ = ("_file", "_map", "size", "start")

    def __init__(self, file: ScratchFile, start: int, size: int) -> None:
        self._file = file
        self.start = start
        self.size = size
        self._map: Any = None

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        if self._map is None:
            self._map = self._file.open_window(self)
        return torch.frombuffer(self._map, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)

    def load(self) -> Block:
        """The bytes in memory of their own."""
        block = Block(round_up(self.size))
        self._file.file.read(self.start, self.size, block.array)
        return block

    def let_go(self) -> None:
        """The window's pages, if it has any, are the kernel's."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)


class Buffer:
    """A piece of memory through which bytes pass."""

    def __init__(self, size: int) -> None:
        self.block = Block(size)
        self.used: Mark = None
        """Passes when the device has taken what was in it."""


class ScratchFile:
    """The file, and who reads and writes it."""

    def __init__(self, folder: str, piece: int = 0) -> None:
        os.makedirs(folder, exist_ok=True)
        handle, path = tempfile.mkstemp(dir=folder, prefix="outsize-fit-")
        os.close(handle)
        self.file = AlignedFile(path, writable=True)
        os.unlink(path)
        self.file.path = folder
        self.piece = piece
        """Bytes of one transfer; 0: bytes are read and written in the call."""
        self.looked = False
        """Somebody has used the windows since the last step."""
        self.stays = ""
        """Why it cannot come back into memory at the end, empty where it can."""
        self._stretches: dict[Key, Stretch] = {}
        self._end = 0
        self._in: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        self._out: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        self.buffers = [Buffer(piece) for _ in range(READERS + WRITERS if piece else 0)]
        for number, buffer in enumerate(self.buffers):
            (self._in if number < READERS else self._out).put(buffer)
        self._readers = ThreadPoolExecutor(READERS, "outsize-read")
        self._writers = ThreadPoolExecutor(WRITERS, "outsize-write")

    def reserve(self, wanted: dict[Key, int]) -> None:
        """Room for all of them, or a `StoreError`."""
        for key, size in wanted.items():
            if key not in self._stretches:
                self._stretches[key] = self.take(size)
        self.file.allocate(self._end)

    def take(self, size: int) -> Stretch:
        """So many bytes at the end of the file."""
        stretch = Stretch(self, self._end, size)
        self._end += round_up(size)
        return stretch

    def stretch(self, kind: str, parameter: Any) -> Stretch:
        """Where a parameter's bytes of one kind are in the file."""
        return self._stretches[kind, id(parameter)]

    def open_window(self, stretch: Stretch) -> Any:
        return mmap.mmap(self.file._buffered, round_up(stretch.size), offset=stretch.start)

    def settle(self) -> None:
        """What was written through windows is in the file, and their pages are nobody's."""
        if self.looked:
            self.looked = False
            for stretch in self._stretches.values():
                stretch.let_go()
            self.file.sync()
            os.posix_fadvise(self.file._buffered, 0, 0, os.POSIX_FADV_DONTNEED)

    # transfers in the call, from memory that need not begin on a page

    def write_now(self, stretch: Stretch, data: Any) -> None:
        """Write the bytes of a flat byte tensor on the CPU."""
        view, done = _view(data), 0
        try:
            while done < stretch.size:
                done += os.pwrite(self.file._buffered, view[done:], stretch.start + done)
        except OSError as error:
            raise StoreError(
                f"the scratch folder {self.file.path} could not take {format_bytes(stretch.size)}: {error.strerror}",
                path=self.file.path,
            ) from error

    def read_now(self, stretch: Stretch, into: Any) -> None:
        """Fill a flat byte tensor on the CPU."""
        view, done = _view(into), 0
        while done < stretch.size:
            read = os.preadv(self.file._buffered, [view[done:]], stretch.start + done)
            if read == 0:
                end = stretch.start + stretch.size
                raise StoreError(f"the scratch file in {self.file.path} ends before byte {end}", path=self.file.path)
            done += read

    # transfers by threads, in pieces

    def cut(self, size: int) -> Iterator[tuple[int, int]]:
        """(first, last) byte of the pieces of so many bytes."""
        for first in range(0, size, self.piece):
            yield first, min(size, first + self.piece)

    def read(self, place: int, size: int, use: Callable[[Buffer], Mark], sync: Callable[[Mark], None]) -> Future[Mark]:
        """Read a piece; `use(buffer)` starts to take it out of the buffer, and gives the mark of that."""

        def work() -> Mark:
            buffer = self._in.get()
            try:
                sync(buffer.used)
                self.file.read(place, size, buffer.block.array)
                buffer.used = use(buffer)
                return buffer.used
            finally:
                self._in.put(buffer)

        return self._readers.submit(work)

    def write(
        self, place: int, size: int, fill: Callable[[Buffer], Mark], sync: Callable[[Mark], None]
    ) -> tuple[Mark, Future[None]]:
        """Fill a buffer now and write it once what fills it has ended; gives the mark of the filling."""
        buffer = self._out.get()
        try:
            mark = fill(buffer)
        except BaseException:
            self._out.put(buffer)
            raise

        def work() -> None:
            try:
                sync(mark)
                self.file.write(place, buffer.block.array[: round_up(size)], buffer.block.array[:0])
            finally:
                self._out.put(buffer)

        return mark, self._writers.submit(work)

    def put(self, stretch: Stretch, parts: list[tuple[int, Any]]) -> None:
        """Write tensors of host memory at their offsets in a stretch; they are there when this returns."""
        rows = [(at, tensor.detach().contiguous().reshape(-1).view(torch.uint8)) for at, tensor in parts]
        writes = []
        for first, last in self.cut(stretch.size):

            def fill(buffer: Buffer, first: int = first, last: int = last) -> Mark:
                for at, flat in rows:
                    low, high = max(first, at), min(last, at + flat.numel())
                    if low < high:
                        buffer.block.bytes[low - first : high - first].copy_(flat[low - at : high - at])

            writes.append(self.write(stretch.start + first, last - first, fill, lambda mark: None)[1])
        wait(writes)
        for write in writes:
            write.result()

    def close(self) -> None:
        """No more transfers; windows stay what they are for as long as somebody has them."""
        for pool in (self._readers, self._writers):
            pool.shutdown()
        for buffer in self.buffers:
            buffer.block.unlock()
        self.file.close()


def _view(data: Any) -> memoryview:
    """The bytes of a flat CPU tensor; by address, since `Tensor.numpy` forbids its storage ever to be resized."""
    return memoryview((ctypes.c_ubyte * data.numel()).from_address(data.data_ptr())).cast("B")


class Reads:
    """The mark of bytes of which some have to be read first."""

    __slots__ = ("marks",)

    def __init__(self, marks: list[Mark | Future[Mark]]) -> None:
        self.marks = marks
        """Reads that give a mark, and marks."""


class FileMover(Mover):
    """A mover on whose host side some bytes are in a scratch file."""

    def __init__(self, mover: Mover, file: ScratchFile) -> None:
        super().__init__(mover.device, mover.leaving)
        self.real = mover.real
        self._mover = mover
        self._file = file
        self._reads: list[Future[Mark]] = []
        self._writes: list[Future[None]] = []

    def empty(self, size: int) -> Any:
        return self._mover.empty(size)

    def mark(self) -> Mark:
        return self._mover.mark()

    def bring(self, into: Any, source: Any, after: Iterable[Mark] = ()) -> Mark:
        """From memory as ever; from the file as soon as it is read."""
        if not isinstance(source, Stretch):
            return self._mover.bring(into, source, self._read(after))
        if not self._file.piece:
            return self.copy(into, source)
        waits = list(after)

        def use(there: Any) -> Callable[[Buffer], Mark]:
            return lambda buffer: self._mover.bring(there, buffer.block.bytes[: there.numel()], self._read(waits))

        file, sync = self._file, self._mover.sync
        reads = [file.read(source.start + a, b - a, use(into[a:b]), sync) for a, b in file.cut(source.size)]
        self._reads = [*(read for read in self._reads if not read.done()), *reads]
        return Reads([*reads])

    def send(
        self, into: Any, source: Any, hold: bool = False, after: Iterable[Mark] = (), landed: Landed | None = None
    ) -> Mark:
        """To memory as ever; to the file through its buffers. The mark passes when the source may be used again."""
        if not isinstance(into, Stretch):
            return self._mover.send(into, source, hold, self._read(after), landed)
        if not self._file.piece:
            return self.copy(into, source)
        self._check([write for write in self._writes if write.done()])

        def fill(part: Any) -> Callable[[Buffer], Mark]:
            return lambda buffer: self._mover.send(buffer.block.bytes[: part.numel()], part, hold)

        mark = None
        for a, b in self._file.cut(into.size):
            mark, write = self._file.write(into.start + a, b - a, fill(source[a:b]), self._mover.sync)
            self._writes.append(write)
        return mark

    def copy(self, into: Any, source: Any) -> None:
        if isinstance(into, Stretch):
            self._file.write_now(into, source)
        elif isinstance(source, Stretch):
            self._file.read_now(source, into)
        else:
            self._mover.copy(into, source)

    def join(self, marks: list[Mark]) -> Mark:
        """Reads end in any order."""
        return Reads([one for mark in marks for one in (mark.marks if isinstance(mark, Reads) else (mark,))])

    def _read(self, marks: Iterable[Mark]) -> list[Mark]:
        """Marks of the mover itself: what has to be read first is read."""
        found = []
        for mark in marks:
            for one in mark.marks if isinstance(mark, Reads) else (mark,):
                found.append(one.result() if isinstance(one, Future) else one)
        return found

    def wait(self, mark: Mark) -> None:
        for one in self._read([mark]):
            self._mover.wait(one)

    def sync(self, mark: Mark) -> None:
        for one in self._read([mark]):
            self._mover.sync(one)

    def drain(self) -> None:
        """Nothing is under way, neither to the device nor to the file; a `StoreError` where something was not written."""
        wait(self._reads)  # whoever wanted them hears of a failure
        self._reads = []
        self._mover.drain()
        wait(self._writes)
        self._check(list(self._writes))

    def _check(self, writes: list[Future[None]]) -> None:
        self._writes = [write for write in self._writes if write not in writes]
        for write in writes:
            write.result()


def measure_disk(folder: str, piece: int, most: int) -> tuple[float, float]:
    """Bytes a second that are read and written in a folder, in pieces; `most` bytes are written to learn it."""
    file = ScratchFile(folder, piece)
    try:
        size = min(SAMPLE, most)
        file.reserve({("sample", 0): size})
        pieces = list(file.cut(size))
        for buffer in file.buffers:
            buffer.block.bytes.random_()  # zeros may never reach a disk
        start = time.perf_counter()
        wait([file.write(a, b - a, lambda buffer: None, lambda mark: None)[1] for a, b in pieces])
        middle = time.perf_counter()
        wait([file.read(a, b - a, lambda buffer: None, lambda mark: None) for a, b in pieces])
        return size / (time.perf_counter() - middle), size / (middle - start)
    finally:
        file.close()


def piece_of(room: int) -> int:
    """Bytes of a piece where all of them together may take `room`."""
    step = 2**21 if room >= (READERS + WRITERS) * 2**21 else ALIGNMENT  # memory comes in huge pages from there on
    return max(ALIGNMENT, min(PIECE, room // (READERS + WRITERS)) // step * step)
