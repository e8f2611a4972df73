"""Finds how weights, gradients, state and inputs should go to and fro so that device and host stay inside their budgets.

In: facts with a stage that projects hosted choices, the two budgets, measured rates. Out: the first choice, from the fastest to
the smallest, that the trace shows to fit; what traces have taught of the work is in the search's facts. Where none fits, the
smallest device budget, or the smallest host budget, is named before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outsize.core.errors import BudgetError
from outsize.core.units import format_bytes
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.pinned_blocks import state_bytes
from outsize.model.fitting.move.ring import ALIGNMENT, aligned
from outsize.model.fitting.move.units import Cut, cut_model
from outsize.model.fitting.move.visits import Nested
from outsize.model.fitting.plan.facts import HostedFacts
from outsize.model.fitting.plan.foreign_tensors import say_beside
from outsize.model.fitting.plan.host_memory import LIBRARIES, check_disk, host_bytes, spill
from outsize.model.fitting.plan.hosted_remedies import place_of_update
from outsize.model.fitting.plan.projection import Projection
from outsize.model.fitting.plan.remedies import REMEDIES, remedies_on
from outsize.model.fitting.plan.search import Candidate, Search
from outsize.model.fitting.run.chunked_loss import find_head
from outsize.model.torch_port.objects import sizeof

ROUNDS = 8
"""How often a choice is traced until what the traces teach changes nothing."""
SHARE = {"cpu": 1.0, "cuda": 0.97}
"""Part of a device's budget that is planned with; the rest is for workspaces inside its libraries."""
FEW = 8 * 2**20
"""Parameters below so many bytes, or one part in 64 of the device's budget, are updated a few at a time."""
TINY = 64
"""Modules below one part in so many of a unit stay on the device."""


class HostedSearch(Search[HostedFacts]):
    """One search; its facts are replaced as traces teach it."""

    remedies = tuple(kind for kind in REMEDIES if kind.hosted)

    def __init__(self, facts: HostedFacts, traced: Callable[[], None]) -> None:
        super().__init__(facts, facts.stage.project, "exact", int(facts.budget * SHARE[facts.device]))
        self.traced = traced

    def run(self) -> Candidate:
        """The fastest choice that fits device, host and disk."""
        self._learn(layout=self.facts.stage.layout())
        facts, least = self.facts, self._least_host()
        if least > facts.host and facts.side.grounded:
            raise BudgetError(
                f"weights, optimizer state and what this process holds take {format_bytes(least)} of host memory, the budget is "
                f"{format_bytes(facts.host)}: host={least} is the smallest budget that has a plan (none of it can be on disk: "
                f"{facts.side.grounded})",
                needed=least, budget=facts.host, smallest=least, culprit="host",
            )  # fmt: skip
        self._learn(spills=facts.spills or least > facts.host)
        found = super().run()
        check_disk(self.facts, found.choice)
        return found

    def fits(self, candidate: Candidate) -> bool:
        return candidate.projection is not None and candidate.peak <= self.budget and candidate.host <= self.facts.host

    def _learn(self, **known: Any) -> None:
        self.facts = replace(self.facts, **known)

    def _forbid(self, *keys: str) -> None:
        self._learn(forbidden=self.facts.forbidden.union(keys))

    def _last_resort(self) -> Candidate:
        """The same with part of it on disk, where only the host is too small."""
        held = min((c.host for c in self.tried if c.peak <= self.budget), default=None)
        if held is None:
            raise self._device_error()
        if self.facts.spills or self.facts.side.grounded:
            raise self._host_error(held)
        self._learn(spills=True)
        self.tried.clear()
        return super().run()

    def _host_error(self, held: int) -> BudgetError:
        """No choice that fits the device fits the host: the smallest holds so much of it."""
        facts = self.facts
        now = "" if not facts.spills or not facts.side.before else (
            f" (model and state take {format_bytes(facts.side.before)} of memory before they can be moved to disk: weights of "
            "torch.load(file, mmap=True) and load_state_dict(weights, assign=True) take none)"
        )  # fmt: skip
        return BudgetError(
            f"the smallest step that fits the device holds {format_bytes(held)} of host memory, the budget is "
            f"{format_bytes(facts.host)}: host={held} is the smallest budget that was found{now}",
            needed=held, budget=facts.host, smallest=held, culprit="host",
        )  # fmt: skip

    def _device_error(self) -> BudgetError:
        best = min(self.tried, key=lambda candidate: candidate.peak)
        choice, projection = best.choice, best.projection
        assert projection is not None
        needed = -(-int(projection.peak / SHARE[self.facts.device] + 1) // 2**12) * 2**12
        culprit = max((name for name in projection.peaks if name != "reserved"), key=projection.peaks.__getitem__)
        return BudgetError(
            f"no exact plan fits into {format_bytes(self.facts.budget)} of the device: the smallest found holds "
            f"{format_bytes(projection.peak)} in its {culprit} pass (units of at most {format_bytes(choice.unit_bytes)}, "
            f"rows in {choice.pieces} pieces){say_beside(projection.beside)}, so budget={needed} is the smallest that has one",
            needed=projection.peak, budget=self.facts.budget, smallest=needed, culprit=culprit,
        )  # fmt: skip

    # the candidates

    def _is_hopeful(self, candidate: Candidate) -> bool:
        """It makes sense with what is known by now, and what is there all the time has room; the first is traced anyway."""
        if not self.tried or not self._is_sensible(candidate.choice):
            return not self.tried
        if not candidate.predicted:
            full, cut = self._complete(candidate.choice)
            candidate.predicted = full.ring + full.state_ring + cut.held.size
        return candidate.predicted <= self.facts.budget

    def _complete(self, choice: Choice) -> tuple[Choice, Cut]:
        """Rings and held modules for the units that a choice leads to."""
        facts = self.facts
        cut = facts.cut(choice)
        held = dict.fromkeys((*choice.held, *facts.outside))
        size = max(1, cut.largest)
        held |= dict.fromkeys(name for name, unit in cut.units.items() if unit.size * TINY < size)
        held |= dict.fromkeys(name for kind in remedies_on(choice) for name in kind.stays(facts))
        cut = cut_model(facts.work.model, choice.unit_bytes, tuple(held), facts.order)
        state = 0
        if choice.update == "card" or (
            choice.update == "kept" and facts.side.later and place_of_update(facts) == "card"
        ):
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
        return min(FEW, self.facts.budget // 64)

    def _state_of_few(self) -> int:
        """State of small parameters that are updated together."""
        layout, few = self.facts.layout, self._few
        small = [p for p in self.facts.work.model.parameters() if sizeof(p) < few]
        ratio = max((state_bytes(layout.get(id(p), [])) / max(1, aligned(sizeof(p))) for p in small), default=0.0)
        return min(int(2 * ratio * (few + ALIGNMENT * 64)), sum(state_bytes(layout.get(id(p), [])) for p in small))

    def _project(self, candidate: Candidate) -> None:
        """Trace; what that shows (order, outside uses, written buffers, generators, heads) is used from then on."""
        choice = candidate.choice
        for attempt in range(ROUNDS):
            facts = self.facts
            full, cut = self._complete(choice)
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
            except Exception as error:
                refused = [kind.key for kind in remedies_on(choice) if isinstance(error, kind.refusals)]
                if not refused:
                    raise
                self._forbid(*refused)
                return
            self._learn_of_work(projection, cut)
            for kind in self.remedies:
                if kind.is_ruled_out(choice, projection, self.facts):
                    self._forbid(kind.key)
                    if kind.on(choice):
                        return
            now = self.facts
            if (now.outside, now.work.written, now.order) == (facts.outside, facts.work.written, order):
                break
        if projection.peak <= self.budget:
            full = spill(self.facts, full, projection)
            candidate.host = host_bytes(self.facts, full, projection)
        candidate.choice, candidate.projection = full, projection

    def _learn_of_work(self, projection: Projection, cut: Cut) -> None:
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

    def _improve(self, candidate: Candidate) -> Candidate:
        """What room is left makes the rings longer, and lets modules stay."""
        choice = candidate.choice
        cut = self.facts.cut(choice)
        left = self.budget - candidate.peak
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
            return candidate
        following = self._trace(self._candidate(wider))
        return following if self.fits(following) else candidate

    def _least_host(self) -> int:
        """Fewest bytes of any choice that has everything in memory."""
        facts = self.facts
        if facts.side.files is not None:
            return 0
        gradients = facts.weights if facts.side.forced else 0
        return facts.side.base + LIBRARIES[facts.device] + facts.weights + facts.state + gradients
