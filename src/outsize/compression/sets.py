"""Sets of candidates that reach a size, measured: all methods together, each alone, each stage alone.

The set with the lowest loss is not taken blindly: of eight sets one is lowest by chance. Sets are compared one standard error
above what was measured, so that one which changes the model less is ahead of one that happened to do well. All that are within
another standard error of the best one count as equally good, and of those the one of the fewest methods is taken. So a
mixture is taken where the data show that it is better than a method alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outsize.compression.evaluation import Measured, evaluate
from outsize.compression.healing import Healing, heal
from outsize.compression.judge import Judge, build
from outsize.compression.method import Candidate, Subject
from outsize.compression.search import Trial, walk
from outsize.core.outcomes.shrinking import ShrinkSet

HEALED = 3
"""Sets that are healed with all steps."""
PILOT = 4
"""Part of the steps with which all sets are healed, where there are more."""
TRIES = 6
"""Sizes that are tried for the nearest set within the allowed loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltSet:
    """A set that was measured, and how it is built again."""

    noun: ShrinkSet
    candidates: tuple[Candidate, ...]
    model: Any = None
    """The healed model, where it was healed."""


def measure_sets(judge: Judge, trials: Sequence[Trial], target: int, plain: Measured) -> list[BuiltSet]:
    """Lowest loss first, with its standard error; those that do not reach the size come last."""
    methods = dict.fromkeys(trial.candidate.method for trial in trials)
    stages = dict.fromkeys(trial.candidate.stage for trial in trials)
    groups = {"mixture": list(trials)}
    groups |= {name: [trial for trial in trials if trial.candidate.method == name] for name in methods}
    for stage in stages:
        groups[f"mixture, {stage.name.lower()}"] = [trial for trial in trials if trial.candidate.stage == stage]
    found: dict[frozenset[Candidate], BuiltSet] = {}
    if target >= judge.subject.count(judge.subject.model):
        return [measure_set(judge, "as it is", (), plain)]
    for name, group in groups.items():
        chosen = walk(judge.subject, group, target)
        if chosen and frozenset(chosen) not in found:
            found[frozenset(chosen)] = measure_set(judge, name, chosen, plain)
    return _sorted(found.values(), target)


def measure_set(judge: Judge, name: str, chosen: Sequence[Candidate], plain: Measured) -> BuiltSet:
    """A set, built and measured."""
    size = judge.subject.count(build(judge.subject, chosen))
    try:
        measured = judge.measure(chosen)
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


def choose_set(sets: Sequence[BuiltSet], target: int, allowed: float) -> BuiltSet | None:
    """The simplest of those that are as good as the best one, as far as the data can tell; None where none will do."""
    reach = [one for one in sets if one.noun.bytes <= target and one.noun.best_loss <= allowed]
    if not reach:
        return None
    best = min(reach, key=lambda one: one.noun.likely_loss).noun
    near = [one for one in reach if one.noun.likely_loss <= best.likely_loss + best.doubt]
    return min(near, key=lambda one: (len({part.method for part in one.candidates}), one.noun.likely_loss))


def heal_sets(
    subject: Subject, sets: Sequence[BuiltSet], target: int, healing: Healing, plain: Measured
) -> list[BuiltSet]:
    """The sets that reach the size, healed and measured again; lowest loss first.

    What a set loses before training says little of what it loses after it: so all are trained for a part of the steps, and
    the best of them for all.
    """

    def trained(one: BuiltSet, steps: int) -> BuiltSet:
        model = heal(subject, one.candidates, replace(healing, steps=steps))
        found = evaluate(model, subject)
        if not found.loss < one.noun.loss:  # a healing that does harm is not used
            return replace(one, model=build(subject, one.candidates))
        noun = replace(one.noun, healed=found.loss, doubt=found.doubt(plain), bytes=subject.count(model))
        return replace(one, noun=noun, model=model)

    reach = {one.noun.name: one for one in sets if one.noun.bytes <= target and math.isfinite(one.noun.loss)}
    order = list(reach)
    if len(reach) > HEALED:
        short = max(1, healing.steps // PILOT)
        pilots = [replace(trained(one, short), model=None) for one in reach.values()]
        order = [one.noun.name for one in _sorted(pilots, target)]
    healed = [trained(reach[name], healing.steps) for name in order[:HEALED]]
    done = {one.noun.name for one in healed}
    rest = [one for one in sets if one.noun.name not in done]
    return [*_sorted(healed, target), *_sorted(rest, target)]


def find_nearest(
    judge: Judge, trials: Sequence[Trial], target: int, allowed: float, plain: Measured
) -> ShrinkSet | None:
    """The smallest set within the allowed loss that a search by halves finds; None where there is none."""
    low, high = target, judge.subject.count(judge.subject.model)
    best: ShrinkSet | None = None
    for _ in range(TRIES):
        middle = (low + high) // 2
        chosen = walk(judge.subject, trials, middle)
        tried = measure_set(judge, "mixture", chosen, plain).noun if chosen else None
        if tried is not None and tried.bytes <= middle and tried.loss <= allowed:
            best, high = tried, middle
        else:
            low = middle
    return best
