"""The plan that a fitted step obeys now, with its choice and its runner, and how another takes its place.

In: a plan, and who makes others (`Replan`) and opens their runners (`Reopen`). Out: the same model under another plan: a tighter
one after a step that held too much, one for other surroundings, one that may be faster. The model and the optimizer are the same
before and after.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outsize.core.errors import BudgetError, OutOfMemory
from outsize.core.fitting import FitPlan
from outsize.core.noun import Known
from outsize.core.plan import Peak
from outsize.core.units import format_bytes
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.plan.remedies import OF_TENSORS
from outsize.model.fitting.run.expandable_segments import let_grow

TIGHTER = {"cpu": 0.85, "cuda": 0.93, "hosted": 0.85}
"""After a failure the next plan holds at most this part of what the failed one should have held."""

Replan = Callable[..., tuple[FitPlan, Choice]]
"""(bytes of the device, batch to run plans on or None) -> another plan; `without`: keys of remedies that it must not use."""

Reopen = Callable[[Choice, Any], Any]
"""(another choice, the runner so far) -> the runner of that choice."""

Planned = tuple[Replan, Reopen, FitPlan, Choice]
"""A plan for other surroundings, and who makes such."""


class PlanInUse:
    """A plan with the runner that obeys it."""

    def __init__(self, replan: Replan, reopen: Reopen, plan: FitPlan, choice: Choice, runner: Any) -> None:
        self.plan = plan
        """How a step runs, with its projected peaks."""
        self.choice = choice
        """The decisions as plain data."""
        self.runner = runner
        """Runs a step as it was decided; None where nothing is run (any more)."""
        self.measured: int | None = None
        """Highest peak of this plan's steps in bytes; None: not measured yet."""
        self.replan, self.reopen = replan, reopen
        self._failed: list[Choice] = []
        """Those that were left since a step of theirs held too much."""
        self._projected = 0
        """What the plan said before a step showed that it holds more; 0: none has."""
        if runner is not None:
            self.set_allocator()

    @property
    def planned(self) -> Planned:
        """The plan and who made it, to come back to."""
        return self.replan, self.reopen, self.plan, self.choice

    def set_allocator(self) -> None:
        """Let the allocator be as this plan wants it."""
        let_grow(self, self.choice.expandable)

    def end(self) -> None:
        """No step is run any more."""
        self.runner = None
        let_grow(self, False)

    def note(self, text: str) -> None:
        self.plan = replace(self.plan, notes=(*self.plan.notes, text))

    def own_up(self) -> None:
        """A step held more than projected, though not more than allowed: from now on the plan says what it held."""
        pool, held = self.plan.pool, self.measured
        projected = self.plan.peak(pool)
        if held is None or held <= projected:
            return
        self._projected = self._projected or projected
        highest = max(self.plan.steps, key=lambda step: step.peak(pool))
        beside = (peak for peak in highest.peaks if peak.pool != pool)
        measured = replace(highest, peaks=(Peak(pool=pool, bytes=held, known=Known.EXACT), *beside))
        self.plan = replace(self.plan, steps=tuple(measured if step is highest else step for step in self.plan.steps))
        self.note(f"a step held {format_bytes(held)} where {format_bytes(projected)} were projected")

    def take(self, plan: FitPlan, choice: Choice) -> None:
        let_grow(self, choice.expandable)
        try:
            following = self.reopen(choice, self.runner)
        except OutOfMemory:
            self.set_allocator()
            raise
        self.plan, self.choice, self.runner = plan, choice, following
        self.measured, self._projected = None, 0

    def take_planned(self, planned: Planned) -> None:
        """Go on with a plan by somebody else."""
        self.replan, self.reopen, plan, choice = planned
        self.take(plan, choice)

    def plan_again(self, limit: int, batch: Any) -> tuple[FitPlan, Choice]:
        """Another plan, compared with the plain step: weights are at home for that, the optimizer's state may have no room."""
        self.runner.weights.bring_weights()
        return self.replan(limit, batch)

    def tighten(self, failure: str) -> None:
        """Go on with a plan that holds less than this one should have held."""
        self._failed.append(self.choice)
        if self.choice.hosted:
            self.runner.gather()
        else:
            with contextlib.suppress(OutOfMemory):  # weights without room at home cannot be compared, and are not
                self.runner.weights.bring_weights()
        plan, choice = self._tighter()
        self.take(replace(plan, budgets=self.plan.budgets, notes=(*plan.notes, f"tightened: {failure}")), choice)

    def _tighter(self) -> tuple[FitPlan, Choice]:
        """A plan that holds clearly less than this one should have held; where there is none, the smallest of all, if that holds
        less at all; else one that leaves single tensors alone, since what this one said of them was wrong."""
        hosted, allowed = self.choice.hosted, self.plan.budgets[0].bytes
        projected = self._projected or self.plan.peak(self.plan.pool)
        should = min(projected, allowed)
        tighter = int(should * TIGHTER["hosted" if hosted else self.runner.work.device])
        # such as a kernel's scratch: the next plan may have it too
        room = allowed - max(0, (self.measured or 0) - projected)
        try:
            return self.replan(min(tighter, room), None)
        except BudgetError as error:
            none = error
        if room < tighter:
            with contextlib.suppress(BudgetError):
                return self.replan(tighter, None)
        if not hosted and none.smallest is not None and none.smallest < should:
            with contextlib.suppress(BudgetError):
                plan, choice = self.replan(none.smallest, None)
                if choice not in self._failed:
                    return plan, choice
        single = tuple(kind.key for kind in OF_TENSORS if kind.on(self.choice))
        if hosted or not single:
            raise none
        try:
            return self.replan(room, None, without=single)
        except BudgetError:
            raise none from None
