"""`outsize.fit`: the user's model, loss, optimizer, one batch and a budget in; a step that stays inside it out.

Nothing is changed until a plan is found: the request is checked, a planner looks for the cheapest choice that fits and describes
it, and settles it (its gradients are compared with the plain ones, a hosted step is rehearsed). There is one planner for
training on the model's device, one for inference there, and one for a model that lives on the host; all give the same things.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outsize.model.fitting.arguments import Request, read_request
from outsize.model.fitting.fitted import Fitted, Renew
from outsize.model.fitting.hosting import HostedPlanner
from outsize.model.fitting.inference import InferencePlanner
from outsize.model.fitting.plan_in_use import PlanInUse, Planned
from outsize.model.fitting.planner import Planner, Settled
from outsize.model.fitting.ranks.fit import fit_ranked
from outsize.model.fitting.ranks.spread import find_spread
from outsize.model.fitting.training import TrainingPlanner
from outsize.model.fitting.user_errors import warning_once
from outsize.model.frameworks import adapter_of
from outsize.model.torch_port.parts import require_torch


def fit(
    model: Any,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: Any = None,
    batch: Any = None,
    *,
    budget: int | str | None = None,
    device: Any = None,
    host: int | str | None = None,
    weights: Any = None,
    allow: str = "exact",
    own_step: bool = False,
    clip: float | None = None,
    scaler: Any = None,
    without: tuple[str, ...] = (),
    batch_axis: Any = None,
    dry_run: bool = False,
    compile: bool | str = "auto",
) -> Any:
    """Make a training step run inside `budget` bytes of the memory of the model's device.

    `loss(model, batch)` gives a scalar, or (total, count) whose quotient is the loss. `allow` is `"exact"` (the
    same gradient up to rounding), `"distribution"` (other dropout masks) or `"approximate"` (lower precision too).
    Without an optimizer (and without `own_step`) an inference is planned: `loss(model, batch)` then is how the model is
    called and gives its output, None calls it with the batch.
    `own_step`: you call `backward` and step the optimizer yourself. `clip` is the norm to which `step` clips gradients,
    `scaler` your GradScaler. `without` names remedies not to use: slices, again, checkpoint, offload, recipes, tensors_away,
    in_backward, state_away, gradients_away, stream, chunks, autocast, state_bits, frozen_bits, kept_bits, expandable; of a model
    on the host also pieces and disk. `dry_run` only plans.
    `batch_axis`: which axis of the batch's tensors counts samples, where fit does not find it: a number for all, or a table such
    as `{"x": 1, "weights": None, "cu_seqlens": "ends"}` (None: all samples share it; "ends": of packed sequences).

    `compile`: a model under `torch.compile` or after `model.compile()` is fitted as compiled (`"auto"`, `True`: it has to be) or
    refused (`False`). Its graphs are compiled anew, with a remedy of their own: again.

    `device`: the model stays in host memory and visits that device unit by unit; `budget` is then the device's and `host`
    the host's; what that does not hold goes to a file in the scratch folder. `weights`: the model is on the meta device, and
    its weights are read from this file for inference.
    """
    other = adapter_of(model, loss, optimizer, batch)
    if other is not None:
        return other.fit(
            model, loss, optimizer, batch, budget=budget, device=device, host=host, weights=weights, allow=allow,
            own_step=own_step, clip=clip, scaler=scaler, without=without, batch_axis=batch_axis, dry_run=dry_run,
        )  # fmt: skip
    require_torch("outsize.fit")
    spread = find_spread(model)
    if spread is not None:
        with warning_once(loss):
            return fit_ranked(
                spread, loss, optimizer, batch, budget=budget, device=device, host=host, weights=weights, allow=allow,
                own_step=own_step, clip=clip, scaler=scaler, without=without, batch_axis=batch_axis, dry_run=dry_run,
            )  # fmt: skip
    with warning_once(loss):
        request = read_request(
            model, loss, optimizer, batch, budget=budget, device=device, host=host, weights=weights, allow=allow,
            own_step=own_step, clip=clip, scaler=scaler, without=without, batch_axis=batch_axis, dry_run=dry_run,
            compile=compile,
        )  # fmt: skip
        planner: Planner
        renew: Renew | None = None
        if request.host is not None:
            planner = HostedPlanner(request, request.host)
        elif request.call is not None:
            planner = InferencePlanner(request, request.call)
        else:
            planner = TrainingPlanner(request)
            renew = functools.partial(_plan_anew, request)
        plan, choice = planner.plan(request.budgets[0].bytes, batch)
        settled = Settled(plan, choice, None) if dry_run else planner.settle(plan, choice)
    used = PlanInUse(planner.plan, planner.reopen, settled.plan, settled.choice, settled.runner)
    used.measured = settled.measured
    return Fitted(used, planner.request.rows, seconds=settled.seconds, renew=renew, call=request.call)


def _plan_anew(request: Request, backwards: int) -> Planned:
    """A plan for the step as it is now."""
    planner = TrainingPlanner(replace(request, work=replace(request.work, backwards=backwards)))
    return planner.plan, planner.reopen, *planner.plan(request.budgets[0].bytes, None)
