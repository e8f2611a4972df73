"""Finds the choice that is predicted to be fastest among those that fit, and compiles few on the way.

In: work, shapes, which remedies are allowed. Out: compiled candidates. The jaxpr's liveness orders the candidates: it takes
a fraction of a second each. What it predicts is corrected by what XLA took for the plain step. Only a compilation decides.
Which is fastest no count tells for sure, so others that fit are given too, to be timed.
The host's memory is used where nothing else fits: how its copies hide behind other work is not known before a run.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from outsize.core.errors import InputError
from outsize.model.jax.compiled import Compiled
from outsize.model.jax.fitting.choice import Choice
from outsize.model.jax.fitting.chunks import lost
from outsize.model.jax.fitting.costs import work_of
from outsize.model.jax.fitting.step import Shapes, Work, arguments_of, compile_step, donated_of, is_sent, step_for
from outsize.model.jax.liveness import follow
from outsize.model.jax.private_parts import names_in, require_jax

SEGMENTS = (1, 2, 4, 8, 16, 32)
SLACK = 1.1
"""A candidate that is predicted to be this much above the budget is compiled all the same."""
ORDER_SAVES = 1.35
"""Another order is tried for a candidate that is at most this much above the budget."""
SLICED = 0.03
"""Time that doubling the slices adds, as a part of the plain step's: 0.025 to 0.04 on an H200."""
NEAR = 1.2
"""A choice of another kind is timed too if it is predicted to take at most this much of the first one's time."""
OTHERS = 3
"""Choices that are compiled beside the first to be timed: slices alone, which one may write by hand, and other kinds."""
PATIENCE = 60.0
"""Seconds that the plain step may have compiled for others to be compiled beside the first choice."""
LEAST = 4
"""Candidates that are compiled to find the smallest budget that works."""


class Candidate(NamedTuple):
    """A choice that was compiled."""

    choice: Choice
    compiled: Compiled
    lost: int = 0
    """Most bytes that the arena of a card gives above what is asked."""

    @property
    def peak(self) -> int:
        return self.compiled.peak + self.lost

    def fits(self, budget: int, host: int | None) -> bool:
        return self.peak <= budget and (host is None or self.compiled.away <= host)


class Search:
    """All choices for one batch."""

    def __init__(
        self, work: Work, shapes: Shapes, forbidden: frozenset[str], host: int | None = None, timed: bool = False
    ) -> None:
        self.work, self.shapes, self.forbidden, self.host = work, shapes, forbidden, host
        self.tried: dict[Choice, Candidate] = {}
        self._traced: dict[Choice, tuple[int, float]] = {}
        begin = time.perf_counter()
        self.plain = self.compile(Choice())
        self._timed = timed and time.perf_counter() - begin < PATIENCE
        """Others are compiled beside the first choice."""

    def compile(self, choice: Choice) -> Candidate:
        """A choice with its bytes, compiled once."""
        if choice not in self.tried:
            made = compile_step(self.work, self.shapes, choice)
            self.tried[choice] = Candidate(choice, made, self._lost(made))
        return self.tried[choice]

    def _lost(self, made: Compiled) -> int:
        gradients = self.shapes.params if self.work.optimizer is None else ()
        return lost(self.work.device, (self.shapes.params, self.shapes.state, self.shapes.batch), gradients, made)

    def find(self, budget: int) -> Candidate | None:
        """The candidate that is predicted to be fastest among those inside the budget; None where none was found."""
        if self.plain.peak <= budget:
            return self.plain
        found = self._first(self._agains(), budget) or self._first(self._aways(), budget)
        if found is None:
            least = self.least()
            found = least if least.fits(budget, self.host) else None
        return found

    def _first(self, agains: list[Choice], budget: int) -> Candidate | None:
        """The first that fits of these, with as many slices as each needs."""
        heap: list[tuple[float, bool, Choice]] = [(self.slow_down(again), False, again) for again in agains]
        if self._can_order and Choice() in agains:
            heap.append((self.slow_down(Choice(ordered=True)), True, Choice(ordered=True)))
        heapq.heapify(heap)
        while heap:
            _, ready, choice = heapq.heappop(heap)
            if not ready:  # how many slices it needs is only asked when its turn comes
                slices = self._first_slices(choice, budget)
                following = None if slices is None else replace(choice, slices=slices)
            else:
                if self._timed and len(self.tried) <= OTHERS and self.predict(choice) <= budget * SLACK:
                    self._compile_beside(choice, budget)
                found = self.compile(choice)
                if found.fits(budget, self.host):
                    return found
                following = self._next(found, budget)
            if following is not None:
                heapq.heappush(heap, (self.slow_down(following), True, following))
        return None

    def others(self, found: Candidate, budget: int) -> list[Candidate]:
        """Candidates inside the budget that may be faster than the first, whatever was predicted; none unless they are timed."""
        if not self._timed or found is self.plain:
            return []
        beside = self._compile_beside(found.choice, budget)
        return [one for one in beside if one.choice != found.choice and one.fits(budget, self.host)]

    def _compile_beside(self, choice: Choice, budget: int) -> list[Candidate]:
        """A choice and others that may be faster, compiled side by side: slices alone, and what runs again in other ways."""
        wanted = list(dict.fromkeys([choice, *self._slices_alone(choice, budget), *self._other_kinds(choice, budget)]))
        with ThreadPoolExecutor(1 + OTHERS) as pool:
            return list(pool.map(self.compile, wanted[: 1 + OTHERS]))

    def _slices_alone(self, choice: Choice, budget: int) -> list[Choice]:
        """Slices of which nothing runs again: two numbers of them, from the fewest that may fit."""
        alone = replace(choice, segments=0, kept="", kept_away=False)
        fewest = 2 * choice.slices if alone == choice else self._first_slices(replace(alone, slices=1), budget)
        levels = [count for count in self._slices() if fewest is not None and count >= fewest]
        return [replace(alone, slices=count) for count in levels[:2]]

    def _other_kinds(self, choice: Choice, budget: int) -> list[Choice]:
        """What runs again or does not in other ways, with the fewest slices that may fit, fastest first."""
        found = []
        for again in self._agains():
            slices = self._first_slices(again, budget)
            if slices is not None and again.kind != choice.kind:
                kind = replace(again, slices=slices, state_away=choice.state_away)
                found.append((self.slow_down(kind), kind))
        return [kind for predicted, kind in sorted(found) if predicted <= NEAR * self.slow_down(choice)]

    def least(self) -> Candidate:
        """The smallest that was found; which are compiled for it does not depend on a budget."""
        most = max(self._slices())
        rows = [replace(again, slices=most) for again in (*self._agains(), *self._aways())]
        rows.sort(key=lambda choice: (self.predict(choice), self.slow_down(choice)))
        for choice in rows[:LEAST]:
            self.compile(choice)
            if self._can_order:
                self.compile(replace(choice, ordered=True))
        inside = [one for one in self.tried.values() if self.host is None or one.compiled.away <= self.host]
        return min(inside, key=lambda one: (one.peak, self.slow_down(one.choice)))

    # levels

    @property
    def _can_order(self) -> bool:
        return "order" not in self.forbidden and self.work.device.platform == "cpu"

    def _slices(self) -> list[int]:
        """1, 2, 4, ... up to one sample each."""
        if "slices" in self.forbidden:
            return [1]
        rows = self.shapes.axes.rows
        return [*(2**power for power in range(rows.bit_length()) if 2**power < rows), rows]

    def _agains(self) -> list[Choice]:
        """What may be computed again, with all other decisions plain."""
        if "checkpoint" in self.forbidden:
            return [Choice()]
        kept = [Choice(segments=1, kept="products"), Choice(segments=8, kept="products")]
        kept += [Choice(segments=1, kept="names")] * self._has_names
        return [Choice(), *kept, *(Choice(segments=count) for count in SEGMENTS)]

    @property
    def can_offload(self) -> bool:
        """True where the device has memory of its own, beside its host's."""
        return "offload" not in self.forbidden and self.work.device.platform != "cpu"

    @functools.cached_property
    def _has_names(self) -> bool:
        """True where the user named values with `checkpoint_name`."""
        jax = require_jax()
        return bool(names_in(jax.make_jaxpr(self.work.loss)(self.shapes.params, self.shapes.batch)))

    def _aways(self) -> list[Choice]:
        """The same with optimizer state, what is kept, or both on the host."""
        if not self.can_offload:
            return []
        agains = [again for again in self._agains() if again.segments in (8, 32) or again.kept == "names"]
        found = [replace(again, kept_away=True) for again in agains]
        if any(map(is_sent, require_jax().tree_util.tree_leaves(self.shapes.state))):
            found += [replace(again, state_away=True) for again in (Choice(), *agains, *found)]
        return found

    def _first_slices(self, again: Choice, budget: int) -> int | None:
        """The fewest slices with which a choice is predicted to fit, by halving."""
        levels = self._slices()
        fits = lambda slices: self.predict(replace(again, slices=slices)) <= budget * SLACK  # noqa: E731
        place = bisect.bisect_left(levels, True, key=fits)
        return levels[place] if place < len(levels) else None

    def _next(self, found: Candidate, budget: int) -> Choice | None:
        """The same with the operators in another order, if that may be enough; then with more slices."""
        choice = found.choice
        if self._can_order and not choice.ordered and found.peak <= budget * ORDER_SAVES:
            return replace(choice, ordered=True)
        levels = self._slices()
        place = levels.index(choice.slices) + 1
        return replace(choice, ordered=False, slices=levels[place]) if place < len(levels) else None

    def predict(self, choice: Choice) -> int:
        """Bytes by liveness, corrected by what XLA took for the plain step."""
        ratio = self.plain.peak / max(1, self._bytes(Choice()))
        return int(self._bytes(choice) * min(1.0, ratio))

    def slow_down(self, choice: Choice) -> float:
        """Predicted time over that of the plain step: an estimate, by what the jaxpr computes and writes."""
        plain, here = (self._trace(one)[1] for one in (Choice(), choice))
        moved = (0.4 if choice.kept == "products" else 0.15) * choice.kept_away + 0.15 * choice.state_away
        small = SLICED * math.log2(choice.slices) + (0.02 if choice.ordered else 0.0)
        return here / max(1.0, plain) + moved + small

    def _bytes(self, choice: Choice) -> int:
        return self._trace(choice)[0]

    def _trace(self, choice: Choice) -> tuple[int, float]:
        """(bytes by liveness, work) of a choice; the order of operators changes neither."""
        choice = replace(choice, ordered=False)
        if choice not in self._traced:
            jax = require_jax()
            arguments = arguments_of(self.work, self.shapes, choice)
            try:
                closed = jax.make_jaxpr(step_for(self.work, self.shapes.axes, choice))(*arguments)
            except Exception as error:
                raise InputError(f"the step of {choice} cannot be traced: {type(error).__name__}: {error}") from error
            given = donated_of(self.work)
            donated = [
                number in given for number, tree in enumerate(arguments) for _ in jax.tree_util.tree_leaves(tree)
            ]
            self._traced[choice] = follow(closed, donated).peak, work_of(closed, self.work.device.platform)
        return self._traced[choice]
