"""The user's data and loss -> a measured loss.

A loss is measured in evaluation mode, without gradients, on the same batches each time and from the same random state, so
that two models differ only by what was done to them.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from outsize.compression.method import Subject
from outsize.core.errors import InputError

MOST_BATCHES = 32
"""Batches that are taken of a longer loader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one evaluation found."""

    loss: float
    """Mean over all samples; infinite where it is not a number."""
    seconds: float
    """Of one batch, the fastest."""


def read_batches(data: Any, most: int = MOST_BATCHES) -> tuple[list[Any], bool]:
    """The batches, and whether there were more. A tensor, tuple or table is one batch; a list or loader holds many."""
    import torch

    if data is None:
        raise InputError(
            "shrink measures on your data: give data=, a list or loader of batches that loss(model, batch) takes"
        )
    if isinstance(data, torch.Tensor | tuple | dict):
        return [data], False
    if not isinstance(data, Iterable):
        raise InputError(f"data is {type(data).__name__}: give one batch, or a list or loader of batches")
    found = list(itertools.islice(iter(data), most + 1))
    if not found:
        raise InputError("data has no batches: shrink takes nothing away without measuring on your data")
    return found[:most], len(found) > most


def default_loss(model: Any, batch: Any) -> Any:
    """What models of transformers give: `model(**batch).loss`."""
    found = getattr(model(**batch), "loss", None) if isinstance(batch, dict) else None
    if found is None:
        raise InputError("give loss=: a function loss(model, batch) that returns a scalar, or (total, count)")
    return found


def evaluate(model: Any, subject: Subject) -> Measured:
    """The loss of a model on the subject's data; the model is left as it was."""
    import torch

    modes = [(module, module.training) for module in model.modules()]
    total = weight = 0.0
    fastest = math.inf
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            for batch in subject.batches:
                began = time.perf_counter()
                part, count = _as_numbers(subject.loss(model, batch))
                fastest = min(fastest, time.perf_counter() - began)
                total, weight = total + part, weight + count
    finally:
        for module, training in modes:
            module.training = training
    mean = total / weight if weight else math.nan
    return Measured(loss=mean if math.isfinite(mean) else math.inf, seconds=fastest)


def _as_numbers(found: Any) -> tuple[float, float]:
    """(total, count) of what a loss gave."""
    try:
        if isinstance(found, tuple):
            total, count = found
            return float(total), float(count)
        return float(found), 1.0
    except (TypeError, ValueError, RuntimeError):
        shape = getattr(found, "shape", None)
        what = type(found).__name__ if shape is None else f"a tensor of shape {tuple(shape)}"
        raise InputError(f"loss(model, batch) gave {what}: it must give a scalar, or (total, count)") from None


def require_loss(subject: Subject) -> Measured:
    """The loss of the user's own model, which must be a number."""
    found = evaluate(subject.model, subject)
    if not math.isfinite(found.loss):
        raise InputError(
            "the loss of this model on this data is not a finite number: nothing can be measured against it"
        )
    return found
