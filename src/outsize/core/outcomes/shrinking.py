"""What making a model smaller saves and costs: candidates, sets of them, and the set that was taken."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from outsize.core.noun import Noun

CAUTION = 2
"""Standard errors by which a change of the loss that was measured may be too low by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkCandidate(Noun):
    """One method at one place of the model, measured alone."""

    method: str
    site: str
    level: str
    """How far it goes."""
    bytes: int
    """Bytes of the whole model with this alone: exact."""
    loss: float
    """With this alone: that of the model as it was and the change that was measured, on some batches where there are many;
    infinite where it is not a number."""
    seconds: float
    """Of the loss of one batch, measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkSet(Noun):
    """Several candidates together, measured together."""

    name: str
    """`mixture`, or the method that is used alone."""
    parts: tuple[str, ...]
    """What is done: a method and its level, and how many places."""
    bytes: int
    """Bytes of the model: exact."""
    loss: float
    """Measured on the user's data: where methods are fitted to data, on batches to which they were not."""
    seconds: float
    """Of the loss of one batch, measured."""
    before: float
    """Loss of the model as it is, on the same data."""
    doubt: float = 0.0
    """One standard error of the change of the loss, from how it differs between batches."""
    healed: float | None = None
    """Loss after the healing steps; None where there were none."""

    @property
    def best_loss(self) -> float:
        """After healing, where it was healed."""
        return self.loss if self.healed is None else self.healed

    @property
    def cautious_loss(self) -> float:
        """Above what was measured by two standard errors of its change: what the loss hardly exceeds on other batches. Sets and
        healings are compared by it."""
        return self.best_loss + CAUTION * self.doubt


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Shrinking(Noun):
    """How a model becomes smaller, and what that costs."""

    before: int
    """Bytes as they were, of what `of` says."""
    of: str = "weights"
    """What is counted: `weights` (parameters and buffers) or `training` (those, gradients and optimizer state)."""
    target: int
    loss: float
    """Measured as it was."""
    within: float
    """Share of the loss by which it may rise."""
    seconds: float
    """Of the loss of one batch as it was, measured."""
    batches: int
    """Batches of the user's data that were measured on."""
    candidates: tuple[ShrinkCandidate, ...]
    sets: tuple[ShrinkSet, ...]
    """Each method alone and their mixtures, as near to the asked size as each comes; lowest loss first."""
    chosen: ShrinkSet | None
    """What is taken; None where no set reaches the size within the allowed loss."""
    nearest: ShrinkSet | None = None
    """Where none does: the smallest set within the allowed loss."""
    peak: int | None = None
    """Projected peak of a step on the asked card, after; None where no card was asked for."""
    card: str | None = None
    notes: tuple[str, ...] = ()

    said_twice: ClassVar[tuple[str, ...]] = ("cheapest",)

    @property
    def fits(self) -> bool:
        """True where a set reaches the size within the allowed loss."""
        return self.chosen is not None

    @property
    def allowed(self) -> float:
        """The highest loss that is allowed."""
        return self.loss + abs(self.loss) * self.within if math.isfinite(self.within) else math.inf

    @property
    def share(self) -> float | None:
        """Bytes after, as a share of those before."""
        return None if self.chosen is None else self.chosen.bytes / max(1, self.before)

    @property
    def cheapest(self) -> ShrinkSet | None:
        """The set of the asked size with the lowest loss, within what is allowed or not; None where none is that small."""
        found = [one for one in self.sets if one.bytes <= self.target]
        return min(found, key=lambda one: one.best_loss, default=None)
