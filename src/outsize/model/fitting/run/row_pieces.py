"""A unit's rows in pieces: its weights are here once, its activations a piece at a time.

In: a forward function that treats the rows of its input independently. Out: one that runs on a few rows after the other and
joins what comes out. The loss sees the whole batch, so nothing has to be known about how it adds up. `mixes_rows` finds
modules that are not like that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outsize.model.fitting import batch as batches
from outsize.model.fitting.batch import join
from outsize.model.fitting.move.out_of_memory import is_out_of_memory
from outsize.model.torch_port.dispatch import leaves_of, map_leaves

Forward = Callable[..., Any]

CLOSE = {"float32": 1e-4, "float64": 1e-9, "bfloat16": 5e-2, "float16": 1e-2}
"""Relative difference that rounding explains, by type: other shapes use other kernels."""


class MixesRows(Exception):
    """A unit cannot run on a few rows at a time."""


def count_rows(args: Any, kwargs: Any) -> int:
    """Rows of the first tensor that a module is called with."""
    for leaf in leaves_of((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 1:
            return int(leaf.shape[0])
    return 1


def take_rows(value: Any, rows: int, start: int, stop: int) -> Any:
    """Some rows of every tensor that has `rows` of them."""
    taken: dict[int, Any] = {}

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != rows:
            return leaf
        if id(leaf) not in taken:  # modules ask whether two inputs are the same
            taken[id(leaf)] = leaf[start:stop]
        return taken[id(leaf)]

    return map_leaves(take, value)


def in_pieces(forward: Forward, pieces: int) -> Forward:
    """`forward` on a few rows at a time."""

    def run(*args: Any, **kwargs: Any) -> Any:
        rows = count_rows(args, kwargs)
        if rows < 2:
            return forward(*args, **kwargs)
        outs = []
        runs = batches.cut(rows, pieces)
        for start, stop in runs:
            some, named = take_rows((args, kwargs), rows, start, stop)
            outs.append(forward(*some, **named))
        return outs[0] if len(outs) == 1 else join(outs, [stop - start for start, stop in runs])

    return run


def mixes_rows(forward: Forward, args: Any, kwargs: Any, values: bool = True) -> bool:
    """True where two rows together give something else than each by itself, or where they cannot run so.

    Without `values` (tensors without contents) only the latter is seen.
    """
    if count_rows(args, kwargs) < 2:
        return False
    try:
        return _differ(forward, args, kwargs, values)
    # a cache of keys, say, that has seen another number of rows
    except (
        RuntimeError,
        ValueError,
        IndexError,
    ) as error:
        if is_out_of_memory(error):
            raise
        return True


def _differ(forward: Forward, args: Any, kwargs: Any, values: bool) -> bool:
    rows = count_rows(args, kwargs)
    with torch.no_grad():
        two, named = take_rows((args, kwargs), rows, 0, 2)
        whole = _tensors(forward(*two, **named))
        parts = []
        for row in range(2):
            one, named = take_rows((args, kwargs), rows, row, row + 1)
            parts.append(_tensors(forward(*one, **named)))
    for all_, first, second in zip(whole, *parts, strict=True):
        if tuple(all_.shape) != (2, *first.shape[1:]):
            return True
        if not values:
            continue
        apart = torch.cat([first, second])
        allowed = CLOSE.get(str(all_.dtype).removeprefix("torch."), 0.0)
        if float((all_ - apart).float().norm()) > allowed * float(all_.float().norm()):
            return True
    return False


def _tensors(out: Any) -> list[Any]:
    return [leaf for leaf in leaves_of(out) if isinstance(leaf, torch.Tensor)]
