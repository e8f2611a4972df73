"""A folder of `.npy` blocks as one array.

The rule: if every file is called by its place, `0-0.npy`, `0-1.npy`, ... (two or more numbers joined by `-`, whatever
stands before them), they form a grid with one axis a number, and every place must be there. Else the blocks are
concatenated along axis 0 in natural order: `part-2.npy` before `part-10.npy`. All blocks have one dtype, and lengths
that meet.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from outsize.array.store.base import Block, Buffer, Region, Store, region_shape, round_up
from outsize.array.store.formats import npy
from outsize.array.store.formats.flat import FlatStore, most_extent
from outsize.array.store.io.chunks import Piece, cut
from outsize.array.store.io.file import naming
from outsize.array.store.options import Options
from outsize.core.errors import StoreError

_OPEN = 64
"""Blocks kept open at once; a folder may hold more than a process may open."""
_GRID_NAME = re.compile(r"(?:.*?)(\d+(?:-\d+)+)\.npy")
_NUMBER = re.compile(r"(\d+)")


class _Head(NamedTuple):
    """What a block's header says."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def recognise(path: str, head: bytes, size: int) -> bool:
    """True for a folder with `.npy` files."""
    return os.path.isdir(path) and any(name.endswith(".npy") for name in os.listdir(path))


def open_file(path: str, options: Options) -> Store:
    """The array that the folder's blocks make up."""
    return BlocksStore(path)


class BlocksStore(Store):
    """The array that a folder's blocks make up."""

    def __init__(self, path: str) -> None:
        with naming(path):
            names = [name for name in os.listdir(path) if name.endswith(".npy") and not name.startswith(".")]
        if not names:
            raise StoreError(f"{path} holds no .npy blocks", path=path)
        heads = _arrange(path, names)
        first = heads[min(heads)]
        self.name, self.dtype = path, first.dtype
        self.paths = tuple(head.path for head in heads.values())
        self._heads = heads
        self._edges = _find_edges(path, heads, len(first.shape))
        self.shape = tuple(edges[-1] for edges in self._edges)
        self.granule = tuple(
            min(length, 1) if axis == 0 else max(1, max(b - a for a, b in itertools.pairwise(edges)))
            for axis, (length, edges) in enumerate(zip(self.shape, self._edges, strict=True))
        )
        self._open: OrderedDict[tuple[int, ...], FlatStore] = OrderedDict()
        self._lock = threading.Lock()

    def _block(self, place: tuple[int, ...]) -> FlatStore:
        with self._lock:
            store = self._open.get(place)
            if store is None:
                store = self._open[place] = npy.open_file(self._heads[place].path)
                if len(self._open) > _OPEN:
                    self._open.popitem(last=False)  # closes when its last reader lets go of it
            self._open.move_to_end(place)
            return store

    def _pieces(self, region: Region) -> Iterator[tuple[FlatStore, Region, Piece]]:
        """(block, region inside it, piece) of every block that the region touches, one open at a time."""
        for piece in cut(region, self._edges):
            yield self._block(piece.chunk), tuple((s.start, s.stop) for s in piece.inside), piece

    def extent(self, region: Region) -> int:
        """As if the region met several blocks: plans look at one region of a shape for all of them."""
        size = math.prod(region_shape(region)) * self.dtype.itemsize
        return most_extent(size) + (round_up(size) if len(self.paths) > 1 else 0)

    def traffic(self, region: Region) -> int:
        return sum(store.traffic(inside) for store, inside, _ in self._pieces(region))

    def read(self, region: Region, buffer: Buffer) -> Block:
        shape = region_shape(region)
        used = math.prod(shape) * self.dtype.itemsize
        block = np.ndarray(shape, self.dtype, buffer.data)
        for store, inside, piece in self._pieces(region):
            if region_shape(piece.region) == shape:  # all of it lies in one block
                return store.read(inside, buffer)
            block[piece.target] = store.read(inside, buffer[round_up(used) :])
        return block

    def __reduce__(self) -> tuple[Any, ...]:
        return BlocksStore, (self.name,)

    def fingerprint(self) -> str:
        newest = max(os.stat(path).st_mtime_ns for path in self.paths)
        return f"{os.path.abspath(self.name)} {self.shape} {self.dtype.str} {len(self.paths)} {newest}"

    def close(self) -> None:
        with self._lock:
            self._open.clear()


def _arrange(path: str, names: list[str]) -> dict[tuple[int, ...], _Head]:
    """Every block's header by its place in the grid; blocks that are not named by a place follow one another along axis 0."""
    matches = [_GRID_NAME.fullmatch(name) for name in names]
    places = [tuple(int(number) for number in match.group(1).split("-")) for match in matches if match]
    if len(places) < len(names) or len({len(place) for place in places}) > 1:
        names, places = sorted(names, key=_natural), [(number,) for number in range(len(names))]
    if len(set(places)) < len(places):
        raise StoreError(f"{path}: two blocks have the same place in the grid", path=path)
    heads = {place: _read_head(os.path.join(path, name)) for place, name in zip(places, names, strict=True)}
    first = heads[min(heads)]
    if not first.shape:
        raise StoreError(f"{first.path} is 0-d: blocks are concatenated along axis 0 and need one", path=first.path)
    for head in heads.values():
        if head.dtype != first.dtype or len(head.shape) != len(first.shape):
            raise StoreError(
                f"{head.path} is {head.dtype} with {len(head.shape)} axes, {os.path.basename(first.path)} is "
                f"{first.dtype} with {len(first.shape)}: blocks of one array must agree", path=head.path,
            )  # fmt: skip
    return _complete(path, heads)


def _complete(path: str, grid: dict[tuple[int, ...], _Head]) -> dict[tuple[int, ...], _Head]:
    """The grid counted from 0, with every place taken, and further axes of the blocks in one piece."""
    low = tuple(min(place[axis] for place in grid) for axis in range(len(next(iter(grid)))))
    size = tuple(max(place[axis] for place in grid) - low[axis] + 1 for axis in range(len(low)))
    if math.prod(size) != len(grid):
        known = itertools.product(*(range(a, a + n) for a, n in zip(low, size, strict=True)))
        missing = next(place for place in known if place not in grid)
        raise StoreError(
            f"{path}: block {'-'.join(map(str, missing))}.npy of a grid of {' x '.join(map(str, size))} is missing",
            path=path,
        )
    dimensions = len(grid[min(grid)].shape)
    if dimensions < len(low):
        raise StoreError(f"{path}: blocks have {dimensions} axes, their names give places along {len(low)}", path=path)
    rest = (0,) * (dimensions - len(low))
    return {(*(n - a for n, a in zip(place, low, strict=True)), *rest): head for place, head in grid.items()}


def _read_head(path: str) -> _Head:
    with naming(path), open(path, "rb") as file:
        return _Head(path, *npy.read_header(file, path)[:2])


def _find_edges(path: str, heads: dict[tuple[int, ...], _Head], dimensions: int) -> list[list[int]]:
    """Where blocks meet, per axis; an error names the block whose length does not fit its row of the grid."""
    edges = []
    for axis in range(dimensions):
        lengths: dict[int, int] = {}
        for place, head in sorted(heads.items()):
            length = lengths.setdefault(place[axis], head.shape[axis])
            if length != head.shape[axis]:
                raise StoreError(
                    f"{head.path} has length {head.shape[axis]} along axis {axis}, its neighbours have {length}",
                    path=head.path,
                )
        edges.append([0, *itertools.accumulate(lengths[number] for number in sorted(lengths))])
    return edges


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Text compared as text, numbers in it as numbers."""
    parts = _NUMBER.split(name)
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts]
