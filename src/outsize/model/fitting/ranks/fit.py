"""`outsize.fit` for a model that is spread over ranks.

In: the arguments of `fit`, on every rank. Out: a `RankedFitted` on every rank, or the same error on all of them.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from outsize.model.fitting.arguments import Request, read_request
from outsize.model.fitting.plan_in_use import PlanInUse, Planned
from outsize.model.fitting.planner import Settled
from outsize.model.fitting.ranks.agreement import Ranks, all_ranks
from outsize.model.fitting.ranks.fitted import RankedFitted
from outsize.model.fitting.ranks.planner import RankedPlanner, agree_on_budget, refuse, refuse_inference
from outsize.model.fitting.ranks.spread import Spread


def fit_ranked(spread: Spread, loss: Any, optimizer: Any, batch: Any, **given: Any) -> RankedFitted:
    """Plan on all ranks."""
    refuse(given)
    request = read_request(spread.model, loss, optimizer, batch, **given)
    refuse_inference(request)
    ranks = all_ranks()
    request = agree_on_budget(request, ranks)
    planner = RankedPlanner(request, spread, ranks)
    plan, choice = planner.plan(request.budgets[0].bytes, None)
    settled = Settled(plan, choice, None) if request.dry_run else planner.settle(plan, choice)
    used = PlanInUse(planner.plan, planner.reopen, settled.plan, settled.choice, settled.runner)
    renew = functools.partial(_plan_anew, request, spread, ranks)
    return RankedFitted(used, planner.request.rows, renew=renew, ranks=ranks)


def _plan_anew(request: Request, spread: Spread, ranks: Ranks, backwards: int) -> Planned:
    """A plan for the step as it is now."""
    planner = RankedPlanner(replace(request, work=replace(request.work, backwards=backwards)), spread, ranks)
    return planner.plan, planner.reopen, *planner.plan(request.budgets[0].bytes, None)
