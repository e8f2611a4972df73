"""The plan of a fitted step: which remedies it uses, what the step then holds, and which other plans were close."""

from __future__ import annotations

from dataclasses import dataclass

from outsize.core.failure import Remedy
from outsize.core.noun import Noun
from outsize.core.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour(Noun):
    """A plan that was close to the chosen one."""

    name: str
    """Its remedies, in a few words."""
    peak: int
    """Projected peak on the device in bytes."""
    slow_down: float
    """Predicted time over that of the plain step."""
    traced: bool
    """True if the peak was traced, False if the planner only computed it."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FitPlan(Plan):
    """How a step runs inside its budget. `steps` are the phases of one training step."""

    remedies: tuple[Remedy, ...]
    """The remedies that are used; empty if the plain step fits."""
    slow_down: float
    """Predicted time over that of the plain step: an estimate."""
    plain: int
    """Projected peak of the plain step in bytes."""
    away: int
    """The most bytes that are moved away from the device at one time."""
    place: str
    """Where they are moved to: `host` or `disk`."""
    cheaper: Neighbour | None = None
    """The next faster plan, which does not fit or was not needed."""
    smaller: Neighbour | None = None
    moved: int = 0
    """Bytes that go over the link in a step, both ways; 0 where the model is on the device."""
    seconds: float | None = None
    """Predicted seconds of a step, None where only the ratio to the plain step is known."""
    tokens: int = 0
    notes: tuple[str, ...] = ()
    """What was found in the model and the loss, and which remedies this rules out."""
