"""Reductions that leave NaN out, with NumPy's names and answers. A reduction of nothing but NaN is NaN, without a warning."""

from __future__ import annotations

from typing import Any

import numpy as np

from outsize.array.api.lazy import Array, apply
from outsize.array.functions.elementwise import asarray, where
from outsize.array.functions.manipulation import expand_dims, gather, moveaxis
from outsize.array.functions.order_statistics import median, quantile
from outsize.array.functions.reductions import cumprod, cumsum
from outsize.array.functions.sorting import sort
from outsize.array.graph import build as make
from outsize.array.graph.elementwise import operation
from outsize.core.errors import InputError

__all__ = [
    "nan_to_num", "nanargmax", "nanargmin", "nancumprod", "nancumsum", "nanmax", "nanmean", "nanmedian", "nanmin",
    "nanpercentile", "nanprod", "nanquantile", "nanstd", "nansum", "nanvar",
]  # fmt: skip


def _has_nan(x: Array) -> bool:
    return x.dtype.kind in "fc"


def _is_nan(x: Array) -> Array:
    return apply(operation(np.isnan), x)


def _without(x: Any, instead: Any) -> Array:
    """The array with another value for NaN."""
    array = asarray(x)
    return where(_is_nan(array), np.asarray(instead, array.dtype)[()], array) if _has_nan(array) else array


def nan_to_num(x: Any, copy: bool = True, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> Array:
    """Numbers for NaN and the infinities: 0 and the largest and smallest of the dtype, where no others are given."""
    array = asarray(x)
    if array.dtype.kind == "c":
        raise InputError("nan_to_num takes real numbers: call it on real(x) and imag(x)")
    if array.dtype.kind != "f":
        return array
    limits = np.finfo(array.dtype)
    for value, instead in (
        (np.inf, limits.max if posinf is None else posinf),
        (-np.inf, limits.min if neginf is None else neginf),
    ):
        array = where(array == value, array.dtype.type(instead), array)
    return _without(array, nan)


def nansum(x: Any, axis: Any = None, *, dtype: Any = None, keepdims: bool = False) -> Array:
    """Sum; NaN counts as 0."""
    return _without(x, 0).sum(axis, dtype=dtype, keepdims=keepdims)


def nanprod(x: Any, axis: Any = None, *, dtype: Any = None, keepdims: bool = False) -> Array:
    """Product; NaN counts as 1."""
    return _without(x, 1).prod(axis, dtype=dtype, keepdims=keepdims)


def nancumsum(x: Any, axis: int | None = None, dtype: Any = None) -> Array:
    """Running sum; NaN counts as 0."""
    return cumsum(_without(x, 0), axis, dtype)


def nancumprod(x: Any, axis: int | None = None, dtype: Any = None) -> Array:
    """Running product; NaN counts as 1."""
    return cumprod(_without(x, 1), axis, dtype)


def _number(x: Array, axis: Any, keepdims: bool) -> Array:
    """How many elements are not NaN."""
    return (~_is_nan(x)).sum(axis, keepdims=keepdims)


def nanmean(x: Any, axis: Any = None, *, dtype: Any = None, keepdims: bool = False) -> Array:
    """Mean of what is not NaN."""
    array = asarray(x) if dtype is None else asarray(x).astype(dtype)
    if not _has_nan(array):
        return array.mean(axis, keepdims=keepdims)
    wide = array.astype(np.result_type(array.dtype, np.float64))  # as the plain mean: added up in float64
    total = nansum(wide, axis, keepdims=keepdims)
    return (total / _number(array, axis, keepdims)).astype(array.dtype)


def nanvar(
    x: Any, axis: Any = None, *, correction: float = 0, ddof: float = 0, dtype: Any = None, keepdims: bool = False
) -> Array:
    """Variance of what is not NaN; NaN where no more elements are left than `correction` (in NumPy `ddof`)."""
    array, taken = asarray(x) if dtype is None else asarray(x).astype(dtype), correction or ddof
    if not _has_nan(array):
        return array.var(axis, correction=taken, keepdims=keepdims)
    wide = array.astype(np.result_type(array.dtype, np.float64))
    apart = abs(wide - nanmean(wide, axis, keepdims=True))
    number = _number(array, axis, keepdims) - taken
    squares = where(_is_nan(array), 0.0, apart * apart).sum(axis, keepdims=keepdims)  # of infinities, NaN stays
    found = squares / where(number > 0, number, np.nan)
    return found.astype(np.zeros(1, array.dtype).real.dtype)


def nanstd(
    x: Any, axis: Any = None, *, correction: float = 0, ddof: float = 0, dtype: Any = None, keepdims: bool = False
) -> Array:
    """Standard deviation of what is not NaN; `correction` as in `nanvar`."""
    return apply(operation(np.sqrt), nanvar(x, axis, correction=correction or ddof, dtype=dtype, keepdims=keepdims))


def _extreme(name: str, x: Any, axis: Any, keepdims: bool) -> Array:
    """The smallest or largest element, or where it is. Of nothing but NaN it is NaN, and has no place: that is looked up now."""
    array = asarray(x)
    if not _has_nan(array):
        return Array(make.reduce(name, array.node, axis, keepdims))
    if array.dtype.kind == "c":
        raise InputError(f"nan{name} takes real numbers, not {array.dtype}")
    nothing = _is_nan(array).all(axis, keepdims=keepdims)
    found = Array(make.reduce(name, _without(array, np.inf if name.endswith("min") else -np.inf).node, axis, keepdims))
    if not name.startswith("arg"):
        return where(nothing, array.dtype.type(np.nan), found)
    if bool(nothing.any()):
        raise ValueError(f"nan{name} of nothing but NaN has no value")
    return found


def nanmin(x: Any, axis: Any = None, *, keepdims: bool = False) -> Array:
    """Smallest element that is not NaN."""
    return _extreme("min", x, axis, keepdims)


def nanmax(x: Any, axis: Any = None, *, keepdims: bool = False) -> Array:
    """Largest element that is not NaN."""
    return _extreme("max", x, axis, keepdims)


def nanargmin(x: Any, axis: Any = None, *, keepdims: bool = False) -> Array:
    """Index of the smallest element that is not NaN; whether there is one is looked up at the call."""
    return _extreme("argmin", x, axis, keepdims)


def nanargmax(x: Any, axis: Any = None, *, keepdims: bool = False) -> Array:
    """Index of the largest element that is not NaN; whether there is one is looked up at the call."""
    return _extreme("argmax", x, axis, keepdims)


def nanmedian(x: Any, axis: Any = None, *, keepdims: bool = False) -> Array:
    """Median of what is not NaN. Lanes are sorted: NaN comes last, and the middle lies between those before it."""
    array = asarray(x)
    if not _has_nan(array) or not array.size:
        return median(array, axis, keepdims=keepdims)
    low, high, share = _between(array, axis, 0.5)
    found = where(share > 0, (low + high) / array.dtype.type(2), low).astype(array.dtype)
    return _kept(found, array.ndim, axis, keepdims)[0]


def nanquantile(x: Any, q: Any, axis: Any = None, *, method: str = "linear", keepdims: bool = False) -> Array:
    """Quantiles of what is not NaN, by NumPy's linear rule; lanes are sorted as for `nanmedian`."""
    array, shares = asarray(x), np.asarray(q, np.float64)
    if not array.size:  # NumPy's answer, without an axis for the shares
        return nanmean(array, axis, keepdims=keepdims)
    if not _has_nan(array):
        return quantile(array, q, axis, method=method, keepdims=keepdims)
    if method != "linear" or array.dtype.kind == "c":
        raise InputError(f"nanquantile is of real numbers and by the method 'linear', not {array.dtype} by {method!r}")
    if shares.ndim > 1 or not bool(((shares >= 0) & (shares <= 1)).all()):
        raise InputError("nanquantile takes one share or a list of them, from 0 to 1")
    low, high, share = _between(array, axis, shares.reshape(-1))
    step = high - low
    found = where(share >= 0.5, high - step * (1 - share), low + step * share)
    given = np.asarray(q)
    strong = [given.dtype if given.dtype.kind == "f" else np.dtype(np.float64)] if type(q) not in (int, float) else []
    dtype = np.result_type(array.dtype, *strong)
    found = _kept(found.astype(dtype), array.ndim, axis, keepdims)
    return found if shares.ndim else found[0]


def nanpercentile(x: Any, q: Any, axis: Any = None, *, method: str = "linear", keepdims: bool = False) -> Array:
    """Quantiles of what is not NaN, by percentages from 0 to 100."""
    hundred = asarray(x).dtype.type(100) if asarray(x).dtype.kind == "f" else 100  # as NumPy: shares of the same dtype
    share = q / 100 if type(q) in (int, float) else np.true_divide(q, hundred)
    return nanquantile(x, share, axis, method=method, keepdims=keepdims)


def _between(array: Array, axis: Any, shares: Any) -> tuple[Array, Array, Array]:
    """(the elements below and above each share, how far it is from one to the other): shares come last, lanes before them."""
    axes = make.axis_tuple(axis, array.ndim)
    kept = [a for a in range(array.ndim) if a not in axes]
    lanes = Array(make.permute(array.node, [*kept, *axes])).reshape((*(array.shape[a] for a in kept), -1))
    ordered = sort(lanes)
    last = _number(lanes, -1, True) - 1
    last = apply(operation(np.maximum), last, 0)
    at = last * asarray(np.atleast_1d(shares))
    below = apply(operation(np.floor), at)
    low = gather(ordered, below.astype(np.int64), lanes.ndim - 1)
    above = apply(operation(np.minimum), below.astype(np.int64) + 1, last)
    high = gather(ordered, above, lanes.ndim - 1)
    return low, high, at - below


def _kept(found: Array, ndim: int, axis: Any, keepdims: bool) -> Array:
    """With the shares first, and axes of length 1 where they are to be kept."""
    found = moveaxis(found, -1, 0)
    if keepdims:
        found = expand_dims(found, axis=tuple(a + 1 for a in make.axis_tuple(axis, ndim)))
    return found
