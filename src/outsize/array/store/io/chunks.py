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
from outsize.core.units import MiB

_TARGET = 8 * MiB
"""Chunks of new arrays are at most this large."""

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


def most_touched(region: Region, chunk: Sequence[int], shape: Sequence[int], *, on_grid: bool) -> int:
    """How many chunks a region of this shape touches at most: `on_grid` as a tile of a grid whose other tiles are asked for too,
    else wherever it lies."""
    return math.prod(_most_on_axis(a, b, g, n, on_grid) for (a, b), g, n in zip(region, chunk, shape, strict=True))


def _most_on_axis(start: int, stop: int, granule: int, length: int, on_grid: bool) -> int:
    if start >= stop:
        return 0
    if on_grid and (nests(start, stop, granule) or (stop == length and start % granule == 0)):
        return -(-stop // granule) - start // granule
    return min((stop - start + 2 * granule - 2) // granule, -(-length // granule))


def nests(start: int, stop: int, granule: int) -> bool:
    """True where a span is one of equal spans from 0 on, which are whole granules or whole parts of one."""
    size = stop - start
    return size > 0 and start % size == 0 and (size % granule == 0 or granule % size == 0)


def _cut_axis(start: int, stop: int, lines: Sequence[int]) -> list[tuple[int, int, int, int, int]]:
    """(number of the chunk, start, stop, start of the chunk, start of the region) along one axis."""
    if start >= stop:
        return []
    return [
        (index, max(start, lines[index]), min(stop, lines[index + 1]), lines[index], start)
        for index in range(bisect_right(lines, start) - 1, bisect_left(lines, stop))
        if lines[index] < lines[index + 1]
    ]


def on_grid(region: Region, chunk: Sequence[int], shape: Sequence[int]) -> bool:
    """True where a region cuts no chunk, so that nothing has to be read back to write it."""
    return all(
        start % length == 0 and (stop % length == 0 or stop == end)
        for (start, stop), length, end in zip(region, chunk, shape, strict=True)
    )


def output_chunks(asked: tuple[int, ...] | None, shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The chunks of a new array: those that are asked for, else of a size that is good to move; none longer than its axis."""
    chosen = choose_chunks(shape, itemsize, _TARGET) if asked is None else asked
    return tuple(min(length, max(1, end)) for length, end in zip(chosen, shape, strict=True))


def choose_chunks(shape: tuple[int, ...], itemsize: int, target: int) -> tuple[int, ...]:
    """Chunks of at most `target` bytes: the longest axis is halved until they fit."""
    chunk = [max(1, length) for length in shape]
    while math.prod(chunk) * itemsize > target and max(chunk) > 1:
        longest = chunk.index(max(chunk))
        chunk[longest] = -(-chunk[longest] // 2)
    return tuple(chunk)
