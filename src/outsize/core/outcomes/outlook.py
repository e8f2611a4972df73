"""When memory reaches a limit: forecasts that are tried on the run itself, and said as far as they held there.

In: (seconds, bytes) of a run, and a limit. Out: `Outlook`, a range of seconds, or None where memory does not grow.

What counts is the highest so far: a program ends at one of its peaks. The run is cut into bins of equal time. A line and a
curve (a parabola) are laid through the last bins, for parts of seven lengths: fourteen forecasts. Each is tried on the past
of the same run: when it would have said, some time ago, that the present height is reached, and when it was. A forecast
counts the more the smaller its errors were. These errors, and by how much the forecasts differ, make the range.

The range is wider where the limit is further away than what could be tried, where a curve would say something else than a
line, and where memory rises unevenly. It always has half the longest pause between two rises: nobody knows at which part of
a step the limit lies. `benchmarks/watch_forecasts.py` tries all this on random programs.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from outsize.core.outcomes.rates import counted_twice, held_bytes
from outsize.core.outcomes.recording import Sample

_BINS, _FEWEST_BINS, _POINTS = 64, 8, 4
"""How many bins, at most and at least, and points of each of which the mean is taken."""
_LEAST_SECONDS = 2.0
"""A run shorter than this says nothing."""
_PARTS = (1.0, 0.7, 0.5, 0.35, 0.25, 0.17, 0.125)
"""Parts of the run, up to now, that forecasts are made from."""
_AGO = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
"""How long ago a forecast is tried, in lengths of its part."""
_TRIED = 3
"""Trials that a forecast needs."""
_SHORTEST, _PAUSES = 6, 3
"""Bins, and pauses between rises, that a part must have."""
_NO_BETTER, _BY_STEP = 0.02, 0.1
"""Relative error that a forecast has even where its trials had none: always, and by the part of its length that one step has."""
_BEND, _UNEVEN = 0.15, 0.3
"""How much of the difference between line and curve, and of the unevenness of the rises, is taken as error."""
_USUAL = 0.75
"""Part of the summed-up errors that is said: they are cautious, each alone."""
_FURTHEST = 20
"""Lengths of the run: what is further away than this is taken as that far."""
_STOPPED = 3
"""A pause this many times the longest before it is the end of the growth."""
_REACH = 3
"""A limit is spoken of where the way to it is at most this many times what has been risen already."""
_WITH_THE_MEAN = 0.1
"""Part of the rise of the highs that the means must show: else only chance makes a new high."""
_BEFORE = (0.125, 0.35)
"""Parts of the run after which the same must have been known."""
_KNOWN = 0.2
"""A time is known where half of its range is at most this part of its middle."""


class Outlook(NamedTuple):
    """When a limit will be reached, in seconds from now."""

    earliest: float
    middle: float
    latest: float

    @property
    def is_known(self) -> bool:
        """True where the range is narrow enough to be said."""
        return self.latest - self.earliest <= 2 * _KNOWN * self.middle


def look_ahead(limit: int, held: Sequence[tuple[float, int]]) -> Outlook | None:
    """When a series of (seconds, bytes) reaches a limit; None where it does not grow, or has not grown for long enough to say.

    What is known must have been so a moment ago, and some time ago: else the range takes in what would have been said then."""
    now = _look(limit, held)
    for part in _BEFORE:
        if now is None or not now.is_known:
            break
        ago = part * (held[-1][0] - held[0][0])
        before = _look(limit, held[: bisect.bisect_right(held, held[-1][0] - ago, key=lambda point: point[0])])
        said = 2 * now.middle if before is None else max(0.0, before.middle - ago)
        now = Outlook(min(now.earliest, said), now.middle, max(now.latest, said))
    return now


def _look(limit: int, held: Sequence[tuple[float, int]]) -> Outlook | None:
    bins = min(_BINS, len(held) // 2)
    if bins < _FEWEST_BINS or held[-1][0] - held[0][0] < _LEAST_SECONDS:
        return None
    course = _Course(held, bins)
    if not course.grows(limit):
        return None
    found = [forecast for length in _lengths(course) for forecast in _forecasts(course, length, limit)]
    if not found:
        return _guess(course, limit)
    weights = [forecast.error**-2 for forecast in found]
    whole = sum(weights)
    middle = sum(weight * forecast.log for weight, forecast in zip(weights, found, strict=True)) / whole
    spread = sum(
        weight * (forecast.error**2 + (forecast.log - middle) ** 2)
        for weight, forecast in zip(weights, found, strict=True)
    )
    factor = math.exp(min(3.0, _USUAL * math.sqrt(spread / whole)))
    ahead, part_of_a_step = math.exp(middle), 0.5 * max(course.pause, course.age) + 0.5
    return Outlook(
        max(0.0, ahead / factor - part_of_a_step) * course.seconds,
        ahead * course.seconds,
        (ahead * factor + part_of_a_step) * course.seconds,
    )


def host_outlook(samples: Sequence[Sample]) -> Outlook | None:
    """When the host's limit is reached; None where it is not nearing it."""
    if not samples or samples[-1].host.limit is None or samples[-1].host.used is None:
        return None
    last = samples[-1].host
    assert last.limit is not None and last.used is not None
    if counted_twice(samples[-1]):
        return look_ahead(
            last.limit, [(sample.time, sample.host.used) for sample in samples if sample.host.used is not None]
        )
    watched = [(sample.time, held_bytes(sample)) for sample in samples]
    others = last.used - watched[-1][1]  # what else counts against the limit is taken as it is now
    return look_ahead(last.limit - others, watched)


def gpu_outlook(samples: Sequence[Sample], index: int) -> Outlook | None:
    """When a GPU is full; None where it is not filling up."""
    cards = [(sample.time, gpu) for sample in samples for gpu in sample.gpus if gpu.index == index]
    held = [(time, gpu.used) for time, gpu in cards if gpu.used is not None]
    total = cards[-1][1].total if cards else None
    return None if total is None else look_ahead(total, held)


class _Course:
    """A run in bins of equal time."""

    def __init__(self, held: Sequence[tuple[float, int]], bins: int) -> None:
        start = held[0][0]
        self.bins, self.seconds = bins, (held[-1][0] - start) / bins
        """How many bins, and the seconds of one."""
        counts, means = [0] * bins, [0.0] * bins
        for time, bytes_ in held:
            index = min(bins - 1, int((time - start) / self.seconds))
            counts[index] += 1
            means[index] += bytes_
        self._means = _fill(means, counts)
        points = list(_highs(held, start, self.seconds / _POINTS, bins * _POINTS))
        self.highs = [sum(points[index : index + _POINTS]) / _POINTS for index in range(0, len(points), _POINTS)]
        """The highest so far, its mean in each bin."""
        self.top = self.highs[-1]
        same = 1e-3 * (self.top - self.highs[0])
        self.reached = next(index for index, value in enumerate(self.highs) if value >= self.top - same)
        """The bin in which the present height was reached."""
        self.age = bins - 1 - self.reached
        """Bins since then."""
        self.pause = _longest_pause(self.highs[bins // 2 - 1 : self.reached + 1], same)
        """The longest time without a rise before that, in the later half, in bins."""
        self._sums = tuple(
            [0.0, *accumulate(value * factor for value, factor in zip(self.highs, factors, strict=True))]
            for factors in ([1] * bins, range(bins), [index * index for index in range(bins)], self.highs)
        )

    def grows(self, limit: int) -> bool:
        """True where it has grown by a good part of the way to the limit, still does, and its mean with it."""
        grown = self.top - self.highs[0]
        if grown < 2**20 or limit - self.top > _REACH * grown or self.age > _STOPPED * max(self.pause, 2):
            return False
        return _rise(self._means) >= _WITH_THE_MEAN * _rise(self.highs)

    def fit(self, low: int, high: int) -> _Fit:
        """A line and a curve through the bins from `low` up to `high`, by least squares."""
        count, middle = high - low, (low + high - 1) / 2
        value, first, second, square = (sums[high] - sums[low] for sums in self._sums)
        variance, fourth = (count**2 - 1) / 12, count * (count**2 - 1) * (count**2 - 4) / 180
        slope = (first - middle * value) / (count * variance)
        curve = (second - 2 * middle * first + (middle**2 - variance) * value) / fourth
        beside_line = max(0.0, square - value**2 / count - slope**2 * count * variance)
        straight = 0.0 if beside_line <= 0 else min(1.0, curve**2 * fourth / beside_line)
        return _Fit(value / count, slope, curve, variance, count / 2, straight)

    @functools.cached_property
    def unevenness(self) -> float:
        """Variance of the rises of the later half over the square of their mean, for each bin: what is left when a trend in
        them is taken away. Even steps have little of it over spans that are longer than a step."""
        return min(self._unevenness_over(max(2, self.bins // span)) for span in (12, 6))

    def _unevenness_over(self, span: int) -> float:
        half = self.bins // 2
        rises = [self.highs[index] - self.highs[index - span] for index in range(self.bins - half, self.bins)]
        mean, centre = sum(rises) / half, (half - 1) / 2
        slope = sum((index - centre) * rise for index, rise in enumerate(rises)) / (half * (half**2 - 1) / 12)
        left = sum((rise - mean - slope * (index - centre)) ** 2 for index, rise in enumerate(rises)) / half
        return left / max(0.2 * mean, mean + slope * centre, 1.0) ** 2 * span


class _Fit(NamedTuple):
    """A line and a curve: `mean + slope * x + curve * (x * x - variance)`, x in bins from the middle."""

    mean: float
    slope: float
    curve: float
    variance: float
    end: float
    """x of the end."""
    bent: float
    """Part of what a line leaves that a curve explains."""

    def until(self, level: float, curved: bool) -> float:
        """Bins from the end until a level is reached; infinite where it never is."""
        if not curved or abs(self.curve) * self.end <= 1e-9 * abs(self.slope):
            return (level - self.mean) / self.slope - self.end if self.slope > 0 else math.inf
        inside = self.slope**2 - 4 * self.curve * (self.mean - self.curve * self.variance - level)
        if inside < 0:
            return math.inf
        there = (math.sqrt(inside) - self.slope) / (2 * self.curve)
        return there - self.end if there >= -self.end else math.inf


class _Forecast(NamedTuple):
    """What one fit says."""

    log: float
    """Logarithm of the bins from now."""
    error: float
    """Its relative error, as far as it is known."""


def _guess(course: _Course, limit: int) -> Outlook | None:
    """At the rate of the last quarter, or of the whole run if that is slower, where no forecast could be tried: not known."""
    quarter, left = course.bins // 4, limit - course.top
    last, whole = ((course.top - course.highs[-1 - bins]) / bins for bins in (quarter, course.bins - 1))
    if last <= 0:
        return None
    ahead, latest = (max(0.0, left / rate) * course.seconds for rate in (last, min(last, whole)))
    return Outlook(0.0, ahead, latest + course.seconds)


def _lengths(course: _Course) -> Iterator[int]:
    """Lengths of the parts that are long enough."""
    for part in _PARTS:
        length = round(part * course.bins)
        if length >= max(_SHORTEST, _PAUSES * course.pause):
            yield length


def _forecasts(course: _Course, length: int, limit: int) -> Iterator[_Forecast]:
    fit = course.fit(course.bins - length, course.bins)
    line, curve = (_bound(course, fit.until(limit, curved)) for curved in (False, True))
    bend = _BEND * fit.bent * abs(math.log(line / curve))
    for curved, ahead in ((False, line), (True, curve)):
        error = _try(course, length, curved, ahead)
        if error is not None:
            uneven = _UNEVEN * course.unevenness * (1 / ahead + 1 / length)
            yield _Forecast(math.log(ahead), math.sqrt((error + bend) ** 2 + uneven))


def _try(course: _Course, length: int, curved: bool, ahead: float) -> float | None:
    """The relative error of a forecast for a time that is `ahead`, from trials in the past; None where there are too few.

    From the nearest trial on, so many of them are taken as make the error smallest: before, the run may have been another.
    What is further ahead than the furthest of them has more error, by the square of how much further it is."""
    best, squares, weights, before, trials = None, 0.0, 0.0, 0.0, 0
    for ago in _AGO:
        end = course.bins - int(ago * length)
        start = max(0, end - length)
        real = course.reached + 0.5 - end
        if end > course.bins - 2 or end - start < max(_SHORTEST, 0.6 * length) or real < 1:
            continue
        said = _bound(course, course.fit(start, end).until(course.top, curved))
        error = math.log1p(max(0.0, abs(said - real) - 0.5 * course.pause) / min(said, real))
        weight = min(real, ahead)
        squares, weights, trials = squares + weight * error**2, weights + weight, trials + 1
        if trials >= _TRIED:
            further = max(1.0, ahead / real)
            last = math.sqrt((error**2 + before**2) / 2) * further**2
            found = max(math.sqrt(squares / weights), last) + (_NO_BETTER + _BY_STEP * course.pause / length) * further
            best = found if best is None else min(best, found)
        before = error
    return best


def _bound(course: _Course, ahead: float) -> float:
    return min(max(ahead, 0.1), _FURTHEST * course.bins)


def _highs(held: Sequence[tuple[float, int]], start: float, seconds: float, count: int) -> Iterator[float]:
    """The highest so far in the middle of each of `count` spans, between two readings on the line that joins them."""
    index, before, high = 0, held[0][0], held[0][1]
    for time, bytes_ in held:
        higher = bytes_ if bytes_ > high else high
        while index < count and (wanted := start + (index + 0.5) * seconds) <= time:
            part = (wanted - before) / (time - before) if time > before else 1.0
            yield high + (higher - high) * part
            index += 1
        before, high = time, higher
    yield from [float(high)] * (count - index)


def _fill(sums: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Means; a bin without a reading repeats the one before."""
    means: list[float] = []
    for total, count in zip(sums, counts, strict=True):
        means.append(total / count if count else means[-1])
    return means


def _longest_pause(highs: Sequence[float], same: float) -> int:
    longest = now = 1
    for index in range(1, len(highs)):
        now = now + 1 if highs[index] - highs[index - 1] <= same else 1
        longest = max(longest, now)
    return longest


def _rise(values: Sequence[float]) -> float:
    """Mean of the last quarter over that of the quarter before."""
    quarter = len(values) // 4
    return (sum(values[-quarter:]) - sum(values[-2 * quarter : -quarter])) / quarter
