"""The plan as the user reads it.

In: a search and what it found, facts, findings. Out: `FitPlan`, with the peak of each phase, what every remedy saves and
costs, the choices beside the one that was made, and what was found and decided on the way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from outsize.core.failure import Remedy
from outsize.core.fitting import FitPlan, Neighbour
from outsize.core.memory import Allowance
from outsize.core.noun import Known
from outsize.core.plan import Peak, Step
from outsize.core.units import format_bytes
from outsize.model.fitting.learn.findings import Findings
from outsize.model.fitting.plan.choice import Choice
from outsize.model.fitting.plan.facts import Facts
from outsize.model.fitting.plan.foreign_tensors import note_beside
from outsize.model.fitting.plan.remedies import REMEDIES, describe, place, predict, remedies_on
from outsize.model.fitting.plan.search import Candidate, Search, plain_seconds, slow_down

WORTH = 0.95
"""A setting that leaves at most this part of what is reserved is worth naming."""

MARGIN = 0.03
"""What a card may reserve above the replay: ties between equal blocks go to the lower address, which only the driver knows."""


def tell(
    search: Search, found: Candidate, facts: Facts, allowance: Allowance, findings: Findings, decided: Iterable[str]
) -> FitPlan:
    """Everything about one choice."""
    return FitPlan(
        name=f"training step of {facts.rows} samples", steps=_phases(search, found, allowance), budgets=(allowance,),
        smallest=None, remedies=_remedies(found, facts, findings), slow_down=slow_down(found.choice, facts),
        plain=facts.plain.peak, away=found.projection.away if found.projection else 0, place=place(facts),
        cheaper=_neighbour(search, found, facts, cheaper=True), smaller=_neighbour(search, found, facts, cheaper=False),
        notes=(
            *_notes(facts, findings), *note_beside(facts.plain.beside), *say_absent(found.choice), *_setting(found), *decided
        ),
    )  # fmt: skip


def _phases(search: Search, found: Candidate, allowance: Allowance) -> tuple[Step, ...]:
    """Peaks by phase; what a card reserves is bounded by the budget where the allocator stops there."""
    projection = found.projection
    assert projection is not None
    peaks = dict(projection.peaks)
    if projection.card:
        peaks["reserved"] = bound(peaks["reserved"], allowance.bytes, search.limited)
    known = Known.ESTIMATE if projection.card else Known.EXACT
    return tuple(
        Step(name=name, peaks=(Peak(pool=allowance.pool, bytes=size, known=known),)) for name, size in peaks.items()
    )


def bound(reserved: int, allowed: int, limited: bool) -> int:
    """What a card may reserve where a replay reserves so much; no more than allowed where the allocator is stopped there."""
    return min(int(reserved * (1 + MARGIN)), allowed if limited else max(allowed, reserved))


def _remedies(found: Candidate, facts: Facts, findings: Findings) -> tuple[Remedy, ...]:
    choice = found.choice
    return tuple(
        Remedy(
            name=kind.name, saves=max(0, _without(choice, kind.key, facts) - predict(choice, facts)), known=Known.ESTIMATE,
            costs=f"+{100 * kind.seconds(choice, facts) / max(plain_seconds(facts), 1e-9):.0f} % time",
            exactness=kind.exactness_of(bool(findings.random)), how=kind.how(choice, facts),
        )
        for kind in remedies_on(choice)
    )  # fmt: skip


def _setting(found: Candidate) -> list[str]:
    """What another setting of torch's allocator would reserve, where that is worth a restart."""
    projection = found.projection
    if projection is None or not projection.card or projection.grown > WORTH * projection.peak:
        return []
    return [
        f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the start would reserve {format_bytes(projection.grown)} "
        f"instead of {format_bytes(projection.peak)}"
    ]


def say_absent(choice: Choice) -> list[str]:
    """What a user should know who reads weights between steps."""
    if not choice.stream:
        return []
    return [
        "streamed weights have no memory between steps: reading them brings all of them home, saving too where they have room"
    ]


def _notes(facts: Facts, findings: Findings) -> list[str]:
    notes = [f"not used: {kind.name}: {facts.forbidden[kind.key]}" for kind in REMEDIES if kind.key in facts.forbidden]
    if findings.normaliser is not None:
        notes.append(f"the loss is {findings.normaliser}")
    if findings.written:
        notes.append(
            f"{len(findings.written)} modules write buffers in a forward pass; a second run does not write them again"
        )
    if facts.timing.measured:
        said = "; ".join(f"{n} samples {1e3 * (a + b):.1f} ms" for n, a, b in facts.timing.points)
        notes.append(f"measured here, forward and backward: {said}; link to the host {facts.link / 1e9:.0f} GB/s")
    return notes


def _without(choice: Choice, key: str, facts: Facts) -> int:
    return predict(replace(choice, **{key: getattr(Choice(), key)}), facts)


def _neighbour(search: Search, found: Candidate, facts: Facts, cheaper: bool) -> Neighbour | None:
    """The next faster choice that is larger, or the next smaller one that is slower."""
    rows = [c for c in (*search.candidates, *search.tried) if c.choice != found.choice]
    if cheaper:
        beside = [c for c in rows if c.seconds < found.seconds and c.peak > found.peak]
        best = max(beside, key=lambda c: (c.seconds, -c.peak), default=None)
    else:
        beside = [c for c in rows if c.peak < 0.95 * found.peak]
        best = min(beside, key=lambda c: (c.seconds, c.peak), default=None)
    if best is None:
        return None
    return Neighbour(
        name=describe(best.choice),
        peak=best.peak,
        slow_down=slow_down(best.choice, facts),
        traced=best.projection is not None,
    )
