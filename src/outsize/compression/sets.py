"""Sets of candidates that reach a size, measured: all methods together, each alone, each stage alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outsize.compression.evaluation import Measured, evaluate
from outsize.compression.healing import Healing, heal
from outsize.compression.method import Candidate, Subject
from outsize.compression.search import Trial, build, walk
from outsize.compression.weights import count_bytes
from outsize.core.shrinking import ShrinkSet

HEALED = 3
"""Sets that are healed: the best ones before healing."""
TRIES = 6
"""Sizes that are tried for the nearest set within the allowed loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltSet:
    """A set that was measured, and how it is built again."""

    noun: ShrinkSet
    candidates: tuple[Candidate, ...]
    model: Any = None
    """The healed model, where it was healed."""


def measure_sets(subject: Subject, trials: Sequence[Trial], target: int, plain: Measured) -> list[BuiltSet]:
    """Lowest loss first, with its standard error; those that do not reach the size come last."""
    methods = dict.fromkeys(trial.candidate.method for trial in trials)
    stages = dict.fromkeys(trial.candidate.stage for trial in trials)
    groups = {"mixture": list(trials)}
    groups |= {name: [trial for trial in trials if trial.candidate.method == name] for name in methods}
    for stage in stages:
        groups[f"mixture, {stage.name.lower()}"] = [trial for trial in trials if trial.candidate.stage == stage]
    found: dict[frozenset[Candidate], BuiltSet] = {}
    if target >= count_bytes(subject.model):
        return [measure_set(subject, "as it is", (), plain)]
    for name, group in groups.items():
        chosen = walk(subject, group, target)
        if chosen and frozenset(chosen) not in found:
            found[frozenset(chosen)] = measure_set(subject, name, chosen, plain)
    return _sorted(found.values(), target)


def measure_set(subject: Subject, name: str, chosen: Sequence[Candidate], plain: Measured) -> BuiltSet:
    """A set, built and measured."""
    model = build(subject, chosen)
    size = count_bytes(model)
    try:
        measured = evaluate(model, subject)
    except Exception:  # candidates that work alone and not together: a set that nobody takes
        measured = Measured(loss=math.inf, seconds=math.inf)
    counts = Counter((one.method, one.level) for one in sorted(chosen, key=lambda one: one.stage))
    parts = tuple(
        f"{level if level.startswith(method) else f'{method} {level}'} ({count})"
        for (method, level), count in counts.items()
    )
    noun = ShrinkSet(
        name=name,
        parts=parts,
        bytes=size,
        loss=measured.loss,
        before=plain.loss,
        seconds=measured.seconds,
        doubt=measured.doubt(plain),
    )
    return BuiltSet(noun=noun, candidates=tuple(chosen))


def _sorted(sets: Iterable[BuiltSet], target: int) -> list[BuiltSet]:
    nouns = [(one.noun, one) for one in sets]
    return [one for _, one in sorted(nouns, key=lambda two: (two[0].bytes > target, two[0].likely_loss, two[0].bytes))]


def heal_sets(
    subject: Subject, sets: Sequence[BuiltSet], target: int, healing: Healing, plain: Measured
) -> list[BuiltSet]:
    """The best sets that reach the size, healed and measured again; lowest loss first."""
    reach = [one for one in sets if one.noun.bytes <= target]
    healed = []
    for one in reach[:HEALED]:
        model = heal(subject, one.candidates, healing)
        found = evaluate(model, subject)
        noun = replace(one.noun, healed=found.loss, doubt=found.doubt(plain), bytes=count_bytes(model))
        healed.append(replace(one, noun=noun, model=model))
    rest = [one for one in sets if one not in reach[:HEALED]]
    return _sorted([*healed, *rest], target)


def find_nearest(
    subject: Subject, trials: Sequence[Trial], target: int, allowed: float, plain: Measured
) -> ShrinkSet | None:
    """The smallest set within the allowed loss that a search by halves finds; None where there is none."""
    low, high = target, count_bytes(subject.model)
    best: ShrinkSet | None = None
    for _ in range(TRIES):
        middle = (low + high) // 2
        chosen = walk(subject, trials, middle)
        tried = measure_set(subject, "mixture", chosen, plain).noun if chosen else None
        if tried is not None and tried.bytes <= middle and tried.loss <= allowed:
            best, high = tried, middle
        else:
            low = middle
    return best
