"""Fit inside other people's training loops.

In: a `Fitted` with `own_step=True`, and the loop's trainer. Out: the loop's own step with our gradients: it still
clips, schedules, logs, saves and steps the optimizer itself. Duck-typed: neither library is imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from outsize.core.errors import InputError
from outsize.model.fitting.fitted import Fitted


@contextlib.contextmanager
def in_trainer(trainer: Any, fitted: Fitted) -> Iterator[Any]:
    """A transformers `Trainer` whose training step is the fitted one for as long as the block runs.

    Fit with `own_step=True` and the trainer's full batch; leave `gradient_accumulation_steps` at 1, since fit slices by itself.
    """
    steps = getattr(getattr(trainer, "args", None), "gradient_accumulation_steps", None)
    if steps is None or not hasattr(trainer, "training_step"):
        raise InputError(f"{type(trainer).__name__} is no transformers Trainer: it has no training_step")
    if steps != 1:
        raise InputError(
            f"gradient_accumulation_steps is {steps}: set it to 1 and give the loader the full batch, fit slices it"
        )

    def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        inputs = trainer._prepare_inputs(inputs)
        loss = fitted.backward(inputs)
        counted = fitted.count_labels(inputs)
        if num_items_in_batch is None or not counted or not getattr(trainer, "model_accepts_loss_kwargs", False):
            return loss
        share = counted / float(num_items_in_batch)  # the trainer divides by its own count of labels
        if share != 1.0:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(share)
        return loss * share

    trainer.training_step = training_step
    try:
        yield trainer
    finally:
        del trainer.training_step


def lightning_step(module: Any, fitted: Fitted, batch: Any) -> Any:
    """The body of a Lightning `training_step` under manual optimization: gradients by fit, the update by its optimizer."""
    if getattr(module, "automatic_optimization", True):
        raise InputError("set self.automatic_optimization = False: fit runs the backward pass itself")
    optimizer = module.optimizers()
    optimizer.zero_grad()
    loss = fitted.backward(batch)
    optimizer.step()
    return loss
