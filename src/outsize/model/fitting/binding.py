"""A plan, bound to the user's model: on one process, or on every rank of a run.

Nothing is changed until a plan is found: the request is checked, a planner looks for the cheapest choice that fits and describes
it, and settles it (its gradients are compared with the plain ones, a hosted step is rehearsed). There is one planner for
training on the model's device, one for inference there, one for a model that lives on the host, and one for a model that is
spread over ranks, where all ranks get the same plan or the same error; all give the same things.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outsize.model.fitting.arguments import Request, read_request
from outsize.model.fitting.compiling import Compiling
from outsize.model.fitting.fitted import Fitted
from outsize.model.fitting.hosting import HostedPlanner
from outsize.model.fitting.inference import InferencePlanner
from outsize.model.fitting.plan_in_use import PlanInUse, Planned
from outsize.model.fitting.planner import Planner, Settled
from outsize.model.fitting.ranks.agreement import all_ranks
from outsize.model.fitting.ranks.fitted import RankedFitted
from outsize.model.fitting.ranks.planner import RankedPlanner, agree_on_budget, refuse, refuse_inference
from outsize.model.fitting.ranks.spread import find_spread
from outsize.model.fitting.saved.file import SavedPlan, read_saved
from outsize.model.fitting.training import TrainingPlanner
from outsize.model.fitting.user_errors import warning_once


def bind(model: Any, loss: Any, optimizer: Any, batch: Any, compile: bool | str, asked: dict[str, Any]) -> Fitted:
    """Plan as it was asked for, and bind the plan."""
    compiling = Compiling(model, compile)
    try:
        fitted = _bind(compiling, loss, optimizer, batch, asked)
    except BaseException:
        compiling.undo()
        raise
    if asked["dry_run"]:
        compiling.undo()
    return fitted


def _bind(compiling: Compiling, loss: Any, optimizer: Any, batch: Any, asked: dict[str, Any]) -> Fitted:
    model, compile = compiling.model, compiling.asked
    spread = find_spread(model)
    plan_by: Callable[[Request], Planner]
    fitted: Callable[..., Fitted] = Fitted
    with warning_once(loss):
        if spread is None:
            saved = None if asked["plan"] is None else read_saved(asked["plan"])
            if saved is not None:
                asked = asked | _budgets_of(saved, asked)
            request = read_request(model, loss, optimizer, batch, compile=compile, **_without_plan(asked))
            request = compiling.apply(request, wanted=compile is True or _asks_to_compile(saved, compile))
            trains = TrainingPlanner if request.call is None else InferencePlanner
            plan_by = trains if request.host is None else HostedPlanner
        else:
            refuse(asked)
            saved = None
            request = read_request(spread.model, loss, optimizer, batch, **_without_plan(asked))
            refuse_inference(request)
            ranks = all_ranks()
            request = agree_on_budget(request, ranks)
            plan_by = functools.partial(RankedPlanner, spread=spread, ranks=ranks)
            fitted = functools.partial(RankedFitted, ranks=ranks)
        planner = plan_by(request)
        if saved is not None:
            saved.check_basis(planner.basis)
        found = planner.plan(request.budgets[0].bytes, batch) if saved is None else planner.take(saved)
        plan, choice = found
        settled = Settled(plan, choice, None) if request.dry_run else planner.settle(plan, choice)
    said = settled.plan if spread is not None else compiling.describe(settled.plan, request)
    used = PlanInUse(planner.plan, planner.reopen, said, settled.choice, settled.runner)
    used.measured = settled.measured
    renew = functools.partial(_plan_anew, plan_by, request) if isinstance(planner, TrainingPlanner) else None
    made = fitted(
        used, planner.request.rows, seconds=settled.seconds, renew=renew, call=request.call, end=compiling.undo,
        given=compiling.given if compiling.stripped else None,
    )  # fmt: skip
    if saved is not None:
        made.keep_plan()
    return made


def _plan_anew(plan_by: Callable[[Request], Planner], request: Request, backwards: int) -> Planned:
    """A plan for the step as it is now."""
    planner = plan_by(replace(request, work=replace(request.work, backwards=backwards)))
    return planner.plan, planner.reopen, *planner.plan(request.budgets[0].bytes, None)


def _asks_to_compile(saved: SavedPlan | None, compile: bool | str) -> bool:
    """True for a plan of a model that was compiled for its fit."""
    if saved is None or not saved.compiled:
        return False
    if compile is False:
        raise saved.refuse("its model is compiled, and compile=False forbids that")
    return True


def _budgets_of(saved: SavedPlan, asked: dict[str, Any]) -> dict[str, Any]:
    """Budgets that were not asked for are those of the plan."""
    found = {"budget": saved.budget(0)} if asked["budget"] is None else {}
    hosted = any(asked[name] is not None for name in ("device", "host", "weights"))
    return found | ({"host": saved.budget(1)} if hosted and asked["host"] is None else {})


def _without_plan(asked: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in asked.items() if name != "plan"}
