"""What samples hold and how fast it grows: medians of slopes (Theil and Sen), which outliers do not move."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from outsize.core.outcomes.recording import Sample


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


def held_bytes(sample: Sample) -> int:
    """Bytes of RAM that the watched processes hold and the kernel cannot take back."""
    return sample.host.anonymous + sample.host.shared


def counted_twice(sample: Sample) -> bool:
    """True where the watched processes seem to hold more than is used in all: pages that forks share count for each of them."""
    return sample.host.used is not None and held_bytes(sample) > sample.host.used
