"""Arrays that are already in memory: a store without reads, and a sink into a NumPy array."""

from __future__ import annotations

from typing import Any

import numpy as np

from outsize.array.store.base import Block, Buffer, Region, Sink, Store


def _index(region: Region) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in region)


class MemoryStore(Store):
    """A NumPy array. Regions are views of it: reading takes no memory and moves no bytes."""

    resident = True

    def __init__(self, array: Block, name: str = "memory", *, writable: bool = False) -> None:
        self.array = np.asarray(array)
        self.name = name
        self.shape, self.dtype = self.array.shape, self.array.dtype
        self.granule = tuple(min(length, 1) for length in self.shape)
        self.order = tuple(sorted(range(self.array.ndim), key=lambda axis: -abs(self.array.strides[axis])))
        self._writable = writable

    def extent(self, region: Region) -> int:
        """Nothing."""
        return 0

    def read(self, region: Region, buffer: Buffer) -> Block:
        """A view; the buffer is not used."""
        return self.array[_index(region)]

    def traffic(self, region: Region) -> int:
        """Nothing."""
        return 0

    def fingerprint(self) -> str:
        """Shape, dtype and a hash of the values."""
        import hashlib

        digest = hashlib.blake2b(np.ascontiguousarray(self.array).view(np.uint8).data, digest_size=16).hexdigest()
        return f"memory {self.shape} {self.dtype.str} {digest}"

    def update(self) -> Sink:
        """A sink into this array."""
        return MemorySink(self.array) if self._writable else super().update()


class MemorySink(Sink):
    """Writes into a NumPy array that the caller made."""

    partial = ""

    def __init__(self, array: Block, name: str = "memory", *, counted: bool = True) -> None:
        self.array = array
        self.counted = counted
        """False where the array is a user's: its memory is not in our budget."""
        self.name = name
        self.shape, self.dtype = array.shape, array.dtype
        self.granule = tuple(min(length, 1) for length in array.shape)
        self.order = tuple(sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis])))

    def extent(self, region: Region) -> int:
        """Nothing."""
        return 0

    def room(self, region: Region) -> int:
        """Nothing: blocks are laid in the array itself."""
        return 0

    def lay(self, region: Region, buffer: Buffer) -> Block:
        """The place itself."""
        view: Any = self.array[_index(region)] if self.array.ndim else self.array
        return view  # type: ignore[no-any-return]

    def write(self, region: Region, block: Block, buffer: Buffer) -> None:
        """Nothing where the block was laid here, else a copy."""
        place = self.lay(region, buffer)
        if place.size and not np.may_share_memory(place, block):
            np.copyto(place, block, casting="unsafe")

    def traffic(self, region: Region) -> int:
        """Nothing."""
        return 0

    def sync(self) -> None:
        """Nothing to do."""

    def commit(self) -> Store:
        """The array as a store."""
        return MemoryStore(self.array, self.name)

    def abort(self) -> None:
        """Nothing to remove."""
