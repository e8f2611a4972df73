"""Cutting a region along a grid of chunks: which chunks it touches, and which part of each.

In: a region and the shape of a chunk. Out: one `Piece` a chunk, in C order of the grid, so that files are read in the
order in which they were most likely written. Every store that is made of chunks or files (zarr, HDF5, a folder of
blocks) reads and writes through this one loop.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
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
    for combination in itertools.product(*axes):
        yield Piece(
            chunk=tuple(index for index, *_ in combination),
            region=tuple((first, last) for _, first, last, _, _ in combination),
            inside=tuple(slice(first - low, last - low) for _, first, last, low, _ in combination),
            target=tuple(slice(first - origin, last - origin) for _, first, last, _, origin in combination),
        )


def cut_regular(region: Region, chunk: Sequence[int]) -> Iterator[Piece]:
    """Pieces of a region over a grid of equal chunks, the last of each axis cut short by the array's end."""
    return cut(region, [range(0, stop + length, length) for (_, stop), length in zip(region, chunk, strict=True)])


def _cut_axis(start: int, stop: int, lines: Sequence[int]) -> list[tuple[int, int, int, int, int]]:
    """(number of the chunk, start, stop, start of the chunk, start of the region) along one axis."""
    if start >= stop:
        return []
    return [
        (index, max(start, lines[index]), min(stop, lines[index + 1]), lines[index], start)
        for index in range(bisect_right(lines, start) - 1, bisect_left(lines, stop))
        if lines[index] < lines[index + 1]
    ]


def choose_chunks(shape: tuple[int, ...], itemsize: int, target: int) -> tuple[int, ...]:
    """Chunks of at most `target` bytes: the longest axis is halved until they fit."""
    chunk = [max(1, length) for length in shape]
    while math.prod(chunk) * itemsize > target and max(chunk) > 1:
        longest = chunk.index(max(chunk))
        chunk[longest] = -(-chunk[longest] // 2)
    return tuple(chunk)
