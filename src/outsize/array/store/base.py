"""What the engine asks of a store (an array it can read) and of a sink (an array it can write).

The engine owns all memory. Before it reads, it asks a store how large a buffer the read needs (`extent`: data,
alignment, decoded chunks, everything), takes that much from its pool, and hands the buffer over; the store reads into
it and returns the wanted block as a view inside it. So no byte of a read is outside the budget, and a direct, aligned
read needs no second copy although a file's data may begin at any offset. Writing mirrors it: `room` bytes of buffer
are given to `lay`, which returns the block to fill, placed so that it can be written without another copy; `write`
then takes it.
"""

from __future__ import annotations

import abc
import ctypes
import functools
import math
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from outsize.core.errors import InputError

Region = tuple[tuple[int, int], ...]
"""Half-open (start, stop) along each axis; () is the whole of a 0-d array."""

Block = npt.NDArray[Any]
Buffer = npt.NDArray[np.uint8]

ALIGNMENT = 4096
"""Bytes: what direct I/O asks of file offsets, lengths and buffer addresses on every file system we met."""


def region_shape(region: Region) -> tuple[int, ...]:
    """Lengths of a region's axes."""
    return tuple([stop - start for start, stop in region])  # lists: plans ask for thousands


def whole(shape: tuple[int, ...]) -> Region:
    """The region that covers an array."""
    return tuple((0, length) for length in shape)


@functools.lru_cache(maxsize=4096)
def _hollow(shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]) -> Block:
    return np.lib.stride_tricks.as_strided(np.zeros((), dtype), shape, strides, writeable=False)


def hollow(shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]) -> Block:
    """A block of any size that takes no memory; it has strides to look at, and its elements must never be touched. Each is an
    object of its own, for frames tell blocks apart by that."""
    return _hollow(shape, strides, dtype).view()


def count_chunks(region: Region, chunk: Sequence[int]) -> int:
    """How many chunks of a regular grid a region touches."""
    spans = zip(region, chunk, strict=True)
    return math.prod(-(-stop // length) - start // length if start < stop else 0 for (start, stop), length in spans)


def round_up(value: int, step: int = ALIGNMENT) -> int:
    """The next multiple of `step`."""
    return -(-value // step) * step


def give_back(buffer: Buffer) -> None:
    """Return the whole pages inside `buffer` to the system; they read as zeros afterwards.

    A store that decodes through a library (zarr-python's filters, HDF5's) cannot make it work inside our buffer. So its `extent`
    asks for as much more as the library takes, and it gives that part back before it calls the library: what the process
    holds is then the buffer's size or less, whoever allocates it.
    """
    start = round_up(buffer.ctypes.data, mmap.PAGESIZE)
    stop = (buffer.ctypes.data + buffer.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if stop > start:
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def block_in(buffer: Buffer, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Block:
    """The block at the start of a buffer, which may be empty where the block is."""
    return np.ndarray(shape, dtype, buffer.data) if math.prod(shape) else np.empty(shape, dtype)


class Stored(abc.ABC):
    """What stores and sinks have in common: an array that is moved in regions. All methods are safe to call from many threads."""

    name: str
    """What a user calls it: its path, or `memory`."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    """Element type as stored, byte order included."""
    order: tuple[int, ...] | None = None
    """Axes from the slowest to the fastest where it lies; None is C order."""

    @functools.cached_property
    def granule(self) -> tuple[int, ...]:
        """Shape of the smallest piece that is cheap to move: a chunk, or an element of what lies in one stretch. Regions
        of a sink that are cut at multiples of it are written without reading anything back; other cuts may not be parallel."""
        return tuple([min(length, 1) for length in self.shape])

    @abc.abstractmethod
    def extent(self, region: Region) -> int:
        """Bytes of buffer that moving this region needs: for a read everything that it takes, at most; for a write what it takes
        beside the block itself."""

    @abc.abstractmethod
    def traffic(self, region: Region) -> int:
        """Bytes that moving this region takes from disk or brings to it."""

    def seeks(self, region: Region) -> int:
        """How many separate transfers moving this region takes; granules of one element do not count as a grid."""
        return 1 if all(length <= 1 for length in self.granule) else count_chunks(region, self.granule)

    def bytes_of(self, region: Region) -> int:
        """Bytes of a region's elements."""
        return math.prod(region_shape(region)) * self.dtype.itemsize


class Store(Stored):
    """An array that can be read in regions. Opening reads headers only."""

    paths: tuple[str, ...] = ()
    """Files it reads, so that nobody writes over them while they are needed."""
    resident: bool = False
    """True where the data already lies in memory: reading it moves nothing and needs no buffer."""
    held_as: Callable[[Any], Any] | None = None
    """Makes what users hold of it out of its node, where that is more than a lazy array."""
    note: str = ""
    """What a user should know of its values, as a sentence."""

    @property
    def holds(self) -> int:
        """Bytes of memory that it keeps while it is open, which a plan counts: the factors of a tensor."""
        return 0

    def packing(self, region: Region) -> tuple[int, int]:
        """Bytes that BLAS takes for its own buffers while this region is read: (of every call, of every thread)."""
        return (0, 0)

    def most(self, region: Region) -> int:
        """What `extent` may be for any region up to this shape, wherever it lies."""
        return self.extent(region)

    @abc.abstractmethod
    def read(self, region: Region, buffer: Buffer) -> Block:
        """Read a region into `buffer` (page-aligned, at least `extent(region)` long); the block is a view inside it.

        The block has the region's shape and the store's dtype; its strides and byte order are the store's own.
        A damaged or short file is a `StoreError`.
        """

    def fingerprint(self) -> str:
        """Text that changes when the data may have changed; a journal is only followed while it stays the same."""
        files = [(stat.st_size, stat.st_mtime_ns) for stat in map(os.stat, self.paths)]
        return f"{os.path.abspath(self.name)} {self.shape} {self.dtype.str} {files}"

    def update(self) -> Sink:
        """A sink that writes into this very array; an `InputError` where it was not opened for writing."""
        raise InputError(f"{self.name} is open for reading only: open it with mode='r+' to write into it")

    @property
    def writable(self) -> bool:
        """True where it was opened for writing."""
        try:
            self.update()
        except InputError:
            return False
        return True

    def close(self) -> None:
        """Let go of files."""


class Sink(Stored):
    """An array that is to be written: beside its target, and renamed to it by `commit`.

    A new sink only describes the output, which is enough to plan with; `create` makes it."""

    shared: bool = False
    """True where several processes may write disjoint regions at once: a pickle of it opens the same unfinished output."""
    partial: str
    """Path of the unfinished output: the same for the same target, so that a resumed run finds it."""

    def create(self, *, resume: bool = False) -> None:
        """Make the unfinished output; with `resume` take up the one that an earlier run left, if it is the same."""

    def traffic(self, region: Region) -> int:
        return self.bytes_of(region)

    @abc.abstractmethod
    def write(self, region: Region, block: Block, buffer: Buffer) -> None:
        """Write a block into a region; disjoint regions may be written from several threads at once."""

    def sync(self) -> None:
        """Make everything written so far survive a crash; nothing where there is nothing that could, or writing does it."""

    @abc.abstractmethod
    def commit(self) -> Store:
        """Sync, give the output its final name, and open it."""

    def abort(self) -> None:
        """Remove the unfinished output, where there is one."""

    def pieces(self, region: Region) -> list[Region]:
        """The region in parts that may be written at once, out of one block and with one scratch buffer."""
        return [region]

    def room(self, region: Region) -> int:
        """Bytes of buffer that `lay` needs for this region."""
        return round_up(self.bytes_of(region))

    def sketch(self, region: Region) -> Block:
        """What a plan knows of the block to fill: shape, dtype and strides; its elements may not be touched. The block may be a
        part of a tile, or have gaps between its runs: only whole axes, and one more, lie without gaps."""
        shape, strides, step, gap = region_shape(region), [0] * len(region), self.dtype.itemsize, 0
        for axis in reversed(self.order or range(len(shape))):
            strides[axis] = step
            gap = gap or self.dtype.itemsize * (shape[axis] < self.shape[axis])
            step = step * shape[axis] + gap
        return hollow(shape, tuple(strides), self.dtype)

    def lay(self, region: Region, buffer: Buffer) -> Block:
        """The block to fill for this region: a view inside `buffer`, placed as `write` likes it best."""
        return np.ndarray(region_shape(region), self.dtype, buffer.data)


class InPlace(Sink):
    """Writes into an array that exists: nothing to rename, nothing to remove."""

    store: Store

    def commit(self) -> Store:
        self.sync()
        return self.store
