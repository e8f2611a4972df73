"""`outsize.fit`: the user's model, loss, optimizer, one batch and a budget in; a step that stays inside it out.

Whose step it is decides who plans it: JAX's and Keras's have rooms of their own, torch's are bound in `binding`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outsize.model.frameworks import adapter_of
from outsize.model.torch_port.parts import require_torch


def fit(
    model: Any, loss: Callable[[Any, Any], Any] | None = None, optimizer: Any = None, batch: Any = None, *,
    budget: int | str | None = None, device: Any = None, host: int | str | None = None, weights: Any = None,
    allow: str = "exact", own_step: bool = False, clip: float | None = None, scaler: Any = None,
    without: tuple[str, ...] = (), batch_axis: Any = None, dry_run: bool = False, compile: bool | str = "auto",
    plan: Any = None,
) -> Any:  # fmt: skip
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

    `compile`: `"auto"` fits a model under `torch.compile` or after `model.compile()` as compiled, and others as they are; `True`
    compiles the model until `undo()`; `False` fits it as it was written, however it came. Graphs are compiled anew, with a
    remedy of their own: again.

    `plan`: a plan that `fitted.plan.save(path)` wrote for the same work, or its path. It is taken without a search; a plan of
    another model, batch, optimizer, torch, card or budget is refused.

    `device`: the model stays in host memory and visits that device unit by unit; `budget` is then the device's and `host`
    the host's; what that does not hold goes to a file in the scratch folder. `weights`: the model is on the meta device, and
    its weights are read from this file for inference.
    """
    asked: dict[str, Any] = {
        "budget": budget, "device": device, "host": host, "weights": weights, "allow": allow, "own_step": own_step, "clip": clip,
        "scaler": scaler, "without": without, "batch_axis": batch_axis, "dry_run": dry_run, "plan": plan,
    }  # fmt: skip
    other = adapter_of(model, loss, optimizer, batch)
    if other is not None:
        return other.fit(model, loss, optimizer, batch, **asked)
    require_torch("outsize.fit")
    from outsize.model.fitting.binding import bind

    return bind(model, loss, optimizer, batch, compile, asked)
