"""How a step grows with its batch and its sequence, and the largest batch that fits.

In: a function that replays the step for given sizes. Out: how the peak grows, and the largest batch per common card.
Growth is a line through two traces, checked against a third. If the third is off the line, a parabola through the
three is used if it is nearer to a fourth trace. (Attention that stores its matrix grows with the square of the
sequence.) If a capacity is given, the largest batch is found by tracing.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from outsize.core.cards import CARDS, Card
from outsize.core.errors import InputError
from outsize.core.footprint import Footprint, Growth, Largest
from outsize.core.noun import Known
from outsize.core.units import MiB
from outsize.model.estimation.pressure import gets_through
from outsize.model.estimation.replayed_steps import ReplayedSteps

Played = ReplayedSteps | int
"""A replay, or the bytes that have to fit where those are all that is known."""
Play = Callable[[int], Played]

SAFETY = (0.99, 1.0)
"""Parts of the capacity. The likely replay must fit into each of them: memory jumps with the addresses of blocks. A
run may fit into a little less than the capacity and fail with all of it."""

STEPS = 2
"""Steps that are traced to see how the peak grows: the second one has gradients, states and activations together."""

SEEN, FURTHER = 128 * MiB, 8
"""Bytes by which the peak must have grown before a line is drawn, and how many times larger the next trace is until then:
an allocator's segments of 20 MiB hide what small tensors add."""

STRAIGHT = 0.05
"""How far the third trace may be from the line through the other two."""


def fit(name: str, play: Play, at: int, peak: int) -> Growth | None:
    """How the reserved peak grows with a size that is `at` now, where it is `peak`; None where no other size is accepted."""
    below = _first_accepted(play, [size for size in (at // 2, at // 2 + 1, at - 2) if 0 < size < at])
    above = _first_accepted(play, [2 * at, at + 2, at + 1])
    reserved = {size: _reserved(played) for size, played in (*below, *above)} | {at: peak}
    if len(reserved) == 1:
        return None
    while max(reserved.values()) - min(reserved.values()) < SEEN and max(reserved) < MOST:
        further = _first_accepted(play, [FURTHER * max(reserved)])
        if not further:
            break
        reserved |= {size: _reserved(played) for size, played in further}
    smaller, larger = min(reserved), max(reserved)
    each = max(1, (reserved[larger] - reserved[smaller]) // (larger - smaller))
    line = Growth(size=name, traced=(), fixed=reserved[smaller] - each * smaller, each=each, error=0.0)
    error = _error(line, at, peak)
    if error > STRAIGHT and at >= 4:
        curve = _parabola(name, [(size, reserved[size]) for size in (smaller, at, larger)])
        for between, played in _first_accepted(play, [at + at // 2, at + at // 4]):
            reserved[between] = _reserved(played)
            off = _error(curve, between, reserved[between])
            if off < _error(line, between, reserved[between]):
                line, error = curve, off
    return dataclasses.replace(line, traced=tuple(sorted(reserved.items())), error=error)


def _reserved(played: Played) -> int:
    return played if isinstance(played, int) else played.likely.peak.reserved


def _first_accepted(play: Play, sizes: list[int]) -> list[tuple[int, Played]]:
    """The first of some sizes that the user's code accepts, with its replay; empty if it rejects all."""
    for size in sizes:
        try:
            return [(size, play(size))]
        except InputError:
            continue
    return []


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
    name: str
    capacity: int


MOST = 2**20
"""The largest batch that is reported. If a step hardly grows, its line means nothing beyond this."""


def largest(
    growth: Growth, place: Place | None, play: Play, room: Callable[[Card], int] = lambda card: card.usable
) -> tuple[Largest, ...]:
    """The largest batch in the place that the user named, by tracing, and on each other common card, by the fitted growth.
    `room`: bytes of a card that a step may use."""
    rows = [
        Largest(
            place=known.name, capacity=room(known), size="batch", largest=_last(growth, room(known)), next_needs=None,
            known=Known.ESTIMATE,
        )
        for known in CARDS
        if known.common and (place is None or place.name != known.name)
    ]  # fmt: skip
    if place is not None:
        rows.insert(0, search(place.name, place.capacity, play, max(1, _last(growth, place.capacity))))
    return tuple(rows)


def with_growth(
    found: Footprint, line: Growth | None, other: Growth | None, batch: int, card: Card | None, capacity: int | None, play: Play,
    room: Callable[[Card], int] = lambda card: card.usable,
) -> Footprint:  # fmt: skip
    """The footprint with how it grows with its batch (`line`) and its sequence, and the largest batch."""
    laws = tuple(law for law in (line, other) if law is not None)
    if line is None:
        note = f"no other batch than {batch} was accepted by the step, so its growth is not known"
        return dataclasses.replace(found, growth=laws, notes=(*found.notes, note))
    place = None if capacity is None else Place("the budget" if card is None else card.name, capacity)
    return dataclasses.replace(found, growth=laws, largest=largest(line, place, play, room))


def _last(growth: Growth, capacity: int) -> int:
    """The largest size whose projected peak is inside the capacity."""
    if growth.at(1) > capacity:
        return 0
    low, high = 1, 2
    while growth.at(high) <= capacity and high < MOST:
        low, high = high, 2 * high
    if growth.at(high) <= capacity:
        return MOST
    return low + bisect.bisect_right(range(low + 1, high), capacity, key=growth.at)


def search(place: str, capacity: int, play: Play, guess: int, unit: int = 1) -> Largest:
    """The largest batch, a multiple of `unit`, whose own trace fits; `guess` is where to look first.

    If the user's code rejects a size, the next lower multiples of 2, 4, 8 and 16 are tried (many programs need even
    batches). If it rejects these too, they count as too large.
    """
    low, high = 0, None
    needs: int | None = None
    size = max(unit, min(guess, MOST) // unit * unit)
    while high is None or high - low > unit:
        rounded = dict.fromkeys(size // (unit * by) * unit * by for by in (1, 2, 4, 8, 16))
        tried = _first_accepted(play, [number for number in rounded if number > low])
        if not tried:
            high = size
        elif fits(tried[0][1], capacity):
            unit = _unit(tried[0][0], size, unit)
            low = tried[0][0]
            if low >= MOST:
                break
            size = low + max(unit, low // 16 // unit * unit) if high is None else _middle(low, high, unit)
            continue
        else:
            unit = _unit(tried[0][0], size, unit)
            high, needs = tried[0][0], _reserved(tried[0][1])
        near = max(unit, high - max(unit, high // 16 // unit * unit))
        size = near if low == 0 and near > low else _middle(low, high, unit)
        if size <= low or size >= high:
            break
    return Largest(place=place, capacity=capacity, size="batch", largest=low, next_needs=needs, known=Known.BOUND)


def _unit(accepted: int, wanted: int, unit: int) -> int:
    """What sizes have to be a multiple of, after `accepted` was taken where `wanted` was rejected."""
    while wanted // unit * unit != accepted and unit < 16:
        unit *= 2
    return unit


def _middle(low: int, high: int, unit: int) -> int:
    return max(unit, (low + (high - low) // 2) // unit * unit)


def fits(replayed: Played, capacity: int) -> bool:
    """True if the step fits after the allocator has given back its cache."""
    if isinstance(replayed, int):
        return replayed <= capacity
    return all(gets_through(replayed.events, int(capacity * part), most=False) for part in SAFETY)


def verdict(replayed: ReplayedSteps, capacity: int, margin: float) -> bool | None:
    """True if even the bound fits, False if the likely replay does not, None in between."""
    if gets_through(replayed.events, int(capacity / (1 + margin)), most=True):
        return True
    return None if gets_through(replayed.events, capacity, most=False) else False
