"""Finds the cheapest choice whose dry run stays inside the budget: the loop of every search.

In: the facts of a step, a function that projects a choice, a budget. Out: a `Candidate`. All combinations of the remedies' levels
are candidates, ranked by the seconds that they add. The first that may fit is traced. Where it fits, what room is left improves
it. Where it does not, the search learns from its trace, so that few are needed. What it learns depends on the step: for training
on the device how far its arithmetic errs (`training_search`), for a model on the host what that does (`hosted_search`).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Generic

from outsize.model.fitting.choice import Choice
from outsize.model.fitting.plan.projection import Projection
from outsize.model.fitting.plan.remedies import ALLOWED, APPROXIMATE, OF_TENSORS, remedies_on
from outsize.model.fitting.plan.remedy_kind import F, Level, RemedyKind

TRACES = 16
"""Most traces of one search."""

SURE = 0.02
"""Room that a card's plan leaves where nothing stops the allocator at the budget."""


@dataclass(slots=True)
class Candidate:
    """A choice with what is thought and known of it."""

    choice: Choice
    seconds: float = 0.0
    """Added to the plain step."""
    predicted: int = 0
    """Peak by arithmetic; of a hosted step, once it is asked for, what is there all the time."""
    projection: Projection | None = None
    """The trace, None where there is none."""
    host: int = 0
    """Bytes of host memory that a hosted step holds, once it is traced."""

    @property
    def peak(self) -> int:
        """The best number there is."""
        return self.projection.peak if self.projection is not None else self.predicted


class Search(abc.ABC, Generic[F]):
    """One search, for one batch size and one budget."""

    remedies: ClassVar[tuple[RemedyKind[Any], ...]]
    """Those that are for its steps."""
    most: ClassVar[int] = TRACES
    """Traces before the last resort."""

    def __init__(self, facts: F, project: Callable[[Choice], Projection], allow: str, budget: int) -> None:
        self.facts: F = facts
        self.project, self.allow, self.budget = project, allow, budget
        self.tried: list[Candidate] = []
        """Those with a trace."""
        self.candidates: list[Candidate] = []
        """The cheapest first."""
        self.tracing = Choice()
        """The choice that was traced last."""
        self.traced: Callable[[], None] = lambda: None
        """Called after each trace."""

    def run(self) -> Candidate:
        """The cheapest choice that fits, or a `BudgetError`."""
        self.candidates = sorted(self._combine(), key=lambda c: (c.seconds, c.predicted))
        found = self._cheapest(self.candidates, self.most)
        if found is None or self._is_dear(found):
            found = self._cheaper(OF_TENSORS, found)
        if found is None and self.allow == "approximate":
            found = self._cheaper(APPROXIMATE, found)
        return found or self._last_resort()

    def _cheaper(self, later: tuple[RemedyKind[Any], ...], found: Candidate | None) -> Candidate | None:
        """The cheapest with one of these remedies, or what was found without them where that costs less."""
        more = sorted(self._combine(later), key=lambda c: (c.seconds, c.predicted))
        if found is not None:
            more = [c for c in more if c.seconds < found.seconds]
        self.candidates += more
        other = self._cheapest(more, len(self.tried) + (self.most if found is None else self.most // 2))
        return min((c for c in (found, other) if c is not None), key=lambda c: c.seconds, default=None)

    def fits(self, candidate: Candidate) -> bool:
        """True where the traced step stays inside the budget."""
        return candidate.projection is not None and needed_for(candidate.projection) <= self.budget

    def _cheapest(self, candidates: list[Candidate], most: int) -> Candidate | None:
        """The first that fits, cheapest first, improved; at most `most` traces are made in all."""
        fitting: list[Candidate] = []
        while len(self.tried) < most:
            candidate = next((c for c in candidates if c.projection is None and self._is_hopeful(c)), None)
            if candidate is None or any(c.seconds <= candidate.seconds for c in fitting):
                break
            if self.fits(self._trace(candidate)):
                fitting.append(candidate)
                break
            fitting += self._learn_from(candidate, candidates)
        return self._improve(min(fitting, key=lambda c: c.seconds)) if fitting else None

    def _combine(self, later: tuple[RemedyKind[Any], ...] = ()) -> Iterator[Candidate]:
        """Every combination of levels that makes sense; of what may not be used the first level only. With
        `later` remedies at least one of them is on; of others that come later none is."""
        choices = [Choice()]
        for kind in self.remedies:
            choices = list(self._at_levels(kind, choices, kind in later))
            if later and kind == later[-1]:
                choices = [choice for choice in choices if any(other.on(choice) for other in later)]
        for choice in choices:
            if self._is_sensible(choice):
                yield self._candidate(choice)

    def _at_levels(self, kind: RemedyKind[Any], choices: list[Choice], wanted: bool) -> Iterator[Choice]:
        """Each of the choices at every level of a remedy that makes sense there; `wanted`: also of one that comes later."""
        every = kind.levels(self.facts)
        now = wanted or kind not in OF_TENSORS + APPROXIMATE
        usable = now and kind.exactness in ALLOWED[self.allow] and kind.key not in self.facts.forbidden
        levels = every if usable and not kind.shown_without else every[:1]
        readers = [_reader(level) for level in levels]
        for choice in choices:
            for level, (read, values) in zip(
                levels, readers, strict=True
            ):  # most choices are at the level: a new one has all fields to fill
                further = choice if read(choice) == values else choice.changed(level)
                if not kind.on(further) or kind.is_sensible(further, self.facts):
                    yield further

    def _is_sensible(self, choice: Choice) -> bool:
        return all(kind.is_sensible(choice, self.facts) for kind in remedies_on(choice))

    def _trace(self, candidate: Candidate) -> Candidate:
        self.tracing = candidate.choice
        self._project(candidate)
        if candidate.projection is not None:
            self.tried.append(candidate)
            self.traced()
        return candidate

    # what a step of its kind adds

    def _is_dear(self, candidate: Candidate) -> bool:
        """True where others are looked for although this one fits."""
        return False

    def _candidate(self, choice: Choice) -> Candidate:
        return Candidate(choice)

    def _is_hopeful(self, candidate: Candidate) -> bool:
        """True where a choice is worth a trace."""
        return True

    def _project(self, candidate: Candidate) -> None:
        """Trace a choice; where that shows that a remedy cannot be used, there is no projection."""
        candidate.projection = self.project(candidate.choice)

    def _learn_from(self, candidate: Candidate, candidates: list[Candidate]) -> list[Candidate]:
        """Learn from one that does not fit; others that do, where they were traced for that."""
        return []

    def _improve(self, candidate: Candidate) -> Candidate:
        """Use the room that one leaves."""
        return candidate

    @abc.abstractmethod
    def _last_resort(self) -> Candidate:
        """A choice all the same, or the `BudgetError` that names the smallest budget."""


def _reader(level: Level) -> tuple[Callable[[Choice], Any], Any]:
    """(what reads the fields of a level from a choice, what it gives where the choice is at that level)"""
    read: Callable[[Choice], Any] = attrgetter(*level) if level else lambda _: None
    values = tuple(level.values())
    return read, values if len(values) > 1 else next(iter(values), None)


def needed_for(projection: Projection) -> int:
    """The budget for a traced step: on a card somewhat more than its peak."""
    return int(projection.peak * (1 + SURE)) if projection.card else projection.peak
