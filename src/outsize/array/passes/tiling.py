"""Grids of boxes, and which box is best: the one that moves data in the longest runs the budget allows.

In: a shape, what a box costs in seconds of disk time, what it holds in bytes. Out: a box. The box grows from the
smallest by doubling whichever axis saves most; it stops when nothing more is saved or nothing more fits. So a row-wise
file gets blocks of rows, a transposition gets tiles that are long both ways, and a matrix product a nearly square C:
nobody told it so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from outsize.array.store.base import Region, Sink, Store, region_shape
from outsize.array.tuning import Tuning

Box = tuple[int, ...]

_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Grid:
    """A shape cut into boxes."""

    shape: tuple[int, ...]
    box: Box
    """Lengths of a box; boxes at the end are shorter."""

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(-(-length // step) if length else 0 for length, step in zip(self.shape, self.box, strict=True))

    def __len__(self) -> int:
        return math.prod(self.counts)

    def region(self, index: tuple[int, ...]) -> Region:
        """The box at an index."""
        return tuple(
            (i * step, min(length, (i + 1) * step)) for i, step, length in zip(index, self.box, self.shape, strict=True)
        )

    def at(self, number: int) -> Region:
        """The box of this number, in order."""
        index = []
        for count in reversed(self.counts):
            number, place = divmod(number, count)
            index.append(place)
        return self.region(tuple(reversed(index)))

    def __iter__(self) -> Iterator[Region]:
        return map(self.at, range(len(self)))  # not itertools.product, which holds every axis as a tuple

    def kinds(self) -> Iterator[tuple[Region, int]]:
        """One box of each kind (first, inner, last along each axis) and how many there are of it."""
        axes = []
        for length, step, count in zip(self.shape, self.box, self.counts, strict=True):
            rows = [((0, min(length, step)), 1)] if count else []
            if count > 2:
                rows.append(((step, 2 * step), count - 2))
            if count > 1:
                rows.append((((count - 1) * step, length), 1))
            axes.append(rows)
        for combination in itertools.product(*axes):
            yield tuple([span for span, _ in combination]), math.prod([number for _, number in combination])


def inner_grid(outer: Region, box: Box) -> Iterator[Region]:
    for region in Grid(region_shape(outer), box):
        yield tuple((a + start, b + start) for (a, b), (start, _) in zip(region, outer, strict=True))


def page_box(shape: tuple[int, ...], box: Box, order: tuple[int, ...] | None, itemsize: int) -> Box:
    """A box made longer along the fastest axes to a page of bytes: the least that is worth a transfer."""
    longer = list(box)
    for axis in reversed(order or range(len(shape))):
        size = math.prod(longer) * itemsize
        if size >= _PAGE:
            break
        longer[axis] = max(longer[axis], min(shape[axis], longer[axis] * -(-_PAGE // size)))
    return tuple(longer)


def center(shape: tuple[int, ...], box: Box) -> Region:
    """A box away from the edges, as most are."""
    spans = []
    for length, step in zip(shape, box, strict=True):
        start = (length - step) // 2 // max(step, 1) * step
        spans.append((start, min(length, start + step)))
    return tuple(spans)


def read_seconds(reads: Mapping[tuple[Store, Region], int], tuning: Tuning, transfer: float | None = None) -> float:
    """Disk time of some reads."""
    each = tuning.transfer if transfer is None else transfer
    return sum(
        times * (store.traffic(region) / tuning.disk_rate + store.seeks(region) * each)
        for (store, region), times in reads.items()
    )


def write_seconds(sink: Sink, region: Region, tuning: Tuning) -> float:
    """Disk time of a write."""
    bytes_ = sink.traffic(region)
    return bytes_ / tuning.disk_rate + (sink.seeks(region) * tuning.transfer if bytes_ else 0)


def grow(
    shape: tuple[int, ...], smallest: Box, seconds: Callable[[Box], float], fits: Callable[[Box], bool],
    size: Callable[[Box], int], tuning: Tuning, most: int | None = None,
) -> tuple[Box, bool]:  # fmt: skip
    """(the best box, whether it stopped for want of memory). `seconds` is what a box costs, `size` its bytes."""
    if not shape:
        return (), False
    box = tuple(min(step, length) if length else step for step, length in zip(smallest, shape, strict=True))
    cost = seconds(box) / max(math.prod(box), 1)
    last = 0
    while True:
        options = []
        starved = False
        for axis, length in enumerate(shape):
            if box[axis] >= length:
                continue
            step = min(length, box[axis] * 2)
            larger = (*box[:axis], step, *box[axis + 1 :])
            if most is not None and size(larger) > most:
                continue
            if not fits(larger):
                starved = True
                continue
            options.append((seconds(larger) / math.prod(larger), axis, larger))
        if not options:
            return (_stretch(box, last, shape[last], fits) if starved else box), starved
        best = min(options, key=lambda option: (option[0], -option[1]))
        if best[0] > cost * tuning.worth_it and size(best[2]) > tuning.least_box:
            return box, False
        cost, last, box = best


def _stretch(box: Box, axis: int, length: int, fits: Callable[[Box], bool]) -> Box:
    """The last doubled axis as far as memory goes: a full buffer is a whole number of the disk's largest transfers."""
    low, high = box[axis], min(length, 2 * box[axis])
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        if fits((*box[:axis], middle, *box[axis + 1 :])):
            low = middle
        else:
            high = middle
    return (*box[:axis], low, *box[axis + 1 :])


def balance(shape: tuple[int, ...], box: Box, granule: Box) -> Box:
    """The same number of boxes along each axis, of equal lengths (in whole granules), so that none is a sliver."""
    result = []
    for length, step, grain in zip(shape, box, granule, strict=True):
        if length == 0 or step >= length:
            result.append(max(length, 1))
            continue
        even, grain = -(-length // -(-length // step)), max(grain, 1)
        result.append(min(-(-even // grain) * grain, step))
    return tuple(result)
