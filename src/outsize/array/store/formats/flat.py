"""Arrays that lie in a file as one stretch of elements: .npy, raw, members of .npz, tensors of safetensors and .pt.

In: a file, the offset of its first element, shape, dtype and order. A region of such an array is a number of equal
runs of bytes. One run is read straight into the buffer. Several are gathered through a bounce buffer, a few rows at a
time where they lie close together (one large read beats many small ones), else one by one.
"""

from __future__ import annotations

import itertools
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np

from outsize.array.store.base import ALIGNMENT, Block, Buffer, InPlace, Region, Sink, Store, region_shape, round_up
from outsize.array.store.io.edges import Edges, edge_pages
from outsize.array.store.io.file import AlignedFile, naming, window
from outsize.array.store.io.partial import EDGES, forget_earlier, partial_path, publish
from outsize.core.errors import StoreError
from outsize.core.units import format_bytes
from outsize.engine.pool import make_buffer

Each = TypeVar("Each")
_AXES = 64
"""Axes of an array at the most, in NumPy."""
_BOUNCE = 1 << 20
"""Bytes gathered at once when runs are close together; fits the second-level cache."""
_CLOSE = 65536
"""Rows nearer than this are read with the gap between them, if the gap is not most of what is read."""
_PIECE = 8 << 20
"""Bytes of a tile that one worker writes while others write the rest."""
_PACKED = 16384
"""Shorter runs than this are laid out packed: placing each at its own phase of a page would waste more than it
saves."""


class Runs(NamedTuple):
    """A region of a flat array, as equal runs of bytes."""

    length: int
    """Bytes of one run."""
    outer: tuple[tuple[int, int, int], ...]
    """Axes that step from run to run, slowest first: (first index, how many, bytes from one to the next)."""
    start: int
    """Byte offset of the first run."""
    axes: int
    """How many leading axes of the region are in `outer`."""

    @property
    def number(self) -> int:
        number = 1
        for _, count, _ in self.outer:
            number *= count
        return number


class FlatLayout:
    """Where the elements of an array lie in a file: its axes from the slowest to the fastest in a given order, else in C's."""

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int, order: tuple[int, ...] | None = None
    ) -> None:
        self.order = None if order == tuple(range(len(shape))) else order
        self.shape, self.dtype, self.offset = self.turn(shape), dtype, offset
        self.strides = packed_strides(tuple(max(length, 1) for length in self.shape), dtype.itemsize)
        self._known: tuple[Region | None, Runs] = (None, Runs(0, (), 0, 0))

    def turn(self, of_axes: tuple[Each, ...]) -> tuple[Each, ...]:
        """A region or a shape, its axes as they lie in the file."""
        return of_axes if self.order is None else tuple(of_axes[axis] for axis in self.order)

    def turn_back(self, block: Block) -> Block:
        """A block whose axes are as in the file, with the array's own."""
        return block if self.order is None else block.transpose(np.argsort(self.order))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def runs_of(self, region: Region) -> Runs:
        """A region of the array as runs."""
        return self.runs(self.turn(region))

    def runs(self, region: Region) -> Runs:
        """The region, as it lies in the file, as runs: trailing axes that are whole, and one more, make up a run. The last answer
        is kept: a plan asks for extent, traffic and seeks of one region after another."""
        known, found = self._known
        if known == region:
            return found
        axis, length = len(self.shape), self.dtype.itemsize
        while axis > 0:
            axis -= 1
            start, stop = region[axis]
            length *= stop - start
            if stop - start != self.shape[axis]:
                break
        while axis > 0 and region[axis - 1][1] - region[axis - 1][0] == 1:  # single indices do not break a run
            axis -= 1
        first, outer = self.offset, []
        for number, ((start, stop), stride) in enumerate(zip(region, self.strides, strict=True)):
            first += start * stride
            if number < axis:
                outer.append((start, stop - start, stride))
        found = Runs(length, tuple(outer), first, axis)
        self._known = (region, found)
        return found


def offsets(runs: Runs, upto: int | None = None) -> Iterator[tuple[tuple[int, ...], int]]:
    """(index within the region, byte offset) of every run, or of every group of the first `upto` outer axes."""
    outer = runs.outer[:upto]
    for index in itertools.product(*(range(count) for _, count, _ in outer)):
        yield index, runs.start + sum(i * step for i, (_, _, step) in zip(index, outer, strict=True))


def run_offset(runs: Runs, number: int) -> int:
    start = runs.start
    for _, count, step in reversed(runs.outer):
        number, index = divmod(number, count)
        start += index * step
    return start


def _sieve(runs: Runs) -> bool:
    """True where rows are to be read together with the gaps between them."""
    if not runs.outer:
        return False
    pitch = runs.outer[-1][2]
    return pitch <= 2 * ALIGNMENT or (pitch <= _CLOSE and runs.length * 4 >= pitch)


class FlatStore(Store):
    """A flat array in a file, for reading, and for writing in place where the file was opened so."""

    def __init__(
        self, file: AlignedFile, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int,
        order: tuple[int, ...] | None = None, name: str | None = None,
    ) -> None:  # fmt: skip
        self.file, self.shape, self.dtype = file, shape, dtype
        self.name = name or file.path
        self.paths = (file.path,)
        self.layout = FlatLayout(shape, dtype, offset, order)
        self.order = self.layout.order
        if len(shape) > _AXES:
            raise StoreError(f"{self.name} says {len(shape)} axes: NumPy has at most {_AXES}", path=file.path)
        missing = offset + self.layout.nbytes - file.size
        if missing > 0:
            raise StoreError(
                f"{self.name} is cut off: {shape} of {dtype} need {offset + self.layout.nbytes} bytes, "
                f"the file has {file.size} ({format_bytes(missing)} are missing)",
                path=file.path,
            )

    def extent(self, region: Region) -> int:
        """A window of pages for one run; for several, the packed block and the bounce buffer."""
        runs = self.layout.runs_of(region)
        if runs.number * runs.length == 0:
            return 0
        if runs.number == 1:
            return window(runs.length)
        return _bounce_bytes(runs) + round_up(runs.number * runs.length)

    def most(self, region: Region) -> int:
        """As if it were several runs, of any length."""
        return most_extent(self.bytes_of(region))

    def traffic(self, region: Region) -> int:
        """Whole pages, gaps between close rows counted."""
        runs = self.layout.runs_of(region)
        if runs.number * runs.length == 0:
            return 0
        if not _sieve(runs):
            return runs.number * round_up(runs.length)
        _, rows, pitch = runs.outer[-1]
        return runs.number // rows * round_up((rows - 1) * pitch + runs.length)

    def seeks(self, region: Region) -> int:
        """One for each run, or for each group of close rows."""
        runs = self.layout.runs_of(region)
        rows = runs.outer[-1][1] if runs.outer else 1
        return runs.number // max(rows, 1) * -(-rows // _rows_at_once(runs))

    def read(self, region: Region, buffer: Buffer) -> Block:
        """One window, or rows gathered through the bounce buffer at its head."""
        runs, shape = self.layout.runs_of(region), region_shape(self.layout.turn(region))
        if runs.number * runs.length == 0:
            block: Block = np.empty(shape, self.dtype)
        elif runs.number == 1:
            data = self.file.read(runs.start, runs.length, buffer)
            block = np.ndarray(shape, self.dtype, data.data)
        else:
            block = self._gather(runs, shape, buffer)
        return self.layout.turn_back(block)

    def _gather(self, runs: Runs, shape: tuple[int, ...], buffer: Buffer) -> Block:
        bounce = buffer[: _bounce_bytes(runs)]
        packed = buffer[bounce.nbytes : bounce.nbytes + runs.number * runs.length]
        rows = packed.reshape(*(count for _, count, _ in runs.outer), runs.length)
        _, count, pitch = runs.outer[-1]
        group = _rows_at_once(runs)
        for index, offset in offsets(runs, len(runs.outer) - 1):
            for row in range(0, count, group):
                taken = min(group, count - row)
                data = self.file.read(offset + row * pitch, (taken - 1) * pitch + runs.length, bounce)
                rows[index][row : row + taken] = np.ndarray(
                    (taken, runs.length), np.uint8, data.data, strides=(pitch, 1)
                )
        return np.ndarray(shape, self.dtype, packed.data)

    def update(self) -> Sink:
        return InPlaceSink(self) if self.file.writable else super().update()

    def close(self) -> None:
        self.file.close()


def _rows_at_once(runs: Runs) -> int:
    """Close rows that one read takes: up to the bounce buffer, which is never larger than what is wanted in all."""
    if not _sieve(runs):
        return 1
    _, rows, pitch = runs.outer[-1]
    return max(1, min(rows, min(_BOUNCE, max(4 * ALIGNMENT, runs.number * runs.length)) // pitch))


def _bounce_bytes(runs: Runs) -> int:
    return window((_rows_at_once(runs) - 1) * runs.outer[-1][2] + runs.length)


def most_extent(size: int) -> int:
    """Bytes of buffer that reading `size` bytes of a flat array may need, however they lie."""
    return round_up(size) + window(max(size // 2, min(_BOUNCE, max(4 * ALIGNMENT, size)))) if size else 0


class FlatSink(Sink):
    """A flat array that is to be written into `partial`, whose first bytes are a header made by the caller."""

    shared = True
    edges: Edges | None = None
    """Pages that wait for their other half; None where nothing says when the last one has come."""

    def __init__(
        self, target: str, shape: tuple[int, ...], dtype: np.dtype[Any], header: bytes,
        reopen: Callable[[str], Store] | None = None,
    ) -> None:  # fmt: skip
        """`reopen` opens the finished file; without it, it is opened as what it was written as."""
        self.name, self.partial, self.shape, self.dtype = target, partial_path(target), shape, dtype
        self.layout = FlatLayout(shape, dtype, len(header))
        self._header, self._reopen = header, reopen

    def __getstate__(self) -> dict[str, Any]:
        """Another process writes into the same file, without pages that wait here."""
        return self.__dict__ | {"edges": None, "_reopen": None}

    def create(self, *, resume: bool = False) -> None:
        """Make the file, with all its space and its header."""
        header, total = self._header, len(self._header) + self.layout.nbytes
        self.file = AlignedFile(self.partial, writable=True, create=True)
        resume = resume and self.file.size == total
        if resume:  # one of ours says that it holds the same
            resume = self.file.read(0, len(header), make_buffer(window(len(header)))).tobytes() == header
        if not resume:
            forget_earlier(self.partial)
        self.edges = Edges(self.partial + EDGES)
        if resume:
            return
        try:
            self.file.allocate(0)
            self.file.allocate(total)
            self.file.write(0, np.frombuffer(header, np.uint8), np.empty(0, np.uint8))
        except StoreError:
            self.abort()
            raise

    def extent(self, region: Region) -> int:
        """A bounce buffer, for runs that `lay` could not place, and pages that wait for their other half."""
        size = self.bytes_of(region)
        return min(_BOUNCE, max(4 * ALIGNMENT, round_up(2 * size))) + self._waiting(region) * ALIGNMENT

    def _waiting(self, region: Region) -> int:
        """Pages that may wait: the ends of runs that are long enough to be written by themselves."""
        runs = self.layout.runs_of(region)
        return edge_pages(runs.number) if runs.length >= _PACKED else 0

    def seeks(self, region: Region) -> int:
        """One for each run, three where its ragged ends go through the page cache."""
        runs = self.layout.runs_of(region)
        return runs.number if runs.start % ALIGNMENT == 0 and runs.length % ALIGNMENT == 0 else 3 * runs.number

    def room(self, region: Region) -> int:
        """Bytes of the layout that `lay` uses, whatever the phase of the first run."""
        runs = self.layout.runs_of(region)
        strides = _memory_strides(runs)
        if not strides:
            return window(runs.number * runs.length)
        return round_up(runs.outer[0][1] * strides[0] + runs.length) + ALIGNMENT

    def lay(self, region: Region, buffer: Buffer) -> Block:
        """A block in which every run has the same place within a page as in the file: written without another copy."""
        runs, shape = self.layout.runs_of(region), region_shape(self.layout.turn(region))
        if self.edges is not None:
            self.edges.allow(self._waiting(region))
        phase = runs.start % ALIGNMENT
        strides = _memory_strides(runs)
        if strides:
            steps = (*strides, *packed_strides(shape[runs.axes :], self.dtype.itemsize))
            block: Block = np.ndarray(shape, self.dtype, buffer[phase:].data, strides=steps)
        else:
            block = np.ndarray(shape, self.dtype, buffer[phase if runs.number == 1 else 0 :].data)
        return self.layout.turn_back(block)

    def pieces(self, region: Region) -> list[Region]:
        """A few runs each, where they lie so that nothing of them goes through the scratch buffer."""
        runs = self.layout.runs_of(region)
        if not _memory_strides(runs):
            return [region]
        axis = next(axis for axis, (_, count, _) in enumerate(runs.outer) if count > 1)
        axis = axis if self.layout.order is None else self.layout.order[axis]
        start, stop = region[axis]
        step = max(1, -(-_PIECE * (stop - start) // (runs.number * runs.length)))
        cuts = [(low, min(stop, low + step)) for low in range(start, stop, step)]
        return [(*region[:axis], cut, *region[axis + 1 :]) for cut in cuts]

    def write(self, region: Region, block: Block, buffer: Buffer) -> None:
        lying = block if self.layout.order is None else block.transpose(self.layout.order)
        self._write(self.layout.turn(region), lying, buffer)

    def _write(self, region: Region, block: Block, buffer: Buffer) -> None:
        """Every run by itself; a block of another layout or dtype is first packed, piece by piece, into the buffer."""
        runs = self.layout.runs(region)
        if runs.number * runs.length == 0:
            return
        inner, strides = region_shape(region)[runs.axes :], block.strides[runs.axes :]
        if block.dtype != self.dtype or not is_packed(inner, strides, self.dtype.itemsize):
            self._write_packed(region, block, buffer)
            return
        edges = self.edges if runs.length >= _PACKED else None
        for index, offset in offsets(runs):
            place: Any = (*index, ...)  # the dots keep a single element an array
            self.file.write(offset, block[place].reshape(-1).view(np.uint8), buffer, edges)

    def _write_packed(self, region: Region, block: Block, buffer: Buffer) -> None:
        """Copy the block into the buffer in pieces and write those."""
        half = buffer.nbytes // 2 // ALIGNMENT * ALIGNMENT
        bounce, room = buffer[:half], buffer[half:]
        if block.size * self.dtype.itemsize <= room.nbytes:
            copy = np.ndarray(block.shape, self.dtype, room.data)
            np.copyto(copy, block, casting="unsafe")
            self._write(region, copy, bounce)
            return
        axis = next(a for a, length in enumerate(block.shape) if length > 1)
        middle = block.shape[axis] // 2
        start = region[axis][0]
        for low, high in ((0, middle), (middle, block.shape[axis])):
            part = (*region[:axis], (start + low, start + high), *region[axis + 1 :])
            self._write_packed(part, block[(slice(None),) * axis + (slice(low, high),)], buffer)

    def sync(self) -> None:
        if self.edges is None:
            self.file.sync()
            return
        with naming(self.edges.path), self.edges.surviving():
            self.file.sync()

    def commit(self) -> Store:
        for offset, data in self.edges.rest() if self.edges is not None else ():
            self.file.write(offset, data, np.empty(0, np.uint8))
        self.file.sync()
        publish(self.partial, self.name)
        if self.edges is not None:
            self.edges.remove()
        self.file.close()
        if self._reopen is not None:
            return self._reopen(self.name)
        return FlatStore(AlignedFile(self.name), self.shape, self.dtype, self.layout.offset)

    def abort(self) -> None:
        self.file.close()
        if self.edges is not None:
            self.edges.remove()
        pathlib.Path(self.partial).unlink(missing_ok=True)


class InPlaceSink(InPlace, FlatSink):
    """Writes into a flat file that exists."""

    def __init__(self, store: FlatStore) -> None:
        self.store, self.file, self.layout = store, store.file, store.layout
        self.name = self.partial = store.file.path
        self.shape, self.dtype, self.granule, self.order = store.shape, store.dtype, store.granule, store.order


def packed_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Strides of a C-ordered block."""
    strides = [itemsize]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * length)
    return tuple(reversed(strides))[: len(shape)] if shape else ()


def is_packed(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """True where strides are those of a C-ordered block; those of axes of length 1 do not matter."""
    wanted = zip(shape, strides, packed_strides(shape, itemsize), strict=True)
    return all(length == 1 or have == want for length, have, want in wanted)


def _memory_strides(runs: Runs) -> tuple[int, ...]:
    """Strides of the outer axes with which every run meets its own phase of a page; () where runs are packed."""
    if runs.number <= 1 or runs.length < _PACKED:
        return ()
    strides: list[int] = []
    need = runs.length
    for _, count, pitch in reversed(runs.outer):
        step = need + (pitch - need) % ALIGNMENT
        strides.append(step)
        need = step * count
    return tuple(reversed(strides))
