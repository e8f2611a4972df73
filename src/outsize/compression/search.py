"""Which candidates to take: the sets that reach the size, of which one is taken (`sets.py`).

Each candidate is measured alone. A path then takes candidates one by one, always the one that raises the loss least for the bytes
it saves, as if the rises added up. They do not quite, so several paths are walked (`sets.py`), the first set of each that reaches
the size is built and measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outsize.compression.evaluation import Measured, evaluate
from outsize.compression.judge import Judge, build
from outsize.compression.method import Candidate, Subject
from outsize.compression.weights import count_bytes, own_parameters
from outsize.core.outcomes.shrinking import ShrinkCandidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A candidate and what it does alone."""

    candidate: Candidate
    saves: int
    """Bytes."""
    rise: float
    """Of the loss, with one standard error; a fall counts as a rise, since it is chance. A little above 0 at least, more the
    more is saved."""
    noun: ShrinkCandidate


def try_alone(judge: Judge, candidates: Sequence[Candidate], plain: Measured) -> tuple[list[Trial], list[str]]:
    """Each candidate measured alone, and why some cannot be used. `plain` is the user's model on all data, of which the judge
    may have a part."""
    subject = judge.subject
    here = plain if len(plain.parts) == len(subject.batches) else evaluate(subject.model, subject)
    before, trials, failures = subject.count(subject.model), [], []
    for candidate in candidates:
        try:
            after = subject.count(build(subject, [candidate]))
            if after >= before:
                continue
            found = judge.measure([candidate])
        except Exception as error:  # the model's own code may refuse what was changed: then it is not offered
            failures.append(
                f"{candidate.method} of {candidate.site} is left out: {type(error).__name__}: {str(error)[:120]}"
            )
            continue
        least = (abs(plain.loss) + 1e-9) * 1e-6 * (before - after) / before
        noun = ShrinkCandidate(
            method=candidate.method,
            site=candidate.site,
            level=candidate.level,
            bytes=after,
            loss=found.loss + (plain.loss - here.loss),
            seconds=found.seconds,
        )
        trials.append(
            Trial(
                candidate=candidate,
                saves=before - after,
                rise=max(abs(found.loss - here.loss) + found.doubt(here), least),
                noun=noun,
            )
        )
    return trials, failures


class Walk:
    """A path: what was taken so far, and what the set is thought to save and to cost."""

    def __init__(self, subject: Subject, trials: Sequence[Trial]) -> None:
        self.trials = trials
        self.taken: tuple[Trial, ...] = ()
        more = subject.count(subject.model) / max(1, count_bytes(subject.model))  # of training: gradients and state too
        self._sizes = {
            name: more * sum(tensor.nbytes for tensor in own_parameters(module))
            for name, module in subject.model.named_modules()
        }

    def saves(self, taken: Iterable[Trial]) -> float:
        """Bytes that a set saves: a later stage saves only of what the earlier ones left."""
        left: dict[str, float] = {}
        saved = 0.0
        for trial in sorted(taken, key=lambda one: one.candidate.stage):
            touched = [name for name in trial.candidate.touches if name in self._sizes]
            whole = sum(self._sizes[name] for name in touched)
            part = sum(self._sizes[name] * left.get(name, 1.0) for name in touched)
            saved += trial.saves * part / max(1, whole)
            for name in touched:
                left[name] = left.get(name, 1.0) * max(0.0, 1 - trial.saves / max(1, whole))
        return saved

    def step(self) -> bool:
        """Take the candidate that raises the loss least for what it saves; False where none saves more."""
        now, rise = self.saves(self.taken), sum(trial.rise for trial in self.taken)
        best: tuple[float, tuple[Trial, ...]] | None = None
        for trial in self.trials:
            if trial in self.taken or not math.isfinite(trial.rise):
                continue
            changed = (*(one for one in self.taken if not _exclude(one, trial)), trial)
            saves = self.saves(changed) - now
            if saves > 0:
                price = max(0.0, sum(one.rise for one in changed) - rise) / saves
                if best is None or price < best[0]:
                    best = price, changed
        if best is not None:
            self.taken = best[1]
        return best is not None

    def give_back(self, needed: float) -> None:
        """Leave out what costs most and is not needed, or take the gentler candidate of the same place."""
        for trial in sorted(self.taken, key=lambda one: -one.rise):
            rest = tuple(one for one in self.taken if one is not trial)
            gentler = [one for one in self.trials if _exclude(one, trial) and one.rise < trial.rise]
            free = [one for one in gentler if not any(_exclude(one, other) for other in rest)]
            for changed in [rest, *((*rest, one) for one in sorted(free, key=lambda one: one.rise))]:
                if self.saves(changed) >= needed:
                    self.taken = changed
                    break


def _exclude(one: Trial, other: Trial) -> bool:
    """True of two candidates of one stage that touch the same module."""
    return one.candidate.stage == other.candidate.stage and bool(one.candidate.touches & other.candidate.touches)


def walk(subject: Subject, trials: Sequence[Trial], target: int) -> list[Candidate]:
    """The first set of the path that is small enough, counted on a built model; or the last set."""
    path, before = Walk(subject, trials), subject.count(subject.model)
    needed = float(before - target)
    while True:
        while path.saves(path.taken) < needed:
            if not path.step():
                return [one.candidate for one in path.taken]
        last = path.taken
        path.give_back(needed)
        chosen = [one.candidate for one in path.taken]
        short = subject.count(build(subject, chosen)) - target
        if short <= 0:
            return chosen
        path.taken = last
        needed = path.saves(last) + min(short, needed)  # the sum of the savings said too much
