"""Sees how a loss takes its means. Samples with all their labels, or with a full mask, do not show what it leaves out.

In: a loss that runs on a few samples. Out: `Means`: the labels that cross entropies leave out, how many labels they counted, and
what makes the number of terms depend on the batch's contents. That is a division by a sum of them (a mask's), a mean over
elements that are picked by their values, or labels that the loss makes itself. With any of these, the weight of a slice is not
known before it runs. The batch's tensors are followed from operator to operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Flag, auto
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from outsize.model.fitting.run.loss import IGNORED
from outsize.model.torch_port.dispatch import seeing, tensors_in
from outsize.model.torch_port.objects import base_of, is_view

MOVING = {
    "clone", "copy", "_to_copy", "_unsafe_view", "_reshape_copy", "lift_fresh", "cat", "stack", "roll", "flip", "repeat",
    "constant_pad_nd", "index_select", "gather",
}  # fmt: skip
"""Operators beside views that give the values they got."""

SUMS = {"sum", "mean", "count_nonzero"}

PICKING = {"nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave"}
"""Operators whose results have as many elements as values say."""

INTO = ("index_put", "index_add", "index_copy", "scatter", "masked_scatter", "index_fill")
"""Beginnings of the names of operators whose result has the size of what they write into."""


class Origin(Flag):
    """What a tensor comes from."""

    NOTHING = 0
    GIVEN = auto()
    """Values of the batch as they are."""
    BATCH = auto()
    """Made from the batch."""
    SUMMED = auto()
    """Sums over samples of such values."""
    PICKED = auto()
    """Its size depends on values."""
    WEIGHTS = auto()
    """Made from the model's parameters."""


class Means:
    """How a loss took its means."""

    def __init__(self) -> None:
        self.found: dict[int, None] = {}
        """Labels that cross entropies leave out."""
        self.counts: list[int] = []
        """Labels that each of them counted."""
        self.weighted = False
        """Classes weigh differently in one of them."""
        self.made = False
        """Labels of one of them are made in the loss."""
        self.divisors: list[float] = []
        """Sums over the batch's contents that were divided by, or read as numbers."""
        self.picked = False
        """A mean was taken over elements that were picked by their values."""

    @property
    def ignored(self) -> list[int]:
        """Labels that are left out, those that somebody chose first."""
        return sorted(self.found or {IGNORED: None}, key=lambda label: label == IGNORED)

    @property
    def why_unknown(self) -> str:
        """Why the number of terms of a slice is not known before it runs, empty where it is."""
        if self.picked:
            return "the loss is a mean over elements that it picks by their values"
        if self.divisors:
            return "the loss divides by a sum over the batch's contents (a mask, lengths, weights)"
        return "the loss is a mean over labels that it makes itself" if self.made else ""


@contextlib.contextmanager
def watching_means(model: Any, batch: dict[str, Any], rows: int) -> Iterator[Means]:
    """Follow the tensors of a batch of `rows` samples for as long as the block runs."""
    means = Means()
    origins = WeakIdKeyDictionary()
    for parameter in model.parameters():
        origins[parameter] = Origin.WEIGHTS
    for tensor in batch.values():
        if tensor.dim():
            origins[tensor] = Origin.GIVEN

    def call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        of = [origins.get(a, Origin.NOTHING) for a in tensors_in((args, kwargs))]
        _notice(means, name, args, [_origin(a, origins) for a in args])
        out = func(*args, **kwargs)
        for tensor in tensors_in(out) if any(of) else ():
            came = _follow(func, name, args, of, tensor, rows)
            origins[tensor] = came
            if name.endswith("_") and is_view(tensor) and Origin.GIVEN not in came:  # written through a view
                base = base_of(tensor)
                origins[base] = origins.get(base, Origin.NOTHING) & ~Origin.GIVEN | came
        return out

    with seeing(call):
        yield means


def _origin(value: Any, origins: Any) -> Origin:
    return origins.get(value, Origin.NOTHING) if isinstance(value, torch.Tensor) else Origin.NOTHING


def _follow(func: Any, name: str, args: Any, of: list[Origin], out: Any, rows: int) -> Origin:
    came = Origin.NOTHING
    for one in of:
        came |= one
    if func.is_view or name in MOVING:
        return came
    if name.startswith(INTO):
        came &= ~Origin.PICKED | of[0]
    if name in PICKING or (name == "index" and _is_mask(args[1])):
        came |= Origin.PICKED
    batch = Origin.GIVEN | Origin.BATCH
    if not came & batch:
        return came
    summed = name in SUMS and not any(size % rows == 0 for size in out.shape)
    kept = all(one & Origin.SUMMED for one in of if one & batch)
    came = came & ~(batch | Origin.SUMMED) | Origin.BATCH
    return came | Origin.SUMMED if summed or kept else came


def _is_mask(indices: Any) -> bool:
    return any(str(index.dtype) in ("torch.bool", "torch.uint8") for index in indices if index is not None)


def _notice(means: Means, name: str, args: Any, of: list[Origin]) -> None:
    if name in ("nll_loss_forward", "nll_loss2d_forward") and args[3] == 1:  # a mean
        means.found.setdefault(int(args[4]))
        means.counts.append(int((args[1] != args[4]).sum()))
        means.weighted |= args[2] is not None
        means.picked |= Origin.PICKED in of[1]
        means.made |= Origin.BATCH in of[1]
    elif name == "mean" and Origin.PICKED in of[0]:
        dims = args[1] if len(args) > 1 and args[1] is not None else [0]
        means.picked |= any(dim % args[0].dim() == 0 for dim in dims)
    elif name in ("div", "div_", "true_divide", "floor_divide"):
        means.picked |= Origin.PICKED in of[0] and not args[0].dim() and not of[1]
        if Origin.SUMMED in of[1]:
            means.divisors.append(_value(args[1]))
    elif (name == "reciprocal" and Origin.SUMMED in of[0]) or (
        name == "_local_scalar_dense"
        and Origin.SUMMED in of[0]
        and not of[0] & Origin.WEIGHTS
        and str(args[0].dtype) != "torch.bool"
    ):
        means.divisors.append(_value(args[0]))


def _value(tensor: Any) -> float:
    return float(tensor) if tensor.numel() == 1 else float("nan")
