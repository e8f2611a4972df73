"""Plans for a model that only answers.

In: a `Request` without an optimizer. Out: plans whose `infer` stays inside the budget: the batch in
slices, and where the weights themselves do not fit, weights that visit. Slices are used only where a few samples show
that their outputs, joined, are the output of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outsize.core.errors import BudgetError
from outsize.core.fitting import FitPlan
from outsize.core.units import format_bytes
from outsize.model.fitting import batch as batches
from outsize.model.fitting.arguments import Request
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.fitted import reopen_resident
from outsize.model.fitting.learn.findings import SAMPLES
from outsize.model.fitting.move.stores import NoStore, open_store
from outsize.model.fitting.plan.describe import tell_inference
from outsize.model.fitting.plan.dry_run import Stage
from outsize.model.fitting.plan.foreign_tensors import say_beside
from outsize.model.fitting.plan.search import SURE
from outsize.model.fitting.planner import Settled
from outsize.model.fitting.run.join_outputs import NotJoined
from outsize.model.fitting.run.random_sources import same_draws
from outsize.model.fitting.run.resident import ResidentRunner, open_resident
from outsize.model.fitting.run.runner import Work
from outsize.model.fitting.user_errors import in_users_code

SHARE = 8
"""A unit whose weights visit together holds at most one part in so many of all weights, where it has parts at all."""

Call = Callable[[Any, Any], Any]


class InferencePlanner:
    """Plans for one request: the fewest slices that fit, with weights at home where they can be."""

    def __init__(self, request: Request, call: Call) -> None:
        self._request, self._call = request, call
        work, rows, without = request.work, request.rows, request.without
        self._stage = Stage(work, request.batch)
        self._notes = [] if "slices" in without else _why_not_sliced(work, call, request.batch)
        sliced = not self._notes and "slices" not in without
        counts = [2**p for p in range(20) if 2**p < rows] + [rows] if sliced else [1]
        units = () if "stream" in without else find_units(work.model)
        self._choices = [Choice(slices=n, stream=names) for names in dict.fromkeys(((), units)) for n in counts]

    def plan(self, limit: int, batch: Any) -> tuple[FitPlan, Choice]:
        """The first choice that fits."""
        request = self._request
        plain, tried = None, []
        for choice in self._choices:
            projection = self._stage.project(choice, call=self._call)
            plain = plain or projection.peak
            needed = int(projection.peak * (1 + SURE)) if projection.card else projection.peak
            tried.append((needed, choice))
            if needed <= limit:
                inside = replace(request.budgets[0], bytes=limit)
                return tell_inference(
                    request.work, choice, projection, inside, request.rows, plain, self._notes
                ), choice
        least, choice = min(tried, key=lambda pair: pair[0])
        raise BudgetError(
            f"no plan fits this inference into {format_bytes(limit)}: the smallest found holds {format_bytes(least)}"
            f"{say_beside(projection.beside)}, so a budget of {least} bytes is the smallest that has one",
            needed=least, budget=limit, smallest=least, culprit="forward",
        )  # fmt: skip

    def settle(self, plan: FitPlan, choice: Choice) -> Settled:
        """Open the runner of a choice; nothing has to be rehearsed."""
        request = self._request
        store = open_store(request.device, request.scratch)
        return Settled(plan, choice, open_resident(request.work, choice, store, rows=request.rows))

    def reopen(self, choice: Choice, old: ResidentRunner) -> ResidentRunner:
        """A runner on the store of the old one."""
        return reopen_resident(choice, old, self._request.rows)


def find_units(model: Any) -> tuple[str, ...]:
    """Modules whose weights visit together: none inside another, small beside the whole where they have parts."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    found: list[str] = []

    def visit(name: str, module: Any) -> None:
        size = sum(p.numel() * p.element_size() for p in module.parameters())
        children = list(module.named_children())
        if not size:
            return
        if name and (size * SHARE <= total or not children):
            found.append(name)
            return
        for child, part in children:
            visit(f"{name}.{child}" if name else child, part)

    visit("", model)
    return tuple(found)


def _why_not_sliced(work: Work, call: Call, batch: Any) -> list[str]:
    """Why the outputs of slices are not the output of the whole, empty where they are."""
    import torch

    rows = batches.count_rows(batch)
    if rows == 1:
        return ["not used: slice the batch: it has one sample"]
    part = batches.take(batch, 0, min(SAMPLES, rows))
    with same_draws(), in_users_code("the model, called with the first samples,"):
        whole = open_resident(work, Choice(), NoStore()).infer(part, call)
    try:
        with same_draws():
            cut = open_resident(work, Choice(slices=2), NoStore()).infer(part, call)
    except NotJoined as error:
        return [f"not used: slice the batch: {error}"]
    one, other = (list(batches.tensors_of(out).values()) for out in (whole, cut))
    same = len(one) == len(other) and all(
        a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=1e-3, atol=1e-3) for a, b in zip(one, other, strict=True)
    )  # fmt: skip
    return [] if same else ["not used: slice the batch: the outputs of slices, joined, are not the output of the whole"]
