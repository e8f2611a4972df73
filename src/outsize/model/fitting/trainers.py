"""Fit inside other people's training loops.

In: a `Fitted` with `own_step=True`, and the loop's trainer. Out: the loop's own step with our gradients: it still
clips, schedules, logs, saves and steps the optimizer itself. Duck-typed: neither library is imported.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from outsize.core.errors import InputError
from outsize.model.fitting.fitted import Fitted


class TrainerLoss:
    """The loss of a transformers `Trainer`, for `outsize.fit`: `trainer_loss(trainer)` makes it.

    A Trainer divides the sum over labels by their number in the whole batch; with that fixed, losses of slices add up.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.items: int | None = None
        """Labels in the batch, as the trainer counts them; None before it has said so."""
        self._counts = "num_items_in_batch" in inspect.signature(trainer.compute_loss).parameters
        self._counts = self._counts and getattr(trainer, "model_accepts_loss_kwargs", False)

    def __call__(self, model: Any, batch: Any) -> Any:
        """The loss as the trainer's own step takes it, in its precision."""
        if self._counts and self.items is None:
            labels = batch.get("labels")
            self.items = None if labels is None else int((labels != -100).sum())
        said = {"num_items_in_batch": self.items} if self._counts else {}
        with self.trainer.compute_loss_context_manager():
            return self.trainer.compute_loss(model, dict(batch), **said)


def trainer_loss(trainer: Any) -> TrainerLoss:
    """The loss that a transformers `Trainer` would take, to be given to `outsize.fit`."""
    if not hasattr(trainer, "compute_loss"):
        raise InputError(f"{type(trainer).__name__} is no transformers Trainer: it has no compute_loss")
    return TrainerLoss(trainer)


@contextlib.contextmanager
def in_trainer(trainer: Any, fitted: Any) -> Iterator[Any]:
    """A transformers `Trainer` whose training step is the fitted one for as long as the block runs.

    Fit with `own_step=True` and the trainer's full batch; leave `gradient_accumulation_steps` at 1, since fit slices by itself.
    The loss is the one that fit was given: `trainer_loss(trainer)` is the trainer's own.
    """
    steps = getattr(getattr(trainer, "args", None), "gradient_accumulation_steps", None)
    if steps is None or not hasattr(trainer, "training_step"):
        raise InputError(f"{type(trainer).__name__} is no transformers Trainer: it has no training_step")
    if steps != 1:
        raise InputError(
            f"gradient_accumulation_steps is {steps}: set it to 1 and give the loader the full batch, fit slices it"
        )

    if not isinstance(fitted, Fitted):
        raise InputError(f"in_trainer needs what outsize.fit(..., own_step=True) gives, not {type(fitted).__name__}")
    if fitted._work.model is not trainer.model:
        raise InputError(
            "the fitted model is not the trainer's: fit trainer.model, or its gradients go where nobody steps"
        )

    scaler = getattr(getattr(trainer, "accelerator", None), "scaler", None)
    if scaler is not None and fitted._work.scaler is not scaler:
        raise InputError(
            "the trainer scales its loss (fp16): fit with scaler=trainer.accelerator.scaler, or train in bf16"
        )
    loss = fitted._work.loss

    def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        inputs = trainer._prepare_inputs(inputs)
        if isinstance(loss, TrainerLoss):
            loss.items = None if num_items_in_batch is None else int(num_items_in_batch)
            return fitted.backward(inputs)
        value = fitted.backward(inputs)
        counted = fitted.count_labels(inputs)
        if num_items_in_batch is None or not counted or not getattr(trainer, "model_accepts_loss_kwargs", False):
            return value
        share = counted / float(num_items_in_batch)  # the trainer divides by its own count of labels
        if share != 1.0:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(share)
        return value * share

    trainer.training_step = training_step
    try:
        yield trainer
    finally:
        del trainer.training_step


def lightning_step(module: Any, fitted: Any, batch: Any) -> Any:
    """The body of a Lightning `training_step` under manual optimization: gradients by fit, the update by its optimizer."""
    if getattr(module, "automatic_optimization", True):
        raise InputError("set self.automatic_optimization = False: fit runs the backward pass itself")
    optimizer = module.optimizers()
    if isinstance(optimizer, list | tuple):
        raise InputError(
            f"the module has {len(optimizer)} optimizers: call fitted.backward(batch) and step the one you mean"
        )
    optimizer.zero_grad()
    loss = fitted.backward(batch)
    optimizer.step()
    return loss
