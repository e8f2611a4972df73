"""Looks for a faster plan while the first steps run, and keeps it only where its steps are faster.

In: the plan in use. Out: another plan in its place, or a note why there is none. On a card the first
steps are timed. Where they held much less than projected, a plan with more room is tried; where the allocator had to clear its
cache in every step, a smaller one. What was left is taken again if the new plan is slower, or holds too much.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

import torch

from outsize.core.errors import BudgetError, OutOfMemory
from outsize.core.fitting import FitPlan
from outsize.core.units import format_bytes
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.out_of_memory import clear_up, is_out_of_memory
from outsize.model.fitting.plan_in_use import PlanInUse

ROOMY = 0.93
"""A step that holds less than this part of what was projected lets the plan be made again with the difference."""

SMALLER = 0.93
"""Part of what is allowed that a plan may hold so that the allocator need not clear its cache."""

SLOWER = 1.2
"""Another plan that spares the allocator trouble may take so much longer by prediction."""

FASTER = 0.98
"""Another plan is taken where it needs at most this part of the time."""


class FasterPlans:
    """The search for a faster plan, over the steps of one fit."""

    def __init__(self, watched: int) -> None:
        self.watched = watched
        """Steps until it looks, 0: it does not."""
        self.cleared = 0
        """How often the allocator cleared its cache in the last timed step, to stay inside its limit."""
        self.took = 0.0
        """Seconds of the last timed step."""
        self.left: tuple[FitPlan, Choice, float] | None = None
        """The plan that was left for one that should be faster, with the seconds of its step."""
        self.looked = False
        """It looked: that is done once."""

    def time(self, runner: Any, batch: Any) -> Any:
        """A step on a card, timed."""
        before = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = runner.step(batch)
        torch.cuda.synchronize()
        self.took = time.perf_counter() - start
        self.cleared = torch.cuda.memory_stats().get("num_alloc_retries", 0) - before
        return loss

    def look(self, used: PlanInUse, batch: Any, *, whole: bool, on_card: bool) -> None:
        """Look for a faster plan, or whether the one that was found is; a batch that is not `whole` tells nothing about it."""
        if self.left is not None and not whole:
            self.watched = 1
            return
        try:
            if self.left is not None:
                self.keep_faster(used, *self.left)
            elif whole and used.measured and not self.looked and (self.cleared or on_card):
                self.looked = True
                (self.make_room if self.cleared else self.relax)(used, batch)
            return
        except Exception as error:  # the step is done: what only might be faster must not fail it
            if not is_out_of_memory(error):
                raise
        clear_up()
        used.set_allocator()
        used.note("memory ran out while a faster plan was looked for: this one stays")

    def make_room(self, used: PlanInUse, batch: Any) -> None:
        """The step fits only because the allocator clears its cache in every step: a little smaller may be faster."""
        said = f"the allocator cleared its cache {self.cleared} times in a step"
        try:
            plan, choice = used.plan_again(int(used.plan.budgets[0].bytes * SMALLER), batch)
        except BudgetError:
            used.note(f"{said}; no smaller plan exists")
            return
        if plan.slow_down > SLOWER * used.plan.slow_down:
            used.note(f"{said}; smaller plans are slower still")
            return
        self.try_plan(used, plan, choice, f"{said}: tightened")

    def relax(self, used: PlanInUse, batch: Any) -> None:
        """The steps held less than projected: a faster plan may have room."""
        allowed, measured = used.plan.budgets[0], used.measured or 0
        projected = used.plan.peak(allowed.pool)
        if not used.plan.remedies or measured >= ROOMY * projected:
            return
        plan, choice = used.plan_again(allowed.bytes * projected // max(1, measured), batch)
        said = f"the steps held {format_bytes(measured)} of {format_bytes(projected)} projected"
        if plan.slow_down >= FASTER * used.plan.slow_down:
            used.note(f"{said}; no plan with more room is faster")
            return
        said += f": relaxed from {used.plan.slow_down:.2f}x to {plan.slow_down:.2f}x"
        self.try_plan(used, plan, choice, said)

    def try_plan(self, used: PlanInUse, plan: FitPlan, choice: Choice, said: str) -> None:
        """Go on with a plan that should be faster, and look whether it is."""
        left = used.plan, used.choice, self.took
        used.take(replace(plan, budgets=used.plan.budgets, notes=(*plan.notes, said)), choice)
        self.left, self.watched = left, 2

    def keep_faster(self, used: PlanInUse, plan: FitPlan, choice: Choice, took: float) -> None:
        """Back to the plan that was left, where its step took less."""
        self.left = None
        if self.took > took:
            said = f"another plan took {1e3 * self.took:.1f} ms a step and not {1e3 * took:.1f} ms: taken back"
            used.take(replace(plan, notes=(*plan.notes, said)), choice)

    def take_back(self, used: PlanInUse, failure: str) -> bool:
        """Back to the plan that was left, since the one that is tried holds too much; False where none was left."""
        if self.left is None:
            return False
        (plan, choice, _), self.left = self.left, None
        said = f"another plan held too much ({failure}): taken back"
        with contextlib.suppress(OutOfMemory):  # what it has at home may have no room now
            used.take(replace(plan, notes=(*plan.notes, said)), choice)
            return True
        return False
