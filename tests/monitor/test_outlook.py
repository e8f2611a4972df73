"""When a limit is reached: random programs that grow, in fifteen ways, and programs that only look like it."""

import random

import growing_programs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.core.outcomes.outlook import look_ahead

MiB = 2**20
UNEVEN = {"uneven steps", "uneven work", "growing steps", "faster and faster (exponential)"}
"""Kinds of which the time can seldom be known."""


def statements(kind, seed, count):
    """(seconds that were left, outlook) at `count` moments of a program, evenly spaced."""
    program = growing_programs.make(kind, seed)
    end = program.held[-1][0]
    for number in range(1, count):
        now = [point for point in program.held if point[0] <= end * number / count]
        yield end - now[-1][0], look_ahead(program.limit, now), now[-1][0]


@pytest.mark.parametrize("kind", growing_programs.KINDS)
def test_what_is_known_is_within_a_fifth_and_something_is_said_before_the_end(kind):
    known, wrong = 0, []
    for seed in range(100, 112):
        said = list(statements(kind, seed, 16))
        assert any(outlook is not None and outlook.middle < at / 2 for _, outlook, at in said), seed
        errors = [abs(outlook.middle - left) / left for left, outlook, _ in said if outlook and outlook.is_known]
        known += len(errors)
        wrong += [error for error in errors if error > 0.2]
    assert len(wrong) <= 0.05 * known + (kind in UNEVEN)
    assert known >= (0 if kind in UNEVEN else 15)


@pytest.mark.parametrize("kind", ["loads and then works", "a cache that fills up", "breathes", "wanders"])
def test_what_does_not_fill_the_memory_is_never_said_to(kind):
    for seed in range(100, 104):
        late = [outlook for _, outlook, at in statements(kind, seed, 16) if at > 20]
        assert not any(outlook is not None and outlook.is_known for outlook in late)


@pytest.mark.parametrize("kind", growing_programs.KINDS)
def test_growth_that_stops_is_soon_no_longer_spoken_of(kind):
    program = growing_programs.make(kind, 7)
    stop = int(len(program.held) * 0.6)
    seconds = program.held[stop - 1][0]
    flat = [(seconds + number * 0.1, program.held[stop - 1][1]) for number in range(1, int(seconds * 7))]
    assert look_ahead(program.limit, [*program.held[:stop], *flat]) is None


@given(st.integers(2 * MiB, 10**10), st.floats(5, 5000), st.floats(0.3, 0.95), st.integers(0, 2**32))
def test_a_line_is_known_to_a_tenth_at_any_scale(rate, seconds, part, seed):
    rng = random.Random(seed)
    times = sorted(rng.uniform(0, seconds) for _ in range(300))
    held = [(at, int(at / seconds * rate)) for at in (0.0, *times, seconds)]
    outlook = look_ahead(int(rate / part), held)
    left = seconds * (1 / part - 1)
    assert outlook.middle == pytest.approx(left, rel=0.1, abs=seconds / 64)
    assert outlook.earliest <= left <= outlook.latest


@given(st.lists(st.tuples(st.floats(0.001, 100), st.integers(0, 2**40)), max_size=80), st.integers(0, 2**41))
def test_no_series_is_too_odd(points, limit):
    at, held = 0.0, []
    for pause, bytes_ in points:
        at += pause
        held.append((at, bytes_))
    outlook = look_ahead(limit, held)
    assert outlook is None or 0 <= outlook.earliest <= outlook.middle <= outlook.latest


@pytest.mark.parametrize("held", [[], [(0.0, 5)] * 30, [(time / 10, 10**9) for time in range(100)]])
def test_what_does_not_grow_is_never_full(held):
    assert look_ahead(10**10, held) is None


def test_what_grows_in_steps_is_full_within_the_range_and_a_step():
    step = 20 * MiB
    held = [(at / 4, at // 20 * step) for at in range(241)]  # a step every five seconds, for a minute
    for limit in range(400 * MiB, 420 * MiB, MiB):
        outlook = look_ahead(limit, held)
        left = -(-limit // step) * 5.0 - 60.0
        assert outlook.is_known and abs(outlook.middle - left) <= 5.0 and outlook.earliest <= left <= outlook.latest


def test_an_end_that_is_a_few_steps_away_is_a_wide_range_and_not_known():
    step = 20 * MiB
    held = [(at / 4, at // 20 * step) for at in range(241)]
    outlook = look_ahead(13 * step, held)
    assert not outlook.is_known and outlook.earliest <= 5.0 <= outlook.latest


def test_a_jump_after_a_long_rest_is_a_guess_that_is_not_known():
    held = [(at / 10, (10 + min(at, 100) // 5) * MiB) for at in range(500)]
    held += [(50 + at / 10, (30 + at) * MiB) for at in range(60)]
    outlook = look_ahead(110 * MiB, held)
    assert outlook is not None and not outlook.is_known and outlook.earliest == 0.0 < outlook.middle < outlook.latest
