"""Times a few plans over the first training steps, and keeps the one whose steps are fastest.

In: plans that fit, the arguments of each step. Out: what the step gives. Every plan gives the same result up to rounding, so
the steps that are timed train as all others do. Nothing is copied: what a step donates, the next plan's step gets.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from outsize.core.units import format_bytes
from outsize.model.jax.fitting.planner import Planned
from outsize.model.jax.private_parts import require_jax

ROUNDS = 2
"""Turns of each plan: other work on the machine comes and goes."""
STEPS = 3
"""Steps of a turn. The first of all loads the program, and on a card the second records it."""


class Trial:
    """Plans for the same step, tried one after the other."""

    def __init__(self, plans: Sequence[Planned]) -> None:
        self.plans = list(plans)
        names = ", ".join(f"{plan.choice} ({format_bytes(plan.candidate.peak)})" for plan in plans)
        note = (
            f"the first {ROUNDS * STEPS * len(plans)} steps time the plans that may be fastest: {names}; the fastest stays. "
            "without=('timing',) times nothing"
        )
        self._announced = [_noted(plan, note) for plan in plans]
        self._seconds: list[list[float]] = [[] for _ in self.plans]

    @property
    def over(self) -> bool:
        return len(self._seconds[-1]) == ROUNDS * STEPS

    @property
    def now(self) -> Planned:
        """The plan whose turn it is, which says that others are timed."""
        return self._announced[self._turn]

    @property
    def _turn(self) -> int:
        return sum(map(len, self._seconds)) // STEPS % len(self.plans)

    def run(self, arguments: tuple[Any, ...]) -> Any:
        """A step by the plan whose turn it is."""
        wait = require_jax().block_until_ready
        wait(arguments)
        begin = time.perf_counter()
        made = wait(self.now.candidate.compiled.program(*arguments))
        self._seconds[self._turn].append(time.perf_counter() - begin)
        return made

    def fastest(self) -> Planned:
        """The plan that stays, which says what was timed."""
        best = [min(seconds[1:]) for seconds in self._seconds]
        found = self.plans[best.index(min(best))]
        said = ", ".join(f"{plan.choice} {1e3 * each:.1f} ms" for plan, each in zip(self.plans, best, strict=True))
        return _noted(found, f"timed in the first steps: {said}; the fastest stays")


def _noted(planned: Planned, note: str) -> Planned:
    return planned._replace(plan=replace(planned.plan, notes=(*planned.plan.notes, note)))
