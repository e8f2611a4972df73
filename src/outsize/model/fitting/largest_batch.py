"""`outsize.batch_size`: the largest batch whose step fits, found without running out of memory once.

In: the same as `fit`, with a batch to grow. Out: a number of samples. Each candidate is projected on tensors without
contents, so a candidate that does not fit costs a trace and nothing else.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

from outsize.core.errors import BudgetError
from outsize.core.extras import need
from outsize.core.units import format_bytes
from outsize.model.fitting.arguments import read_request
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.plan.dry_run import Stage
from outsize.model.fitting.plan.search import needed_for
from outsize.model.fitting.user_errors import in_users_code

MOST = 2**16
"""No batch above this is tried: some CUDA kernels refuse more rows."""


def batch_size(
    model: Any, loss: Callable[[Any, Any], Any], optimizer: Any, batch: Any, *, budget: int | str | None = None
) -> int:
    """The largest number of samples, each like those of `batch`, whose plain training step holds at most `budget` bytes."""
    need("torch", "outsize.batch_size")
    request = read_request(model, loss, optimizer, batch, budget=budget, own_step=optimizer is None)
    allowance = request.budgets[0]
    stage = Stage(request.work, batch)

    def peak(rows: int) -> int:
        with in_users_code(f"loss(model, batch) with {rows} samples"):
            return needed_for(stage.with_rows(rows).project(Choice()))

    least = peak(1)
    if least > allowance.bytes:
        raise BudgetError(
            f"a step of one sample holds {format_bytes(least)}, the budget is {format_bytes(allowance.bytes)}: outsize.fit may "
            "make it fit", needed=least, budget=allowance.bytes, smallest=least,
        )  # fmt: skip
    low, high = 1, 2
    while high <= MOST and peak(high) <= allowance.bytes:
        low, high = high, high * 2
    return low + bisect.bisect_left(range(low + 1, high), True, key=lambda rows: peak(rows) > allowance.bytes)
