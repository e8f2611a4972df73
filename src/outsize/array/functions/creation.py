"""Arrays from nothing: they take no memory, whatever their shape."""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from outsize.array.api.lazy import Array, check_device
from outsize.array.functions.elementwise import asarray, where
from outsize.array.functions.manipulation import broadcast_to, reshape, swapaxes
from outsize.array.graph import build as make
from outsize.array.graph.node import Range
from outsize.core.errors import InputError
from outsize.core.spec import parse_shape

__all__ = [
    "arange", "empty", "empty_like", "eye", "full", "full_like", "linspace", "meshgrid", "ones", "ones_like",
    "tril", "triu", "zeros", "zeros_like",
]  # fmt: skip


def zeros(shape: Any, *, dtype: Any = None, device: Any = None) -> Array:
    """Zeros."""
    return full(shape, 0, dtype=dtype or np.float64, device=device)


def ones(shape: Any, *, dtype: Any = None, device: Any = None) -> Array:
    """Ones."""
    return full(shape, 1, dtype=dtype or np.float64, device=device)


def empty(shape: Any, *, dtype: Any = None, device: Any = None) -> Array:
    """Zeros: nothing is stored, so nothing is saved by leaving them out."""
    return zeros(shape, dtype=dtype, device=device)


def full(shape: Any, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Array:
    """One value everywhere; takes no memory."""
    check_device(device)
    element = np.asarray(fill_value).dtype if dtype is None else np.dtype(dtype)
    return Array(make.fill(parse_shape(shape), fill_value, element))


def zeros_like(x: Array, /, *, dtype: Any = None, device: Any = None) -> Array:
    """Zeros of the same shape."""
    return zeros(x.shape, dtype=dtype or x.dtype, device=device)


def ones_like(x: Array, /, *, dtype: Any = None, device: Any = None) -> Array:
    """Ones of the same shape."""
    return ones(x.shape, dtype=dtype or x.dtype, device=device)


def empty_like(x: Array, /, *, dtype: Any = None, device: Any = None) -> Array:
    """Zeros of the same shape."""
    return zeros_like(x, dtype=dtype, device=device)


def full_like(x: Array, /, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Array:
    """One value, of the same shape."""
    return full(x.shape, fill_value, dtype=dtype or x.dtype, device=device)


def arange(start: Any, /, stop: Any = None, step: Any = 1, *, dtype: Any = None, device: Any = None) -> Array:
    """start, start + step, ... below stop."""
    check_device(device)
    begin, end = (0, start) if stop is None else (start, stop)
    if not step:
        raise InputError(f"arange from {begin} to {end} needs a step other than 0")
    exact = builtins.all(isinstance(value, int | np.integer) for value in (begin, end, step))
    count = builtins.max(0, -((begin - end) // step) if exact else math.ceil((end - begin) / step))
    element = np.dtype(dtype) if dtype is not None else np.asarray([begin, end, step]).dtype
    return Array(Range(shape=(count,), dtype=element, start=begin, step=step))


def linspace(
    start: Any, stop: Any, /, num: int, *, dtype: Any = None, device: Any = None, endpoint: bool = True
) -> Array:
    """`num` evenly spaced values."""
    check_device(device)
    (num,) = parse_shape((num,))
    gaps = num - 1 if endpoint else num
    step = (stop - start) / gaps if gaps > 0 else 0.0
    complex_ = isinstance(start, complex) or isinstance(stop, complex)
    element = np.dtype(dtype) if dtype is not None else np.dtype(complex if complex_ else float)
    working = np.result_type(element, np.float64)
    line = Array(Range(shape=(num,), dtype=working, start=start, step=step))
    if endpoint and num > 1:
        places = Array(Range(shape=(num,), dtype=np.dtype(np.int64), start=0, step=1))
        line = where(places == num - 1, full((), stop, dtype=working), line)
    return line.astype(element)


def eye(n_rows: int, n_cols: int | None = None, /, *, k: int = 0, dtype: Any = None, device: Any = None) -> Array:
    """Ones on the k-th diagonal."""
    check_device(device)
    columns = n_rows if n_cols is None else n_cols
    k = _diagonal(k, n_rows, columns)
    return (arange(n_rows)[:, None] + k == arange(columns)[None, :]).astype(dtype or np.float64)


def _diagonal(k: Any, rows: int, columns: int) -> int:
    """The number of a diagonal; all beyond the corners are one."""
    return builtins.max(-rows, builtins.min(columns, make.whole("the number of a diagonal", k)))


def _triangle(x: Array, k: int, stays: Callable[[Any, Any], Any]) -> Array:
    """Zeros on one side of a diagonal. A vector is every row of a square, as in NumPy."""
    if not x.ndim:
        raise InputError("tril and triu take matrices, and this array has no dimensions")
    rows, columns = (x.shape[-1] if x.ndim == 1 else x.shape[-2]), x.shape[-1]
    beyond = arange(rows)[:, None] + _diagonal(k, rows, columns)
    return where(stays(beyond, arange(columns)[None, :]), x, zeros((), dtype=x.dtype))


def tril(x: Array, /, *, k: int = 0) -> Array:
    """Zeros above the k-th diagonal."""
    return _triangle(x, k, operator.ge)


def triu(x: Array, /, *, k: int = 0) -> Array:
    """Zeros below the k-th diagonal."""
    return _triangle(x, k, operator.le)


def meshgrid(*arrays: Array, indexing: str = "xy") -> tuple[Array, ...]:
    """Coordinates of a grid; nothing is stored."""
    if indexing not in ("xy", "ij"):
        raise InputError(f"meshgrid is indexed 'xy' or 'ij', not {indexing!r}")
    found = [asarray(a) for a in arrays]
    shape = tuple(a.size for a in found)
    grids = [
        broadcast_to(reshape(a, tuple(-1 if i == place else 1 for i in range(len(found)))), shape)
        for place, a in enumerate(found)
    ]
    return tuple(swapaxes(g, 0, 1) for g in grids) if indexing == "xy" and len(found) > 1 else tuple(grids)
