"""Finds how weights, gradients, state and inputs should go to and fro so that device and host stay inside their budgets.

In: a stage that projects hosted choices, the two budgets, measured rates. Out: the first choice, from the fastest to the
smallest, that the trace shows to fit. Where none does, the smallest device budget, or the smallest host budget, is named
before anything is changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from outsize.core.errors import BudgetError
from outsize.core.units import format_bytes
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.pinned_blocks import state_bytes
from outsize.model.fitting.move.ring import ALIGNMENT, aligned
from outsize.model.fitting.move.units import Cut, cut_model, sizeof
from outsize.model.fitting.move.visits import Nested
from outsize.model.fitting.plan.foreign_tensors import say_beside
from outsize.model.fitting.plan.host_memory import LIBRARIES, check_disk, host_bytes, spill
from outsize.model.fitting.plan.hosted_facts import HostedFacts
from outsize.model.fitting.plan.hosted_remedies import HOSTED_REMEDIES, place_of_update
from outsize.model.fitting.plan.projection import Projection
from outsize.model.fitting.run.chunked_loss import find_head
from outsize.model.fitting.run.join_outputs import NotJoined
from outsize.model.fitting.run.row_pieces import MixesRows

TRACES = 16
"""Most traces of one search."""
ROUNDS = 8
"""How often a choice is traced until what the traces teach changes nothing."""
SHARE = {"cpu": 1.0, "cuda": 0.97}
"""Part of a device's budget that is planned with; the rest is for workspaces inside its libraries."""
FEW = 8 * 2**20
"""Parameters below so many bytes, or one part in 64 of the device's budget, are updated a few at a time."""
TINY = 64
"""Modules below one part in so many of a unit stay on the device."""


@dataclass(slots=True)
class HostedSearch:
    """One search; its facts are replaced as traces teach it."""

    facts: HostedFacts
    traced: Callable[[], None] = lambda: None
    """Called after each trace."""
    tried: list[tuple[Choice, Projection]] = field(default_factory=list)

    def run(self) -> tuple[Choice, Projection]:
        """The fastest choice that fits, or a `BudgetError`."""
        self._learn(layout=self.facts.stage.layout())
        facts, least = self.facts, self._least_host()
        if least > facts.host and facts.grounded:
            raise BudgetError(
                f"weights, optimizer state and what this process holds take {format_bytes(least)} of host memory, the budget is "
                f"{format_bytes(facts.host)}: host={least} is the smallest budget that has a plan (none of it can be on disk: "
                f"{facts.grounded})",
                needed=least, budget=facts.host, smallest=least, culprit="host",
            )  # fmt: skip
        self._learn(spills=facts.spills or least > facts.host)
        found, tight = self._first()
        if found is None and tight and not self.facts.spills and not facts.grounded:
            self._learn(spills=True)
            self.tried.clear()
            found, tight = self._first()
        if found is not None:
            check_disk(self.facts, found[0])
            return found
        raise self._host_error(min(tight)) if tight else self._device_error()

    def _learn(self, **known: Any) -> None:
        self.facts = replace(self.facts, **known)

    def _forbid(self, remedy: str) -> None:
        self._learn(forbidden=self.facts.forbidden | {remedy})

    @property
    def _room(self) -> int:
        """Bytes of the device that are planned with."""
        return int(self.facts.device * SHARE[self.facts.kind])

    def _first(self) -> tuple[tuple[Choice, Projection] | None, list[int]]:
        """The first choice that fits, or what those hold of the host that fit the device."""
        tight: list[int] = []
        for choice in self._choices():
            if len(self.tried) >= TRACES:
                break
            if choice.pieces > 1 and "pieces" in self.facts.forbidden:
                continue
            found = self._trace(choice)
            if found is None or found[1].peak > self._room:
                continue
            choice = spill(self.facts, *found)
            held = host_bytes(self.facts, choice, found[1])
            if held <= self.facts.host:
                return self._widen(choice, found[1]), tight
            tight.append(held)
        return None, tight

    def _host_error(self, held: int) -> BudgetError:
        """No choice that fits the device fits the host: the smallest holds so much of it."""
        facts = self.facts
        now = "" if not facts.spills or not facts.before else (
            f" (model and state take {format_bytes(facts.before)} of memory before they can be moved to disk: weights of "
            "torch.load(file, mmap=True) and load_state_dict(weights, assign=True) take none)"
        )  # fmt: skip
        return BudgetError(
            f"the smallest step that fits the device holds {format_bytes(held)} of host memory, the budget is "
            f"{format_bytes(facts.host)}: host={held} is the smallest budget that was found{now}",
            needed=held, budget=facts.host, smallest=held, culprit="host",
        )  # fmt: skip

    def _device_error(self) -> BudgetError:
        """No choice fits the device."""
        choice, projection = min(self.tried, key=lambda row: row[1].peak)
        needed = -(-int(projection.peak / SHARE[self.facts.kind] + 1) // 2**12) * 2**12
        culprit = max((name for name in projection.peaks if name != "reserved"), key=projection.peaks.__getitem__)
        return BudgetError(
            f"no exact plan fits into {format_bytes(self.facts.device)} of the device: the smallest found holds "
            f"{format_bytes(projection.peak)} in its {culprit} pass (units of at most {format_bytes(choice.unit_bytes)}, "
            f"rows in {choice.pieces} pieces){say_beside(projection.beside)}, so budget={needed} is the smallest that has one",
            needed=projection.peak, budget=self.facts.device, smallest=needed, culprit=culprit,
        )  # fmt: skip

    # the candidates

    def _choices(self) -> Iterator[Choice]:
        """From the fastest to the smallest."""
        for levels in itertools.product(*(kind.levels(self.facts) for kind in HOSTED_REMEDIES)):
            choice = Choice(**{name: value for level in levels for name, value in level.items()})
            if all(kind.is_sensible(choice, self.facts) for kind in HOSTED_REMEDIES):
                yield choice

    def _complete(self, choice: Choice) -> tuple[Choice, Cut]:
        """Rings and held modules for the units that a choice leads to."""
        facts = self.facts
        cut = facts.cut(choice)
        held = dict.fromkeys((*choice.held, *facts.outside))
        size = max(1, cut.largest)
        held |= dict.fromkeys(name for name, unit in cut.units.items() if unit.size * TINY < size)
        held |= dict.fromkeys(facts.work.heads if choice.chunks else ())
        cut = cut_model(facts.work.model, choice.unit_bytes, tuple(held), facts.order)
        state = 0
        if choice.update == "card" or (choice.update == "kept" and facts.later and place_of_update(facts) == "card"):
            longest = max((state_bytes(shapes) for shapes in facts.layout.values()), default=0)
            state = max(longest, 2 * self._state_of_few(), ALIGNMENT)
        elif choice.update == "host":
            state = 2 * max((aligned(place.size) for place in cut.places()), default=0)
        return replace(
            choice,
            held=tuple(held),
            ring=choice.ring or 2 * cut.largest,
            state_ring=choice.state_ring or state,
            small_bytes=self._few,
            more_pieces=facts.call is None and "pieces" not in facts.forbidden,
        ), cut

    @property
    def _few(self) -> int:
        """Bytes below which parameters are updated together."""
        return min(FEW, self.facts.device // 64)

    def _state_of_few(self) -> int:
        """State of small parameters that are updated together."""
        layout, few = self.facts.layout, self._few
        small = [p for p in self.facts.work.model.parameters() if sizeof(p) < few]
        ratio = max((state_bytes(layout.get(id(p), [])) / max(1, aligned(sizeof(p))) for p in small), default=0.0)
        return min(int(2 * ratio * (few + ALIGNMENT * 64)), sum(state_bytes(layout.get(id(p), [])) for p in small))

    def _trace(self, choice: Choice) -> tuple[Choice, Projection] | None:
        """Project; what the trace learns (order, outside uses, written buffers, generators, heads) is used from then on."""
        for attempt in range(ROUNDS):
            facts = self.facts
            full, cut = self._complete(choice)
            if choice.chunks and not facts.work.heads:
                return None
            if full.ring + full.state_ring + cut.held.size > facts.device and self.tried:
                return None
            order = tuple(name for name in facts.order if name in cut.units) or tuple(cut.units)
            try:
                projection = facts.stage.project(
                    full, call=facts.call, work=facts.work, layout=facts.layout, order=order
                )
            except Nested as nested:
                if attempt == ROUNDS - 1 or nested.unit in facts.outside:
                    raise
                self._learn(outside=(*facts.outside, nested.unit))
                continue
            except (RuntimeError, MixesRows, NotJoined):
                if choice.pieces == 1:
                    raise
                self._forbid("pieces")  # a unit cannot run on a few rows: it keeps something, or gives no rows
                return None
            self.traced()
            self._learn_from(projection, cut)
            if choice.pieces > 1 and "pieces" in self.facts.forbidden:
                return None
            if choice.chunks and not projection.heads_taken:
                self._forbid("chunks")
                return None
            now = self.facts
            if (now.outside, now.work.written, now.order) == (facts.outside, facts.work.written, order):
                break
        self.tried.append((full, projection))
        return full, projection

    def _learn_from(self, projection: Projection, cut: Cut) -> None:
        """What a trace shows of the work, whatever the choice is."""
        facts, work = self.facts, self.facts.work
        heads = work.heads
        if not heads and not facts.call and "chunks" not in facts.forbidden:
            name = find_head(work.model, list(projection.calls))
            heads = (name,) if name else ()
        written = work.written | projection.written
        sources = tuple(dict.fromkeys((*work.sources, *projection.sources)))
        self._learn(
            outside=tuple(dict.fromkeys((*facts.outside, *projection.outside))), order=projection.order or tuple(cut.units),
            work=replace(work, written=written, sources=sources, heads=heads),
        )  # fmt: skip
        if (projection.random and facts.exact) or written:
            self._forbid("pieces")

    def _widen(self, choice: Choice, projection: Projection) -> tuple[Choice, Projection]:
        """What room is left makes the rings longer, and lets modules stay."""
        cut = self.facts.cut(choice)
        left = self._room - projection.peak
        wider = choice
        if left > cut.largest:
            wider = replace(wider, ring=choice.ring + cut.largest)
            left -= cut.largest
        if choice.state_ring and choice.update != "host":
            more = min(left // 2, 2 * choice.state_ring)
            wider = replace(wider, state_ring=choice.state_ring + more)
            left -= more
        elif self.facts.call is not None:
            stay: list[str] = []
            for name in reversed(self.facts.order):
                size = cut.units[name].size if name in cut.units else left
                if size < left * 0.9:
                    stay.append(name)
                    left -= size
            wider = replace(wider, held=(*choice.held, *stay))
        if wider == choice:
            return choice, projection
        found = self._trace(wider)
        if found is not None and found[1].peak <= self._room:
            wider = spill(self.facts, *found)
            if host_bytes(self.facts, wider, found[1]) <= self.facts.host:
                return wider, found[1]
        return choice, projection

    def _least_host(self) -> int:
        """Fewest bytes of any choice that has everything in memory."""
        facts = self.facts
        if facts.streamed:
            return 0
        gradients = facts.weights if facts.forced else 0
        return facts.base + LIBRARIES[facts.kind] + facts.weights + facts.state + gradients
