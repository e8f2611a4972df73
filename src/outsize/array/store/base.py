"""What the engine asks of a store (an array it can read) and of a sink (an array it can write).

The engine owns all memory. Before it reads, it asks a store how large a buffer the read needs (`extent`: data, alignment,
decoded chunks, everything), takes that much from its pool, and hands the buffer over; the store reads into it and
returns the wanted block as a view inside it. So no byte of a read is outside the budget, and a direct, aligned read needs no
second copy although a file's data may begin at any offset.
"""

from __future__ import annotations

import abc
from typing import Any

import numpy as np
import numpy.typing as npt

Region = tuple[tuple[int, int], ...]
"""Half-open (start, stop) along each axis; () is the whole of a 0-d array."""

Block = npt.NDArray[Any]
Buffer = npt.NDArray[np.uint8]

ALIGNMENT = 4096
"""Bytes: what direct I/O asks of file offsets, lengths and buffer addresses on every file system we met."""


def region_shape(region: Region) -> tuple[int, ...]:
    """Lengths of a region's axes."""
    return tuple(stop - start for start, stop in region)


class Store(abc.ABC):
    """An array that can be read in regions. Opening reads headers only; all methods are safe to call from many threads."""

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

    @abc.abstractmethod
    def extent(self, region: Region) -> int:
        """Bytes of buffer that `read` needs for this region; an upper bound on all memory the read takes."""

    @abc.abstractmethod
    def read(self, region: Region, buffer: Buffer) -> Block:
        """Read a region into `buffer` (page-aligned, at least `extent(region)` long); the block is a view inside it.

        The block has the region's shape and the store's dtype; its strides and byte order are the store's own.
        A damaged or short file is a `StoreError`.
        """

    @abc.abstractmethod
    def traffic(self, region: Region) -> int:
        """Bytes that reading this region moves from disk."""

    def close(self) -> None:  # noqa: B027  (most stores hold nothing open)
        """Let go of files."""


class Sink(abc.ABC):
    """An array that is being written: beside its target, and renamed to it by `commit`."""

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
