"""Sets of candidates that reach a size, measured: all methods together, each alone, each stage alone.

The set with the lowest loss is not taken blindly: of eight sets one is lowest by chance, and most easily one that changes the
losses of the batches a lot, up and down. So the loss of a set is read two standard errors of its change above what was measured
(`cautious_loss`), and the lowest of these is taken. A set that changes little thus stands before one that changes much, until the
batches show that this one is better.

A healing is used unless it makes a set worse by more than chance explains (`Measured.is_worse`): training helps as a rule, and a
few batches cannot always show it. A set that was trained no further is taken only where no other will do.
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

PILOT = 4
"""Part of the steps with which all sets are healed first."""
TRIES = 6
"""Sizes that are tried for the nearest set within the allowed loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltSet:
    """A set that was measured, and how it is built again."""

    noun: ShrinkSet
    candidates: tuple[Candidate, ...]
    measured: Measured
    model: Any = None
    """The healed model, where it was healed."""
    dropped: bool = False
    """True where it was trained no further, since it was too far behind the others."""


def measure_sets(judge: Judge, trials: Sequence[Trial], target: int, plain: Measured) -> list[BuiltSet]:
    """Lowest loss first, with its standard error; those that do not reach the size come last."""
    methods = dict.fromkeys(trial.candidate.method for trial in trials)
    stages = dict.fromkeys(trial.candidate.stage for trial in trials)
    groups = {name: [trial for trial in trials if trial.candidate.method == name] for name in methods}
    groups["mixture"] = list(trials)  # after each method alone, which gives a set of one method its name
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
    return BuiltSet(noun=noun, candidates=tuple(chosen), measured=measured)


def _sorted(sets: Iterable[BuiltSet], target: int) -> list[BuiltSet]:
    nouns = [(one.noun, one) for one in sets]
    return [one for _, one in sorted(nouns, key=lambda two: (two[0].bytes > target, two[0].best_loss, two[0].bytes))]


def choose_set(sets: Sequence[BuiltSet], target: int, allowed: float) -> BuiltSet | None:
    """Of the sets that reach the size, the one of the lowest cautious loss; None where none will do."""
    fitting = [one for one in sets if one.noun.bytes <= target and one.noun.best_loss <= allowed]

    def order(one: BuiltSet) -> tuple[float, int, int]:
        return one.noun.cautious_loss, len({part.method for part in one.candidates}), one.noun.bytes

    return min([one for one in fitting if not one.dropped] or fitting, key=order, default=None)


def heal_sets(
    subject: Subject, sets: Sequence[BuiltSet], target: int, allowed: float, healing: Healing, plain: Measured
) -> list[BuiltSet]:
    """The sets that reach the size, healed and measured again; lowest loss first.

    What a set loses before training says little of what it loses after it: so all are trained for a part of the steps, and
    those for all that can still become the best.
    """

    def trained(one: BuiltSet, steps: int) -> BuiltSet:
        model = heal(subject, one.candidates, replace(healing, steps=steps))
        found = evaluate(model, subject)
        if found.is_worse(one.measured) or one.noun.loss <= allowed < found.loss:  # it does harm
            return replace(one, model=build(subject, one.candidates))
        noun = replace(one.noun, healed=found.loss, doubt=found.doubt(plain), bytes=subject.count(model))
        return replace(one, noun=noun, measured=found, model=model)

    reach = {one.noun.name: one for one in sets if one.noun.bytes <= target and math.isfinite(one.noun.loss)}
    if len(reach) > 1:
        short = replace(healing, steps=max(1, healing.steps // PILOT))
        pilots = {name: evaluate(heal(subject, one.candidates, short), subject) for name, one in reach.items()}
        reach = {name: one for name, one in reach.items() if _can_catch_up(one, pilots[name], pilots.values())}
    healed = [trained(one, healing.steps) for one in reach.values()]
    done = {one.noun.name for one in healed}
    rest = [replace(one, dropped=one.noun.bytes <= target) for one in sets if one.noun.name not in done]
    return [*_sorted(healed, target), *_sorted(rest, target)]


def _can_catch_up(one: BuiltSet, pilot: Measured, pilots: Iterable[Measured]) -> bool:
    """True where a set is not farther behind the best one than its training has moved it so far."""
    best = min(pilots, key=lambda found: found.loss)
    return not pilot.is_worse(best) or pilot.loss - best.loss <= abs(pilot.loss - one.measured.loss)


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
