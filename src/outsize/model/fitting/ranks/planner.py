"""Plans a training step on all ranks of a run: one plan, which fits the rank that holds most.

In: a `Request` on every rank. Out: the same plan on all of them. Each rank looks at its own step, searches and traces by itself;
then they compare notes. Shards are looked at with the first rank's samples, so that all ranks run the same passes.
"""

from __future__ import annotations

import contextlib
import math
import pickle
from dataclasses import replace
from typing import Any

import torch

from outsize.core.errors import BudgetError, InputError
from outsize.core.events import told
from outsize.core.fitting import FitPlan
from outsize.core.units import format_bytes
from outsize.model.fitting import batch as batches
from outsize.model.fitting.arguments import Request
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.learn.findings import SAMPLES, Findings, calm, look, preserved
from outsize.model.fitting.learn.gradients_equal import EQUAL, worst_of
from outsize.model.fitting.plan.describe import describe_training
from outsize.model.fitting.plan.dry_run import Stage
from outsize.model.fitting.plan.facts import Facts
from outsize.model.fitting.plan.search import Candidate
from outsize.model.fitting.plan.speeds import estimate_times
from outsize.model.fitting.plan.take_apart import gather_facts
from outsize.model.fitting.plan.training_search import TrainingSearch
from outsize.model.fitting.planner import Settled
from outsize.model.fitting.ranks.agreement import Ranks
from outsize.model.fitting.ranks.runner import RankedRunner, open_ranked
from outsize.model.fitting.ranks.spread import Shards, Spread
from outsize.model.fitting.ranks.stage import stage_of
from outsize.model.fitting.run.runner import Work
from outsize.model.fitting.training import TrainingPlanner
from outsize.model.fitting.update.gradient_sink import InPlace
from outsize.model.fitting.user_errors import in_users_code
from outsize.model.torch_port.sharding import local_part, modules_with_shards_inside

ROUNDS = 8
"""Most times that ranks search again because what they agreed on does not fit one of them."""

TIGHTER = 0.96
"""Part of its limit that a rank searches with then."""


class RankedPlanner(TrainingPlanner):
    """Plans for one request that all ranks make."""

    def __init__(self, request: Request, spread: Spread, ranks: Ranks) -> None:
        self.spread = spread
        self.ranks = ranks
        super().__init__(request)

    # what is known of the step

    def _look(self, work: Work) -> Findings:
        """What a few samples show on this rank; then what they show on all: a batch that one rank cannot cut, none cuts."""
        batch = self.request.batch
        found = self._look_at_same(work) if self.spread.talks else look(work, batch)
        self.spread.settle()
        rows, why_not, normaliser = work.axes.count(batch), found.why_not, found.normaliser
        if normaliser is not None and (missing := normaliser.find_missing(batch)):
            normaliser, why_not = None, missing
        notes = self.ranks.share((normaliser is None, why_not, min(found.few, rows)))
        first = next((number for number, (cannot, _, _) in enumerate(notes) if cannot), None)
        if first is not None:
            normaliser, why_not = None, f"{notes[first][1]} (on rank {first})"
        inside = modules_with_shards_inside(work.model) if self.spread.talks else []
        return replace(
            found, rows=rows, few=min(few for _, _, few in notes), normaliser=normaliser, why_not=why_not,
            writing=found.writing | frozenset(inside),
        )  # fmt: skip

    def _look_at_same(self, work: Work) -> Findings:
        """On all ranks the first one's samples; where those alone do not do, each rank's whole batch."""
        samples = self._same_samples(work)
        try:
            return look(work, samples)
        except InputError:
            return look(work, self.request.batch)

    def _same_samples(self, work: Work) -> Any:
        """The first rank's first samples, or this rank's own where they cannot be sent."""
        batch, device = self.request.batch, self.request.device
        few = work.axes.take(batch, 0, min(SAMPLES, work.axes.count(batch)))
        packed = None
        with contextlib.suppress(Exception):  # a batch may hold what cannot be sent
            packed = pickle.dumps(batches.transform(few, lambda _, tensor: tensor.detach().cpu().clone()))
        packed = self.ranks.from_first(packed)
        return few if packed is None else batches.transform(pickle.loads(packed), lambda _, tensor: tensor.to(device))

    def _stage(self, work: Work) -> Stage:
        return stage_of(work, self.request.batch, self.spread, self.request.device)

    def _take_apart(self, stage: Stage) -> Facts:
        """Facts of the plain step; times are estimated, since a rank that is measured alone waits for the others."""
        with in_users_code("the step, followed without contents (values that it reads are chosen),"):
            plain = stage.project(Choice())
        heads = self.findings.heads and "chunks" not in self.spread.forbidden
        chunked = stage.project(Choice(chunks=8)) if heads else None
        timing = estimate_times(self.work.device, plain, self.findings.rows)
        return gather_facts(self.work, self.findings, plain, self.request.own_step, timing, chunked)

    def _forbid(self, facts: Facts) -> dict[str, str]:
        mine = self.spread.forbidden | super()._forbid(facts)
        every = self.ranks.share(facts.forbidden | mine)
        return {key: why for others in reversed(every) for key, why in others.items()} | mine

    # one plan for all

    def plan(self, limit: int, batch: Any, without: tuple[str, ...] = ()) -> tuple[FitPlan, Choice]:
        """The cheapest choice that fits every rank and whose gradients are right."""
        self.look_once()
        self._leave_out(without)
        spread = self.spread
        if not isinstance(spread, Shards):
            return self._plan(limit)
        spread.each = False
        try:
            return self._plan(limit)
        except BudgetError:
            spread.each = True
        return self._plan(limit)

    def _plan(self, limit: int) -> tuple[FitPlan, Choice]:
        mine = limit
        for _ in range(ROUNDS):
            search, found = self._search(mine)
            choice = self._join(self.ranks.share(found.choice))
            traced = found if choice == found.choice else search.trace(choice)
            fits = [bool(said) for (said,) in self.ranks.tell([traced is not None])]
            if not all(fits):
                mine = mine if traced is not None else int(mine * TIGHTER)
                continue
            assert traced is not None
            if self._is_right(choice, self._few):
                return self._describe(search, traced, limit), choice
        raise BudgetError(
            f"the ranks found no plan that fits all of them into {format_bytes(limit)}: their batches differ too much; give them "
            "batches of the same shape, or a larger budget",
            budget=limit, needed=limit, smallest=None, culprit="",
        )  # fmt: skip

    def _search(self, limit: int) -> tuple[TrainingSearch, Candidate]:
        """The cheapest choice of this rank; where one rank has none, all raise its error."""
        search = TrainingSearch(self.facts, self.project, self.request.allow, limit)
        found: Candidate | None = None
        failure: Exception | None = None
        try:
            with told("tracing plans", "plans") as search.traced:
                found = search.run()
        except Exception as error:
            failure = error
        said = self.ranks.share(None if failure is None else (str(failure), getattr(failure, "smallest", None)))
        short = [(number, *words) for number, words in enumerate(said) if words is not None]
        if not short:
            assert found is not None
            return search, found
        if failure is not None and not isinstance(failure, BudgetError):
            raise failure
        number, text, smallest = max(short, key=lambda row: row[2] or math.inf)
        raise BudgetError(
            f"rank {number} of {self.ranks.count}: {text}", needed=smallest or limit, budget=limit, smallest=smallest, culprit="",
        )  # fmt: skip

    def _join(self, choices: list[Choice]) -> Choice:
        """What does as much as any rank asks for."""
        if all(choice == choices[0] for choice in choices):
            return choices[0]
        rows = [int(count) for (count,) in self.ranks.tell([self.findings.rows])]
        return Choice(
            slices=min(max(choice.slices for choice in choices), min(rows)),
            checkpoint=max((choice.checkpoint for choice in choices), key=len),
            offload=max((choice.offload for choice in choices), key=len),
            chunks=max(choice.chunks for choice in choices),
            state_away=max(choice.state_away for choice in choices),
            autocast=any(choice.autocast for choice in choices),
            expandable=any(choice.expandable for choice in choices),
        )

    def _describe(self, search: TrainingSearch, found: Candidate, limit: int) -> FitPlan:
        """The plan of the rank that holds most, on all ranks."""
        allowance = replace(self.request.budgets[0], bytes=limit)
        plan = describe_training(search, found, allowance, self.findings, [])
        plans: list[FitPlan] = self.ranks.share(plan)
        peaks = [other.peak(plan.pool) for other in plans]
        worst = peaks.index(max(peaks))
        notes = [
            f"{self.spread.kind} on {self.ranks.count} ranks: all run this plan; rank {worst} holds most, "
            f"{format_bytes(max(peaks))}, and the least is {format_bytes(min(peaks))}"
        ]
        if isinstance(self.spread, Shards) and found.choice.slices > 1:
            notes.append(
                "gradients are reduced in every slice, for whole ones have no room"
                if self.spread.each
                else "gradients are reduced once, in the last slice"
            )
        if self.spread.held:
            notes.append(f"{format_bytes(self.spread.held)} of it are DDP's buckets")
        return replace(plans[worst], notes=(*plans[worst].notes, *notes))

    # gradients

    def _differs(self, choice: Choice, few: Any) -> str:
        wrong = self._shards_differ(choice, few) if self.spread.talks else super()._differs(choice, few)
        return next((f"{text} (on rank {n})" for n, text in enumerate(self.ranks.share(wrong)) if text), "")

    def _is_right(self, choice: Choice, few: Any) -> bool:
        """As of one rank; a plain pass of shards runs too, from which its collective calls are known."""
        if choice.plain and self.spread.talks:
            self._gradients(Choice(), few)
        return super()._is_right(choice, few)

    def _shards_differ(self, choice: Choice, few: Any) -> str:
        rows = self.work.axes.count(few)
        fitted = replace(choice, slices=min(choice.slices, rows), first=0)
        still = fitted.slices > 1 and self.work.replay is None
        with calm() if still else contextlib.nullcontext():
            plain, other = self._gradients(Choice(), few), self._gradients(fitted, few)
        names = [name for name, parameter in self.work.model.named_parameters() if parameter.requires_grad]
        pairs = [(plain.get(name), other.get(name)) for name in names]
        if any((a is None) != (b is None) for a, b in pairs):
            return "a parameter has a gradient in one of them and none in the other"
        squares = [
            n
            for a, b in pairs
            for n in ((float((a - b).norm()) ** 2, float(a.norm()) ** 2) if a is not None else (0.0, 0.0))
        ]
        sums = [sum(column) for column in zip(*self.ranks.tell(squares), strict=True)]
        norms = [(name, math.sqrt(d), math.sqrt(s)) for name, d, s in zip(names, sums[::2], sums[1::2], strict=True)]
        worst, name = worst_of(norms)
        if worst <= EQUAL[choice.autocast or self.findings.lower]:
            return ""
        return f"the gradient of {name} differs from the plain one by {worst:.1e} of its size"

    def _gradients(self, choice: Choice, few: Any) -> dict[str, Any]:
        """This rank's part of every gradient."""
        model = self.work.model
        with preserved(model, self.work.sources), contextlib.closing(self.open_store()) as store:
            torch.manual_seed(0)
            runner = open_ranked(replace(self.work, scaler=None, clip=None), choice, store, self.spread, self.ranks)
            sink = InPlace(model, None)
            sink.finish(runner.passes(few, sink)[1])
            return {n: local_part(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}

    # the step itself

    def settle(self, plan: FitPlan, choice: Choice) -> Settled:
        runner = open_ranked(self.work, choice, self.open_store(), self.spread, self.ranks, rows=self.request.rows)
        return Settled(plan, choice, runner)

    def reopen(self, choice: Choice, old: RankedRunner) -> RankedRunner:
        following = open_ranked(
            self.work,
            choice,
            old.weights.store,
            self.spread,
            self.ranks,
            rows=self.request.rows,
            evicted=old.weights.evicted,
        )
        following.weights.settle(following.sink)
        return following


def agree_on_budget(request: Request, ranks: Ranks) -> Request:
    """The smallest budget of all ranks, on all of them."""
    mine = request.budgets[0]
    every = [int(size) for (size,) in ranks.tell([mine.bytes])]
    if min(every) == mine.bytes:
        return request
    least = replace(mine, bytes=min(every), reason=f"what rank {every.index(min(every))} has")
    return replace(request, budgets=(least, *request.budgets[1:]))


def refuse(given: dict[str, Any]) -> None:
    """Arguments that are not for ranks."""
    if given.get("plan") is not None:
        raise InputError(
            "plan= is for one process: ranks plan together, since the one that holds most decides for all; leave it out"
        )
    if any(given.get(name) is not None for name in ("device", "host", "weights")):
        raise InputError(
            "device=, host= and weights= are for one process: a model on many ranks stays where it is spread"
        )


def refuse_inference(request: Request) -> None:
    """What is not planned over ranks."""
    if request.call is not None:
        raise InputError(
            "fit plans training steps over ranks: give an optimizer or own_step=True; for inference fit the model of one rank"
        )
