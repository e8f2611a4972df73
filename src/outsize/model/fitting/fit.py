"""`outsize.fit`: the user's model, loss, optimizer, one batch and a budget in; a step that stays inside it out.

Nothing is changed until a plan is found: the request is checked, a planner looks for the cheapest choice that fits and describes
it, and settles it (its gradients are compared with the plain ones, a hosted step is rehearsed). There is one planner for
training on the model's device, one for inference there, and one for a model that lives on the host; all give the same things.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outsize.model.fitting.arguments import read_request
from outsize.model.fitting.fitted import Fitted
from outsize.model.fitting.hosting import HostedPlanner
from outsize.model.fitting.inference import InferencePlanner
from outsize.model.fitting.planner import Planner
from outsize.model.fitting.training import TrainingPlanner
from outsize.model.torch_port.parts import require_torch


def fit(
    model: Any,
    loss: Callable[[Any, Any], Any] | None,
    optimizer: Any,
    batch: Any,
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
    dry_run: bool = False,
) -> Any:
    """Make a training step run inside `budget` bytes of the memory of the model's device.

    `loss(model, batch)` gives a scalar, or (total, count) whose quotient is the loss. `allow` is `"exact"` (the
    same gradient up to rounding), `"distribution"` (other dropout masks) or `"approximate"` (lower precision too).
    Without an optimizer (and without `own_step`) an inference is planned: `loss(model, batch)` then is how the model is
    called and gives its output, None calls it with the batch.
    `own_step`: you call `backward` and step the optimizer yourself. `clip` is the norm to which `step` clips gradients,
    `scaler` your GradScaler. `without` names remedies not to use: slices, checkpoint, offload, in_backward, state_away,
    gradients_away, stream, chunks, autocast, expandable. `dry_run` only plans.

    `device`: the model stays in host memory and visits that device unit by unit; `budget` is then the device's and `host`
    the host's; what that does not hold goes to a file in the scratch folder. `weights`: the model is on the meta device, and
    its weights are read from this file for inference.
    """
    require_torch()
    request = read_request(
        model, loss, optimizer, batch, budget=budget, device=device, host=host, weights=weights, allow=allow,
        own_step=own_step, clip=clip, scaler=scaler, without=without, dry_run=dry_run,
    )  # fmt: skip
    planner: Planner
    if request.host is not None:
        planner = HostedPlanner(request, request.host)
    elif request.call is not None:
        planner = InferencePlanner(request, request.call)
    else:
        planner = TrainingPlanner(request)
    plan, choice = planner.plan(request.budgets[0].bytes, batch)
    if dry_run:
        return Fitted(plan, choice, None, None, request.rows, call=request.call)
    plan, choice, runner, measured, seconds = planner.settle(plan, choice)
    fitted = Fitted(plan, choice, runner, planner.plan, request.rows, reopen=planner.reopen, call=request.call)
    fitted.measured, fitted.seconds = measured, seconds
    return fitted
