"""Which series count as growth."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.core.outcomes.rates import median_slope
from outsize.monitor.trend import FEWEST, LEAST, Point, find_trend, still_grows

KiB = 1024
MiB = 1024 * KiB


def series(values):
    return [Point(number * 0.1, number, int(value)) for number, value in enumerate(values)]


def noise(seed):
    return random.Random(seed)


@given(st.integers(16 * KiB, 4 * MiB), st.integers(0, 2**32), st.floats(0, 8))
def test_a_steady_leak_is_found_with_its_rate(each, seed, swing):
    rng = noise(seed)
    trend = find_trend(series(10**8 + step * each + rng.random() * swing * each for step in range(400)))
    assert trend is not None
    assert trend.per_step == pytest.approx(each, rel=0.15)
    assert trend.per_second == pytest.approx(each * 10, rel=0.15)


@given(st.integers(0, 2**32), st.integers(1, 64))
def test_memory_that_only_breathes_is_no_leak(seed, swing):
    rng = noise(seed)
    assert find_trend(series(10**8 + rng.random() * swing * MiB for _ in range(300))) is None


@given(st.integers(10, 120), st.integers(0, 2**32))
def test_a_cache_that_has_filled_up_is_no_leak(shapes, seed):
    rng, seen, held = noise(seed), set(), []
    for _ in range(shapes * 8):
        seen.add(rng.randrange(shapes))
        held.append(10**8 + len(seen) * MiB)
    points = series(held)
    trend = find_trend(points)
    assert trend is None or not still_grows(points, trend.per_step)


def test_one_jump_is_no_leak():
    assert find_trend(series([10**8] * 100 + [2 * 10**8] * 100)) is None


def test_a_staircase_is_a_leak_once_it_has_enough_steps():
    assert find_trend(series(10**8 + step // 20 * MiB for step in range(60))) is None
    assert find_trend(series(10**8 + step // 20 * MiB for step in range(400))) is not None


def test_a_leak_that_begins_late_is_found_in_the_later_half():
    assert find_trend(series(10**8 + max(0, step - 150) * MiB for step in range(300))) is not None


def test_too_few_points_and_too_few_bytes_say_nothing():
    assert find_trend(series(10**8 + step * MiB for step in range(FEWEST))) is None
    assert find_trend(series(10**8 + step * LEAST // 1000 for step in range(400))) is None


def test_an_outlier_does_not_move_the_rate():
    points = [(float(number), float(number)) for number in range(30)] + [(30.0, 1e9)]
    assert median_slope(points) == pytest.approx(1.0)
