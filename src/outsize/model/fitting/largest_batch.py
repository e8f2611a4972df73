"""`outsize.batch_size`: the largest batch whose step fits, found without running out of memory once.

In: the same as `fit`, with a batch to grow. Out: a number of samples. Each candidate is projected on tensors without
contents, so a candidate that does not fit costs a trace and nothing else.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

from outsize.core.errors import BudgetError, InputError
from outsize.core.extras import need
from outsize.core.units import format_bytes
from outsize.model.fitting.user_errors import in_users_code

MOST = 2**16
"""No batch above this is tried: some CUDA kernels refuse more rows."""


def batch_size(
    model: Any, loss: Callable[[Any, Any], Any] | None = None, optimizer: Any = None, batch: Any = None, *,
    budget: int | str | None = None, inference: bool = False,
) -> int:  # fmt: skip
    """The largest number of samples, each like those of `batch`, whose plain training step holds at most `budget` bytes.

    `inference`: whose output, made without gradients, does. `loss(model, batch)` then is how the model is called, such as a
    function that generates; None calls it with the batch.
    """
    need("torch", "outsize.batch_size")
    from outsize.model.fitting.arguments import read_request
    from outsize.model.fitting.choice import Choice
    from outsize.model.fitting.plan.dry_run import Stage
    from outsize.model.fitting.plan.search import needed_for

    if batch is None:
        raise InputError("give batch=, a batch of which the size is asked: its samples are grown")
    if inference and optimizer is not None:
        raise InputError("an inference has no optimizer: leave it out, or leave inference=True out")
    if not inference and loss is None:
        raise InputError("give loss(model, batch), or inference=True for a model that only answers")
    own_step = optimizer is None and not inference
    request = read_request(model, loss, optimizer, batch, budget=budget, own_step=own_step)
    allowance = request.budgets[0]
    stage = Stage(request.work, batch)
    what = "an output" if inference else "a step"

    def peak(rows: int) -> int:
        with in_users_code(
            f"the model with {rows} samples" if inference else f"loss(model, batch) with {rows} samples"
        ):
            return needed_for(stage.with_rows(rows).project(Choice(), call=request.call))

    least = peak(1)
    if least > allowance.bytes:
        raise BudgetError(
            f"{what} of one sample holds {format_bytes(least)}, the budget is {format_bytes(allowance.bytes)}: outsize.fit may "
            "make it fit", needed=least, budget=allowance.bytes, smallest=least,
        )  # fmt: skip
    low, high = 1, 2
    while high <= MOST and peak(high) <= allowance.bytes:
        low, high = high, high * 2
    return low + bisect.bisect_left(range(low + 1, high), True, key=lambda rows: peak(rows) > allowance.bytes)
