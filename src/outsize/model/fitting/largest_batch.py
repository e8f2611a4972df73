"""`outsize.batch_size`: the largest batch whose step fits, found without running out of memory once.

In: the same as `fit`, with a batch to grow. Out: a number of samples. Each candidate is projected on tensors without
contents, so a candidate that does not fit costs a trace and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outsize.core.errors import BudgetError
from outsize.core.units import format_bytes
from outsize.model.fitting import batch as batches
from outsize.model.fitting.arguments import read_request
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.plan.dry_run import Outline, Stage
from outsize.model.fitting.plan.search import SURE
from outsize.model.fitting.user_errors import in_users_code

MOST = 2**16
"""No batch above this is tried: some CUDA kernels refuse more rows."""


def batch_size(
    model: Any, loss: Callable[[Any, Any], Any], optimizer: Any, batch: Any, *, budget: int | str | None = None
) -> int:
    """The largest number of samples, each like those of `batch`, whose plain training step holds at most `budget` bytes."""
    request = read_request(model, loss, optimizer, batch, budget=budget, own_step=optimizer is None)
    allowance = request.budgets[0]
    stage = Stage(request.work, batch)

    def peak(rows: int) -> int:
        with in_users_code(f"loss(model, batch) with {rows} samples"):
            projection = _grown(stage, rows).project(Choice())
        return int(projection.peak * (1 + SURE)) if projection.card else projection.peak

    least = peak(1)
    if least > allowance.bytes:
        raise BudgetError(
            f"a step of one sample holds {format_bytes(least)}, the budget is {format_bytes(allowance.bytes)}: outsize.fit may "
            "make it fit", needed=least, budget=allowance.bytes, smallest=least,
        )  # fmt: skip
    low, high = 1, 2
    while high <= MOST and peak(high) <= allowance.bytes:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if peak(middle) <= allowance.bytes else (low, middle)
    return low


def _grown(stage: Stage, rows: int) -> Stage:
    """The stage with a batch of another length."""

    def grow(_: str, outline: Outline) -> Outline:
        return replace(outline, shape=(rows, *outline.shape[1:]), contents=None) if outline.shape else outline

    return stage.with_batch(batches.transform(stage.batch, grow, leaf=Outline))
