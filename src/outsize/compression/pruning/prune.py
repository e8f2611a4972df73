"""`prune`: a copy of a model with fewer channels and heads.

In: a model, batches, a loss, the share of bytes to keep. Out: `Pruned`: the smaller model, what left, and what stays whole
and why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.compression.hooks import evaluating
from outsize.compression.pruning.choose import Shrinking
from outsize.compression.pruning.scores import by_loss, by_magnitude
from outsize.compression.pruning.structure import find_structure
from outsize.compression.pruning.verify import settle, stirred
from outsize.compression.weights import count_bytes
from outsize.core.errors import InputError
from outsize.core.units import format_bytes

LEAST = 0.1
"""Part of each dim that stays, so that no layer becomes a needle's eye."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """Channels or heads that left together, from all tensors that have them."""

    name: str
    """The tensor that made them."""
    before: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """A model made smaller."""

    model: Any
    """In the mode of the one given."""
    before: int
    """Bytes of parameters and buffers."""
    after: int
    removed: tuple[Removed, ...]
    whole: dict[str, str]
    """Parameter -> why it stays as it is."""


def prune(
    model: Any, batches: Sequence[Any], keep: float = 0.5, loss: Callable[[Any, Any], Any] | None = None,
    least: float = LEAST, through_norms: bool = False,
) -> Pruned:  # fmt: skip
    """A copy of `model` with `keep` of its bytes; the user's is not changed.

    `loss(model, batch)` gives a scalar, or (total, count). Without it the model is called on a batch, and small
    weights leave first.
    `through_norms` also shortens axes that are normalised (LayerNorm), which changes what is left.
    """
    if not 0 < keep < 1:
        raise InputError(f"keep is {keep}: give a share of the bytes between 0 and 1, such as 0.5")
    if not batches:
        raise InputError("there are no batches: pruning has to see the model run on your data")

    def run(other: Any) -> Any:
        return call(other, batches[0]) if loss is None else loss(other, batches[0])

    with evaluating(model):
        structure = find_structure(model, run, through_norms)
        opened = structure.opened(model)
        tensors = structure.trace.tensors
        scores = by_magnitude(opened, tensors) if loss is None else by_loss(opened, tensors, batches, loss)
        before = count_bytes(model)
        kept: dict[Any, Any] = {}
        while True:
            plan = Shrinking(structure.weights(opened), scores, [dim for dim in structure.dims if not dim.why], least)
            plan.run(int(before * keep))
            if plan.bytes > before * keep:
                raise InputError(
                    f"pruning reaches {format_bytes(plan.bytes)} of {format_bytes(before)} and not {keep:.0%}: "
                    f"{_reasons(structure.whole())}; allow more with least= below {least} or through_norms=True"
                )
            kept = plan.kept()
            tried = len(kept)
            settle(stirred(opened), structure.trace, kept, structure.fixes, run, not through_norms)
            if len(kept) == tried:
                break
    small = structure.prune(model, kept, structure.fixes)
    removed = tuple(
        Removed(name=structure.name(dim), before=dim.size, after=int(np.count_nonzero(stays)))
        for dim, stays in kept.items()
    )
    return Pruned(model=small, before=before, after=count_bytes(small), removed=removed, whole=structure.whole())


def call(model: Any, batch: Any) -> Any:
    """A model on a batch: a table by name, a tuple or list in order, anything else alone."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _reasons(whole: dict[str, str]) -> str:
    """What stays whole, in a few words."""
    if not whole:
        return "each dim keeps a part"
    first = next(iter(whole.items()))
    return f"{len(whole)} tensors stay whole ({first[0]}: {first[1]})"
