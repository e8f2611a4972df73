"""Plans for a model that only answers.

In: a `Request` without an optimizer. Out: plans whose `infer` stays inside the budget: the batch in
slices, and where the weights themselves do not fit, weights that visit. Slices are used only where a few samples show
that their outputs, joined, are the output of the whole.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from outsize.core.errors import BudgetError
from outsize.core.fitting import FitPlan
from outsize.core.units import format_bytes
from outsize.model.fitting import batch as batches
from outsize.model.fitting.arguments import Request
from outsize.model.fitting.batch import NotJoined
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.learn.findings import SAMPLES, attempt
from outsize.model.fitting.move.stores import NoStore
from outsize.model.fitting.move.units import cut_model
from outsize.model.fitting.plan.describe import describe_inference
from outsize.model.fitting.plan.dry_run import Call, Stage
from outsize.model.fitting.plan.facts import InferenceFacts
from outsize.model.fitting.plan.foreign_tensors import say_beside
from outsize.model.fitting.plan.remedies import REMEDIES
from outsize.model.fitting.plan.search import Candidate, Search, needed_for
from outsize.model.fitting.planner import Planner
from outsize.model.fitting.run.random_sources import same_draws
from outsize.model.fitting.run.resident import open_resident
from outsize.model.fitting.run.runner import Work
from outsize.model.fitting.saved.file import SavedPlan, describe_origin
from outsize.model.fitting.user_errors import in_users_code
from outsize.model.torch_port.objects import sizeof

SHARE = 8
"""A unit whose weights visit together holds at most one part in so many of all weights, where it has parts at all."""


class InferencePlanner(Planner):
    """Plans for one request: the fewest slices that fit, with weights at home where they can be."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        assert request.call is not None
        self._call: Call = request.call
        self._facts: InferenceFacts | None = None
        """What a search knows; None: nobody has looked."""
        self._stage: Stage

    def take(self, saved: SavedPlan) -> tuple[FitPlan, Choice]:
        self.work = work = saved.read_work(self.request)
        self.request = request = replace(self.request, rows=work.axes.count(self.request.batch))
        choice = saved.read_choice(request, work, request.rows)
        if choice.slices > 1 and (why := _why_not_sliced(work, self._call, request.batch)):
            raise saved.refuse(why)
        stage = Stage(work, request.batch)
        stage.take_over(saved.more.get("reads") is True)
        with saved.followed():
            projection = stage.project(choice, call=self._call)
        return saved.require_fit(projection), choice

    def _look(self) -> InferenceFacts:
        """Which axis counts samples, and what forbids a remedy."""
        request, call = self.request, self._call
        forbidden = dict.fromkeys(request.without, "you forbade it")
        for axes in () if "slices" in forbidden else request.readings:
            self.work = work = replace(request.work, axes=axes)
            why_not = _why_not_sliced(work, call, request.batch)
            if not why_not:
                forbidden.pop("slices", None)
                break
            forbidden.setdefault("slices", why_not)
        else:
            self.work = work = request.work
        self.request = request = replace(request, rows=work.axes.count(request.batch))
        self._stage = Stage(work, request.batch)
        weights = sum(map(sizeof, work.model.parameters()))
        units = tuple(cut_model(work.model, weights // SHARE).units)
        return InferenceFacts(device=work.device, rows=request.rows, streamable=units, forbidden=forbidden)

    def plan(self, limit: int, batch: Any) -> tuple[FitPlan, Choice]:
        facts = self._facts = self._facts or self._look()
        project = functools.partial(self._stage.project, call=self._call)
        search = InferenceSearch(facts, project, self.request.allow, limit)
        with in_users_code("the model, followed without contents,"):
            found = search.run()
        inside = replace(self.request.budgets[0], bytes=limit)
        plan = describe_inference(facts, found, inside, search.tried[0].peak)
        projection = found.projection
        assert projection is not None
        origin = describe_origin(
            self.basis, found.choice, self.work, projection.peaks, projection.beside, reads=self._stage.reads
        )
        return replace(plan, origin=origin), found.choice


class InferenceSearch(Search[InferenceFacts]):
    """Weights at home with more and more slices, then weights that visit."""

    remedies = tuple(kind for kind in reversed(REMEDIES) if kind.inference)
    most = 100  # all of them: such a trace is short

    def _last_resort(self) -> Candidate:
        projections = [c.projection for c in self.tried if c.projection is not None]
        least = min(map(needed_for, projections))
        raise BudgetError(
            f"no plan fits this inference into {format_bytes(self.budget)}: the smallest found holds {format_bytes(least)}"
            f"{say_beside(projections[-1].beside)}, so a budget of {least} bytes is the smallest that has one",
            needed=least, budget=self.budget, smallest=least, culprit="forward",
        )  # fmt: skip


def _why_not_sliced(work: Work, call: Call, batch: Any) -> str:
    """Why the outputs of slices are not the output of the whole, empty where they are."""
    rows = work.axes.count(batch)
    if rows == 1:
        return "it has one sample"
    part = work.axes.take(batch, 0, min(SAMPLES, rows))
    with same_draws():
        whole, failed = attempt(lambda: open_resident(work, Choice(), NoStore()).infer(part, call))
    if failed:
        return f"the model, called with the first samples, failed with {failed}; batch_axis may say which axis counts samples"
    try:
        with same_draws():
            cut = open_resident(work, Choice(slices=2), NoStore()).infer(part, call)
    except NotJoined as error:
        return str(error)
    one, other = (list(batches.tensors_of(out).values()) for out in (whole, cut))
    same = len(one) == len(other) and all(
        a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=1e-3, atol=1e-3) for a, b in zip(one, other, strict=True)
    )  # fmt: skip
    return "" if same else "the outputs of slices, joined, are not the output of the whole"
