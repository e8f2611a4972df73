"""Finds the cheapest set of remedies whose projected peak is inside the budget.

In: facts, a stage that projects a choice, a budget. Out: the choice, its projection and its neighbours. Arithmetic on
the facts ranks the choices by cost and says which may fit; the trace of the fitted step itself decides. Each trace
also corrects the arithmetic, so few are needed. Where nothing fits, the smallest projected peak of all is the budget
to name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from outsize.core.errors import BudgetError
from outsize.core.units import format_bytes
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.facts import Facts
from outsize.model.fitting.remedies import ALLOWED, REMEDIES, Means, order_blocks
from outsize.model.fitting.projection import Projection

TRACES = 10
"""Most traces of one search."""


@dataclass(slots=True)
class Candidate:
    """A choice with what is thought and known of it."""

    choice: Choice
    seconds: float
    """Added to the plain step."""
    predicted: int
    """Peak by arithmetic."""
    projection: Projection | None = None
    """The trace, None where there is none."""

    @property
    def peak(self) -> int:
        """The best number there is."""
        return self.projection.peak if self.projection is not None else self.predicted


@dataclass(slots=True)
class Search:
    """One search for one batch size."""

    facts: Facts
    project: Callable[[Choice], Projection]
    allow: str
    budget: int
    tried: list[Candidate] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)

    def run(self) -> Candidate:
        """The cheapest choice that fits, or a `BudgetError`."""
        candidates = sorted(self._candidates(), key=lambda c: (c.seconds, c.predicted))
        self.candidates = candidates
        correction = 1.0
        while len(self.tried) < TRACES:
            hopeful = [c for c in candidates if c.projection is None and c.predicted * correction <= self.budget]
            if not hopeful:
                break
            candidate = self._trace(hopeful[0])
            if candidate.peak <= self.budget:
                return self._refine(candidate)
            correction = max(correction, min(1.5, candidate.peak / max(1, candidate.predicted)))
        return self._smallest(candidates)

    def _trace(self, candidate: Candidate) -> Candidate:
        candidate.projection = self.project(candidate.choice)
        self.tried.append(candidate)
        return candidate

    def _smallest(self, candidates: list[Candidate]) -> Candidate:
        """The smallest of all: what it takes decides between a plan and an error."""
        least = sorted((c for c in candidates if c.projection is None), key=lambda c: (c.predicted, -c.choice.slices))[
            :3
        ]
        for candidate in least:
            self._trace(candidate)
        fitting = [c for c in self.tried if c.peak <= self.budget]
        if fitting:
            return min(fitting, key=lambda c: c.seconds)
        best = min(self.tried, key=lambda c: c.peak)
        raise BudgetError(
            f"no {self.allow} plan fits the step into {format_bytes(self.budget)}: the smallest found holds "
            f"{format_bytes(best.peak)} ({describe(best.choice)}), so a budget of {best.peak} bytes is the smallest that has one",
            needed=best.peak, budget=self.budget, smallest=best.peak, culprit=_highest(best),
        )  # fmt: skip

    def _refine(self, candidate: Candidate) -> Candidate:
        """Fewer blocks that are computed again, as long as it still fits."""
        best, low = candidate, 0
        names = candidate.choice.checkpoint
        smaller = [
            len(c.choice.checkpoint) for c in self.tried if _alike(c.choice, candidate.choice) and c is not candidate
        ]
        low = max((n for n in smaller if n < len(names)), default=0)
        while len(names) - low > 1 and len(self.tried) < TRACES:
            middle = (low + len(names)) // 2
            shorter = self._candidate(replace(candidate.choice, checkpoint=names[:middle]))
            if self._trace(shorter).peak <= self.budget:
                best, names = shorter, names[:middle]
            else:
                low = middle
        return best

    def _candidates(self) -> list[Candidate]:
        levels = []
        for means in REMEDIES:
            usable = means.exactness in ALLOWED[self.allow] and means.key not in self.facts.forbidden
            every = means.levels(self.facts)
            levels.append(every if usable else every[:1])
        choices = (Choice(**_merge(combination)) for combination in itertools.product(*levels))
        return [self._candidate(choice) for choice in choices if _sensible(choice, self.facts)]

    def _candidate(self, choice: Choice) -> Candidate:
        return Candidate(choice, added(choice, self.facts), predict(choice, self.facts))


def _highest(candidate: Candidate) -> str | None:
    """The phase that holds most."""
    peaks = candidate.projection.peaks if candidate.projection is not None else {}
    return max(peaks, key=peaks.__getitem__, default=None)


def _merge(levels: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for level in levels:
        merged.update(level)
    return merged


def _alike(a: Choice, b: Choice) -> bool:
    return replace(a, checkpoint=()) == replace(b, checkpoint=())


def _sensible(choice: Choice, facts: Facts) -> bool:
    """False for choices that contradict themselves or pay for nothing."""
    if choice.in_backward and (choice.slices > 1 or choice.gradients_away):
        return False
    if choice.gradients_away and not choice.state_away and facts.state:
        return False
    if choice.stream and not (choice.state_away or not facts.state):
        return False
    if choice.stream and not (choice.in_backward or choice.gradients_away):
        return False
    if choice.stream and len(choice.checkpoint) < len(order_blocks(facts)) and not choice.offload:
        return False
    if choice.offload and choice.checkpoint:
        return False
    return not (choice.chunks and (set(facts.heads) & {*choice.stream, *choice.checkpoint, *choice.offload}))


def added(choice: Choice, facts: Facts) -> float:
    """Seconds that a choice adds to the plain step."""
    return sum(means.seconds(choice, facts) for means in REMEDIES if means.on(choice))


def slow_down(choice: Choice, facts: Facts) -> float:
    """Predicted time over that of the plain step."""
    plain = max(facts.forward + facts.backward, facts.launch) + 4 * facts.gradients / facts.link / 100
    return 1.0 + added(choice, facts) / max(plain, 1e-9)


def predict(choice: Choice, facts: Facts) -> int:
    """Peak of a choice by arithmetic on the plain step."""
    plain = facts.plain
    share = -(-facts.rows // choice.slices) / facts.rows
    again_names, offloaded, streams = set(choice.checkpoint), set(choice.offload), set(choice.stream)
    freed = sum(block.kept for block in facts.blocks if block.name in again_names or block.name in offloaded)
    again = max((block.kept for block in facts.blocks if block.name in again_names), default=0)
    again = max(again, max((block.kept for block in facts.blocks if block.name in offloaded), default=0) // 4)
    logits = facts.logits * (1 - 1 / choice.chunks) if choice.chunks else 0
    extra = max(0, max(plain.peaks["forward"], plain.peaks["backward"]) - plain.fixed - facts.activations)
    activations = (facts.activations + extra - freed - logits + again) * share * (0.6 if choice.autocast else 1.0)
    fixed = float(plain.fixed)
    if choice.state_away:
        fixed -= facts.state
    if choice.stream:
        streamed = [block.weights for block in facts.blocks if block.name in streams]
        fixed -= sum(streamed) - 2 * max(streamed)
    moment = facts.largest * (1 + (facts.copies if choice.state_away else 0))
    few = choice.gradients_away or choice.in_backward
    gradients = moment if few else facts.gradients
    early = gradients if choice.slices > 1 and not few else 0
    update = fixed + gradients + facts.largest * 2 + (moment if choice.state_away else 0)
    return int(max(fixed + activations + early, update))


def describe(choice: Choice) -> str:
    """The remedies of a choice, in a few words."""
    names = []
    for means in REMEDIES:
        if means.on(choice):
            value = getattr(choice, means.key)
            count = len(value) if isinstance(value, tuple) else value
            names.append(means.name if value is True else f"{means.name} ({count})")
    return ", ".join(names) or "the plain step"


def remedies_on(choice: Choice) -> list[Means]:
    """The remedies that a choice uses."""
    return [means for means in REMEDIES if means.on(choice)]
