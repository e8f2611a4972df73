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
from outsize.model.fitting.fitted import Fitted
from outsize.model.fitting.hosting import HostedPlanner
from outsize.model.fitting.inference import InferencePlanner
from outsize.model.fitting.plan_in_use import PlanInUse, Planned
from outsize.model.fitting.planner import Planner, Settled
from outsize.model.fitting.ranks.agreement import all_ranks
from outsize.model.fitting.ranks.fitted import RankedFitted
from outsize.model.fitting.ranks.planner import RankedPlanner, agree_on_budget, refuse, refuse_inference
from outsize.model.fitting.ranks.spread import find_spread
from outsize.model.fitting.training import TrainingPlanner
from outsize.model.fitting.user_errors import warning_once


def bind(model: Any, loss: Any, optimizer: Any, batch: Any, compile: bool | str, asked: dict[str, Any]) -> Fitted:
    """Plan as it was asked for, and bind the plan."""
    spread = find_spread(model)
    plan_by: Callable[[Request], Planner]
    fitted: Callable[..., Fitted] = Fitted
    with warning_once(loss):
        if spread is None:
            request = read_request(model, loss, optimizer, batch, compile=compile, **asked)
            trains = TrainingPlanner if request.call is None else InferencePlanner
            plan_by = trains if request.host is None else HostedPlanner
        else:
            refuse(asked)
            request = read_request(spread.model, loss, optimizer, batch, **asked)
            refuse_inference(request)
            ranks = all_ranks()
            request = agree_on_budget(request, ranks)
            plan_by = functools.partial(RankedPlanner, spread=spread, ranks=ranks)
            fitted = functools.partial(RankedFitted, ranks=ranks)
        planner = plan_by(request)
        plan, choice = planner.plan(request.budgets[0].bytes, batch)
        settled = Settled(plan, choice, None) if request.dry_run else planner.settle(plan, choice)
    used = PlanInUse(planner.plan, planner.reopen, settled.plan, settled.choice, settled.runner)
    used.measured = settled.measured
    renew = functools.partial(_plan_anew, plan_by, request) if isinstance(planner, TrainingPlanner) else None
    return fitted(used, planner.request.rows, seconds=settled.seconds, renew=renew, call=request.call)


def _plan_anew(plan_by: Callable[[Request], Planner], request: Request, backwards: int) -> Planned:
    """A plan for the step as it is now."""
    planner = plan_by(replace(request, work=replace(request.work, backwards=backwards)))
    return planner.plan, planner.reopen, *planner.plan(request.budgets[0].bytes, None)
