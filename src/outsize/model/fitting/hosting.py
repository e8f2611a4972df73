"""Plans a step or an inference of a model that lives on the host and visits a device.

In: a `Request` with its host side. Out: plans, and a runner: weights move into page-locked blocks, one step is rehearsed, and
gradients of small models are compared with the plain ones. What a rehearsal shows (weights that are used where no trace saw it,
rows that mix) goes into the next search.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from outsize.core.errors import BudgetError, InputError
from outsize.core.events import told
from outsize.core.fitting import FitPlan
from outsize.core.noun import from_plain, to_plain
from outsize.core.units import format_bytes
from outsize.engine.heap import keep_heap_lean
from outsize.model.fitting import batch as batches
from outsize.model.fitting.arguments import Request
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.learn.findings import attempt, preserved
from outsize.model.fitting.learn.gradients_equal import EQUAL, worst_of
from outsize.model.fitting.move.mover import Mover
from outsize.model.fitting.move.out_of_memory import clear_up, give_back_heap, is_out_of_memory
from outsize.model.fitting.move.pinned_blocks import State, Weights, state_bytes
from outsize.model.fitting.move.scratch_file import FileMover, ScratchFile, measure_disk
from outsize.model.fitting.move.units import Cut
from outsize.model.fitting.move.visits import HostSource
from outsize.model.fitting.move.weight_files import FileSource
from outsize.model.fitting.plan.describe import describe_hosted
from outsize.model.fitting.plan.dry_run import Stage
from outsize.model.fitting.plan.facts import HostedFacts
from outsize.model.fitting.plan.host_memory import (
    KINDS,
    LIBRARIES,
    READAHEAD,
    check_disk,
    filed_bytes,
    host_bytes,
    sizes_of,
    spill,
)
from outsize.model.fitting.plan.hosted_search import HostedSearch
from outsize.model.fitting.plan.projection import Projection
from outsize.model.fitting.plan.speeds import Rates, measure_rates, typical_rates
from outsize.model.fitting.plan_in_use import TIGHTER
from outsize.model.fitting.planner import Planner, Settled
from outsize.model.fitting.run.forward_functions import without_cache
from outsize.model.fitting.run.hosted import HostedRunner, open_hosted
from outsize.model.fitting.run.loss import read_loss
from outsize.model.fitting.run.random_sources import same_draws
from outsize.model.fitting.run.recorder import watching
from outsize.model.fitting.run.row_pieces import MixesRows
from outsize.model.fitting.saved.file import SavedPlan, describe_origin
from outsize.model.fitting.update.gradient_sink import Collected
from outsize.model.fitting.user_errors import in_users_code

COMPARED = 2**30
"""A model whose weights have at most so many bytes is compared with its plain step."""


class HostedPlanner(Planner):
    """Plans for one request, and what was learned for all of them."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        assert request.host is not None
        self._host = request.host
        self._room, self._host_room = (allowance.bytes for allowance in request.budgets)
        self._forbidden = frozenset(request.without) - {"stream"}  # a model on the host streams in any case
        """Remedies that are not used."""
        self._outside: dict[str, None] = {}
        """Parameters that a rehearsal has found to be used outside of their units."""
        self._scratch: ScratchFile | None = None
        """The scratch file, once something is in it."""
        self._found: dict[Choice, tuple[HostedFacts, Projection]] = {}
        """Choice -> what the search that gave it knew, and its trace."""
        self._known_rates: Rates | None = None
        """Measured once, while the device is empty; None: not yet."""
        self._taken: dict[Choice, str] = {}
        """Choices of a saved plan, with a note."""

    @property
    def _rates(self) -> Rates:
        if self._known_rates is None:
            mover, kind = self._host.mover, self.request.device.type
            measured = not self.request.dry_run
            self._known_rates = (
                measure_rates(mover, self.work.optimizer, self._room) if measured else typical_rates(kind)
            )
        return self._known_rates

    def take(self, saved: SavedPlan) -> tuple[FitPlan, Choice]:
        request, more = self.request, saved.more
        work = saved.read_work(request)
        choice = saved.read_choice(request, work, request.rows)
        with saved.followed():
            rates = from_plain(Rates, more["rates"])
            self._known_rates = rates if rates.measured or request.dry_run else None
            order, outside = (tuple(map(str, more[name])) for name in ("order", "outside"))
            facts = replace(
                self._facts(self._room), work=work, order=order, outside=outside, spills=choice.transfer_bytes > 0,
                transfer_bytes=choice.transfer_bytes,
            )  # fmt: skip
            facts = replace(facts, layout=facts.stage.layout())
            units = facts.cut(choice).units
            projection = facts.stage.project(
                replace(choice, disk={}, transfer_bytes=0), call=facts.call, work=work, layout=facts.layout,
                order=[name for name in order if name in units] or list(units),
            )  # fmt: skip
        plan = saved.require_fit(projection)
        if fuller := host_bytes(facts, choice, projection) > self._host_room:
            choice = spill(facts, choice, projection)  # what a plan with a scratch file leaves in memory fills the host
        if (held := host_bytes(facts, choice, projection)) > self._host_room:
            raise saved.refuse(
                f"this process would hold {format_bytes(held)} of the host, and the budget is {format_bytes(self._host_room)}"
            )
        check_disk(facts, choice)
        self.work = replace(work, sources=tuple(dict.fromkeys((*work.sources, *projection.sources))))
        self._outside = dict.fromkeys(outside)
        self._found[choice] = replace(facts, work=self.work), projection
        self._taken[choice] = plan.notes[-1] + (
            "; more is on disk than then: this process holds more" if fuller else ""
        )
        return self._describe(choice), choice

    def plan(self, limit: int, batch: Any) -> tuple[FitPlan, Choice]:
        """The first choice, from the fastest to the smallest, that fits device and host."""
        call = self.request.call
        with in_users_code("the model, run on this batch without contents," if call else "loss(model, batch)"):
            try:
                with told("tracing plans", "plans") as traced:
                    choice = self._run(limit, traced)
            except BudgetError as error:
                raise (self._confirm(error) if limit == self._room else error) from None
        return self._describe(choice), choice

    def settle(self, plan: FitPlan, choice: Choice) -> Settled:
        """Rehearse; plan again where the rehearsal shows something else than the trace."""
        runner: HostedRunner | None = None
        with told("moving weights, one step to try", "parts"):
            while True:
                runner = self.reopen(choice, runner)
                try:
                    wrong, measured, seconds = self._rehearse(runner)
                except BaseException:
                    runner.roll_back()
                    runner.close()
                    raise
                if not wrong and measured is not None and measured > self._room:
                    wrong = "memory"
                give_back_heap()
                if not wrong:
                    break
                limit = self._room
                if wrong == "memory":
                    limit = int(self._found[choice][1].peak * TIGHTER["hosted"])
                elif wrong != "outside":
                    self._forbidden |= {wrong}
                runner.roll_back()
                try:
                    plan, choice = self.plan(limit, None)
                except BudgetError:
                    runner.close()
                    raise
        plan = self._describe(choice)
        if seconds is not None:
            written = (plan.seconds or 0.0) if choice.transfer_bytes else 0.0  # a rehearsal writes nothing
            plan = replace(
                plan, seconds=max(seconds, written), notes=(*plan.notes, f"a rehearsal took {seconds:.2g} s")
            )
        return Settled(plan, choice, runner, measured, seconds)

    def reopen(self, choice: Choice, old: HostedRunner | None) -> HostedRunner:
        """Weights into their blocks, and a runner on them."""
        facts, projection = self._found[choice]
        request, files, mover = self.request, self._host.files, self._host.mover
        cut = facts.cut(choice)
        work = replace(self.work, written=facts.work.written)
        order = [name for name in projection.order if name in cut.units]
        if old is not None:
            old.leave_device()
        if files is not None:
            if old is not None:
                old.close()
            source = FileSource(files, cut, mover, order, READAHEAD)
            runner = open_hosted(work, choice, cut, mover, source, order, rows=request.rows)
            empty = [b for b in work.model.buffers() if b.device.type == "meta"]
            runner.weights.visits.given = {id(b): files.read(files.extents[id(b)]) for b in empty}
            return runner
        mover = self._open_scratch(facts, choice, cut)
        weights, state = self._lay_out(facts, choice, cut, old)
        return open_hosted(
            work, choice, cut, mover, HostSource(weights, mover), order, weights=weights, state=state, rows=request.rows,
            scratch=self._scratch,
        )  # fmt: skip

    # searching

    def _run(self, limit: int, traced: Callable[[], None] = lambda: None) -> Choice:
        """One search; what it learns of the work holds for all that follow."""
        search = HostedSearch(self._facts(limit), traced)
        try:
            found = search.run()
        finally:
            self._forbidden = search.facts.forbidden
        assert found.projection is not None
        self.work = search.facts.work
        self._found[found.choice] = search.facts, found.projection
        return found.choice

    def _facts(self, limit: int) -> HostedFacts:
        """What is known before a search."""
        request, host, scratch = self.request, self._host, self._scratch
        stage = Stage(self.work, request.batch, device=request.device, beside=host.beside)
        return HostedFacts(
            side=host, stage=stage, work=replace(self.work, written={}), budget=limit, host=self._host_room, rates=self._rates,
            rows=request.rows, call=request.call, device=request.device.type, forbidden=self._forbidden,
            exact=request.allow == "exact", outside=tuple(self._outside), folder=request.scratch, spills=scratch is not None,
            transfer_bytes=scratch.piece if scratch is not None else 0,
        )  # fmt: skip

    def _confirm(self, error: BudgetError) -> BudgetError:
        """The error with a device budget that has a plan: units depend on the budget, so the one that it names is tried."""
        found = error
        while found.culprit not in ("host", "disk") and found.smallest is not None:
            try:
                self._run(found.smallest)
                break
            except BudgetError as larger:
                found = larger
        if found is error:
            return error
        return BudgetError(
            f"no exact plan fits into {format_bytes(self._room)} of the device: budget={found.smallest} is the smallest that "
            "was found to have one",
            needed=found.needed, budget=self._room, smallest=found.smallest, culprit=found.culprit,
        )  # fmt: skip

    def _describe(self, choice: Choice) -> FitPlan:
        request, (facts, projection) = self.request, self._found[choice]
        if choice.transfer_bytes and not self._rates.read:
            read, write = measure_disk(request.scratch, choice.transfer_bytes, sum(filed_bytes(facts, choice).values()))
            self._known_rates = replace(self._rates, read=read, write=write)
        facts = replace(facts, rates=self._rates)
        plan = describe_hosted(request.batch, request.budgets, facts, choice, projection)
        origin = describe_origin(
            self.basis, choice, facts.work, projection.peaks, projection.beside, rates=to_plain(self._rates),
            order=list(facts.order), outside=list(facts.outside),
        )  # fmt: skip
        plan = replace(plan, origin=origin)
        return plan.with_note(self._taken[choice]) if choice in self._taken else plan

    # moving

    def _open_scratch(self, facts: HostedFacts, choice: Choice, cut: Cut) -> Mover:
        """The scratch file with room for all that is to be there, and the mover that reaches it."""
        request, host = self.request, self._host
        if choice.transfer_bytes and self._scratch is None:
            give_back_heap()
            if request.device.type == "cpu":
                keep_heap_lean()
            self._scratch = ScratchFile(request.scratch, choice.transfer_bytes)
        if self._scratch is None:
            return host.mover
        places = {place.name: place for place in cut.places()}
        self._scratch.reserve(
            {
                (kind, id(places[name].parameter)): sizes_of(facts, choice, kind, places[name])
                for kind in KINDS
                for name in choice.disk.get(kind, ())
            }
        )
        state = sum(state_bytes(shapes) for shapes in facts.layout.values())
        needed, room = host.base + LIBRARIES[request.device.type] + cut.weights + state, self._host_room
        self._scratch.stays = "" if needed <= room else (
            f"weights and state take {format_bytes(needed)} of host memory, the budget is {format_bytes(room)}: they stay in "
            "their file, as memory maps, for as long as you hold them; save them with torch.save(model.state_dict(), ...)"
        )  # fmt: skip
        return FileMover(host.mover, self._scratch)

    def _lay_out(
        self, facts: HostedFacts, choice: Choice, cut: Cut, old: HostedRunner | None
    ) -> tuple[Weights, State | None]:
        """Weights and state in blocks; those of a plan before this one are used where they lie right."""
        filed = {
            kind: {id(place.parameter) for place in cut.places() if place.name in set(choice.disk.get(kind, ()))}
            for kind in KINDS
        }
        weights, state = (old.weights.weights, old.weights.state) if old is not None else (None, None)
        same = old is not None and old.weights.visits.cut.lies_like(cut)
        if weights is None or not same or weights.filed.keys() != filed["weights"]:
            weights = Weights(cut, weights, filed["weights"], self._scratch)
        if state is not None and (not same or state.filed.keys() != filed["state"]):
            state = None
        if choice.update not in ("card", "kept") or not choice.state_ring:
            return weights, None
        if state is None:
            state = State(cut, facts.layout, filed["state"], self._scratch)
            if old is not None and old.weights.state is not None:
                state.take_over(old.weights.state, self.work.optimizer)
            state.move_in(self.work.optimizer)
            state.make_all()
        return weights, state

    # rehearsing

    def _rehearse(self, runner: HostedRunner) -> tuple[str, int | None, float | None]:
        """(what is wrong: `memory`, `outside` or a remedy's name, measured peak, seconds) of a step that changes nothing."""
        card = self.request.device.type == "cuda"
        clear_up()
        try:
            if card:
                torch.cuda.reset_peak_memory_stats()
            sources = self.work.sources
            quiet = preserved(self.work.model, sources) if self.request.call is None else same_draws(sources)
            with quiet, watching(runner.weights.visits) as seen:
                start = time.perf_counter()
                if self.request.call is not None:
                    with runner.weights.rehearsal():  # nobody wants its output
                        runner.infer(self.request.batch, self.request.call)
                else:
                    runner.rehearse(self.request.batch)
                runner.weights.mover.drain()
                seconds = time.perf_counter() - start
            measured = int(torch.cuda.max_memory_reserved()) if card else None
        except MixesRows:
            return "pieces", None, None
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return "memory", None, None
        if seen.outside:
            names = {id(place.parameter): place.name for place in runner.weights.visits.cut.places()}
            self._outside |= dict.fromkeys(names[key] for key in seen.outside)
            return "outside", measured, seconds
        return ("" if self.request.call is not None else self._compare(runner, measured or 0)), measured, seconds

    def _plain_gradients(self, beside: Any) -> tuple[Any, dict[str, Any]]:
        """Two samples, or all where the loss fails on two, and their gradients in the plain step, by name."""
        model = self.work.model
        # what a module keeps (results, a generator) may have no copy
        with contextlib.suppress(RuntimeError, TypeError):
            model = copy.deepcopy(model).to(beside)
        beside = next(model.parameters()).device

        def run(batch: Any) -> dict[str, Any]:
            there = batches.transform(batch, lambda _, tensor: tensor.to(beside))
            with preserved(self.work.model, self.work.sources), preserved(model), without_cache(model):
                loss, count = read_loss(self.work.loss(model, there))
                (loss if count is None else loss / count).backward()
                return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

        few = self.work.axes.take(self.request.batch, 0, min(2, self.request.rows))
        gradients, _ = attempt(lambda: run(few))
        return (few, gradients) if gradients is not None else (self.request.batch, run(self.request.batch))

    def _compare(self, runner: HostedRunner, held: int) -> str:
        """The remedy whose gradients are not the plain ones; empty where all are, or where the model is too large to see."""
        visits, choice = runner.weights.visits, runner.choice
        weights, (facts, projection) = visits.cut.weights, self._found[choice]
        if weights > COMPARED or host_bytes(facts, choice, projection) + 3 * weights > self._host_room:
            return ""
        device = self.request.device
        beside = device if held + 4 * weights <= self._room else torch.device("cpu")
        batch, plain = self._plain_gradients(beside)
        collected = Collected()
        with preserved(self.work.model, self.work.sources):
            runner.collect(batch, collected)
        pairs = [
            (place.name, collected.gradients[id(place.parameter)], plain[place.name])
            for place in visits.cut.places()
            if place.name in plain and id(place.parameter) in collected.gradients
        ]
        worst, name = worst_of(
            (name, float((got.to(beside) - expected).norm()), float(expected.norm())) for name, got, expected in pairs
        )
        if worst <= EQUAL[visits.autocast or beside.type != device.type]:
            return ""
        for remedy, on in (("chunks", choice.chunks), ("pieces", choice.pieces > 1)):
            if on and remedy not in self._forbidden:
                return remedy
        raise InputError(
            f"the gradient of {name} differs from the plain one by {worst:.1e} of its size when its weights visit {device}: "
            "does it draw random numbers from a generator that is not torch's, Python's or numpy.random, or are weights used "
            "by another module than their own?"
        )
