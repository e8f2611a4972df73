"""Plans for a model that only answers.

In: a model, how it is called, a batch, a budget. Out: a `Fitted` whose `infer` stays inside the budget: the batch in
slices, and where the weights themselves do not fit, weights that visit. Slices are used only where a few samples show
that their outputs, joined, are the output of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outsize.core.errors import BudgetError
from outsize.core.failure import Exactness, Remedy
from outsize.core.fitting import FitPlan
from outsize.core.memory import Allowance
from outsize.core.noun import Known
from outsize.core.plan import Peak, Step
from outsize.core.units import format_bytes
from outsize.model.fitting import batch as batches
from outsize.model.fitting.fitted import Fitted
from outsize.model.fitting.guarded import call_model
from outsize.model.fitting.learn.findings import SAMPLES
from outsize.model.fitting.learn.random_sources import same_draws
from outsize.model.fitting.move.stores import NoStore, open_store
from outsize.model.fitting.plan.choice import Choice
from outsize.model.fitting.plan.describe import say_absent
from outsize.model.fitting.plan.dry_run import Stage
from outsize.model.fitting.plan.foreign_tensors import note_beside, say_beside
from outsize.model.fitting.plan.projection import Projection
from outsize.model.fitting.plan.search import SURE
from outsize.model.fitting.run.join_outputs import NotJoined
from outsize.model.fitting.run.resident import open_resident
from outsize.model.fitting.run.runner import Work
from outsize.model.fitting.user_errors import in_users_code

SHARE = 8
"""A unit whose weights visit together holds at most one part in so many of all weights, where it has parts at all."""

Call = Callable[[Any, Any], Any]


def fit_inference(
    work: Work, call: Call | None, batch: Any, allowance: Allowance, without: tuple[str, ...], scratch: str, dry_run: bool
) -> Fitted:  # fmt: skip
    """The fewest slices that fit, with weights at home where they can be."""
    call = call or call_model
    rows = batches.count_rows(batch)
    stage = Stage(work, batch)
    notes = [] if "slices" in without else _why_not_sliced(work, call, batch)
    sliced = not notes and "slices" not in without
    counts = [2**p for p in range(20) if 2**p < rows] + [rows] if sliced else [1]
    units = () if "stream" in without else find_units(work.model)
    choices = [Choice(slices=n, stream=names) for names in dict.fromkeys(((), units)) for n in counts]

    def plan_for(limit: int, samples: Any = None) -> tuple[FitPlan, Choice]:
        inside = replace(allowance, bytes=limit)
        plain, tried = None, []
        for choice in choices:
            projection = stage.project(choice, call=call)
            plain = plain or projection.peak
            needed = int(projection.peak * (1 + SURE)) if projection.card else projection.peak
            tried.append((needed, choice))
            if needed <= limit:
                return _tell(work, choice, projection, inside, rows, plain, notes), choice
        least, choice = min(tried, key=lambda pair: pair[0])
        raise BudgetError(
            f"no plan fits this inference into {format_bytes(limit)}: the smallest found holds {format_bytes(least)}"
            f"{say_beside(projection.beside)}, so a budget of {least} bytes is the smallest that has one",
            needed=least, budget=limit, smallest=least, culprit="forward",
        )  # fmt: skip

    plan, choice = plan_for(allowance.bytes)
    runner = None
    if not dry_run:
        runner = open_resident(work, choice, open_store(next(work.model.parameters()).device, scratch), rows=rows)
    return Fitted(plan, choice, runner, plan_for, rows)


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


def _tell(
    work: Work, choice: Choice, projection: Projection, allowance: Allowance, rows: int, plain: int, notes: list[str]
) -> FitPlan:  # fmt: skip
    known = Known.ESTIMATE if projection.card else Known.EXACT
    saves = max(0, plain - projection.peak)
    remedies = []
    if choice.slices > 1:
        how = f"{choice.slices} slices of {-(-rows // choice.slices)} of {rows} samples"
        remedies.append(("slice the batch", "small slices do not fill a card", how))
    if choice.stream:
        remedies.append(("stream weights", "copies", f"{len(choice.stream)} modules visit while they run"))
    return FitPlan(
        name=f"inference of {rows} samples", budgets=(allowance,), smallest=None, plain=plain, away=projection.away,
        steps=tuple(
            Step(name=name, peaks=(Peak(pool=allowance.pool, bytes=size, known=known),))
            for name, size in projection.peaks.items()
        ),
        remedies=tuple(
            Remedy(name=name, saves=saves, known=Known.ESTIMATE, costs=costs, exactness=Exactness.ROUNDING, how=how)
            for name, costs, how in remedies
        ),
        slow_down=1.0, place="host" if work.device == "cuda" else "disk",
        notes=(*notes, *note_beside(projection.beside), *say_absent(choice)),
    )  # fmt: skip
