"""The remedy of compiled models: their graphs compute a part of the forward pass again.

In: facts of a step. Out: levels, seconds and bytes, as of every remedy. Where the graphs are cut is decided when they are
compiled (`model/compiled/partition.py`), so a level is only a part of what torch itself would save.
"""

from __future__ import annotations

from dataclasses import replace

from outsize.core.failure import Exactness
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.learn.findings import Findings
from outsize.model.fitting.plan.facts import Facts, Sizes
from outsize.model.fitting.plan.remedy_kind import Level, RemedyKind
from outsize.model.fitting.run.runner import Work

PARTS = (0.5, 1.0)
"""Parts that the search tries."""

STEPS = 8
"""Parts that it refines to: so many make the whole."""

FORWARD = 1 / 3
"""The forward pass as a part of both passes."""

LEFT = 0.15
"""Part of what was saved that is there at the peak although all of it is computed again: one segment, and what crosses cuts."""


class Again(RemedyKind[Facts]):
    """A part of compiled graphs, from their beginning, is computed again in the backward pass."""

    key = "again"
    name = "compute parts of compiled graphs again"
    exactness = Exactness.ROUNDING
    compiled = True
    only_saves = True
    graded = True

    def levels(self, facts: Facts) -> list[Level]:
        return [{self.key: part} for part in (0.0, *PARTS)]

    def extent(self, choice: Choice) -> int:
        return round(STEPS * choice.again)

    def why_not(self, work: Work, findings: Findings, own_step: bool) -> str:
        return "" if work.compiled else "the model is not compiled"

    def gentler(self, choice: Choice, facts: Facts) -> list[Choice]:
        """Eighths."""
        return (
            [replace(choice, again=step / STEPS) for step in range(round(STEPS * choice.again) + 1)]
            if choice.again
            else []
        )

    def bytes(self, sizes: Sizes, choice: Choice, facts: Facts) -> Sizes:
        """Most of what is computed again is not there at the peak."""
        return replace(sizes, activations=int(sizes.activations * (1 - (1 - LEFT) * choice.again)))

    def seconds(self, choice: Choice, facts: Facts) -> float:
        return FORWARD * choice.again * facts.passes_in(choice.slices)

    def how(self, choice: Choice, facts: Facts) -> str:
        return f"{choice.again:.0%} of what the graphs would save, from their beginning, one segment at a time"
