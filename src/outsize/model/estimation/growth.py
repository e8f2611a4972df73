"""How a step grows with its batch and its sequence, and the largest batch that fits.

In: a function that replays the step for given sizes. Out: a line through two traces, checked against a third; where that one is
off the line, a parabola through the three where it is nearer to a fourth (attention that is written out grows with the square
of the sequence); the largest batch per common card from that; and, where a capacity was given, the largest one that was itself
traced and fits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from outsize.core.cards import CARDS
from outsize.core.footprint import Growth, Largest
from outsize.core.noun import Known
from outsize.model.estimation.pressure import gets_through
from outsize.model.estimation.replayed_steps import Course

Play = Callable[[int], Course]

SAFETY = (0.99, 1.0)
"""Parts of a capacity that the likely replay has to get through, all of them: where blocks fall changes by leaps, so that a run
may get through with a little less and fail with all of it."""

STEPS = 2
"""Steps that are traced to see how the peak grows: the second one has gradients, states and activations together."""

STRAIGHT = 0.05
"""How far the third trace may be from the line through the other two."""


def fit(name: str, play: Play, at: int, peak: int) -> Growth:
    """How the reserved peak grows with a size that is `at` now, where it is `peak`."""
    smaller, larger = max(1, at // 2), at * 2
    reserved = {size: play(size).likely.peak.reserved for size in (smaller, larger) if size != at}
    reserved[at] = peak
    each = max(1, (reserved[larger] - reserved[smaller]) // (larger - smaller))
    line = Growth(size=name, traced=(), fixed=reserved[smaller] - each * smaller, each=each, error=0.0)
    error = _error(line, at, peak)
    if error > STRAIGHT and at >= 4:
        curve = _parabola(name, [(size, reserved[size]) for size in (smaller, at, larger)])
        between = at + at // 2
        reserved[between] = play(between).likely.peak.reserved
        off = _error(curve, between, reserved[between])
        if off < _error(line, between, reserved[between]):
            line, error = curve, off
    return dataclasses.replace(line, traced=tuple(sorted(reserved.items())), error=error)


def _error(growth: Growth, size: int, peak: int) -> float:
    return abs(growth.at(size) - peak) / max(1, peak)


def _parabola(name: str, points: list[tuple[int, int]]) -> Growth:
    """The parabola through three points, in whole bytes."""
    (a, x), (b, y), (c, z) = points
    square = ((z - y) / (c - b) - (y - x) / (b - a)) / (c - a)
    each = (y - x) / (b - a) - square * (a + b)
    return Growth(
        size=name, traced=(), fixed=round(x - each * a - square * a * a), each=round(each), square=square, error=0.0
    )


class Place(NamedTuple):
    """Where a step should fit."""

    name: str
    capacity: int


def largest(growth: Growth, place: Place | None, play: Play) -> tuple[Largest, ...]:
    """The largest batch in the place that was asked about, by tracing, and on each common card, by the fitted growth."""
    rows = [
        Largest(
            place=known.name, capacity=known.usable, size="batch", largest=_last(growth, known.usable), next_needs=None,
            known=Known.ESTIMATE,
        )
        for known in CARDS
        if known.common
    ]  # fmt: skip
    if place is not None:
        rows.insert(0, search(place.name, place.capacity, play, max(1, _last(growth, place.capacity))))
    return tuple(rows)


def _last(growth: Growth, capacity: int) -> int:
    """The largest size whose projected peak is inside the capacity."""
    if growth.at(1) > capacity:
        return 0
    low, high = 1, 2
    while growth.at(high) <= capacity and high < 2**40:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if growth.at(middle) <= capacity else (low, middle)
    return low


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
    return all(gets_through(course.events, int(capacity * part), most=False) for part in SAFETY)


def verdict(course: Course, capacity: int, margin: float) -> bool | None:
    """True where even the bound gets through, False where the likely course does not, None in between."""
    if gets_through(course.events, int(capacity / (1 + margin)), most=True):
        return True
    return None if gets_through(course.events, capacity, most=False) else False
