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
from outsize.model.fitting.move.stores import IN_FLIGHT
from outsize.model.fitting.plan.choice import Choice
from outsize.model.fitting.plan.dry_run import RATES
from outsize.model.fitting.plan.facts import Facts
from outsize.model.fitting.plan.foreign_tensors import say_beside
from outsize.model.fitting.plan.projection import Projection
from outsize.model.fitting.plan.remedies import ALLOWED, REMEDIES, Means, moved_bytes, order_blocks

TRACES = 16
"""Most traces of one search."""

HOPE = 0.92
"""A choice is traced where the arithmetic says at most its budget over this: it errs by a few percent both ways."""

STRIDE = 1.04
"""After a choice that does not fit, the next one to be traced is predicted to hold so much less."""

SURE = 0.02
"""Room that a card's plan leaves where nothing stops the allocator at the budget."""

TIES = 0.03
"""Room where it does: addresses, which only the driver knows, decide ties; the plain step is given none, as it costs nothing."""

PAGE = 20 * 2**20
"""By so much a segment grows at least."""

SCATTERED = 3
"""So many choices of a kind may fail by the allocator's gaps alone before others like them are given up."""

WORTHWHILE = 0.03
"""Part of the state for which room is used."""

FEW = 4
"""Most traces in search of one more choice to run."""


Places = tuple[tuple[str, ...], float]
"""What is elsewhere, and how much of the state."""


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
    limited: bool = False
    """The allocator stops at the budget, clearing its cache before it fails."""
    tried: list[Candidate] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)
    least: Choice = field(default_factory=Choice)
    """Where nothing fits, the choice that holds least."""
    tracing: Choice = field(default_factory=Choice)
    """The choice that was traced last."""
    corrections: dict[tuple[str, ...], float] = field(default_factory=dict)
    """Kind of a choice -> what traces have shown its arithmetic to be off by."""
    traced: Callable[[], None] = lambda: None
    """Called after each trace."""

    def run(self) -> Candidate:
        """The cheapest choice that fits, or a `BudgetError`."""
        self.candidates = sorted(self._candidates(), key=lambda c: (c.seconds, c.predicted))
        return self._cheapest(self.candidates, TRACES) or self._smallest()

    def another(self, found: list[Candidate], passes: float) -> Candidate | None:
        """The cheapest choice of another kind than those found, where its passes may take less than so many seconds."""
        most = passes - self.facts.passes
        near = (c for c in self.candidates if c.seconds < most)
        others = [c for c in near if not any(_does_more(c.choice, f.choice) for f in found)]
        another = self._cheapest(others, len(self.tried) + FEW)
        return None if another is None or any(_does_more(another.choice, f.choice) for f in found) else another

    def other_cuts(self, candidate: Candidate, most: int) -> list[Choice]:
        """The same choice with first slices up to the largest that may fit: cards take unequal times for samples, and the
        first slice has no gradients of others beside it."""
        facts, choice = self.facts, candidate.choice
        rest = -(-facts.rows // choice.slices)
        fixed = facts.weights + int((1 - choice.state_away) * facts.state) + facts.plain.beside
        each = max(1, (candidate.peak - fixed - facts.gradients) // rest)
        largest = min(facts.rows - choice.slices + 1, int((self.budget / (1 + TIES) - fixed) // each))
        sizes = {rest + (largest - rest) * number // most for number in range(1, most + 1)}
        return [replace(choice, first=size) for size in sorted(sizes, reverse=True) if size > rest]

    def trace(self, choice: Choice) -> Candidate | None:
        """A choice that the search had not thought of, where it fits."""
        candidate = self._trace(self._candidate(replace(choice, expandable=False)))
        return candidate if self.fits(candidate) else None

    def fits(self, candidate: Candidate) -> bool:
        """True where the traced step stays inside the budget."""
        projection = candidate.projection
        assert projection is not None
        if not projection.card:
            return projection.peak <= self.budget
        choice = candidate.choice
        if self._needed(choice, projection.peak) <= self.budget:
            return True
        part = 1.0 if choice == Choice() else 1.0 / (1 + TIES)
        return self.limited and not choice.expandable and projection.settles(int(self.budget * part))

    def _fits_at_once(self, candidate: Candidate) -> bool:
        """True where the allocator need not clear its cache; the plain step may, as it costs nothing otherwise."""
        assert candidate.projection is not None
        if candidate.choice == Choice() and self.fits(candidate):
            return True
        return self._needed(candidate.choice, candidate.projection.peak) <= self.budget

    def _needed(self, choice: Choice, peak: int) -> int:
        """The budget for a traced peak: on a card somewhat more; segments that grow do so by a page, also beyond a limit."""
        if self.facts.device == "cpu":
            return peak
        if choice.expandable:
            return int(peak * (1 + TIES)) + PAGE
        return int(peak * (1 + (TIES if self.limited else SURE))) + 1

    def _cheapest(self, candidates: list[Candidate], most: int) -> Candidate | None:
        """The first that fits, cheapest first; what a trace says about the arithmetic holds for the same kind of choice.

        Where choices that keep weights, gradients and state in the same places have failed twice, the smallest of them is
        traced: where it fails too, all of them do. At most `most` traces are made in all.
        """
        failed: dict[Places, int] = {}
        scattered: dict[tuple[str, ...], int] = {}
        fitting: list[Candidate] = []
        while len(self.tried) < most:
            beyond = self._beyond()
            candidate = next((c for c in candidates if self._hopeful(c, failed, beyond)), None)
            if candidate is None or any(c.seconds <= candidate.seconds for c in fitting):
                break
            if self.fits(self._trace(candidate)):
                fitting.append(candidate)
                break
            kind, places = _means(candidate.choice), _places(candidate.choice)
            scattered[kind] = scattered.get(kind, 0) + self._scatters(candidate)
            if not 0 < scattered[kind] <= SCATTERED:
                part = 1.0 if candidate.choice.expandable else self._handed
                seen = max(STRIDE * self.budget, part * candidate.peak) / max(1, candidate.predicted)
                self.corrections[kind] = max(self.corrections.get(kind, self._hope), seen)
            failed[places] = failed.get(places, 0) + 1
            if failed[places] == 2:
                rest = [c for c in candidates if _places(c.choice) == places and c.projection is None]
                least = min(rest, key=_smallest_first, default=None)
                if least is not None and self.fits(self._trace(least)):
                    fitting.append(least)
                else:
                    failed[places] = TRACES
        return self._spare(min(fitting, key=lambda c: c.seconds)) if fitting else None

    def _scatters(self, candidate: Candidate) -> bool:
        """True where what is handed out would fit, and only the allocator's gaps do not: those of another choice may."""
        assert candidate.projection is not None
        peaks = candidate.projection.peaks
        handed = max(size for name, size in peaks.items() if name != "reserved")
        return candidate.projection.card and self._needed(candidate.choice, handed) <= self.budget

    def _beyond(self) -> dict[Choice, int]:
        """Bytes that the passes of a choice hold beyond the arithmetic: the same, wherever weights, gradients and state are."""
        found = {}
        for candidate in self.tried:
            assert candidate.projection is not None
            peaks = candidate.projection.peaks
            if peaks.get("optimizer", 0) < max(peaks["forward"], peaks["backward"]):
                found[_passes(candidate.choice)] = candidate.peak - candidate.predicted
        return found

    def _hopeful(
        self, candidate: Candidate, failed: dict[Places, int],
        beyond: dict[Choice, int],
    ) -> bool:  # fmt: skip
        """True where a choice is worth a trace; `beyond`: what was learnt about choices whose passes are the same."""
        if failed.get(_places(candidate.choice), 0) >= TRACES:
            return False
        if candidate.projection is not None:
            return False
        more = beyond.get(_passes(candidate.choice))
        if more is not None and (candidate.predicted + more) * (1 - TIES) * self._handed > self.budget:
            return False
        return candidate.predicted * self.corrections.get(_means(candidate.choice), self._hope) <= self.budget

    @property
    def _handed(self) -> float:
        """Part of what the plain step reserves that is handed out: under a limit the allocator gets through with about that."""
        plain = self.facts.plain
        handed = max(size for name, size in plain.peaks.items() if name != "reserved")
        return handed / max(1, _reserved(plain, self.facts)) if self.limited else 1.0

    @property
    def _hope(self) -> float:
        """What the arithmetic is multiplied by before it is believed."""
        return HOPE * self._handed

    def _trace(self, candidate: Candidate) -> Candidate:
        """What a choice holds; where it fits at best by clearing caches and growing segments would reserve less, with those."""
        self.tracing = candidate.choice
        projection = candidate.projection = self.project(candidate.choice)
        if self.facts.grows and projection.grown < projection.peak and not self._fits_at_once(candidate):
            growing = replace(candidate.choice, expandable=True)
            if self._needed(growing, projection.grown) <= self.budget or not self.fits(candidate):
                candidate.choice, candidate.projection = growing, projection.growing()
        self.tried.append(candidate)
        self.traced()
        return candidate

    def _smallest(self) -> Candidate:
        """The smallest of all: what it takes decides between a plan and an error."""
        least: dict[tuple[Any, ...], Candidate] = {}
        for candidate in sorted(self.candidates, key=_smallest_first):
            choice = candidate.choice
            least.setdefault((choice.elsewhere, bool(choice.checkpoint), bool(choice.offload)), candidate)
        looked = list(itertools.islice(least.values(), TRACES))  # the same for every budget, also for the one it names
        for candidate in looked:
            if candidate.projection is None:
                self._trace(candidate)
        fitting = [c for c in self.tried if self.fits(c)]
        if fitting:
            return self._spare(min(fitting, key=lambda c: c.seconds))
        plain = Candidate(
            Choice(), 0.0, self.facts.plain.peak, self.facts.plain
        )  # remedies may cost more than they save
        best = min(plain, *looked, key=lambda c: c.peak)
        self.least = best.choice
        needed = self._needed(best.choice, best.peak)
        reason = self.facts.forbidden.get("slices")
        whole = f"; the batch is not sliced: {reason}" if reason else ""
        raise BudgetError(
            f"no {self.allow} plan fits the step into {format_bytes(self.budget)}: the smallest found holds "
            f"{format_bytes(best.peak)} ({describe(best.choice)}){say_beside(self.facts.plain.beside)}, so a budget of "
            f"{needed} bytes is the smallest that has one{whole}",
            needed=needed, budget=self.budget, smallest=needed, culprit=_highest(best),
        )  # fmt: skip

    def _spare(self, candidate: Candidate) -> Candidate:
        """As little of what a choice does as still fits."""
        return self._bring_home(self._refine(candidate))

    def _bring_home(self, candidate: Candidate) -> Candidate:
        """Less state elsewhere, where there is room for it."""
        choice, state = candidate.choice, self.facts.state
        room = self.budget - self._needed(choice, candidate.peak)
        if not choice.state_away or choice.stream or choice.gradients_away or room < WORTHWHILE * state:
            return candidate
        part = self.facts.share(max(0.0, choice.state_away - room / max(1, state)))
        if part >= choice.state_away:
            return candidate
        nearer = self._trace(self._candidate(replace(choice, state_away=part, expandable=False)))
        return nearer if self.fits(nearer) else candidate

    def _refine(self, candidate: Candidate) -> Candidate:
        """Fewer modules that are computed again, as long as it still fits."""
        nothing: tuple[str, ...] = ()
        ladders = ([nothing, *(rung.names for rung in ladder)] for ladder in self.facts.ladders)
        rungs = next((names for names in ladders if candidate.choice.checkpoint in names), [nothing])
        moved = candidate.choice.offload  # then fewer means more to move
        if moved or not candidate.choice.checkpoint or candidate.choice.checkpoint not in rungs:
            return candidate
        best, high = candidate, rungs.index(candidate.choice.checkpoint)
        failed = [c for c in self.tried if _alike(c.choice, candidate.choice) and not self.fits(c)]
        low = max((rungs.index(c.choice.checkpoint) for c in failed if c.choice.checkpoint in rungs), default=-1)
        low = min(low, high)
        tries = max(3, TRACES + 4 - len(self.tried))
        shorter, reach = candidate, 1
        while high - low > 1 and tries > 0:
            middle = self._likely(shorter, rungs)
            if not low < middle < high:  # beside what is known, and further from it each time
                away = min(reach, (high - low) // 2)
                middle, reach = (low + away if middle <= low else high - away), 2 * reach
            shorter = self._candidate(replace(candidate.choice, checkpoint=rungs[middle], expandable=False))
            tries -= 1
            if self.fits(self._trace(shorter)):
                best, high = shorter, middle
            else:
                low = middle
        return best

    def _likely(self, traced: Candidate, rungs: list[tuple[str, ...]]) -> int:
        """The first rung that fits where the arithmetic errs by as much as in a trace beside it."""
        choice, beyond = traced.choice, traced.peak - traced.predicted
        peaks = (predict(replace(choice, checkpoint=names), self.facts) + beyond for names in rungs)
        return next((n for n, peak in enumerate(peaks) if self._needed(choice, peak) <= self.budget), len(rungs))

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


def _smallest_first(candidate: Candidate) -> tuple[int, int, float]:
    """Where the arithmetic sees no difference, what does most, and so costs most, holds least."""
    return candidate.predicted, -candidate.choice.slices, -candidate.seconds


def _means(choice: Choice) -> tuple[str, ...]:
    """Which remedies a choice uses."""
    return tuple(means.key for means in REMEDIES if means.on(choice) and means.key != "expandable")


def _places(choice: Choice) -> Places:
    """Where a choice has weights, gradients and state."""
    return choice.elsewhere, choice.state_away


def _passes(choice: Choice) -> Choice:
    """What a choice does to forward and backward pass alone."""
    return replace(choice, in_backward=False, state_away=0.0, gradients_away=False, stream=(), expandable=False)


def _does_more(choice: Choice, other: Choice) -> bool:
    """True where a choice does all that another does, and so is hardly faster, or the same to another degree."""
    same = _means(choice) == _means(other) and choice.slices == other.slices
    covers = set(_means(choice)) >= set(_means(other)) and choice.slices >= other.slices
    return same or (covers and len(choice.checkpoint) >= len(other.checkpoint))


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
    return replace(a, checkpoint=(), expandable=False) == replace(b, checkpoint=(), expandable=False)


def _sensible(choice: Choice, facts: Facts) -> bool:
    """False for choices that contradict themselves or pay for nothing."""
    if choice.in_backward and (choice.slices > 1 or choice.gradients_away):
        return False
    if (choice.gradients_away or choice.stream) and choice.state_away < 1 and facts.state:
        return False
    if choice.stream and not (choice.in_backward or choice.gradients_away):
        return False
    if choice.stream and not set(order_blocks(facts)) <= set(choice.checkpoint) and not choice.offload:
        return False
    return not (choice.chunks and (set(facts.heads) & {*choice.stream, *choice.checkpoint, *choice.offload}))


def added(choice: Choice, facts: Facts) -> float:
    """Seconds that a choice adds to the plain step."""
    return sum(means.seconds(choice, facts) for means in REMEDIES if means.on(choice))


def slow_down(choice: Choice, facts: Facts) -> float:
    """Predicted time over that of the plain step."""
    return 1.0 + added(choice, facts) / max(plain_seconds(facts), 1e-9)


def plain_seconds(facts: Facts) -> float:
    """Time of the plain step: its passes, and an update that touches weights, gradients and state a few times."""
    touched = 4 * (facts.weights + facts.gradients + facts.state)
    return facts.passes + touched / RATES[facts.device][1]


def _reserved(plain: Projection, facts: Facts) -> int:
    """What the plain step's allocator takes, in the better of both ways."""
    return min(plain.peak, plain.grown) if facts.grows else plain.peak


def _in_passes(plain: Projection) -> float:
    """Part of the peak that forward and backward pass reach: what the update takes beyond it is no activation."""
    phases = {name: size for name, size in plain.peaks.items() if name != "reserved"}
    return max(phases["forward"], phases["backward"]) / max(1, *phases.values())


def predict(choice: Choice, facts: Facts) -> int:
    """Peak of a choice by arithmetic on the plain step."""
    if choice == Choice():
        return facts.plain.peak  # it is known
    plain = facts.pieces if choice.chunks and facts.pieces is not None else facts.plain
    kept = sum(plain.kept.values())
    largest = choice.first if choice.slices > 1 else 0
    share = (largest or -(-facts.rows // choice.slices)) / facts.rows
    streams = set(choice.stream)
    parts = [facts.parts[name] for name in choice.checkpoint if name in facts.parts]
    freed = sum(part.freed for part in parts) + moved_bytes(choice, facts)
    again = max((part.kept for part in parts), default=0)
    again += min(IN_FLIGHT, moved_bytes(choice, facts)) if choice.offload and facts.device == "cuda" else 0
    extra = max(0, int(_reserved(plain, facts) * _in_passes(plain)) - plain.fixed - kept)
    activations = (kept + extra - freed + again) * share * (0.6 if choice.autocast else 1.0)
    fixed = float(plain.fixed)
    fixed -= choice.state_away * facts.state
    if choice.stream:
        streamed = [block.weights for block in facts.blocks if block.name in streams]
        fixed -= sum(streamed) - 2 * max(streamed)
    gradients, update = _update(choice, facts)
    early = gradients if choice.slices > 1 and gradients == facts.gradients else 0
    early += _logged(facts) if choice.in_backward else 0
    last = fixed + gradients + again * share  # all gradients are there while the first block runs backward
    return int(max(fixed + activations + early, last, fixed + update))


def _update(choice: Choice, facts: Facts) -> tuple[float, float]:
    """Bytes that gradients take in the backward pass, and what the update of a group of parameters holds."""
    group = facts.group
    comes = group * ((facts.copies if choice.state_away else 0) + bool(choice.stream))
    if choice.in_backward:  # a group waits for the next gradient; what it changes goes to the log first
        waiting = group + facts.largest + comes + _logged(facts)
        return waiting, waiting + group
    card = facts.device == "cuda"
    undo, at_once = group * (2 + facts.copies), 2 if card else 1  # on a card the next group comes meanwhile
    if choice.gradients_away:
        flying = min(IN_FLIGHT, facts.gradients) if card else 0
        return 2 * facts.largest + flying, undo + at_once * (group + comes)
    return facts.gradients, facts.gradients + undo + at_once * comes


def _logged(facts: Facts) -> int:
    """Bytes on their way to the log of an update in the backward pass."""
    return min(IN_FLIGHT, facts.weights + facts.state) if facts.device == "cuda" else 0


def describe(choice: Choice) -> str:
    """The remedies of a choice, in a few words."""
    names = []
    for means in REMEDIES:
        if means.on(choice):
            value = getattr(choice, means.key)
            count = len(value) if isinstance(value, tuple) else value
            count = f"{count}, the first of {choice.first}" if means.key == "slices" and choice.first else count
            count = f"{value:.0%}" if isinstance(value, float) else count
            names.append(means.name if value == 1 else f"{means.name} ({count})")
    return ", ".join(names) or "the plain step"


def remedies_on(choice: Choice) -> list[Means]:
    """The remedies that a choice uses."""
    return [means for means in REMEDIES if means.on(choice)]
