"""Reductions and running sums as functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from outsize.array.api.creation import full
from outsize.array.api.elementwise import asarray
from outsize.array.api.lazy import Array
from outsize.array.api.manipulation import concat
from outsize.array.graph import build as make
from outsize.core.errors import InputError


def _reduction(name: str) -> Callable[..., Array]:
    def function(x: Any, /, axis: Any = None, *, keepdims: bool = False, **options: Any) -> Array:
        return getattr(asarray(x), name)(axis, keepdims=keepdims, **options)  # type: ignore[no-any-return]

    function.__name__ = name
    function.__doc__ = f"The method `Array.{name}` as a function."
    return function


def _total(name: str) -> Callable[..., Array]:
    def function(x: Any, /, axis: Any = None, *, dtype: Any = None, keepdims: bool = False) -> Array:
        return getattr(asarray(x), name)(axis, keepdims=keepdims, dtype=dtype)  # type: ignore[no-any-return]

    function.__name__ = name
    function.__doc__ = f"The method `Array.{name}` as a function."
    return function


sum, prod, mean = _total("sum"), _total("prod"), _reduction("mean")
min, max, any, all = _reduction("min"), _reduction("max"), _reduction("any"), _reduction("all")
argmin, argmax = _reduction("argmin"), _reduction("argmax")
amin, amax = min, max


def _spread(name: str) -> Callable[..., Array]:
    def function(
        x: Array, /, axis: Any = None, *, correction: float = 0, ddof: float = 0, keepdims: bool = False
    ) -> Array:
        return Array(make.reduce(name, x.node, axis, keepdims, ddof=correction or ddof))

    function.__name__ = name
    function.__doc__ = f"The method `Array.{name}` as a function; `correction` is taken off the count."
    return function


var, std = _spread("var"), _spread("std")


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
