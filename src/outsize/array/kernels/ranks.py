"""Order statistics as reductions: which element has a given rank, and which elements come first.

In: lanes (the last axis) of any length, a chunk at a time. Out: a few elements of each lane. A rank is found without
sorting: elements are seen as unsigned integers in the same order, one reduction counts their leading bits, which says
with which bits the wanted element begins, and each further reduction counts the next bits of those that begin so. The
passes are as many as the dtype has digits (two for 32 bits), whatever the values are. The first `k` elements are kept
as a list that each chunk's own first `k` are merged into.
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from outsize.array.kernels.accumulators import Accumulator, States
from outsize.array.store.base import Block, Region, region_shape

_TABLE = 2 << 20
"""Bytes of counts of a lane: what many ranks at once have to share."""
_FEW = 8
"""Beginnings that are looked for one by one; more are looked up."""
_LISTED = 18
"""Leading bits up to which every beginning has a line in a list."""


def to_keys(values: Block, keys: Block | None = None, turn: Block | None = None) -> Block:
    """Unsigned integers in the order of the values: NaN last, as NumPy sorts; both zeros are one. `keys` and `turn` are memory
    for as many of them, where the caller has it."""
    kind, size = values.dtype.kind, values.dtype.itemsize
    unsigned = np.dtype(f"u{size}")
    top = unsigned.type(1 << (8 * size - 1))
    if kind in "bu":
        return values.view(unsigned)
    if kind == "i":
        flipped: Block = np.bitwise_xor(values.view(unsigned), top, out=keys)
        return flipped
    signed, sum_ = np.dtype(f"i{size}"), None if keys is None else keys.view(values.dtype)
    keys = np.add(values, values.dtype.type(0), out=sum_).view(unsigned)
    shift = signed.type(8 * size - 1)
    turn = np.right_shift(keys.view(signed), shift, out=None if turn is None else turn.view(signed)).view(unsigned)
    turn |= top  # all bits of a negative number, the sign of others
    keys ^= turn
    strange = np.isnan(values)
    if strange.any():
        keys[strange] = np.iinfo(unsigned).max
    return keys


def from_keys(keys: Block, dtype: np.dtype[Any]) -> Block:
    unsigned = np.dtype(f"u{dtype.itemsize}")
    bits = keys.astype(unsigned)
    top = unsigned.type(1 << (8 * dtype.itemsize - 1))
    if dtype.kind == "i":
        bits ^= top
    if dtype.kind == "f":
        values = np.where(bits & top, bits ^ top, ~bits).view(dtype)
        values[bits == np.iinfo(unsigned).max] = np.nan
        return values
    return bits.view(dtype)


class Rule(Accumulator):
    """A reduction of the last axis, or of all axes, that keeps several values of a lane and finishes them itself."""

    def __init__(self, axes: tuple[int, ...], ndim: int, dtype: np.dtype[Any]) -> None:
        super().__init__(axes, ndim, dtype, dtype)

    @abc.abstractmethod
    def take_block(self, block: Block, region: Region, partial: States, *others: Block) -> None:
        """A whole chunk at once; `others` are the chunk's lanes of what earlier reductions found."""

    @abc.abstractmethod
    def finish(self, name: str, states: States, out: Block) -> None:
        """The result of this name."""

    @abc.abstractmethod
    def detail(self) -> tuple[Any, ...]:
        """What tells it from others."""


class Counts(Rule):
    """Counts of the next bits of elements that begin as the wanted ones do."""

    def __init__(
        self, axes: tuple[int, ...], ndim: int, dtype: np.dtype[Any], ranks: tuple[int, ...], shift: int, bits: int, piece: int,
        then: Callable[[Block], Block] | None, key: tuple[Any, ...],
    ) -> None:  # fmt: skip
        super().__init__(axes, ndim, dtype)
        self.ranks, self.shift, self.bits, self.piece, self.then, self.key = ranks, shift, bits, piece, then, key
        self.first = shift + bits == 8 * dtype.itemsize
        self.rows = 1 if self.first else len(ranks)

    def dtypes(self) -> tuple[np.dtype[Any], ...]:
        return np.dtype((np.int64, (self.rows << self.bits,))), np.dtype((np.uint64, (2 * len(self.ranks),)))

    def detail(self) -> tuple[Any, ...]:
        return (self.ranks, self.shift, self.bits, self.key)

    def start(self, states: States) -> None:
        states[0][...] = 0

    def temporaries(self, elements: int, region: Region) -> int:
        listed = 0 if len(self.ranks) <= _FEW else 4 << _LISTED
        shape = region_shape(region)
        piece = min(self.piece, math.prod(shape[axis] for axis in self.axes))
        return listed + (64 + 3 * self.dtype.itemsize) * piece + 64 * len(self.ranks) + 4096

    def take_block(self, block: Block, region: Region, partial: States, *others: Block) -> None:
        counts, wanted = partial
        counts[...] = 0
        wanted[..., 0, :] = others[0] if others else np.array([0] * len(self.ranks) + [*self.ranks], np.uint64)
        piece = min(self.piece, math.prod(block.shape[axis] for axis in self.axes))
        unsigned = np.dtype(f"u{self.dtype.itemsize}")
        keys, turn, digits = np.empty(piece, unsigned), np.empty(piece, unsigned), np.empty(piece, np.intp)
        for lane in np.ndindex(*self.kept(block.shape)[:-1]):
            starts = np.unique(wanted[lane][0, : len(self.ranks)])
            table = counts[lane][0]
            find = self._finder(starts)
            for values in self._pieces(block if self.flat else block[lane]):
                size = (
                    values.size
                )  # into the same memory every time: fresh pages cost more than what is counted in them
                self._count(table, to_keys(values, keys[:size], turn[:size]), starts, find, turn[:size], digits)

    def _count(self, table: Block, keys: Block, starts: Block, find: Any, begin: Block, digits: Block) -> None:
        """Count the next digit of keys that begin as `starts`, each start in its own part of the table. `begin` and `digits` are
        memory. (`np.add.at` makes no table of its own, as `np.bincount` does.)"""
        of = keys.dtype.type
        if self.first:
            np.right_shift(keys, of(self.shift), out=begin)
            digits[: keys.size] = begin
            np.add.at(table, digits[: keys.size], 1)
            return
        np.right_shift(keys, of(self.shift + self.bits), out=begin)
        if find is None:
            for row, start in enumerate(starts.astype(keys.dtype)):
                found = self._digits(keys[begin == start])
                found += row << self.bits
                np.add.at(table, found, 1)
            return
        rows = find(begin)
        places = np.flatnonzero(rows >= 0)
        found = self._digits(keys[places])
        found += rows[places].astype(np.intp) << self.bits
        np.add.at(table, found, 1)

    def _pieces(self, block: Block) -> Iterator[Block]:
        """All elements, as they lie in memory."""
        if block.ndim == 1:
            for low in range(0, block.shape[0], self.piece):
                yield np.ascontiguousarray(block[low : low + self.piece])
            return
        yield from np.nditer(block, flags=["external_loop", "buffered"], order="K", buffersize=self.piece)

    def _digits(self, keys: Block) -> Block:
        of = keys.dtype.type
        digits: Block = ((keys >> of(self.shift)) & of((1 << self.bits) - 1)).astype(np.intp)
        return digits

    def _finder(self, starts: Block) -> Callable[[Block], Block] | None:
        """From leading bits to the row of counts they belong to, or -1; None where the beginnings are few."""
        if len(starts) <= _FEW:
            return None
        places, high = starts.astype(np.intp), 8 * self.dtype.itemsize - self.shift - self.bits
        if high <= _LISTED:
            listed = np.full(1 << high, -1, np.int32)
            listed[places] = np.arange(len(places))
            return lambda begin: listed[begin]

        def search(begin: Block) -> Block:
            wanted = begin.astype(np.intp)
            rows = np.minimum(np.searchsorted(places, wanted), len(places) - 1)
            return np.where(places[rows] == wanted, rows, -1)

        return search

    def combine(self, states: States, partial: States, count: int) -> None:
        states[0] += partial[0]
        states[1][...] = partial[1]

    def finish(self, name: str, states: States, out: Block) -> None:
        number = len(self.ranks)
        for lane in np.ndindex(out.shape[:-1]):
            begin, rank = np.split(states[1][lane][0].copy(), 2)
            _, rows = np.unique(begin, return_inverse=True)
            table = states[0][lane][0].reshape(self.rows, -1)
            for row in set(rows.tolist()):
                np.cumsum(table[row], out=table[row])
            for place, row in enumerate(rows.tolist()):
                digit = int(np.searchsorted(table[row], int(rank[place]), side="right"))
                begin[place] = (int(begin[place]) << self.bits) | digit
                rank[place] -= np.uint64(table[row, digit - 1] if digit else 0)
            if self.then is not None:
                out[lane] = self.then(from_keys(begin, self.dtype))
            else:
                out[lane][:number], out[lane][number:] = begin, rank


def digits_of(dtype: np.dtype[Any], ranks: int) -> list[tuple[int, int]]:
    """(shift, bits) of each reduction, from the leading bits on: few enough that the counts of a lane stay small."""
    width = 8 * dtype.itemsize
    most = min(16, (_TABLE // (8 * ranks)).bit_length() - 1)
    number = -(-width // max(1, most))
    edges = [width * step // number for step in range(number + 1)]
    return [(width - high, high - low) for low, high in itertools.pairwise(edges)]


class Best(Rule):
    """The first `k` elements of a lane in order, and where they were; equal ones in the order they came."""

    def __init__(self, ndim: int, dtype: np.dtype[Any], k: int, largest: bool) -> None:
        super().__init__((ndim - 1,), ndim, dtype)
        self.k, self.largest = k, largest

    def dtypes(self) -> tuple[np.dtype[Any], ...]:
        return np.dtype((self.dtype, (self.k,))), np.dtype((np.int64, (self.k,)))

    def detail(self) -> tuple[Any, ...]:
        return (self.k, self.largest)

    def start(self, states: States) -> None:
        states[1][...] = -1

    def temporaries(self, elements: int, region: Region) -> int:
        return (region_shape(region)[-1] + 4 * self.k) * (4 * self.dtype.itemsize + 16)

    def take_block(self, block: Block, region: Region, partial: States, *others: Block) -> None:
        values, places = partial
        places[...] = -1
        for lane in np.ndindex(block.shape[:-1]):
            found = best(np.ascontiguousarray(block[lane]), self.k, self.largest)
            values[lane][0, : len(found)] = block[lane][found]
            places[lane][0, : len(found)] = found + region[-1][0]

    def combine(self, states: States, partial: States, count: int) -> None:
        for lane in np.ndindex(states[0].shape[:-2]):
            pairs = [(part[0][lane][0], part[1][lane][0]) for part in (states, partial)]
            value = np.concatenate([v[p >= 0] for v, p in pairs])
            place = np.concatenate([p[p >= 0] for _, p in pairs])
            found = best(value, self.k, self.largest)
            states[0][lane][0, : len(found)], states[1][lane][0, : len(found)] = value[found], place[found]

    def finish(self, name: str, states: States, out: Block) -> None:
        np.copyto(out, states[int(name.endswith("indices"))][..., 0, :], casting="unsafe")


def best(values: Block, k: int, largest: bool) -> Block:
    """Indices of the first `k` values, in order."""
    k = min(k, len(values))
    if values.dtype.kind == "c":
        if largest:
            return len(values) - 1 - np.argsort(values[::-1], kind="stable")[::-1][:k]
        return np.argsort(values, kind="stable")[:k]
    if k == 0:
        return np.empty(0, np.intp)
    near: Any = slice(None)
    if 4 * k < len(values):
        rank = len(values) - k if largest else k - 1
        bound = np.partition(values, rank)[rank]
        near = np.flatnonzero(~(values < bound) if largest else ~(values > bound))  # NaN is near to all
    found = _first_keys(to_keys(values[near]), k, largest)
    return found if isinstance(near, slice) else near[found]


def _first_keys(keys: Block, k: int, largest: bool) -> Block:
    keys = ~keys if largest else keys
    if 4 * k >= len(keys):
        return np.argsort(keys, kind="stable")[:k]
    edge = np.partition(keys, k - 1)[k - 1]
    sure = np.flatnonzero(keys < edge)
    even = np.flatnonzero(keys == edge)[: k - len(sure)]
    found = np.concatenate([sure, even])
    return found[np.argsort(keys[found], kind="stable")]
