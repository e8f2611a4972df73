"""Moving elements without changing them: views, joins, repeats and picks.

`Affine` is every rearrangement that NumPy would call a view, composed into one node: transposition, slices with steps,
flips, single indices, new axes, broadcasting. The others assemble a region piece by piece into a block.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from outsize.array.graph.frame import Frame
from outsize.array.graph.node import Node, Shape, Source
from outsize.array.store.base import ALIGNMENT, Block, Region, region_shape
from outsize.array.store.formats.flat import FlatLayout, run_offset

_SPARSE = 1 << 16
"""Bytes: with steps further apart than this, rows are read one by one and what lies between is left out."""


class Affine(Node):
    """Output index -> input index, axis by axis."""

    axes: tuple[tuple[int | None, int, int], ...]
    """For each input axis (output axis or None, start, step): index = start + step * output index, or `start` alone."""

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        child = self.inputs[0]
        if math.prod(region_shape(region)) == 0:
            return np.empty(region_shape(region), self.dtype)
        axis = self._sparse_axis(region)
        if axis is not None:
            return self._gather(axis, region, frame, out)
        spans: list[tuple[int, int]] = []
        for target, start, step in self.axes:
            if target is None:
                spans.append((start, start + 1))
                continue
            low, high = region[target]
            first, last = start + step * low, start + step * (high - 1)
            spans.append((first, last + 1) if first <= last else (last, first + 1))
        picks, turned, lifted = self._turns
        view = frame.evaluate(child, tuple(spans))[picks]  # a view even of one element: it may not be there yet
        view = view if turned is None else view.transpose(turned)
        view = view if lifted is None else view[lifted]
        shape = region_shape(region)
        return view if view.shape == shape else np.broadcast_to(view, shape)

    @functools.cached_property
    def _turns(self) -> tuple[Any, list[int] | None, Any]:
        """(what is picked of a block of the input, the order of its axes where it changes, where axes are added)."""
        picks = (*(0 if to is None else slice(None, None, step or 1) for to, _, step in self.axes), ...)
        kept = [target for target, _, _ in self.axes if target is not None]
        turned = sorted(range(len(kept)), key=kept.__getitem__)
        lifted = (*(slice(None) if axis in kept else None for axis in range(self.ndim)), ...)
        return picks, None if turned == list(range(len(kept))) else turned, lifted if len(kept) < self.ndim else None

    def _sparse_axis(self, region: Region) -> int | None:
        """An output axis whose steps skip so much that its indices are better read one by one."""
        inner = self.dtype.itemsize
        for (target, _, step), length in zip(reversed(self.axes), reversed(self.inputs[0].shape), strict=True):
            if target is not None and abs(step) > 1 and abs(step) * inner > _SPARSE:
                return target if region[target][1] - region[target][0] > 1 else None
            inner *= length
        return None

    def _gather(self, axis: int, region: Region, frame: Frame, out: Block | None) -> Block:
        block = frame.array(region_shape(region), self.dtype) if out is None else out
        start, stop = region[axis]
        places = range(start, start + 1) if frame.dry else range(start, stop)
        with frame.repeated((stop - start) // len(places)):
            for place in places:
                part = (*region[:axis], (place, place + 1), *region[axis + 1 :])
                frame.fill(block[(slice(None),) * axis + (slice(place - start, place - start + 1),)], self, part)
        return block

    def label(self) -> str:
        order = [target for target, _, _ in self.axes if target is not None]
        return "transpose" if order != sorted(order) else "slice"


def only_reshapes(node: Affine) -> bool:
    """True where it only adds axes of length 1, or drops them."""
    kept = [target for target, _, _ in node.axes if target is not None]
    added = (n for axis, n in enumerate(node.shape) if axis not in kept)
    whole = all(
        n == 1 if target is None else (start, step, node.shape[target]) == (0, 1, n)
        for (target, start, step), n in zip(node.axes, node.inputs[0].shape, strict=True)
    )
    return whole and kept == sorted(kept) and all(n == 1 for n in added)


def base_of_turn(node: Node) -> Node | None:
    """The matrix that a node is the transpose of, if it is one."""
    if isinstance(node, Affine) and node.axes == ((1, 0, 1), (0, 0, 1)) and node.shape == node.inputs[0].shape[::-1]:
        return node.inputs[0]
    return None


def make_affine(node: Node, shape: Shape, axes: tuple[tuple[int | None, int, int], ...]) -> Node:
    """An affine node; one on top of another becomes one, and one that changes nothing disappears."""
    if isinstance(node, Affine):
        inner: list[tuple[int | None, int, int]] = []
        for target, start, step in node.axes:
            if target is None:
                inner.append((None, start, 0))
                continue
            above, above_start, above_step = axes[target]
            inner.append((above, start + step * above_start, step * above_step if above is not None else 0))
        return make_affine(node.inputs[0], shape, tuple(inner))
    identity = tuple((axis, 0, 1) for axis in range(len(shape)))
    if shape == node.shape and axes == identity:
        return node
    return Affine(shape=shape, dtype=node.dtype, inputs=(node,), axes=axes)


_LOOKED_AT = 64
"""Runs of which a plan looks at each one; of more, at every so many-th: a list of them all would be megabytes."""
_GAPS = 16
"""Elements of a whole row for each one that is wanted, at most: a plan holds them all."""


class Reshape(Node):
    """The same elements in C order under another shape."""

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        wide = self._widened(region)
        if wide != region:
            block = frame.evaluate(self, wide)
            return block[tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(region, wide, strict=True))]
        shape = region_shape(region)
        before, after = self._alike()
        straight = out is not None and out.dtype == self.dtype and runs_on(out, before, len(shape) - after)
        block = out if out is not None and straight else frame.array(shape, self.dtype)
        if 0 in self.shape:  # a plan asks for one element at least
            return block
        child = self.inputs[0]
        lead, middle, tail = region[:before], region[before : len(region) - after], region[len(region) - after :]
        inner = child.shape[before : child.ndim - after]
        flat = block.reshape((*shape[:before], -1, *shape[len(shape) - after :]))

        def part(box: Region, position: int) -> tuple[Region, Block]:
            """(a box of the child, its place in the block)."""
            whole = (*lead, *box, *tail)
            place = (slice(None),) * before + (slice(position, position + math.prod(region_shape(box))),)
            return whole, flat[place].reshape(region_shape(whole))

        runs = FlatLayout(self.shape[before : len(shape) - after], np.dtype(np.uint8), 0).runs(middle)
        number = runs.number if runs.length else 0
        every = max(1, number // _LOOKED_AT) if frame.dry else 1
        for run in range(0, number, every):
            start, position = run_offset(runs, run), run * runs.length
            with frame.repeated(min(every, number - run)):
                for box in _boxes(inner, start, start + runs.length):
                    whole, place = part(box, position)
                    frame.fill(place, child, whole)
                    position += math.prod(region_shape(box))
        if frame.dry and block.size:
            row, size = math.prod(inner[1:]), math.prod(region_shape(middle))
            for length in {size // row * row or size, runs.length}:
                for box in _boxes(inner, 0, min(math.prod(inner), length)):
                    frame.suppose(child, *part(box, 0))
        return block

    def _widened(self, region: Region) -> Region:
        """The region with short rows made whole, where it wants a fair part of them: crumbs cost more than the gaps."""
        before, after = self._alike()
        end = len(region) - after
        size, more = self.dtype.itemsize * math.prod(region_shape(region[end:])), 1.0
        wide = list(region)
        for axis in reversed(range(before + 1, end)):
            low, high = region[axis]
            size *= self.shape[axis]
            more *= self.shape[axis] / max(1, high - low)
            if size > ALIGNMENT or more > _GAPS:
                break
            wide[axis] = (0, self.shape[axis])
        return tuple(wide)

    def _alike(self) -> tuple[int, int]:
        """How many leading and trailing axes stay as they are: a part of them is the same part of the child."""
        theirs = self.inputs[0].shape
        pairs = list(zip(self.shape, theirs, strict=False))
        before = next((place for place, (own, other) in enumerate(pairs) if own != other), len(pairs))
        rest = list(zip(reversed(self.shape[before:]), reversed(theirs[before:]), strict=False))
        return before, next((place for place, (own, other) in enumerate(rest) if own != other), len(rest))


def runs_on(block: Block, first: int, end: int) -> bool:
    """True where these axes of a block are one long axis as they lie."""
    axes = [axis for axis in range(first, end) if block.shape[axis] > 1]
    return all(block.strides[a] == block.strides[b] * block.shape[b] for a, b in itertools.pairwise(axes))


def _boxes(shape: Shape, start: int, stop: int) -> list[Region]:
    """Boxes that cover the flat range [start, stop) of a C-ordered shape, in order, each contiguous."""
    if not shape:
        return [()]
    row = math.prod(shape[1:])
    if len(shape) == 1:
        return [((start, stop),)]
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        return [
            ((first - 1, first), *box) for box in _boxes(shape[1:], start - (first - 1) * row, stop - (first - 1) * row)
        ]
    boxes: list[Region] = []
    if start < first * row:
        boxes += [((first - 1, first), *box) for box in _boxes(shape[1:], start - (first - 1) * row, row)]
    if first < last:
        boxes.append(((first, last), *((0, length) for length in shape[1:])))
    if last * row < stop:
        boxes += [((last, last + 1), *box) for box in _boxes(shape[1:], 0, stop - last * row)]
    return boxes


class Concat(Node):
    """Arrays one after another along an axis."""

    axis: int

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        alone = None if out is not None or frame.dry else self._alone(region, frame)
        if alone is not None:  # a view takes less than the block that a dry run has counted
            return frame.evaluate(*alone)
        block = frame.array(region_shape(region), self.dtype) if out is None else out
        start, stop = region[self.axis]
        begin = 0
        for child in self.inputs:
            end = begin + child.shape[self.axis]
            low, high = max(start, begin), min(stop, end)
            if low < high:
                part = (*region[: self.axis], (low - begin, high - begin), *region[self.axis + 1 :])
                frame.fill(block[(slice(None),) * self.axis + (slice(low - start, high - start),)], child, part)
            begin = end
        for child in self._kinds(frame) if frame.dry else ():
            length = min(stop - start, child.shape[self.axis])
            part = (*region[: self.axis], (0, length), *region[self.axis + 1 :])
            frame.suppose(child, part, block[(slice(None),) * self.axis + (slice(0, length),)])
        return block

    def _alone(self, region: Region, frame: Frame) -> tuple[Node, Region] | None:
        """The only part that a region touches, and where in it, if that part lies in memory."""
        start, stop = region[self.axis]
        begin = 0
        for child in self.inputs:
            end = begin + child.shape[self.axis]
            if begin <= start and stop <= end:
                store = frame.bindings.get(child) or (child.store if isinstance(child, Source) else None)
                if store is None or not store.resident:
                    return None
                return child, (*region[: self.axis], (start - begin, stop - begin), *region[self.axis + 1 :])
            begin = end
        return None

    def _kinds(self, frame: Frame) -> list[Node]:
        """The inputs that may differ in the memory they take: of sources alike, the longest."""
        found: dict[Any, Node] = {}
        for child in sorted(self.inputs, key=lambda node: node.shape[self.axis]):
            key: Any = id(child)
            if isinstance(child, Source) and child not in frame.bindings:
                key = (type(child.store), child.store.order, child.dtype)
            found[key] = child
        return list(found.values())


class Wrap(Node):
    """An array repeated end to end along an axis: index -> (index + shift) modulo its length."""

    axis: int
    shift: int = 0
    """Where the first copy begins; a roll is one copy with a shift."""

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        block = frame.array(region_shape(region), self.dtype) if out is None else out
        length = self.inputs[0].shape[self.axis]
        if not length:  # a plan asks for one element at least
            return block
        start, stop = region[self.axis]
        place = start
        while place < stop:
            low = (place + self.shift) % length
            high = min(length, low + stop - place)
            part = (*region[: self.axis], (low, high), *region[self.axis + 1 :])
            view = block[(slice(None),) * self.axis + (slice(place - start, place - start + high - low),)]
            frame.fill(view, self.inputs[0], part)
            place += high - low
        span = (0, min(length, stop - start))
        part = (*region[: self.axis], span, *region[self.axis + 1 :])
        frame.suppose(self.inputs[0], part, block[(slice(None),) * self.axis + (slice(*span),)])
        return block


class Take(Node):
    """Chosen indices along an axis, in any order. The second input is the indices, one-dimensional; negative ones count from
    the end.

    The indices of a region are sorted, those that lie close together are read at once, and each row goes to its place.
    """

    axis: int
    low: int
    """The smallest index, from 0 on."""
    high: int
    rising: bool
    """True where the indices are sorted: then a part of them lies in a part of the axis."""

    greedy = True

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        block = frame.array(region_shape(region), self.dtype) if out is None else out
        if block.size == 0:
            return block
        child, chosen = self.inputs
        span, lead = region[self.axis], (slice(None),) * self.axis
        rows, gap = self._reach(region, frame)
        mark = frame.mark()
        wanted = frame.evaluate(chosen, (span,))
        frame.reserve(64 * (span[1] - span[0]) + 2 * block.nbytes + 4096)
        if frame.dry:
            self._measure(region, rows, gap, frame)
            frame.release(mark)
            return block
        places = np.where(wanted < 0, wanted + child.shape[self.axis], wanted).astype(np.int64, copy=False)
        order = None if self.rising else np.argsort(places, kind="stable")
        places = places if order is None else places[order]
        for low, high, part in _close(places, rows, gap):
            inner = frame.mark()
            found = frame.evaluate(child, (*region[: self.axis], (low, high), *region[self.axis + 1 :]))
            target: Any = part if order is None else order[part]
            block[(*lead, target)] = np.take(found, places[part] - low, axis=self.axis)
            frame.release(inner)
        frame.release(mark)
        return block

    def _reach(self, region: Region, frame: Frame) -> tuple[int, int]:
        """(rows of the axis that are read at once, at most; rows between two wanted ones that are read with them)."""
        child = self.inputs[0]
        shape = region_shape(region)
        row = max(1, math.prod(shape) // shape[self.axis] * self.dtype.itemsize)
        store = frame.bindings.get(child) or (child.store if isinstance(child, Source) else None)
        grain = 1 if store is None else max(1, store.granule[self.axis])
        grain = grain if grain * row <= _PIECE else 1
        most = max(ALIGNMENT, min(_PIECE, 4 * row * shape[self.axis]))
        return max(1, most // row // grain) * grain, max(grain, _SPARSE // row)

    def _measure(self, region: Region, rows: int, gap: int, frame: Frame) -> None:
        """What is read, told as one long read: all between the first and the last, or a page for each where they lie apart."""
        child, number = self.inputs[0], region_shape(region)[self.axis]
        rows = min(rows, child.shape[self.axis])
        spread = self.high - self.low + 1
        if self.rising:
            spread = max(1, spread * number // self.shape[self.axis])
        if spread > number * gap:
            spread = number * max(1, ALIGNMENT * gap // _SPARSE)
        trial = Frame(None, frame.bindings)
        trial.evaluate(child, (*region[: self.axis], (0, spread), *region[self.axis + 1 :]))
        frame.reads.update(trial.reads)
        frame.suppose(child, (*region[: self.axis], (0, rows), *region[self.axis + 1 :]), None)


_PIECE = 1 << 20
"""Bytes of rows that are read at once for the wanted ones among them."""


def _close(places: Block, rows: int, gap: int) -> Iterator[tuple[int, int, slice]]:
    """(first row, end, which of the sorted places): reads that cover all places, of at most so many rows."""
    cuts = np.flatnonzero(np.diff(places) > gap)
    start = 0
    for number in range(cuts.size + 1):
        stop = int(cuts[number]) + 1 if number < cuts.size else places.size
        while start < stop:
            low = int(places[start])
            end = start + int(np.searchsorted(places[start:stop], low + rows))
            yield low, int(places[end - 1]) + 1, slice(start, end)
            start = end
