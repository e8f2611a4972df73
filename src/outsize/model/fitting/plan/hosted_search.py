"""Finds how weights, gradients, state and inputs should go to and fro so that device and host stay inside their budgets.

In: a stage that projects hosted choices, the two budgets, measured rates. Out: the first choice, from the fastest to the
smallest, that the trace shows to fit. Where none does, the smallest device budget, or the smallest host budget, is named
before anything is changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

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


class HostedSearch(HostedFacts):
    """One search."""

    def run(self) -> tuple[Choice, Projection]:
        """The fastest choice that fits, or a `BudgetError`."""
        self.layout = self.stage.layout()
        least = self._least_host()
        self.spills = self.spills or (least > self.host and not self.grounded)
        if least > self.host and self.grounded:
            raise BudgetError(
                f"weights, optimizer state and what this process holds take {format_bytes(least)} of host memory, the budget is "
                f"{format_bytes(self.host)}: host={least} is the smallest budget that has a plan (none of it can be on disk: "
                f"{self.grounded})",
                needed=least, budget=self.host, smallest=least, culprit="host",
            )  # fmt: skip
        room = int(self.device * SHARE[self.kind])
        found, tight = self._first(room)
        if found is None and tight and not self.spills and not self.grounded:
            self.spills = True
            self.tried.clear()
            found, tight = self._first(room)
        if found is not None:
            check_disk(self, found[0])
            return found
        if tight:
            now = "" if not self.spills or not self.before else (
                f" (model and state take {format_bytes(self.before)} of memory before they can be moved to disk: weights of "
                "torch.load(file, mmap=True) and load_state_dict(weights, assign=True) take none)"
            )  # fmt: skip
            raise BudgetError(
                f"the smallest step that fits the device holds {format_bytes(min(tight))} of host memory, the budget is "
                f"{format_bytes(self.host)}: host={min(tight)} is the smallest budget that was found{now}",
                needed=min(tight), budget=self.host, smallest=min(tight), culprit="host",
            )  # fmt: skip
        self._give_up(room)
        raise AssertionError

    def _first(self, room: int) -> tuple[tuple[Choice, Projection] | None, list[int]]:
        """The first choice that fits, or what those hold of the host that fit the device."""
        tight: list[int] = []
        for choice in self._choices():
            if len(self.tried) >= TRACES:
                break
            if choice.pieces > 1 and "pieces" in self.forbidden:
                continue
            found = self._trace(choice)
            if found is None:
                continue
            choice, projection = found
            if projection.peak > room:
                continue
            choice = spill(self, choice, projection)
            held = host_bytes(self, choice, projection)
            if held > self.host:
                tight.append(held)
                continue
            return self._widen(choice, projection, room), tight
        return None, tight

    def _give_up(self, room: int) -> None:
        choice, projection = min(self.tried, key=lambda row: row[1].peak)
        needed = -(-int(projection.peak / SHARE[self.kind] + 1) // 2**12) * 2**12
        culprit = max((name for name in projection.peaks if name != "reserved"), key=projection.peaks.__getitem__)
        raise BudgetError(
            f"no exact plan fits into {format_bytes(self.device)} of the device: the smallest found holds "
            f"{format_bytes(projection.peak)} in its {culprit} pass (units of at most {format_bytes(choice.unit_bytes)}, "
            f"rows in {choice.pieces} pieces){say_beside(projection.beside)}, so budget={needed} is the smallest that has one",
            needed=projection.peak, budget=self.device, smallest=needed, culprit=culprit,
        )  # fmt: skip

    # the candidates

    def _choices(self) -> Iterator[Choice]:
        """From the fastest to the smallest."""
        for levels in itertools.product(*(kind.levels(self) for kind in HOSTED_REMEDIES)):
            choice = Choice(**{name: value for level in levels for name, value in level.items()})
            if all(kind.is_sensible(choice, self) for kind in HOSTED_REMEDIES):
                yield choice

    def _complete(self, choice: Choice) -> tuple[Choice, Cut]:
        """Rings and held modules for the units that a choice leads to."""
        model = self.stage.work.model
        cut = self.cut(choice)
        held = dict.fromkeys((*choice.held, *self.outside))
        size = max(1, cut.largest)
        held |= dict.fromkeys(name for name, unit in cut.units.items() if unit.size * TINY < size)
        held |= dict.fromkeys(self.stage.work.heads if choice.chunks else ())
        cut = cut_model(model, choice.unit_bytes, tuple(held), self.order)
        state = 0
        if choice.update == "card" or (choice.update == "kept" and self.later and place_of_update(self) == "card"):
            longest = max((state_bytes(shapes) for shapes in self.layout.values()), default=0)
            state = max(longest, 2 * self._few(), ALIGNMENT)
        elif choice.update == "host":
            state = 2 * max((aligned(place.size) for place in cut.places()), default=0)
        ring = choice.ring or 2 * cut.largest
        few = min(FEW, self.device // 64)
        return replace(
            choice,
            held=tuple(held),
            ring=ring,
            state_ring=choice.state_ring or state,
            small_bytes=few,
            more_pieces=self.call is None and "pieces" not in self.forbidden,
        ), cut

    def _few(self) -> int:
        """State of small parameters that are updated together."""
        model = self.stage.work.model
        few = min(FEW, self.device // 64)
        small = [p for p in model.parameters() if sizeof(p) < few]
        ratio = max((state_bytes(self.layout.get(id(p), [])) / max(1, aligned(sizeof(p))) for p in small), default=0.0)
        return min(int(2 * ratio * (few + ALIGNMENT * 64)), sum(state_bytes(self.layout.get(id(p), [])) for p in small))

    def _trace(self, choice: Choice) -> tuple[Choice, Projection] | None:
        """Project; what the trace learns (order, outside uses, written buffers, generators, heads) is used from then on."""
        stage = self.stage
        for attempt in range(ROUNDS):
            full, cut = self._complete(choice)
            if choice.chunks and not stage.work.heads:
                return None
            if full.ring + full.state_ring + cut.held.size > self.device and self.tried:
                return None
            order = [name for name in self.order if name in cut.units] or list(cut.units)
            try:
                projection = stage.project(full, self.layout, order, self.written, self.call)
            except Nested as nested:
                if attempt == ROUNDS - 1 or nested.unit in self.outside:
                    raise
                self.outside[nested.unit] = None
                continue
            except (RuntimeError, MixesRows, NotJoined):
                if choice.pieces == 1:
                    raise
                self.forbidden.add("pieces")  # a unit cannot run on a few rows: it keeps something, or gives no rows
                return None
            self.traced()
            known = (dict(self.outside), len(self.written), order)
            self.outside |= dict.fromkeys(projection.outside)
            self.written |= projection.written
            stage.work = replace(stage.work, sources=tuple(dict.fromkeys((*stage.work.sources, *projection.sources))))
            self.order = list(projection.order) or list(cut.units)
            if not stage.work.heads and not self.call and "chunks" not in self.forbidden:
                name = find_head(stage.work.model, list(projection.calls))
                stage.work = replace(stage.work, heads=(name,) if name else ())
            if (projection.random and self.exact) or self.written:
                self.forbidden.add("pieces")
                if choice.pieces > 1:
                    return None
            if choice.chunks and not projection.heads_taken:
                self.forbidden.add("chunks")
                return None
            if known == (dict(self.outside), len(self.written), self.order):
                break
        self.tried.append((full, projection))
        return full, projection

    def _widen(self, choice: Choice, projection: Projection, room: int) -> tuple[Choice, Projection]:
        """What room is left makes the rings longer, and lets modules stay."""
        cut = self.cut(choice)
        left = room - projection.peak
        wider = choice
        if left > cut.largest:
            wider = replace(wider, ring=choice.ring + cut.largest)
            left -= cut.largest
        if choice.state_ring and choice.update != "host":
            more = min(left // 2, 2 * choice.state_ring)
            wider = replace(wider, state_ring=choice.state_ring + more)
            left -= more
        elif self.call is not None:
            stay: list[str] = []
            for name in reversed(self.order):
                size = cut.units[name].size if name in cut.units else left
                if size < left * 0.9:
                    stay.append(name)
                    left -= size
            wider = replace(wider, held=(*choice.held, *stay))
        if wider == choice:
            return choice, projection
        found = self._trace(wider)
        if found is not None and found[1].peak <= room:
            wider, projected = spill(self, *found), found[1]
            if host_bytes(self, wider, projected) <= self.host:
                return wider, projected
        return choice, projection

    def _least_host(self) -> int:
        """Fewest bytes of any choice that has everything in memory."""
        if self.streamed:
            return 0
        gradients = self.weights if self.forced else 0
        return self.base + LIBRARIES[self.kind] + self.weights + self.state + gradients
