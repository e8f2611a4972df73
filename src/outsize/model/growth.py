"""How a step grows with its batch, and the largest batch that fits.

In: a function that replays the step for a given batch. Out: a line through two sizes, checked against a third; the largest batch
per common card from that line; and, where a capacity was given, the largest one that was itself traced and fits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from outsize.allocator import replay
from outsize.core.allocation import AllocationEvent
from outsize.core.cards import CARDS, Card
from outsize.core.footprint import Footprint, Growth, Largest
from outsize.core.noun import Known
from outsize.model.course import Course

Play = Callable[[int], Course]

SAFETY = 0.99
"""Part of a capacity that the likely replay may take: what real runs of one program differ by is mostly below 1 % here."""


def add(footprint: Footprint, batch: int, play: Play, capacity: int | None, card: Card | None) -> Footprint:
    """The footprint with its growth and the largest batches."""
    smaller, larger = max(1, batch // 2), batch * 2
    sizes = sorted({smaller, larger})
    reserved = {size: play(size).likely.peak.reserved for size in sizes}
    reserved[batch] = footprint.peak_reserved.bytes
    each = max(1, (reserved[larger] - reserved[smaller]) // (larger - smaller))
    fixed = reserved[smaller] - each * smaller
    error = abs(fixed + each * batch - reserved[batch]) / max(1, reserved[batch])
    growth = Growth(size="batch", traced=tuple(sorted(reserved.items())), fixed=fixed, each=each, error=error)
    rows = [
        Largest(
            place=known.name,
            capacity=known.usable,
            size="batch",
            largest=max(0, (known.usable - fixed) // each),
            next_needs=None,
            known=Known.ESTIMATE,
        )
        for known in CARDS
        if known.common
    ]
    if capacity is not None:
        place = "the budget" if card is None else card.name
        rows.insert(0, search(place, capacity, play, max(1, (capacity - fixed) // each)))
    return dataclasses.replace(footprint, growth=(growth,), largest=tuple(rows))


def search(place: str, capacity: int, play: Play, guess: int, unit: int = 1) -> Largest:
    """The largest batch, a multiple of `unit`, whose own trace fits; `guess` is where to look first."""
    low, high = 0, None
    needs: int | None = None
    size = max(unit, guess // unit * unit)
    while high is None or high - low > unit:
        course = play(size)
        if fits(course, capacity):
            low = size
            size = size + max(unit, size // 16 // unit * unit) if high is None else _middle(low, high, unit)
        else:
            high, needs = size, course.likely.peak.reserved
            near = max(unit, size - max(unit, size // 16 // unit * unit))
            size = near if low == 0 and near > low else _middle(low, high, unit)
            if size <= low:
                break
    return Largest(place=place, capacity=capacity, size="batch", largest=low, next_needs=needs, known=Known.BOUND)


def _middle(low: int, high: int, unit: int) -> int:
    return max(unit, (low + (high - low) // 2) // unit * unit)


def fits(course: Course, capacity: int) -> bool:
    """True where the allocator, which gives back what it does not need before it fails, gets through."""
    return _through(course, int(capacity * SAFETY), most=False)


def verdict(course: Course, capacity: int, margin: float) -> bool | None:
    """True where even the bound gets through, False where the likely course does not, None in between."""
    if _through(course, int(capacity / (1 + margin)), most=True):
        return True
    return None if _through(course, capacity, most=False) else False


def _through(course: Course, capacity: int, most: bool) -> bool:
    sizes = [(alloc, held.id, held.most if most else held.bytes) for alloc, held in course.events]
    events = [AllocationEvent(i, alloc, id, size) for i, (alloc, id, size) in enumerate(sizes) if size]
    return replay(events, allocator="cuda", capacity=capacity).out_of_memory is None
