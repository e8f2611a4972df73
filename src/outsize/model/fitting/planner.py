"""What `fit` asks of a planner, and what planners for a model on its device share.

In: a `Request`. Out: `Planner`, which makes plans for it, under its budget and, after a failure, under a smaller one.
"""

from __future__ import annotations

import abc
import functools
from typing import Any, NamedTuple

from outsize.core.fitting import FitPlan
from outsize.model.fitting.arguments import Request
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.out_of_memory import clear_up
from outsize.model.fitting.move.stores import open_store
from outsize.model.fitting.run.resident import open_resident, reopen_resident
from outsize.model.fitting.run.runner import Work
from outsize.model.fitting.saved.basis import basis_of
from outsize.model.fitting.saved.file import SavedPlan


class Settled(NamedTuple):
    """A plan that is ready to run."""

    plan: FitPlan
    choice: Choice
    runner: Any
    measured: int | None = None
    """Peak of a rehearsal on the device in bytes; None where there was none."""
    seconds: float | None = None
    """Its seconds."""


class Planner(abc.ABC):
    def __init__(self, request: Request) -> None:
        self.request = request
        self.work: Work = request.work

    @abc.abstractmethod
    def plan(self, limit: int, batch: Any) -> tuple[FitPlan, Choice]:
        """The cheapest choice that holds at most `limit` bytes of the device; `batch`: to run plans on, None: not to."""

    @abc.abstractmethod
    def take(self, saved: SavedPlan) -> tuple[FitPlan, Choice]:
        """A plan that another process made for the same work, after one trace of its choice."""

    @functools.cached_property
    def basis(self) -> dict[str, Any]:
        """What its plans are made for."""
        return basis_of(self.request)

    def settle(self, plan: FitPlan, choice: Choice) -> Settled:
        """The plan on the user's model; another one where a rehearsal shows that this one does not do."""
        runner = open_resident(self.work, choice, self.open_store(), rows=self.request.rows)
        if self.work.device == "cuda":
            clear_up()  # what planning left in the allocator's cache is not the step's
        return Settled(plan, choice, runner)

    def reopen(self, choice: Choice, old: Any) -> Any:
        """The runner of another choice that `plan` gave, in the place of the one so far."""
        return reopen_resident(self.work, choice, old, self.request.rows)

    def open_store(self) -> Any:
        """The place next to the model's device."""
        return open_store(self.request.device, self.request.scratch)
