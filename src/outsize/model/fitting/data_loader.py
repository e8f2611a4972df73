"""`outsize.data_loader`: a DataLoader whose own memory is counted.

In: a dataset, a batch size and a host budget. Out: torch's DataLoader with as many workers and batches ahead as the
budget has room for. Every worker holds the batches it has prepared, pinned copies come on top, and a dataset kept as
a list of Python objects is copied into each worker page by page as reference counts are written; an array or a tensor
is not.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from outsize.core.errors import BudgetError, InputError
from outsize.core.extras import need
from outsize.core.units import format_bytes, parse_bytes
from outsize.machine import current_budget

WORKER = 200 * 2**20
"""Bytes that a worker process takes by itself: the interpreter with torch, measured by its private pages."""


def data_loader(
    dataset: Any, batch_size: int, *, budget: int | str | None = None, workers: int | None = None,
    collate: Callable[..., Any] | None = None, **settings: Any,
) -> Any:  # fmt: skip
    """A DataLoader that holds at most `budget` bytes of host memory: 10 % of the host budget unless said.

    The number of workers and the batches each prepares ahead follow from the size of one batch; `settings` go to
    DataLoader as they are. The loader's `outsize` attribute says what was counted.
    """
    torch = need("torch", "outsize.data_loader")
    from torch.utils.data import DataLoader, default_collate

    from outsize.model.fitting.batch import tensors_of

    _check(dataset, batch_size, workers, settings)
    allowed = parse_bytes(budget) if budget is not None else (current_budget().host or 2**31) // 10
    one = (collate or default_collate)([dataset[0]])
    size = batch_size * sum(t.numel() * t.element_size() for t in tensors_of(one).values())
    pinned = bool(settings.pop("pin_memory", torch.cuda.is_available()))
    most = min(os.cpu_count() or 1, 8) if workers is None else workers
    for count in range(most, -1, -1):
        ahead = 2 if count else 1
        held = count * (WORKER + ahead * size) + size * (1 + pinned)
        if held <= allowed:
            break
    else:
        raise BudgetError(
            f"one batch of {batch_size} samples takes {format_bytes(held)} of host memory while it is loaded, the budget is "
            f"{format_bytes(allowed)}", needed=held, budget=allowed, smallest=held,
        )  # fmt: skip
    more = {"prefetch_factor": ahead, "persistent_workers": True} if count else {}
    made = DataLoader(
        dataset, batch_size=batch_size, num_workers=count, pin_memory=pinned, collate_fn=collate, **{**more, **settings}
    )
    sizes = {"bytes": held, "batch": size, "workers": count, "ahead": ahead, "pinned": pinned}
    made.outsize = {**sizes, "notes": _notes(dataset, count)}
    return made


def _check(dataset: Any, batch_size: Any, workers: Any, settings: dict[str, Any]) -> None:
    """An `InputError` for arguments that no loader can be made of."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise InputError(f"a batch has a whole number of samples and at least one, not {batch_size!r}")
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 0):
        raise InputError(f"workers={workers!r} is no number of processes: 0 or more, None for as many as fit")
    if "num_workers" in settings:
        raise InputError("loader takes workers=, the most processes to start, in the place of num_workers=")
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise InputError(
            f"{type(dataset).__name__} has no length or no samples by number: loader needs both to size a batch before it starts"
        )
    if not len(dataset):
        raise InputError(f"the dataset is empty: {type(dataset).__name__} has 0 samples")


def _notes(dataset: Any, workers: int) -> tuple[str, ...]:
    """What grows although nobody allocates it."""
    lists = [
        name
        for name, value in getattr(dataset, "__dict__", {}).items()
        if isinstance(value, list | dict) and len(value) > 10_000
    ]
    if not (workers and lists):
        return ()
    count = len(vars(dataset)[lists[0]])
    return (f"{lists[0]} holds {count:,} Python objects: each worker copies their pages as it reads; keep an array",)
