"""Reductions and running sums as functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from outsize.array.api.creation import full
from outsize.array.api.elementwise import asarray
from outsize.array.api.lazy import Array
from outsize.array.api.manipulation import concat
from outsize.array.graph import build as make
from outsize.core.errors import InputError

__all__ = [
    "all", "amax", "amin", "any", "argmax", "argmin", "count_nonzero", "cumprod", "cumsum", "cumulative_prod",
    "cumulative_sum", "max", "mean", "min", "prod", "std", "sum", "var",
]  # fmt: skip


def sum(x: Any, /, axis: Any = None, *, dtype: Any = None, keepdims: bool = False) -> Array:
    """Sum of elements; float32 does not drift."""
    return asarray(x).sum(axis, dtype=dtype, keepdims=keepdims)


def prod(x: Any, /, axis: Any = None, *, dtype: Any = None, keepdims: bool = False) -> Array:
    """Product of elements."""
    return asarray(x).prod(axis, dtype=dtype, keepdims=keepdims)


def mean(x: Any, /, axis: Any = None, *, keepdims: bool = False) -> Array:
    """Arithmetic mean."""
    return asarray(x).mean(axis, keepdims=keepdims)


def min(x: Any, /, axis: Any = None, *, keepdims: bool = False) -> Array:
    """Smallest element."""
    return asarray(x).min(axis, keepdims=keepdims)


def max(x: Any, /, axis: Any = None, *, keepdims: bool = False) -> Array:
    """Largest element."""
    return asarray(x).max(axis, keepdims=keepdims)


def any(x: Any, /, axis: Any = None, *, keepdims: bool = False) -> Array:
    """True where any element is."""
    return asarray(x).any(axis, keepdims=keepdims)


def all(x: Any, /, axis: Any = None, *, keepdims: bool = False) -> Array:
    """True where all elements are."""
    return asarray(x).all(axis, keepdims=keepdims)


def argmin(x: Any, /, axis: Any = None, *, keepdims: bool = False) -> Array:
    """Index of the smallest element."""
    return asarray(x).argmin(axis, keepdims=keepdims)


def argmax(x: Any, /, axis: Any = None, *, keepdims: bool = False) -> Array:
    """Index of the largest element."""
    return asarray(x).argmax(axis, keepdims=keepdims)


amin, amax = min, max


def var(x: Any, /, axis: Any = None, *, correction: float = 0, ddof: float = 0, keepdims: bool = False) -> Array:
    """Variance; `correction` (in NumPy `ddof`) is taken off the count."""
    return asarray(x).var(axis, ddof=correction or ddof, keepdims=keepdims)


def std(x: Any, /, axis: Any = None, *, correction: float = 0, ddof: float = 0, keepdims: bool = False) -> Array:
    """Standard deviation; `correction` (in NumPy `ddof`) is taken off the count."""
    return asarray(x).std(axis, ddof=correction or ddof, keepdims=keepdims)


def count_nonzero(x: Array, /, axis: Any = None, *, keepdims: bool = False) -> Array:
    """How many elements are not zero."""
    return (x != 0).sum(axis, keepdims=keepdims)


def cumulative_sum(x: Array, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Array:
    """Running sum."""
    return _cumulative(np.add, 0, x, axis, dtype, include_initial)


def cumulative_prod(x: Array, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Array:
    """Running product."""
    return _cumulative(np.multiply, 1, x, axis, dtype, include_initial)


def _cumulative(ufunc: np.ufunc, start: int, x: Array, axis: int | None, dtype: Any, initial: bool) -> Array:
    if axis is None and x.ndim != 1:
        raise InputError(f"a running sum or product of {x.ndim} dimensions needs an axis")
    place = make.axis_index(0 if axis is None else axis, x.ndim)
    result = Array(make.scan(ufunc, x.node, place, dtype))
    if not initial:
        return result
    edge = (*x.shape[:place], 1, *x.shape[place + 1 :])
    return concat([full(edge, start, dtype=result.dtype), result], axis=place)


def cumsum(x: Array, axis: int | None = None, dtype: Any = None) -> Array:
    """NumPy's running sum: without an axis, of the flattened array."""
    return Array(make.scan(np.add, x.node, axis, dtype))


def cumprod(x: Array, axis: int | None = None, dtype: Any = None) -> Array:
    """NumPy's running product."""
    return Array(make.scan(np.multiply, x.node, axis, dtype))
