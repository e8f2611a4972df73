"""Finds the cheapest set of remedies for a training step on the model's device.

In: facts, a function that projects a choice, a budget. Out: the choice, its projection and its neighbours. Arithmetic on the
facts ranks the choices by cost and says which may fit; the trace of the fitted step itself decides. Each trace also corrects the
arithmetic, so few are needed. Where nothing fits, the smallest projected peak of all is the budget to name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outsize.core.errors import BudgetError
from outsize.core.units import format_bytes
from outsize.model.fitting.choice import PLAIN, REMEMBERED, Choice
from outsize.model.fitting.plan.facts import Facts, reserved_of
from outsize.model.fitting.plan.foreign_tensors import say_beside
from outsize.model.fitting.plan.projection import Projection
from outsize.model.fitting.plan.remedies import TIES, TRAINING, describe, predict, remedies_on
from outsize.model.fitting.plan.search import SURE, TRACES, Candidate, Search
from outsize.model.fitting.plan.tensor_remedies import move_all

HOPE = 0.92
"""A choice is traced where the arithmetic says at most its budget over this: it errs by a few percent both ways."""

STRIDE = 1.04
"""After a choice that does not fit, the next one to be traced is predicted to hold so much less."""

SCATTERED = 3
"""So many choices of a kind may fail by the allocator's gaps alone before others like them are given up."""

FEW = 4
"""Most traces in search of one more choice to run."""

ODD = 1.5
"""A choice that holds so many times what the arithmetic says has kernels that ask for more than those of the whole batch."""

LIGHTER = 5
"""Most traces in search of a cheaper choice, below one that fits."""

CHEAPER = 0.9
"""Part of the seconds added that a cheaper choice may take."""

BESIDE = 0.75
"""Part of a step's time that a smaller choice may take to be traced before a dear one is taken."""

SMALLER = 0.95
"""Part of what a plan holds that a smaller one beside it may hold."""

DEAR = 0.25
"""Tensors are treated one by one where remedies for modules add more than this part of the plain step."""

LOOKED = 8
"""Most choices of a kind among which the smallest is looked for where nothing fits."""

SETTINGS = tuple(kind for kind in TRAINING if kind.shown_without)
"""Remedies that need no trace of their own."""


class TrainingSearch(Search[Facts]):
    """One search; its arithmetic is corrected as traces show."""

    remedies = TRAINING

    def __init__(
        self, facts: Facts, project: Callable[[Choice], Projection], allow: str, budget: int, limited: bool = False
    ) -> None:
        super().__init__(facts, project, allow, budget)
        self.limited = limited
        """The allocator stops at the budget, clearing its cache before it fails."""
        self.least = Choice()
        """Where nothing fits, the choice that holds least."""
        self.corrections: dict[tuple[str, ...], float] = {}
        """Kind of a choice -> what traces have shown its arithmetic to be off by."""
        self._beyond: dict[Choice, int] = {}
        """Bytes that the passes of a choice hold beyond the arithmetic: the same, wherever weights, gradients and state are."""
        self._failed: dict[Any, int] = {}
        """Places of weights, gradients and state -> how many choices with them did not fit."""
        self._most = facts.rows
        """Into more slices the batch is not cut: kernels of fewer samples were seen to hold more."""
        self._fewest = 1
        """With fewer slices single operators hold too much."""
        self._failed_in: dict[int, int] = {}
        """Number of slices -> how many choices with it did not fit."""
        self._scattered: dict[tuple[str, ...], int] = {}
        """Kind of a choice -> how many did not fit by the allocator's gaps alone."""

    def run(self) -> Candidate:
        """Before a dear choice is taken, those are traced that are thought to hold less and to take much less time: the cheapest,
        and after one that does not fit those that are thought to hold as much less as it passed the budget."""
        found, most = super().run(), float(self.budget)
        for _ in range(LIGHTER if self._is_dear(found) else 0):
            seconds = BESIDE * (self.facts.seconds + found.seconds) - self.facts.seconds
            less = [
                c for c in self.candidates if c.projection is None and c.seconds < seconds and self.thought(c) <= most
            ]
            beside = self.smaller(found, less)
            if beside is None:
                break
            thought = self.thought(beside)
            if self.fits(self._trace(beside)):
                found = self._improve(beside)
            else:
                most = thought * min(1.0 / STRIDE, self.budget / beside.peak)
        return found

    def smaller(self, found: Candidate, among: list[Candidate]) -> Candidate | None:
        """The cheapest that is known, or thought after all traces, to hold clearly less than what was found."""
        beside = (c for c in among if c.choice != found.choice and c.choice.runs <= self._most)
        cheapest = sorted(beside, key=lambda c: (c.seconds, c.peak))
        return next((c for c in cheapest if self.thought(c) < SMALLER * found.peak), None)

    def thought(self, candidate: Candidate) -> int:
        """The trace of a choice, or its arithmetic as the kindest trace of another like it corrects that."""
        if candidate.projection is not None:
            return candidate.peak
        return int(candidate.predicted + max(0.0, min(self._back(candidate), default=0.0)) * self._freed(candidate))

    def another(self, found: list[Candidate], passes: float) -> Candidate | None:
        """The cheapest choice of another kind than those found, where its passes may take less than so many seconds."""
        most = passes - self.facts.passes
        near = (c for c in self.candidates if c.seconds < most)
        others = [c for c in near if not any(_does_more(c.choice, f.choice) for f in found)]
        another = self._cheapest(others, len(self.tried) + FEW)
        return None if another is None or any(_does_more(another.choice, f.choice) for f in found) else another

    def variants(self, candidate: Candidate) -> list[Choice]:
        """Choices that do as much otherwise, and may be faster."""
        return [
            variant
            for kind in TRAINING
            for variant in kind.variants(candidate.choice, self.facts, candidate.peak, self.budget)
        ]

    def trace(self, choice: Choice) -> Candidate | None:
        """A choice that the search had not thought of, where it fits."""
        candidate = self._trace(self._candidate(as_traced(choice)))
        return candidate if self.fits(candidate) else None

    def fits(self, candidate: Candidate) -> bool:
        projection = candidate.projection
        assert projection is not None
        if not projection.card:
            return self._needed(candidate.choice, projection.peak) <= self.budget
        choice = candidate.choice
        if self._needed(choice, projection.peak) <= self.budget:
            return True
        part = 1.0 if choice == PLAIN else 1.0 / (1 + TIES)  # the plain step costs nothing, and is given no room
        return self.limited and choice == as_traced(choice) and projection.settles(int(self.budget * part))

    def _fits_at_once(self, candidate: Candidate) -> bool:
        """True where the allocator need not clear its cache; the plain step may, as it costs nothing otherwise."""
        assert candidate.projection is not None
        if candidate.choice == PLAIN and self.fits(candidate):
            return True
        return self._needed(candidate.choice, candidate.projection.peak) <= self.budget

    def _needed(self, choice: Choice, peak: int) -> int:
        """The budget for a traced peak: on a card somewhat more."""
        if self.facts.device == "cpu":
            return peak
        needed = [size for kind in remedies_on(choice) if (size := kind.needed(peak)) is not None]
        return max(needed, default=int(peak * (1 + (TIES if self.limited else SURE))) + 1)

    def _cheapest(self, candidates: list[Candidate], most: int) -> Candidate | None:
        self._failed, self._scattered = {}, {}
        return super()._cheapest(candidates, most)

    def _learn_from(self, candidate: Candidate, candidates: list[Candidate]) -> list[Candidate]:
        """What a trace says about the arithmetic holds for the same kind of choice.

        Where choices that keep weights, gradients and state in the same places have failed twice, the smallest of them is
        traced: where it fails too, all of them do.
        """
        kind, places = _keys(candidate.choice), candidate.choice.places
        self._scattered[kind] = self._scattered.get(kind, 0) + self._scatters(candidate)
        if not 0 < self._scattered[kind] <= SCATTERED:
            part = self._handed if candidate.choice == as_traced(candidate.choice) else 1.0
            seen = max(STRIDE * self.budget, part * candidate.peak) / max(1, candidate.predicted)
            self.corrections[kind] = max(self.corrections.get(kind, self._hope), seen)
        self._failed[places] = self._failed.get(places, 0) + 1
        self._look_at_floor(candidate.choice)
        if self._failed[places] == 2:
            rest = [c for c in candidates if c.choice.places == places and c.projection is None]
            least = self._least_of(rest)
            if least is not None and self.fits(least):
                return [least]
            self._failed[places] = TRACES
        return []

    def _look_at_floor(self, choice: Choice) -> None:
        """Where two choices that cut the batch alike have failed, all that can be is moved: where that fails, so do all others.

        What is left then is held by single operators. Of the weights nothing is known: they may visit.
        """
        runs = choice.runs
        self._failed_in[runs] = self._failed_in.get(runs, 0) + 1
        floor = move_all(choice, self.facts) if self._failed_in[runs] == 2 else None
        if floor is None:
            return
        known = next((c for c in self.tried if c.choice == floor), None)
        held = (known or self._trace(self._candidate(floor))).peak - self.facts.weights
        if held * (1 - TIES) * self._handed > self.budget:
            self._fewest = max(self._fewest, runs + 1)

    def _least_of(self, candidates: list[Candidate]) -> Candidate | None:
        """That which holds least. Kernels for few samples may take more than those for many: then slices are fewer."""
        candidates = [c for c in candidates if c.choice.runs <= self._most]
        least = min(candidates, key=_smallest_first, default=None)
        if least is None:
            return None
        best = self._trace(least)
        while least.choice.runs > 1 and least.peak > ODD * least.predicted and not self.fits(best):
            fewer = max((c.choice.runs for c in candidates if c.choice.runs < least.choice.runs), default=0)
            if not fewer:
                break
            least = self._trace(self._candidate(least.choice.cut_into(fewer)))
            if least.peak > best.peak:
                break
            best, self._most = least, fewer
        return best

    def _scatters(self, candidate: Candidate) -> bool:
        """True where what is handed out would fit, and only the allocator's gaps do not: those of another choice may."""
        assert candidate.projection is not None
        peaks = candidate.projection.peaks
        handed = max(size for name, size in peaks.items() if name != "reserved")
        return candidate.projection.card and self._needed(candidate.choice, handed) <= self.budget

    def _is_dear(self, candidate: Candidate) -> bool:
        return candidate.seconds > DEAR * self.facts.seconds

    def _is_hopeful(self, candidate: Candidate) -> bool:
        """Not given up with others like it, and small enough by arithmetic, as far as traces have corrected that."""
        if self._failed.get(candidate.choice.places, 0) >= TRACES:
            return False
        if not self._fewest <= candidate.choice.runs <= self._most:
            return False
        more = self._beyond.get(candidate.choice.passes)
        if more is not None and (candidate.predicted + more) * (1 - TIES) * self._handed > self.budget:
            return False
        return candidate.predicted * self.corrections.get(_keys(candidate.choice), self._hope) <= self.budget

    @property
    def _handed(self) -> float:
        """Part of what the plain step reserves that is handed out: under a limit the allocator gets through with about that."""
        plain = self.facts.plain
        handed = max(size for name, size in plain.peaks.items() if name != "reserved")
        return handed / max(1, reserved_of(plain, self.facts)) if self.limited else 1.0

    @property
    def _hope(self) -> float:
        """What the arithmetic is multiplied by before it is believed."""
        return HOPE * self._handed

    def _project(self, candidate: Candidate) -> None:
        """What a choice holds; where it fits at best by clearing caches, with the settings under which it holds less."""
        projection = candidate.projection = self.project(candidate.choice)
        for kind in SETTINGS:
            shown = kind.shown_by(projection, self.facts)
            if shown is not None and not self._fits_at_once(candidate):
                other = replace(candidate.choice, **kind.levels(self.facts)[-1])
                if self._needed(other, shown.peak) <= self.budget or not self.fits(candidate):
                    candidate.choice, candidate.projection = other, shown
        peaks = candidate.projection.peaks
        if peaks.get("optimizer", 0) < max(peaks["forward"], peaks["backward"]):
            self._beyond[candidate.choice.passes] = candidate.peak - candidate.predicted

    def _last_resort(self) -> Candidate:
        """The smallest of all: what it takes decides between a plan and an error. Before that, remedies for modules alone."""
        modules = [c for c in self.candidates if not _takes_tensors(c.choice)]
        found = self._cheapest(modules, len(self.tried) + TRACES)
        if found is not None:
            return found
        least: dict[tuple[Any, ...], Candidate] = {}
        for candidate in sorted(self.candidates, key=_smallest_first):
            uncertain = tuple(kind.key for kind in remedies_on(candidate.choice) if not kind.only_saves)
            least.setdefault(uncertain, candidate)
        looked = []  # the same for every budget, also for the one it names
        for single in (False, True):  # tensors one by one, or none
            kind = [c for c in least.values() if _takes_tensors(c.choice) == single]
            looked += kind[:LOOKED]
        for number, candidate in enumerate(looked):
            if candidate.projection is None:
                alike = [c for c in self.candidates if c.choice.cut_into(1) == candidate.choice.cut_into(1)]
                looked[number] = self._least_of(alike) or self._trace(candidate)
        fitting = [c for c in self.tried if self.fits(c)]
        if fitting:
            return self._improve(min(fitting, key=lambda c: c.seconds))
        # remedies may hold more than they save
        plain = Candidate(Choice(), 0.0, self.facts.plain.peak, self.facts.plain)
        best = min(plain, *looked, key=lambda c: c.peak)
        self.least = best.choice
        assert best.projection is not None
        peaks, needed = best.projection.peaks, self._needed(best.choice, best.peak)
        forbidden = self.facts.forbidden
        missed = [
            f"; {kind.missed}: {forbidden[kind.key]}" for kind in TRAINING if kind.missed and kind.key in forbidden
        ]
        raise BudgetError(
            f"no {self.allow} plan fits the step into {format_bytes(self.budget)}: the smallest found holds "
            f"{format_bytes(best.peak)} ({describe(best.choice)}){say_beside(self.facts.plain.beside)}, so a budget of "
            f"{needed} bytes is the smallest that has one{''.join(missed)}",
            needed=needed, budget=self.budget, smallest=needed, culprit=max(peaks, key=peaks.__getitem__),
        )  # fmt: skip

    def _lighten(self, candidate: Candidate) -> Candidate:
        """The cheapest choice found that fits like a dear one.

        The first that fits may do far too much: it was the smallest where others had failed. Traces have shown by now which part
        of what the arithmetic frees is there all the same.
        """
        for _ in range(LIGHTER if self._is_dear(candidate) else 0):
            cheaper = (
                c
                for c in self.candidates
                if c.seconds < CHEAPER * candidate.seconds
                and c.projection is None
                and c.choice.runs <= self._most
                and c.predicted <= self.budget
                and self._corrected(c) <= self.budget
            )
            cheapest = next(cheaper, None)
            if cheapest is None:
                break
            if self.fits(self._trace(cheapest)):
                candidate = cheapest
        return candidate

    def _corrected(self, candidate: Candidate) -> float:
        """The arithmetic of a choice, with what traces like it have shown to be there of what it frees."""
        return candidate.predicted + max(0.0, max(self._back(candidate), default=0.0)) * self._freed(candidate)

    def _back(self, candidate: Candidate) -> list[float]:
        """Parts of what the arithmetic frees that traces of choices like this one have shown to be there all the same."""
        like = [t for t in self.tried if _keys(t.choice.treatment) == _keys(candidate.choice.treatment)]
        return [(t.peak - t.predicted) / max(1, self._freed(t)) for t in like]

    def _freed(self, candidate: Candidate) -> float:
        """Bytes that remedies free in the passes of a slice."""
        return max(1.0, predict(candidate.choice.cut, self.facts) - predict(candidate.choice.passes, self.facts))

    def _improve(self, candidate: Candidate) -> Candidate:
        """As little of what a choice does as still fits."""
        candidate = self._lighten(candidate)
        for kind in TRAINING:
            candidate = self._refine(candidate, kind.gentler(candidate.choice, self.facts), kind.key)
        for kind in TRAINING:
            room = self.budget - self._needed(candidate.choice, candidate.peak)
            closer = kind.with_room(candidate.choice, self.facts, room)
            if closer is not None:
                nearer = self._trace(self._candidate(as_traced(closer)))
                candidate = nearer if self.fits(nearer) else candidate
        return candidate

    def _refine(self, candidate: Candidate, gentler: list[Choice], key: str) -> Candidate:
        """Less of one remedy, as long as it still fits; `gentler`: from nothing of it to what the candidate uses."""
        if len(gentler) < 2:
            return candidate
        best, high = candidate, len(gentler) - 1
        levels = [getattr(choice, key) for choice in gentler]
        alike = replace(as_traced(candidate.choice), **{key: levels[0]})
        failed = [
            levels.index(level)
            for c in self.tried
            if replace(as_traced(c.choice), **{key: levels[0]}) == alike
            and (level := getattr(c.choice, key)) in levels
            and not self.fits(c)
        ]
        low = min(max(failed, default=-1), high)
        tries = max(3, TRACES + 4 - len(self.tried))
        shorter, reach = candidate, 1
        while high - low > 1 and tries > 0:
            middle = self._likely(shorter, gentler)
            if not low < middle < high:  # beside what is known, and further from it each time
                away = min(reach, (high - low) // 2)
                middle, reach = (low + away if middle <= low else high - away), 2 * reach
            shorter = self._candidate(as_traced(gentler[middle]))
            tries -= 1
            if self.fits(self._trace(shorter)):
                best, high = shorter, middle
            else:
                low = middle
        return best

    def _likely(self, traced: Candidate, gentler: list[Choice]) -> int:
        """The first of these choices that fits where the arithmetic errs by as much as in a trace beside it."""
        beyond = traced.peak - traced.predicted
        needed = (self._needed(traced.choice, predict(choice, self.facts) + beyond) for choice in gentler)
        return next((number for number, size in enumerate(needed) if size <= self.budget), len(gentler))

    def _candidate(self, choice: Choice) -> Candidate:
        return Candidate(choice, added(choice, self.facts), predict(choice, self.facts))


@functools.lru_cache(REMEMBERED)
def as_traced(choice: Choice) -> Choice:
    """A choice without those remedies that have no trace of their own."""
    return replace(choice, **{kind.key: getattr(PLAIN, kind.key) for kind in SETTINGS})


def _smallest_first(candidate: Candidate) -> tuple[int, int, float]:
    """Where the arithmetic sees no difference, what does most, and so costs most, holds least."""
    most = max(kind.extent(candidate.choice) for kind in TRAINING if kind.only_saves)
    return candidate.predicted, -most, -candidate.seconds


def _takes_tensors(choice: Choice) -> bool:
    """True where a choice treats saved tensors one by one."""
    return any(kind.of_tensors for kind in remedies_on(choice))


@functools.lru_cache(REMEMBERED)
def _keys(choice: Choice) -> tuple[str, ...]:
    return tuple(kind.key for kind in remedies_on(as_traced(choice)))


def _does_more(choice: Choice, other: Choice) -> bool:
    """True where a choice does all that another does, and so is hardly faster, or the same to another degree."""
    pairs = [(kind, kind.extent(choice), kind.extent(other)) for kind in TRAINING if kind not in SETTINGS]
    same = _keys(choice) == _keys(other) and all(one == two for kind, one, two in pairs if not kind.graded)
    return same or all(one >= two for _, one, two in pairs)


def added(choice: Choice, facts: Facts) -> float:
    """Seconds that a choice adds to the plain step."""
    return sum(kind.seconds(choice, facts) for kind in remedies_on(choice))


def slow_down(choice: Choice, facts: Facts) -> float:
    """Predicted time over that of the plain step."""
    return 1.0 + added(choice, facts) / max(facts.seconds, 1e-9)
