"""Does a series of bytes grow for good, how fast, and when is the limit reached?

In: points of one series, all at the same place of a step. Out: `Trend` where it grows like a leak, else None.

Memory that a program uses goes up and down; memory that it loses only raises the floor. So the points after the warm-up
are cut into windows of equal length and the lowest point of each is taken. A leak raises these floors again and again.
Growth that slows down (caches and pools that fill up), or that comes in one jump (a shape seen for the first time), is
none. Chance alone raises all of eight floors once in forty thousand series. Rates are medians of slopes (Theil and Sen),
which outliers do not move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from outsize.core.outcomes.rates import median_slope
from outsize.core.outcomes.recording import Finding
from outsize.core.units import format_bytes

LEAST = 384 * 1024
"""Bytes of growth below which nothing is said."""
FEWEST = 40
"""Points after the warm-up that are needed."""
WINDOWS = 8
WARM_UP_SHARE, WARM_UP_POINTS = 0.2, 5
"""The part of all points, and the least number of them, that is warm-up."""


class Point(NamedTuple):
    """One reading."""

    time: float
    """Seconds."""
    step: int
    """Number of the step; of the reading where no steps are known."""
    bytes: int
    """Bytes held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """Growth that does not end."""

    grown: int
    """Bytes by which the floor rose since the warm-up."""
    per_step: float
    """Bytes per step."""
    per_second: float
    """Bytes per second."""
    steps: int
    """Steps between the first and the last floor."""

    def rate(self, stepwise: bool) -> str:
        """How fast, in words: by the step where steps are known."""
        size, unit = (self.per_step, "step") if stepwise else (self.per_second, "second")
        return f"{format_bytes(round(size))} more each {unit}"

    def finding(self, stepwise: bool, **said: Any) -> Finding:
        """A finding with the numbers of this trend."""
        per_step = self.per_step if stepwise else None
        return Finding(grown=self.grown, per_step=per_step, per_second=self.per_second, **said)


def find_trend(points: Sequence[Point], least: int = LEAST) -> Trend | None:
    """The trend of a series, in all of it after the warm-up or in its later half."""
    settled = points[max(WARM_UP_POINTS, int(len(points) * WARM_UP_SHARE)) :]
    for part in (settled, settled[len(settled) // 2 :]):
        if len(part) >= FEWEST:
            trend = _judge(part, least)
            if trend is not None:
                return trend
    return None


def _judge(points: Sequence[Point], least: int) -> Trend | None:
    floors = _floors(points)
    grown = floors[-1].bytes - floors[0].bytes
    if grown < least:
        return None
    rises = [later.bytes - earlier.bytes for earlier, later in pairwise(floors)]
    mean = grown / len(rises)
    third = max(2, len(rises) // 3)
    is_steady = sum(rise > 0.15 * mean for rise in rises) >= len(rises) - 1 and min(rises) > -0.5 * mean
    slows_down = _rate(floors[-third - 1 :]) < 0.7 * _rate(floors[: third + 1])
    is_one_jump = max(rises) > 0.55 * grown
    if not is_steady or slows_down or is_one_jump or rises[-1] <= 0:
        return None
    return Trend(
        grown=grown,
        per_step=median_slope([(point.step, point.bytes) for point in floors]),
        per_second=median_slope([(point.time, point.bytes) for point in floors]),
        steps=floors[-1].step - floors[0].step,
    )


def still_grows(points: Sequence[Point], per_step: float) -> bool:
    """True where the later part of a series still grows at about the rate that was found before."""
    floors = _floors(points) if len(points) >= FEWEST else []
    return not floors or _rate(floors[-4:]) > 0.35 * per_step


def _rate(floors: Sequence[Point]) -> float:
    """Bytes per step from the first to the last."""
    return (floors[-1].bytes - floors[0].bytes) / max(1, floors[-1].step - floors[0].step)


def _floors(points: Sequence[Point]) -> list[Point]:
    """The lowest point of each window."""
    edges = [index * len(points) // WINDOWS for index in range(WINDOWS + 1)]
    return [min(points[low:high], key=lambda point: point.bytes) for low, high in pairwise(edges)]
