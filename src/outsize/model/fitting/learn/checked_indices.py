"""Indices that are looked at before a card sees them: a card does not survive one that is too large.

In: a device. Out: a context for trials of the user's loss on samples that may be cut wrongly. An operator that would read or
write beyond a tensor raises an error, as it does on a CPU; on a card its kernel would end every later call of the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from outsize.model.fitting.run.random_sources import name_arguments
from outsize.model.torch_port.dispatch import seeing

Bounds = Callable[[dict[str, Any]], list[tuple[Any, int, int]]]
"""Named arguments of an operator -> (indices, the least that is allowed, the first that is not)."""


def _rows(name: str) -> Bounds:
    return lambda given: [(given["indices"], 0, given[name].shape[0])]


def _along(given: dict[str, Any]) -> list[tuple[Any, int, int]]:
    size = given["self"].shape[given["dim"]] if given["self"].dim() else 1
    return [(given["index"], 0, size)]


def _each(given: dict[str, Any]) -> list[tuple[Any, int, int]]:
    """Of `x[i, j]`: a mask takes the place of as many axes as it has."""
    found, axis = [], 0
    for index in given["indices"]:
        mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        if index is not None and not mask:
            size = given["self"].shape[axis]
            found.append((index, -size, size))
        axis += index.dim() if mask else 1
    return found


def _classes(given: dict[str, Any]) -> list[tuple[Any, int, int]]:
    target, classes = given["target"], given["self"].shape[1 if given["self"].dim() > 1 else 0]
    return [(target[target != given["ignore_index"]], 0, classes)]


BOUNDS: dict[str, Bounds] = {
    "embedding": _rows("weight"), "_embedding_bag": _rows("weight"), "_embedding_bag_forward_only": _rows("weight"),
    "index": _each, "index_put": _each, "index_put_": _each, "_index_put_impl_": _each, "_unsafe_index": _each,
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _classes),
    **dict.fromkeys(
        ("gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_select",
         "index_add", "index_add_", "index_copy", "index_copy_"), _along,
    ),
}  # fmt: skip
"""Operators whose kernels end the process's work on a card."""


def checked_indices(device: str) -> contextlib.AbstractContextManager[Any]:
    """On a card every index is compared with its bounds; elsewhere operators do so themselves."""
    return seeing(_check) if device == "cuda" else contextlib.nullcontext()


def _check(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "overloadpacket", func).__name__
    bounds = BOUNDS.get(name)
    for indices, least, end in bounds(name_arguments(func, args, kwargs)) if bounds is not None else ():
        if type(indices) is torch.Tensor and not indices.is_meta and indices.numel():
            lowest, highest = int(indices.min()), int(indices.max())
            if lowest < least or highest >= end:
                raise IndexError(f"{name}: indices of {lowest} to {highest}, where {least} to {end - 1} are there")
    return func(*args, **kwargs)
