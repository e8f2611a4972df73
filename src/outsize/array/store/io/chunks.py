"""Cutting a region along a grid of chunks: which chunks it touches, and which part of each.

In: a region and the shape of a chunk. Out: one `Piece` a chunk, in C order of the grid, so that files are read in the
order in which they were most likely written. Every store that is made of chunks or files (zarr, HDF5, a folder of
blocks) reads and writes through this one loop.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from outsize.array.store.base import Region

Slices = tuple[slice, ...]


class Piece(NamedTuple):
    """The part of a region that lies in one chunk. A plain tuple: a region may have a million of them."""

    chunk: tuple[int, ...]
    """The chunk's place in the grid."""
    region: Region
    """The part, in coordinates of the whole array."""
    inside: Slices
    """The same part, counted from the chunk's own corner."""
    target: Slices
    """The same part, counted from the region's corner."""


def cut(region: Region, edges: Sequence[Sequence[int]]) -> Iterator[Piece]:
    """Pieces of a region over a grid whose lines stand at `edges` (per axis: 0, ..., length of the axis)."""
    axes = [_cut_axis(start, stop, lines) for (start, stop), lines in zip(region, edges, strict=True)]
    return _combine(axes)


def cut_regular(region: Region, chunk: Sequence[int]) -> Iterator[Piece]:
    """Pieces of a region over a grid of equal chunks, the last of each axis cut short by the array's end."""
    axes = [_cut_regular_axis(start, stop, length) for (start, stop), length in zip(region, chunk, strict=True)]
    return _combine(axes)


def count_regular(region: Region, chunk: Sequence[int]) -> int:
    """How many chunks of a regular grid a region touches."""
    count = 1
    for (start, stop), length in zip(region, chunk, strict=True):
        count *= 0 if stop <= start else (stop - 1) // length - start // length + 1
    return count


_AxisPiece = tuple[int, int, int, int, int]
"""(number of the chunk, start, stop, start of the chunk, start of the region) along one axis."""


def _cut_axis(start: int, stop: int, lines: Sequence[int]) -> list[_AxisPiece]:
    found = []
    for index, (low, high) in enumerate(itertools.pairwise(lines)):
        first, last = max(start, low), min(stop, high)
        if first < last:
            found.append((index, first, last, low, start))
    return found


def _cut_regular_axis(start: int, stop: int, length: int) -> list[_AxisPiece]:
    if stop <= start:
        return []
    return [
        (index, max(start, index * length), min(stop, (index + 1) * length), index * length, start)
        for index in range(start // length, (stop - 1) // length + 1)
    ]


def _combine(axes: list[list[_AxisPiece]]) -> Iterator[Piece]:
    for combination in itertools.product(*axes):
        yield Piece(
            chunk=tuple(index for index, *_ in combination),
            region=tuple((first, last) for _, first, last, _, _ in combination),
            inside=tuple(slice(first - low, last - low) for _, first, last, low, _ in combination),
            target=tuple(slice(first - origin, last - origin) for _, first, last, _, origin in combination),
        )


def choose_chunks(shape: tuple[int, ...], itemsize: int, target: int) -> tuple[int, ...]:
    """Chunks of at most `target` bytes: the longest axis is halved until they fit."""
    chunk = [max(1, length) for length in shape]
    while math.prod(chunk) * itemsize > target and max(chunk) > 1:
        longest = chunk.index(max(chunk))
        chunk[longest] = -(-chunk[longest] // 2)
    return tuple(chunk)
