"""Elementwise functions that are not one ufunc, and the questions about dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np

from outsize.array.api.lazy import Array, apply, as_node, check_device
from outsize.array.graph import build as make
from outsize.array.graph.elementwise import IMAG, REAL, WHERE, operation, rounding
from outsize.array.graph.node import Source
from outsize.array.run.results import to_numpy
from outsize.core.errors import InputError

__all__ = [
    "asarray", "astype", "can_cast", "clip", "from_dlpack", "imag", "isclose", "isdtype", "real", "result_type",
    "round", "where",
]  # fmt: skip


def asarray(obj: Any, /, *, dtype: Any = None, device: Any = None, copy: bool | None = None) -> Array:
    """An array from anything that is one. NumPy's and other libraries' memory is shared unless `copy=True`."""
    check_device(device)
    if isinstance(obj, Array) and not copy and dtype in (None, obj.dtype):
        return obj
    if copy is False and (isinstance(obj, list | tuple | bool | int | float | complex) or _is_cast(obj, dtype)):
        raise ValueError(
            f"asarray(copy=False) cannot share memory with {type(obj).__name__} of another kind: leave out copy"
        )
    found = Array(as_node(obj))
    if copy and isinstance(found.node, Source) and found.node.store.resident:
        found = Array(make.constant(to_numpy(found.node).copy()))
    return found if dtype is None else found.astype(dtype)


def _is_cast(obj: Any, dtype: Any) -> bool:
    return dtype is not None and hasattr(obj, "dtype") and not isinstance(obj, Array) and obj.dtype != np.dtype(dtype)


def from_dlpack(x: Any, /, *, device: Any = None, copy: bool | None = None) -> Array:
    """An array of another library, in host memory: shared, or copied where that is asked for."""
    if not hasattr(x, "__dlpack__"):
        raise InputError(f"{type(x).__name__} has no __dlpack__: give an array of another library, or use asarray")
    said: dict[str, Any] = {name: value for name, value in (("device", device), ("copy", copy)) if value is not None}
    return asarray(np.from_dlpack(x, **said))


def where(condition: Any, x1: Any = None, x2: Any = None, /) -> Array:
    """x1 where the condition holds, x2 elsewhere."""
    if x1 is None or x2 is None:
        raise InputError(
            "where takes a condition and two arrays or values; for the places alone use nonzero(condition)"
        )
    return apply(WHERE, asarray(condition).astype(bool), x1, x2)


def clip(x: Any, /, min: Any = None, max: Any = None) -> Array:
    """Limited to [min, max]; the dtype stays, but where a bound is of another kind (whole numbers up to 2.5) it is NumPy's."""
    result = asarray(x)
    dtype = result.dtype
    for ufunc, bound in ((np.maximum, min), (np.minimum, max)):
        if bound is not None and not _beyond(bound, dtype, ufunc is np.maximum):
            result = apply(operation(ufunc), result, bound)
    return result.astype(dtype) if result.dtype.kind == dtype.kind else result


def _beyond(bound: Any, dtype: np.dtype[Any], lowest: bool) -> bool:
    """True where the dtype holds no number that a bound would change."""
    if not isinstance(bound, int) or dtype.kind not in "iu":
        return False
    return bool(bound <= np.iinfo(dtype).min if lowest else bound >= np.iinfo(dtype).max)


def real(x: Any, /) -> Array:
    """Real part."""
    found = asarray(x)
    return apply(REAL, found) if found.dtype.kind == "c" else found


def imag(x: Any, /) -> Array:
    """Imaginary part."""
    found = asarray(x)
    return apply(IMAG, found) if found.dtype.kind == "c" else Array(make.fill(found.shape, 0, found.dtype))


def round(x: Any, /, decimals: int = 0) -> Array:
    """Nearest value with this many decimals."""
    found = asarray(x)
    if decimals < 0 and found.dtype.kind in "iu":  # tens of whole numbers go through floats, NumPy's too
        return apply(rounding(decimals), found.astype(np.float64)).astype(found.dtype)
    return apply(rounding(decimals), found)


def astype(x: Any, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Array:
    """Another element type."""
    return asarray(x).astype(dtype, copy=copy, device=device)


def result_type(*arrays_and_dtypes: Any) -> np.dtype[Any]:
    """NumPy's promotion."""
    return np.result_type(*(a.dtype if isinstance(a, Array) else a for a in arrays_and_dtypes))


def can_cast(from_: Any, to: Any, /) -> bool:
    """NumPy's rule."""
    return bool(np.can_cast(from_.dtype if isinstance(from_, Array) else from_, to))


def isdtype(dtype: Any, kind: Any) -> bool:
    """True where the dtype is of the kind."""
    return bool(np.isdtype(np.dtype(dtype), kind))


def isclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Array:
    """True where two arrays are close; NaN is close to NaN where `equal_nan` says so."""
    first, second = asarray(a), asarray(b)
    second = second.astype(np.result_type(second.dtype, 1.0))  # differences of whole numbers may wrap
    near = abs(first - second) <= (atol + rtol * abs(second))
    found = near & apply(operation(np.isfinite), second) | (first == second)
    return found | ((first != first) & (second != second)) if equal_nan else found
