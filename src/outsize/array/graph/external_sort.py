"""Sorting lanes larger than the budget: runs are sorted in memory and written, then merged range by range.

In: lanes, the last axis of a node. Out: any range of the sorted lane. While runs are written, every so many-th element
of each is kept. They say, for a range of ranks, between which positions of every run its ends lie, nearly; the few
elements in doubt are read, and then the positions are exact. So ranges are independent: several are merged at once, and
a save that was interrupted goes on with those that are missing. Equal elements stay in the order they came.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from typing import Any

import numpy as np

from outsize.array.graph.barrier import Barrier
from outsize.array.graph.frame import Frame, phantom
from outsize.array.graph.node import Node, Range
from outsize.array.graph.rearrange import make_affine
from outsize.array.store.base import Block, Region, Store, region_shape, round_up
from outsize.array.tuning import current
from outsize.engine.pool import make_buffer

_ROUND = 4096
"""Elements: long runs are whole multiples of this, so that they begin on pages."""
_AT_WORK = 2
"""Lanes whose runs are told apart at a time."""


def pair(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """An element and a whole number that goes with it."""
    return np.dtype([("value", dtype), ("index", np.int64)])


def _packed(block: Block, dtype: np.dtype[Any]) -> bool:
    """True where lanes of this dtype can be sorted in the block itself."""
    return block.dtype == dtype and block.strides[-1] == dtype.itemsize


class Runs(Barrier):
    """Lanes cut into runs, each sorted; with whole numbers beside the elements where the dtype is a pair."""

    run: int
    """Elements of a run; the last is shorter."""

    called = "sorted runs"

    @property
    def step(self) -> int:
        """From one kept element of a run to the next."""
        return max(1, math.isqrt(self.run))

    @property
    def number(self) -> int:
        """Runs of a lane."""
        return -(-self.shape[-1] // self.run)

    def known(self) -> int:
        """Bytes of what tells runs apart: elements of all lanes, and their order in the lanes at work."""
        kept = self.number * (self.run // self.step + 1)
        return kept * (math.prod(self.shape[:-1]) * self.inputs[0].dtype.itemsize + 36 * _AT_WORK)

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        child = self.inputs[0]
        result = frame.array(region_shape(region), self.dtype) if out is None else out
        block = result if _packed(result, child.dtype) else frame.array(region_shape(region), child.dtype)
        frame.fill(block, child, region)
        size = math.prod(region_shape(region))
        frame.reserve(self.known() + (size * (16 + child.dtype.itemsize) if self.dtype.names else 0) + 4096)
        beside = [frame.evaluate(other, region) for other in self.inputs[1:]]
        if frame.dry:
            return result
        if self.dtype.names:
            order = np.argsort(block, axis=-1, kind="stable")
            result["value"] = np.take_along_axis(block, order, -1)
            result["index"] = np.take_along_axis(beside[0], order, -1)
        else:
            block.sort(axis=-1)
            if block is not result:
                result[...] = block
        return result


class Merged(Barrier):
    """The runs of each lane as one."""

    greedy = True

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        runs = self.inputs[0]
        assert isinstance(runs, Runs)
        store = frame.bindings[runs]
        (start, stop), shape = region[-1], region_shape(region)
        result = frame.array(shape, self.dtype) if out is None else out
        packed = _packed(result, runs.dtype)
        block = result if packed else frame.array((stop - start,), runs.dtype)
        frame.reserve(self._outside(stop - start))
        if frame.dry:
            self._measure(store, runs, region, frame)
            return phantom(shape, self.dtype)
        index = index_of(store, runs)
        for lane in itertools.product(*(range(*span) for span in region[:-1])):
            position = 0
            place = tuple(at - span[0] for at, span in zip(lane, region[:-1], strict=True))
            block = result[place] if packed else block
            whole = tuple((place, place + 1) for place in lane)
            for number, (low, high) in enumerate(zip(index.split(lane, start), index.split(lane, stop), strict=True)):
                if low < high:
                    mark, base = frame.mark(), number * runs.run
                    part = frame.read(store, (*whole, (base + int(low), base + int(high))))
                    block[position : position + int(high - low)] = part.reshape(-1)
                    frame.release(mark)
                    position += int(high - low)
            if runs.dtype.names:
                result[place] = block["index"][np.argsort(block["value"], kind="stable")]
            else:
                block.sort()
                if not packed:
                    result[place] = block
        return result

    def _outside(self, length: int) -> int:
        """Temporaries: sorting the range, and the elements in doubt at its ends."""
        runs = self.inputs[0]
        assert isinstance(runs, Runs)
        item = runs.inputs[0].dtype.itemsize
        doubt = min(runs.shape[-1], 3 * runs.number * runs.step)
        lanes = (length * (2 * item + 24) if runs.dtype.names else 0) + doubt * (3 * item + 40)
        return runs.known() + lanes + runs.number * 64 + 16384

    def _measure(self, store: Store, runs: Runs, region: Region, frame: Frame) -> None:
        """What reading a range of every run would take: a share of each, or all of one."""
        length = region[-1][1] - region[-1][0]
        single = tuple((start, start + 1) for start, _ in region[:-1])
        if store.resident or not length:
            return
        mark = frame.mark()
        frame.bytes(store.most((*single, (0, length))) + 8192)
        frame.release(mark)
        share = max(1, length // runs.number)
        parts = [(number * runs.run, number * runs.run + share) for number in range(-(-length // share))]
        with frame.repeated(math.prod(region_shape(region)[:-1])):
            for low, high in parts:
                if low < runs.shape[-1]:
                    frame.count_read(store, (*single, (low, min(runs.shape[-1], high))))

    def label(self) -> str:
        return "sort" if self.dtype == self.inputs[0].dtype else "argsort"


class Index:
    """What is known of the runs in a store: every so many-th element, and where ranges were found to begin."""

    def __init__(self, store: Store, runs: Runs) -> None:
        self._store = weakref.ref(store)
        self.run, self.step, self.number, self.shape = runs.run, runs.step, runs.number, runs.shape
        self._kept: dict[tuple[tuple[int, ...], int], Block] = {}
        self._lanes: dict[tuple[int, ...], tuple[Block, Block, Block, Block]] = {}
        self._splits: dict[tuple[tuple[int, ...], int], Block] = {}
        self._lock = threading.Lock()

    def keep(self, tile: Region, kept: Block) -> None:
        """Elements of a run that was just sorted."""
        self._kept[tuple(start for start, _ in tile[:-1]), tile[-1][0] // self.run] = kept

    def take_all(self) -> dict[tuple[tuple[int, ...], int], Block]:
        """The elements that were kept, which go: another process keeps them."""
        found, self._kept = self._kept, {}
        return found

    def keep_all(self, kept: dict[tuple[tuple[int, ...], int], Block]) -> None:
        """Elements that other processes have kept."""
        self._kept.update(kept)

    def split(self, lane: tuple[int, ...], rank: int) -> Block:
        """How many elements of each run are among the first `rank` of the lane."""
        with self._lock:
            found = self._splits.get((lane, rank))
            if found is None:
                found = self._splits[lane, rank] = self._find(lane, rank)
            return found

    def _find(self, lane: tuple[int, ...], rank: int) -> Block:
        number, least, most, lengths = self._of(lane)
        low = int(np.searchsorted(most, rank, side="right")) - 1
        high = int(np.searchsorted(least, rank, side="left"))
        before = np.bincount(number[:low], minlength=self.number)
        after = np.bincount(number[:high], minlength=self.number)
        start = np.maximum(0, (before - 1) * self.step + 1)
        stop = np.minimum(after * self.step, lengths)
        doubt = [self._read(lane, r, int(start[r]), int(stop[r])) for r in range(self.number)]
        wanted = rank - int(start.sum())
        if not wanted:
            return start
        last = np.partition(np.concatenate(doubt), wanted - 1)[wanted - 1]
        below = np.array([np.searchsorted(part, last) for part in doubt])
        equal = np.array([np.searchsorted(part, last, side="right") for part in doubt]) - below
        earlier = np.cumsum(equal) - equal  # equal elements count in the order of their runs
        found: Block = start + below + np.clip(wanted - int(below.sum()) - earlier, 0, equal)
        return found

    def _of(self, lane: tuple[int, ...]) -> tuple[Block, Block, Block, Block]:
        """The kept elements of a lane in order: whose they are, and at least and at most how many elements come before
        each; and the lengths of the runs."""
        if lane not in self._lanes:
            while len(self._lanes) >= _AT_WORK:
                del self._lanes[next(iter(self._lanes))]
            lengths = np.minimum(self.run, self.shape[-1] - np.arange(self.number) * self.run)
            parts = [self._kept.get((lane, r)) for r in range(self.number)]
            kept = [
                self._read(lane, r, 0, int(lengths[r]))[:: self.step] if part is None else part
                for r, part in enumerate(parts)
            ]
            order = np.argsort(np.concatenate(kept), kind="stable")
            number = np.repeat(np.arange(self.number), [len(part) for part in kept])[order]
            place = np.concatenate([np.arange(len(part)) for part in kept])[order]
            least = np.cumsum(np.concatenate([[0], np.where(place == 0, 1, self.step)]))
            most = np.cumsum(np.concatenate([[0], np.minimum(self.step, lengths[number] - place * self.step)]))
            self._lanes[lane] = number, least, most, lengths
        return self._lanes[lane]

    def _read(self, lane: tuple[int, ...], number: int, start: int, stop: int) -> Block:
        """The values of a part of a run."""
        store = self._store()
        assert store is not None
        base = number * self.run
        region = (*((at, at + 1) for at in lane), (base + start, base + stop))
        block = store.read(region, make_buffer(store.extent(region))) if start < stop else np.empty(0, store.dtype)
        values: Block = (block["value"] if store.dtype.names else block).reshape(-1)
        return values if store.resident else values.copy()


_INDEXES: weakref.WeakKeyDictionary[Store, Index] = weakref.WeakKeyDictionary()
_MAKING = threading.Lock()


def index_of(store: Store, runs: Runs) -> Index:
    """The index of a store of runs; it goes with the store."""
    with _MAKING:
        found = _INDEXES.get(store)
        if found is None:
            found = _INDEXES[store] = Index(store, runs)
        return found


def sort_lanes(node: Node, *, carried: Node | None = None) -> Node:
    """Lanes along the last axis, sorted; or whole numbers that were beside their elements, in the order that sorts
    them."""
    dtype = node.dtype if carried is None else pair(node.dtype)
    length, size = node.shape[-1], dtype.itemsize
    run = max(1, math.isqrt(length * size * current().sort_grain) // size)
    run = min(length, round_up(run, _ROUND) if run > 4 * _ROUND else run)
    inputs = (node,) if carried is None else (node, carried)
    runs = Runs(shape=node.shape, dtype=dtype, inputs=inputs, run=run)
    return Merged(shape=node.shape, dtype=dtype if carried is None else np.dtype(np.int64), inputs=(runs,))


def places(shape: tuple[int, ...]) -> Node:
    """Indices along the last axis."""
    ranges = Range(shape=shape[-1:], dtype=np.dtype(np.int64), start=0, step=1)
    return make_affine(ranges, shape, ((len(shape) - 1, 0, 1),))
