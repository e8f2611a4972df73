"""Factors in double precision and what is known of their error: from here to a promise.

The projections are orthogonal, so the squares of what each lost add up. What was rounded between passes, and what is rounded when
factors are stored, is added to that as it is: norms, not squares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.array.store.base import Block
from outsize.factor.formats.form import cast

_SAFE = 1 + 1e-9
"""For the rounding of the sums themselves."""


@dataclass(frozen=True, slots=True)
class Found:
    """A decomposition before it is stored."""

    arrays: tuple[Block, ...]
    """Core and factors, or the cores of a train, or u, s, vh."""
    norm: float
    """Frobenius norm of the data."""
    lost2: float
    """Squares of what was lost."""
    rounded: float
    """Norm of what was rounded between passes, at most."""
    values: tuple[Block, ...]
    """Singular values at each cut."""
    kept: tuple[int, ...]
    """How many of them stay."""

    @property
    def error(self) -> float:
        """Relative error, before factors are stored; the rounding of double precision is part of it."""
        if self.norm == 0:
            return 0.0
        return (math.sqrt(self.lost2) + self.rounded) / self.norm * _SAFE + arithmetic([a.shape for a in self.arrays])


def arithmetic(shapes: Sequence[tuple[int, ...]]) -> float:
    """What the sums of double precision may have lost, relative to the norm: a term's rounding for every term of the longest
    sum, once for each array."""
    return 2.0**-53 * sum((max(shape) + 16) * math.sqrt(min(shape, default=1)) for shape in shapes if shape)


def room_for(asked: float | None, norm2: float, lost2: float, rounded: float, reserve: float) -> float:
    """Squares that may still be lost."""
    if asked is None:
        return 0.0
    allowed = max(0.0, (asked * (1 - reserve)) * math.sqrt(norm2) - rounded)
    return max(0.0, allowed**2 - lost2) * (1 - 1e-9)


def stored(found: Found, dtype: np.dtype[Any], method: str, size: int) -> tuple[tuple[Block, ...], float]:
    """(the arrays in a narrower dtype, relative error of all). Each array's rounding is measured; the norm of a product of
    matrices is at most the product of their norms, of which all but one array's are 1. `size` is the number of the tensor's
    elements: each is rounded when it is made."""
    with np.errstate(over="ignore"):
        made = tuple(cast(array, dtype) for array in found.arrays)
    if not all(np.isfinite(array).all() for array in made):
        return made, math.inf
    least = float(np.finfo(dtype).smallest_subnormal) * math.sqrt(size) / (found.norm or 1.0)
    spread = [_spread(new, old) for new, old in zip(made, found.arrays, strict=True)]
    if method == "cp":  # columns have length 1 and may be nearly parallel: each array counts with its own norm
        grown = math.prod(norm + change for change, norm in spread) - math.prod(norm for _, norm in spread)
        unit = float(np.finfo(dtype).eps) / 2
        weights = float(np.abs(found.arrays[0]).sum())
        rounding = min(grown, 4 * unit * len(spread) * weights) + 4 * unit * weights
        return made, 0.0 if found.norm == 0 else found.error + rounding / found.norm * _SAFE + least
    heavy = {"tucker": 0, "svd": 1}.get(method, len(spread) - 1)  # the array that has the norm of all
    change, norm = spread.pop(heavy)
    grown = math.prod(1 + other for other, _ in spread)
    rounding = (grown - 1) * norm + grown * change
    unit = float(np.finfo(dtype).eps) / 2
    # elements are made in it, too
    rebuilt = unit * (2 + sum(4 * math.sqrt(min(array.shape, default=1)) for array in made))
    error = 0.0 if found.norm == 0 else found.error + rounding / found.norm * _SAFE + rebuilt + least
    return made, error


def _spread(new: Block, old: Block) -> tuple[float, float]:
    """(norm of the change, norm)."""
    return float(np.linalg.norm(new.astype(old.dtype) - old)), float(np.linalg.norm(old))


def count_bytes(arrays: Sequence[Block]) -> int:
    return sum(array.nbytes for array in arrays)
