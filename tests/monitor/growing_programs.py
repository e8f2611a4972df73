"""Random programs that grow, as series of (seconds, bytes) ten times a second, and programs that stop growing.

Each kind draws all its numbers from the generator it is given: base, limit, rate, sizes of steps and peaks. A series ends
at the first reading at which the limit is reached: there the kernel kills. `KINDS` are killed, `CALM` never are.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

Growth = Callable[[float], float]
"""Seconds -> part of the way from the base to the limit, peaks included."""
LONGEST = 240.0
"""Seconds after which a program that is not full is left."""
INTERVAL = 0.1


class Program(NamedTuple):
    """What one program did."""

    kind: str
    limit: int
    held: list[tuple[float, int]]
    changes: float
    """Seconds at which the course of it changed so that nobody could have known; 0 where it never does."""


def _line(rng: random.Random, seconds: float) -> Growth:
    return lambda at: at / seconds


def _slow_start(rng: random.Random, seconds: float) -> Growth:
    load, share = rng.uniform(0.3, 3.0), rng.uniform(0.1, 0.4)
    return lambda at: share * min(1.0, at / load) + (1 - share) * max(0.0, at - load) / seconds


def _late(rng: random.Random, seconds: float) -> Growth:
    begins = rng.uniform(2.0, 0.5 * seconds)
    return lambda at: max(0.0, at - begins) / seconds


def _peaks(rng: random.Random, seconds: float) -> Growth:
    """Each reading meets another part of a peak."""
    height, often = rng.uniform(0.01, 0.2), rng.choice([0.1, 0.3, 1.0])
    return lambda at: at / seconds + (height * rng.random() if rng.random() < often else 0.0)


def _tall_peaks(rng: random.Random, seconds: float) -> Growth:
    """The same peak at each step: an optimizer's, a batch's."""
    height, period, share = rng.uniform(0.05, 0.4), rng.uniform(0.3, 0.04 * seconds), rng.uniform(0.1, 0.6)
    return lambda at: at / seconds + (height if at % period > period * (1 - share) else 0.0)


def _steps(rng: random.Random, seconds: float) -> Growth:
    count = rng.randint(8, 40)
    phase = rng.random()
    return lambda at: math.floor(at / seconds * count + phase) / count


def _uneven_steps(rng: random.Random, seconds: float) -> Growth:
    count = rng.randint(15, 60)
    walls = [0.0]
    while walls[-1] < LONGEST + 2:
        walls.append(walls[-1] + rng.expovariate(count / seconds))
    sizes = [rng.uniform(0.3, 1.7) / count for _ in walls]
    return _staircase(walls, sizes)


def _growing_steps(rng: random.Random, seconds: float) -> Growth:
    count, factor = rng.randint(8, 30), rng.uniform(1.02, 1.25)
    walls = [seconds * number / count for number in range(1, 40 * count)]
    whole = sum(factor**number for number in range(count))
    return _staircase(walls, [factor ** min(number, 200) / whole for number in range(len(walls))])


def _staircase(walls: list[float], sizes: list[float]) -> Growth:
    state = [0, 0.0]

    def held(at: float) -> float:
        while state[0] < len(walls) and walls[int(state[0])] <= at:
            state[1] += sizes[int(state[0])]
            state[0] += 1
        return state[1]

    return held


def _saw(rng: random.Random, seconds: float) -> Growth:
    period, height = rng.uniform(0.5, 0.08 * seconds), rng.uniform(0.03, 0.3)
    return lambda at: at / seconds + height * (at % period) / period


def _copies(rng: random.Random, seconds: float) -> Growth:
    """An array that is appended to by a copy: each peak is twice what is held."""
    period, share = rng.uniform(0.3, 0.05 * seconds), rng.uniform(0.1, 0.5)
    return lambda at: (at - at % period) / seconds * (2 if at % period > period * (1 - share) else 1)


def _faster(rng: random.Random, seconds: float) -> Growth:
    power = rng.uniform(1.3, 3.0)
    return lambda at: (at / seconds) ** power


def _exponential(rng: random.Random, seconds: float) -> Growth:
    turns = rng.uniform(1.0, 4.0)
    return lambda at: math.expm1(turns * min(at / seconds, 3)) / math.expm1(turns)


def _slower(rng: random.Random, seconds: float) -> Growth:
    power = rng.uniform(0.45, 0.85)
    return lambda at: (at / seconds) ** power


def _walk(rng: random.Random, seconds: float) -> Growth:
    """Work of many sizes: each reading adds another amount, some give back."""
    uneven, state = rng.uniform(1.0, 6.0), [0.0, 0.0]

    def held(at: float) -> float:
        step = (at - state[0]) / seconds
        state[0] = at
        state[1] = max(0.0, state[1] + step * (1 + uneven * rng.gauss(0, 1)))
        return state[1]

    return held


def _epochs(rng: random.Random, seconds: float) -> Growth:
    """Grows while it trains and rests while it evaluates."""
    period, share = rng.uniform(1.0, 0.12 * seconds), rng.uniform(0.3, 0.9)
    return lambda at: (at // period + min(1.0, at % period / period / share)) * period / seconds


KINDS: dict[str, Callable[[random.Random, float], Growth]] = {
    "a line": _line,
    "a line after a load": _slow_start,
    "a line that begins late": _late,
    "a line with random peaks": _peaks,
    "a line with equal peaks": _tall_peaks,
    "even steps": _steps,
    "uneven steps": _uneven_steps,
    "growing steps": _growing_steps,
    "a saw on a rising floor": _saw,
    "appended by copies": _copies,
    "faster and faster (power)": _faster,
    "faster and faster (exponential)": _exponential,
    "slower and slower": _slower,
    "uneven work": _walk,
    "epochs with rests": _epochs,
}


def _loaded(rng: random.Random, seconds: float) -> Growth:
    load, share = rng.uniform(1.0, 8.0), rng.uniform(0.2, 0.7)
    return lambda at: share * min(1.0, at / load)


def _stops(rng: random.Random, seconds: float) -> Growth:
    inner, ends = KINDS[rng.choice(list(KINDS)[:10])](rng, seconds), rng.uniform(0.3, 0.6)
    return lambda at: min(0.85, inner(min(at, ends * seconds)))


def _fills_up(rng: random.Random, seconds: float) -> Growth:
    share, pace = rng.uniform(0.4, 0.85), rng.uniform(0.05, 0.3) * seconds
    return lambda at: share * -math.expm1(-at / pace)


def _breathes(rng: random.Random, seconds: float) -> Growth:
    height = rng.uniform(0.01, 0.5)
    return lambda at: 0.3 + height * rng.random()


def _saws(rng: random.Random, seconds: float) -> Growth:
    period, height = rng.uniform(0.5, 30.0), rng.uniform(0.03, 0.5)
    return lambda at: 0.3 + height * (at % period) / period


def _wanders(rng: random.Random, seconds: float) -> Growth:
    state, pull, pace = [0.4], rng.uniform(0.005, 0.1), rng.uniform(0.001, 0.02)

    def held(at: float) -> float:
        state[0] = min(0.9, max(0.0, state[0] + pull * (0.4 - state[0]) + pace * rng.gauss(0, 1)))
        return state[0]

    return held


CALM: dict[str, Callable[[random.Random, float], Growth]] = {
    "loads and then works": _loaded,
    "grows and stops": _stops,
    "a cache that fills up": _fills_up,
    "breathes": _breathes,
    "a saw on a level floor": _saws,
    "wanders": _wanders,
}


def make(kind: str, seed: int) -> Program:
    """The program of a kind and a seed."""
    rng = random.Random(f"{kind} {seed}")
    base, limit = int(rng.uniform(20, 150) * 2**20), int(rng.uniform(256, 8192) * 2**20)
    seconds = math.exp(rng.uniform(math.log(12), math.log(150)))
    growth = (KINDS | CALM)[kind](rng, seconds)
    held = list(_readings(growth, rng, base, limit))
    return Program(kind, limit, held, 0.0)


def _readings(growth: Growth, rng: random.Random, base: int, limit: int) -> Iterator[tuple[float, int]]:
    at = 0.0
    while at < LONGEST:
        now = base + int(growth(at) * (limit - base))
        yield at, now
        if now >= limit:
            return
        at += INTERVAL * rng.uniform(1.0, 1.15) if rng.random() > 0.01 else INTERVAL * rng.uniform(1, 8)
