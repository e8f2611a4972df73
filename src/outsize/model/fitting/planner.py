"""What `fit` asks of a planner.

In: nothing. Out: `Planner`, which makes plans for one request, under its budget and, after a failure, under a smaller one.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from outsize.core.fitting import FitPlan
from outsize.model.fitting.choice import Choice


class Settled(NamedTuple):
    """A plan that is ready to run."""

    plan: FitPlan
    choice: Choice
    runner: Any
    measured: int | None = None
    """Peak of a rehearsal on the device in bytes; None where there was none."""
    seconds: float | None = None
    """Its seconds."""


class Planner(Protocol):
    """Plans for one request."""

    def plan(self, limit: int, batch: Any) -> tuple[FitPlan, Choice]:
        """The cheapest choice that holds at most `limit` bytes of the device; `batch`: to run plans on, None: not to."""

    def settle(self, plan: FitPlan, choice: Choice) -> Settled:
        """The plan on the user's model; another one where a rehearsal shows that this one does not do."""

    def reopen(self, choice: Choice, old: Any) -> Any:
        """The runner of another choice that `plan` gave, in the place of the one so far."""
