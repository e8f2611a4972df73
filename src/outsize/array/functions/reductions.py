"""Reductions and running sums as functions; those that arrays have as methods are the methods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

import numpy as np

from outsize.array.api.lazy import Array
from outsize.array.functions.creation import full
from outsize.array.functions.elementwise import asarray
from outsize.array.functions.manipulation import concat
from outsize.array.graph import build as make
from outsize.core.errors import InputError

__all__ = [
    "all", "amax", "amin", "any", "argmax", "argmin", "count_nonzero", "cumprod", "cumsum", "cumulative_prod",
    "cumulative_sum", "max", "mean", "min", "prod", "std", "sum", "var",
]  # fmt: skip


Given = ParamSpec("Given")


def _of_anything(method: Callable[Concatenate[Array, Given], Array]) -> Callable[Concatenate[Any, Given], Array]:
    """A method of lazy arrays as a function of whatever is an array."""

    @functools.wraps(method)
    def function(x: Any, /, *args: Given.args, **options: Given.kwargs) -> Array:
        return method(asarray(x), *args, **options)

    function.__qualname__ = method.__name__
    return function


sum, prod, mean = _of_anything(Array.sum), _of_anything(Array.prod), _of_anything(Array.mean)
min, max, var, std = _of_anything(Array.min), _of_anything(Array.max), _of_anything(Array.var), _of_anything(Array.std)
any, all = _of_anything(Array.any), _of_anything(Array.all)
argmin, argmax = _of_anything(Array.argmin), _of_anything(Array.argmax)
amin, amax = min, max


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
