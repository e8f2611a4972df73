"""Sets of candidates that reach a size, measured: all methods together, each alone, each stage alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from outsize.compression.evaluation import evaluate
from outsize.compression.method import Candidate, Subject
from outsize.compression.search import Trial, build, walk
from outsize.compression.weights import count_bytes
from outsize.core.shrinking import ShrinkSet

TRIES = 6
"""Sizes that are tried for the nearest set within the allowed loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltSet:
    """A set that was measured, and how it is built again."""

    noun: ShrinkSet
    candidates: tuple[Candidate, ...]


def measure_sets(subject: Subject, trials: Sequence[Trial], target: int) -> list[BuiltSet]:
    """Lowest loss first; those that do not reach the size come last."""
    methods = dict.fromkeys(trial.candidate.method for trial in trials)
    stages = dict.fromkeys(trial.candidate.stage for trial in trials)
    groups = {name: [trial for trial in trials if trial.candidate.method == name] for name in methods}
    for stage in stages:
        groups[f"mixture of {stage.name.lower()}"] = [trial for trial in trials if trial.candidate.stage == stage]
    groups["mixture"] = list(trials)
    found: dict[frozenset[Candidate], BuiltSet] = {}
    for name, group in groups.items():
        chosen = walk(subject, group, target)
        if chosen and frozenset(chosen) not in found:
            found[frozenset(chosen)] = measure_set(subject, name, chosen)
    return sorted(found.values(), key=lambda one: (one.noun.bytes > target, one.noun.loss, one.noun.bytes))


def measure_set(subject: Subject, name: str, chosen: Sequence[Candidate]) -> BuiltSet:
    """A set, built and measured."""
    model = build(subject, chosen)
    size = count_bytes(model)
    try:
        measured = evaluate(model, subject)
        loss, seconds = measured.loss, measured.seconds
    except Exception:  # candidates that work alone and not together: a set that nobody takes
        loss, seconds = math.inf, math.inf
    counts = Counter((one.method, one.level) for one in sorted(chosen, key=lambda one: one.stage))
    parts = tuple(
        f"{level if level.startswith(method) else f'{method} {level}'} ({count})"
        for (method, level), count in counts.items()
    )
    return BuiltSet(
        noun=ShrinkSet(name=name, parts=parts, bytes=size, loss=loss, seconds=seconds), candidates=tuple(chosen)
    )


def find_nearest(subject: Subject, trials: Sequence[Trial], target: int, allowed: float) -> ShrinkSet | None:
    """The smallest set within the allowed loss that a search by halves finds; None where there is none."""
    low, high = target, count_bytes(subject.model)
    best: ShrinkSet | None = None
    for _ in range(TRIES):
        middle = (low + high) // 2
        chosen = walk(subject, trials, middle)
        tried = measure_set(subject, "mixture", chosen).noun if chosen else None
        if tried is not None and tried.bytes <= middle and tried.loss <= allowed:
            best, high = tried, middle
        else:
            low = middle
    return best
