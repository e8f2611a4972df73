"""The plan of a fitted step: which remedies are on, what the step then holds, and what the choices beside it are."""

from __future__ import annotations

from dataclasses import dataclass

from outsize.core.failure import Remedy
from outsize.core.noun import Noun
from outsize.core.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour(Noun):
    """A choice beside the one that was made."""

    name: str
    """Its remedies, in a few words."""
    peak: int
    """Projected peak on the device in bytes."""
    slow_down: float
    """Predicted time over that of the plain step."""
    traced: bool
    """True where the peak was traced, False where it is the planner's arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FitPlan(Plan):
    """How a step runs inside its budget. `steps` are the phases of one training step."""

    remedies: tuple[Remedy, ...]
    """What is done, empty where the plain step fits."""
    slow_down: float
    """Predicted time over that of the plain step: an estimate."""
    plain: int
    """Projected peak of the plain step in bytes."""
    away: int
    """Bytes that wait elsewhere at most."""
    place: str
    """Where they wait: `host` or `disk`."""
    cheaper: Neighbour | None = None
    """The next faster choice, which does not fit or was not needed."""
    smaller: Neighbour | None = None
    """The next choice that holds less."""
    moved: int = 0
    """Bytes that go over the link in a step, both ways; 0 where the model is on the device."""
    seconds: float | None = None
    """Predicted seconds of a step, None where only the ratio to the plain step is known."""
    tokens: int = 0
    """Tokens (or samples) of a step."""
    notes: tuple[str, ...] = ()
    """What was found in model and loss, and what was not done because of it."""

    def __repr__(self) -> str:
        return self.__str__()
