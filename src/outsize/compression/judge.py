"""What sets of candidates do to the loss, on batches to which they were not fitted.

Pruned channels and low-rank factors are chosen by what they do on the data. On the same data they look better than they are, so
they would be taken in the place of methods that look at nothing. Where training data are given, methods are fitted to those.
Else the data are cut in two halves: each candidate is made three times, from all data (the one that is used) and from either
half (each judged on the other), so that every batch still counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outsize.compression.evaluation import FEW_BATCHES, Measured, evaluate, join
from outsize.compression.method import Candidate, Method, Subject
from outsize.compression.weights import share


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """The data, in parts."""

    subject: Subject
    fitting: Subject
    """What methods look at."""
    halves: tuple[Subject, ...] = ()
    """Parts of the data that are judged by what was fitted to the other; empty where all are judged at once."""

    def find_candidates(self, methods: Sequence[Method]) -> tuple[list[Candidate], list[str]]:
        """What the methods offer, and which of them find nothing."""
        found: list[Candidate] = []
        unused = []
        for method in methods:
            offered = method.candidates(self.fitting)
            if not offered:
                unused.append(f"{method.name} finds nothing in this model: it needs {method.needs}")
            found += self._with_elsewhere(method, offered) if method.fitted and self.halves else offered
        return found, unused

    def _with_elsewhere(self, method: Method, offered: Sequence[Candidate]) -> list[Candidate]:
        others = [{(one.site, one.level): one for one in method.candidates(half)} for half in reversed(self.halves)]
        return [
            replace(one, elsewhere=tuple(other[one.site, one.level] for other in others))
            for one in offered
            if all((one.site, one.level) in other for other in others)
        ]

    def measure(self, chosen: Iterable[Candidate]) -> Measured:
        """The loss of the model with these candidates."""
        chosen = list(chosen)
        if not any(one.elsewhere for one in chosen):
            return evaluate(build(self.subject, chosen), self.subject)
        found = []
        for number, half in enumerate(self.halves):
            fitted = [one.elsewhere[number] if one.elsewhere else one for one in chosen]
            found.append(evaluate(build(self.subject, fitted), half))
        return join(found)


def make_judge(subject: Subject, training: Sequence[Any] | None) -> Judge:
    """How candidates are fitted and judged."""
    if training is not None:
        return Judge(subject=subject, fitting=replace(subject, batches=training))
    half = len(subject.batches) // 2
    if not half:
        return Judge(subject=subject, fitting=subject)
    halves = (replace(subject, batches=subject.batches[:half]), replace(subject, batches=subject.batches[half:]))
    return Judge(subject=subject, fitting=subject, halves=halves)


def take_few(subject: Subject) -> Subject:
    """The subject with some of its batches, from all over them: the halves of these lie in the halves of all."""
    count = len(subject.batches)
    if count <= FEW_BATCHES:
        return subject
    return replace(subject, batches=[subject.batches[number * count // FEW_BATCHES] for number in range(FEW_BATCHES)])


def interleave(batches: Sequence[Any]) -> list[Any]:
    """Every second batch first, so that both halves are alike where data come in an order."""
    return [*batches[::2], *batches[1::2]]


def build(subject: Subject, chosen: Iterable[Candidate]) -> Any:
    """A model with these candidates, which shares the tensors that stay as they are."""
    model = share(subject.model)
    for candidate in sorted(chosen, key=lambda one: one.stage):
        model = candidate.apply(model)
    return model
