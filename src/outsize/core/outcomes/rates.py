"""How fast samples grow, and when a limit is reached: medians of slopes (Theil and Sen), which outliers do not move."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from outsize.core.outcomes.recording import Sample

_LOOKED_AT = 1200
"""Samples that are looked at: two minutes at ten a second."""


def median_slope(points: Sequence[tuple[float, float]], most: int = 48) -> float:
    """The median of the slopes between all pairs of at most `most` points, evenly chosen; 0 for fewer than two."""
    if len(points) > most:
        points = [points[index * (len(points) - 1) // (most - 1)] for index in range(most)]
    slopes = [
        (there[1] - here[1]) / (there[0] - here[0])
        for number, here in enumerate(points)
        for there in points[number + 1 :]
        if there[0] > here[0]
    ]
    return statistics.median(slopes) if slopes else 0.0


def seconds_until(limit: int, held: Sequence[tuple[float, int]]) -> float | None:
    """Seconds until a series of (time, bytes) reaches a limit at the rate of its later part; None where it does not grow.

    A program that only breathes is not growing: the rate must hold in both halves of the part that is looked at.
    """
    if len(held) < 8:
        return None
    end = held[-1][0]
    span = max(3.0, min(120.0, (end - held[0][0]) * 0.6))
    part = [point for point in held if point[0] >= end - span]
    if len(part) < 8 or part[-1][0] - part[0][0] < 0.5:
        return None
    half = len(part) // 2
    rate = median_slope(part)
    if rate <= 0 or min(median_slope(part[:half]), median_slope(part[half:])) < 0.25 * rate:
        return None
    grown = rate * (part[-1][0] - part[0][0])
    if grown < max(2**20, 0.002 * limit):
        return None
    levels = sorted(bytes_ - rate * (time - end) for time, bytes_ in part)
    falls = any(there[1] < here[1] - grown / 50 for here, there in itertools.pairwise(part))
    # one that rises and falls ends at one of its peaks; one that only rises ends at a step, half a step late on average
    level = levels[-1 - len(levels) // 20] if falls else statistics.median(levels)
    return max(0.0, (limit - level) / rate)


def held_bytes(sample: Sample) -> int:
    """Bytes of RAM that the watched processes hold and the kernel cannot take back."""
    return sample.host.anonymous + sample.host.shared


def host_full_in(samples: Sequence[Sample]) -> float | None:
    """Seconds until the host's limit is reached at the rate of the last samples; None where it is not nearing it."""
    if not samples or samples[-1].host.limit is None or samples[-1].host.used is None:
        return None
    last = samples[-1].host
    assert last.limit is not None and last.used is not None
    seen = samples[-_LOOKED_AT:]
    if counted_twice(samples[-1]):
        return seconds_until(
            last.limit, [(sample.time, sample.host.used) for sample in seen if sample.host.used is not None]
        )
    watched = [(sample.time, held_bytes(sample)) for sample in seen]
    others = last.used - watched[-1][1]  # what else counts against the limit is taken as it is now
    return seconds_until(last.limit - others, watched)


def counted_twice(sample: Sample) -> bool:
    """True where the watched processes seem to hold more than is used in all: pages that forks share count for each of them."""
    return sample.host.used is not None and held_bytes(sample) > sample.host.used


def gpu_full_in(samples: Sequence[Sample], index: int) -> float | None:
    """Seconds until a GPU is full at the rate of the last samples."""
    cards = [(sample.time, gpu) for sample in samples[-_LOOKED_AT:] for gpu in sample.gpus if gpu.index == index]
    held = [(time, gpu.used) for time, gpu in cards if gpu.used is not None]
    total = cards[-1][1].total if cards else None
    return None if total is None else seconds_until(total, held)
