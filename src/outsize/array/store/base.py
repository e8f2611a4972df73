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
import math
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
    return tuple(stop - start for start, stop in region)


def whole(shape: tuple[int, ...]) -> Region:
    """The region that covers an array."""
    return tuple((0, length) for length in shape)


def count_granules(region: Region, granule: tuple[int, ...]) -> int:
    """How many granules a region touches; granules of one element do not count as a grid."""
    if all(length <= 1 for length in granule):
        return 1
    return math.prod(-(-stop // g) - start // g for (start, stop), g in zip(region, granule, strict=True))


def round_up(value: int, step: int = ALIGNMENT) -> int:
    """The next multiple of `step`."""
    return -(-value // step) * step


class Store(abc.ABC):
    """An array that can be read in regions. Opening reads headers only; all methods are safe to call from many
    threads."""

    name: str
    """What a user calls it: its path, or `memory`."""
    shape: tuple[int, ...]
    """Lengths of the axes."""
    dtype: np.dtype[Any]
    """Element type as stored, byte order included."""
    granule: tuple[int, ...]
    """Shape of the smallest piece that is cheap to read: a chunk, or one stretch of contiguous bytes."""
    paths: tuple[str, ...] = ()
    """Files it reads, so that nobody writes over them while they are needed."""
    order: tuple[int, ...] | None = None
    """Axes from the slowest to the fastest in memory; None is C order."""
    resident: bool = False
    """True where the data already lies in memory: reading it moves nothing and needs no buffer."""

    @abc.abstractmethod
    def extent(self, region: Region) -> int:
        """Bytes of buffer that `read` needs for this region; an upper bound on all memory the read takes."""

    def most(self, region: Region) -> int:
        """What `extent` may be for any region up to this shape, wherever it lies."""
        return self.extent(region)

    @abc.abstractmethod
    def read(self, region: Region, buffer: Buffer) -> Block:
        """Read a region into `buffer` (page-aligned, at least `extent(region)` long); the block is a view inside it.

        The block has the region's shape and the store's dtype; its strides and byte order are the store's own.
        A damaged or short file is a `StoreError`.
        """

    @abc.abstractmethod
    def traffic(self, region: Region) -> int:
        """Bytes that reading this region moves from disk."""

    def seeks(self, region: Region) -> int:
        """How many separate transfers reading this region takes."""
        return count_granules(region, self.granule)

    def fingerprint(self) -> str:
        """Text that changes when the data may have changed; a journal is only followed while it stays the same."""
        return f"{self.name} {self.shape} {self.dtype.str}"

    def update(self) -> Sink:
        """A sink that writes into this very array; an `InputError` where it was not opened for writing."""
        raise InputError(f"{self.name} is open for reading only: open it with mode='r+' to write into it")

    def close(self) -> None:  # noqa: B027  (most stores hold nothing open)
        """Let go of files."""


class Sink(abc.ABC):
    """An array that is to be written: beside its target, and renamed to it by `commit`.

    A new sink only describes the output, which is enough to plan with; `create` makes it."""

    name: str
    """The target's path."""
    shape: tuple[int, ...]
    """Lengths of the axes."""
    dtype: np.dtype[Any]
    """Element type as it will be stored."""
    granule: tuple[int, ...]
    """Regions cut at multiples of this are written without reading anything back; other cuts may not be parallel."""
    partial: str
    """Path of the unfinished output: the same for the same target, so that a resumed run finds it."""
    order: tuple[int, ...] | None = None
    """Axes from the slowest to the fastest in the file; None is C order."""

    def create(self, *, resume: bool = False) -> None:  # noqa: B027  (what lies in memory is there already)
        """Make the unfinished output; with `resume` take up the one that an earlier run left, if it is the same."""

    @abc.abstractmethod
    def extent(self, region: Region) -> int:
        """Bytes of scratch buffer that `write` needs beside the block itself."""

    @abc.abstractmethod
    def write(self, region: Region, block: Block, buffer: Buffer) -> None:
        """Write a block into a region; disjoint regions may be written from several threads at once."""

    @abc.abstractmethod
    def traffic(self, region: Region) -> int:
        """Bytes that writing this region moves to disk."""

    @abc.abstractmethod
    def sync(self) -> None:
        """Make everything written so far survive a crash."""

    @abc.abstractmethod
    def commit(self) -> Store:
        """Sync, give the output its final name, and open it."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Remove the unfinished output."""

    def seeks(self, region: Region) -> int:
        """How many separate transfers writing this region takes."""
        return count_granules(region, self.granule)

    def pieces(self, region: Region) -> list[Region]:
        """The region in parts that may be written at once, out of one block and with one scratch buffer."""
        return [region]

    def room(self, region: Region) -> int:
        """Bytes of buffer that `lay` needs for this region."""
        return round_up(math.prod(region_shape(region)) * self.dtype.itemsize)

    def lay(self, region: Region, buffer: Buffer) -> Block:
        """The block to fill for this region: a view inside `buffer`, placed as `write` likes it best."""
        shape = region_shape(region)
        return np.ndarray(shape, self.dtype, buffer.data)
