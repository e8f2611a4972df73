"""More data behind a tensor that is kept as factors, without the past data.

In: factors, a block of new data, the axis that grows. Out: factors of both, and a bound on what they have lost. The block is
decomposed by itself, both are written as parts of the longer tensor, added, and rounded. The two lie apart, so the squares of
what they have lost add up; rounding may use what the asked error leaves.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import numpy as np

from outsize.array.store.base import Block
from outsize.core.errors import InputError
from outsize.factor.factored import Factored, describe_cut
from outsize.factor.facts import Facts
from outsize.factor.formats import Canonical, Factors
from outsize.factor.formats.form import Change

_SHARE = 0.5
"""Of the asked error, what the new block may lose by itself."""


def append(old: Factored, block: Any, axis: int, error: float | None, budget: Any = None) -> Factored:
    """The factors of both, within `error` (by default what was asked of the old ones)."""
    if isinstance(block, str | os.PathLike):
        from outsize.array import open as open_array

        block = open_array(block)
    form, target = _check(old, block, axis, error)
    new = _decompose(old, block, target, budget)
    assert isinstance(new.form, Factors)
    sizes = (old.shape[axis], new.shape[axis])
    dtype = np.result_type(form.dtype, new.form.dtype)
    both = (
        form.cast(dtype)
        .along(axis, _padding(0, sizes[1]))
        .plus(new.form.cast(dtype).along(axis, _padding(sizes[0], 0)))
    )
    assert old.lost is not None and new.lost is not None
    norm, used = math.hypot(_least_norm(old), _least_norm(new)), math.hypot(old.lost, new.lost)
    rounding = both.rounding()
    if used + rounding > target * norm:
        said = used / norm if norm else math.inf
        raise InputError(
            f"an error of {target:.3g} cannot be kept: both parts have lost {said:.3g} already; ask for more with error="
        )
    cut = both.rounded(target * norm - used - rounding)
    shape = tuple(length + (sizes[1] if mode == axis else 0) for mode, length in enumerate(old.shape))
    facts = Facts(
        lost=used + cut.lost + rounding, norm=norm, asked=target, original=old.facts.original, known=old.known,
        spectra=describe_cut(cut.spectra, cut.kept, old.method, shape),
    )  # fmt: skip
    assert facts.lost is not None
    return Factored.of(cut.form, replace(facts, error=facts.lost / norm if norm else 0.0))


def _check(old: Factored, block: Any, axis: int, error: float | None) -> tuple[Factors, float]:
    form = old._factors("append")
    if isinstance(form, Canonical):
        raise InputError("cannot append to CP: no theorem bounds what is lost; keep Tucker, a tensor train or an SVD")
    if error is not None and (isinstance(error, bool) or not isinstance(error, int | float) or not 0 < error < 1):
        raise InputError(f"error is relative, 0 < error < 1, not {error!r}")
    target = error if error is not None else old.asked if old.asked is not None else old.error
    if old.lost is None or target is None:
        raise InputError(
            "nothing is known of the error of these factors, so no bound can be kept: decompose the data again"
        )
    shape = tuple(getattr(block, "shape", np.shape(block)))
    if len(shape) != old.ndim or any(
        a != b for mode, (a, b) in enumerate(zip(shape, old.shape, strict=True)) if mode != axis
    ):
        raise InputError(f"a block behind {old.shape} along axis {axis} has its other lengths, not {shape}")
    return form, float(target)


def _decompose(old: Factored, block: Any, target: float, budget: Any) -> Factored:
    if isinstance(block, Factored) and type(block.form) is type(old.form):
        if block.lost is None:
            raise InputError("nothing is known of the error of the block: decompose its data first")
        return block
    from outsize.factor.decompose import decompose

    made = decompose(block, old.method, error=_SHARE * target, budget=budget)
    assert isinstance(made, Factored)
    return made


def _padding(before: int, after: int) -> Change:
    def change(leaf: Block, where: int) -> Block:
        return np.pad(leaf, [(before, after) if axis == where else (0, 0) for axis in range(leaf.ndim)])

    return change


def _least_norm(part: Factored) -> float:
    """The norm of the data, or less."""
    return part.facts.norm if part.facts.norm is not None else max(0.0, part.norm() - (part.lost or 0.0))
