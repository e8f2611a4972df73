"""Arrays that a library decodes: in pieces of rows, or by any region that is asked of it.

In: the edges of the pieces along the first axis and a function that decodes one, or an object with `shape`, `dtype` and
`__getitem__`. Out: a store. The library allocates its own memory; the buffer has as much more as that may be, and gives it back
before the call, so that the process holds no more than the plan says.
"""

from __future__ import annotations

import abc
import bisect
import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from outsize.array.store.base import Block, Buffer, InPlace, Region, Store, give_back, region_shape, round_up
from outsize.array.store.io.chunks import nests
from outsize.core.errors import StoreError

_CONSTANT = 1 << 17
"""Bytes of a library's own for each call."""


def touched(edges: Sequence[int], region: Region) -> tuple[int, int]:
    """The pieces of rows that a region touches, half-open; `edges` are the rows where pieces begin, and the end."""
    start, stop = region[0]
    if start >= stop:
        return 0, 0
    return bisect.bisect_right(edges, start) - 1, bisect.bisect_left(edges, stop)


class Decoded(Store):
    """An array that a library decodes, in memory of its own."""

    @abc.abstractmethod
    def decode(self, region: Region, block: Block) -> None:
        """A region, which has elements, into a block."""

    def read(self, region: Region, buffer: Buffer) -> Block:
        size = self.bytes_of(region)
        block = np.ndarray(region_shape(region), self.dtype, buffer[:size].data)
        if size:
            give_back(buffer[round_up(size) :])
            self.decode(region, block)
        return block


class PieceStore(Decoded):
    """Rows in pieces that are decoded whole, each in as many bytes as it has and `decoding` more."""

    def __init__(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], edges: list[int], load: Callable[[int], Block],
        decoding: int, paths: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.name, self.shape, self.dtype, self.paths = name, shape, dtype, paths
        self._edges, self._load, self._decoding = edges, load, decoding
        longest = max((b - a for a, b in itertools.pairwise(edges)), default=1)
        self.granule = (max(1, longest), *shape[1:]) if shape else ()
        self._row = math.prod(shape[1:]) * dtype.itemsize

    def extent(self, region: Region) -> int:
        return round_up(self.bytes_of(region)) + round_up(self.granule[0] * self._row + self._decoding)

    def traffic(self, region: Region) -> int:
        first, last = touched(self._edges, region)
        return (self._edges[last] - self._edges[first]) * self._row

    def seeks(self, region: Region) -> int:
        first, last = touched(self._edges, region)
        return last - first

    def decode(self, region: Region, block: Block) -> None:
        start, stop = region[0]
        for number in range(*touched(self._edges, region)):
            first, last = self._edges[number], self._edges[number + 1]
            piece = self._load(number)
            if piece.shape != (last - first, *self.shape[1:]):
                raise StoreError(
                    f"{self.name}: piece {number} has the shape {piece.shape}: the file is damaged", path=self.name
                )
            low, high = max(start, first), min(stop, last)
            inner = tuple(slice(a, b) for a, b in region[1:])
            block[low - start : high - start] = piece[(slice(low - first, high - first), *inner)]
            del piece


class ObjectStore(Decoded):
    """An object that gives any region of itself; what it allocates is taken for `memory` times the region."""

    def __init__(
        self, source: Any, granule: tuple[int, ...] | None = None, memory: float = 2.0, name: str = ""
    ) -> None:
        self._source, self._memory = source, memory
        self.shape, self.dtype = tuple(int(n) for n in source.shape), np.dtype(source.dtype)
        self.name = name or type(source).__name__
        if granule:
            self.granule = granule

    def extent(self, region: Region) -> int:
        """Where the grid that a region lies on and that of granules do not nest, a region like it may touch a granule more."""
        return self._room(region, on_grid=True)

    def most(self, region: Region) -> int:
        """Wherever it lies, a region may touch a granule more along each axis."""
        return self._room(region, on_grid=False)

    def _room(self, region: Region, on_grid: bool) -> int:
        touched = (
            min(max(b - a, g), n) if on_grid and nests(a, b, g) else min(-(-(b - a + g - 1) // g), -(-n // g)) * g
            for (a, b), g, n in zip(region, (max(1, g) for g in self.granule), self.shape, strict=True)
        )
        decoded = int(self._memory * math.prod(touched) * self.dtype.itemsize)
        return round_up(self.bytes_of(region)) + round_up(decoded + _CONSTANT)

    def traffic(self, region: Region) -> int:
        """Whole granules: the library fetches and decodes all of each that is touched."""
        spans = zip(region, (max(1, g) for g in self.granule), self.shape, strict=True)
        touched = [(min(n, -(-b // g) * g) - a // g * g) if a < b else 0 for (a, b), g, n in spans]
        return math.prod(touched) * self.dtype.itemsize

    def decode(self, region: Region, block: Block) -> None:
        block[...] = np.asarray(self._source[tuple(slice(a, b) for a, b in region)])

    def fingerprint(self) -> str:
        return f"{self.name} {self.shape} {self.dtype.str} {id(self._source)}"


class ObjectSink(InPlace):
    """An object of another library that takes any region of itself, from `first` on. Several threads write at once where
    `granule` are the pieces that it writes whole. What it allocates is taken for three times the region."""

    partial = ""

    def __init__(
        self, target: Any, shape: tuple[int, ...], dtype: np.dtype[Any], first: tuple[int, ...],
        granule: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        self._target, self._first = target, first
        self.name, self.shape, self.dtype = type(target).__name__, shape, dtype
        if granule:
            self.granule = granule
        self._turn: contextlib.AbstractContextManager[Any] = contextlib.nullcontext() if granule else threading.Lock()

    def extent(self, region: Region) -> int:
        return round_up(3 * self.bytes_of(region)) + _CONSTANT

    def write(self, region: Region, block: Block, buffer: Buffer) -> None:
        give_back(buffer)
        key = tuple(slice(low + a, low + b) for low, (a, b) in zip(self._first, region, strict=True))
        with self._turn:
            self._target[key] = block
