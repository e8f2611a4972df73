"""Arrays larger than memory: graph -> plan -> run, inside a budget of bytes. The namespace of the array API standard.

Elementwise functions, creation, manipulation, reductions, running sums, products, indexing, masks, order
statistics, sorting, sets, windows, and in namespaces of their own Fourier transforms (`fft`), linear algebra
(`linalg`) and random numbers (`random`). What has a length that depends on data (masks, `nonzero`, `unique_*`) is counted
at the call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from outsize.array.api.functions import FUNCTIONS
from outsize.array.api.inspection import Info
from outsize.array.api.lazy import Array, apply
from outsize.array.graph.elementwise import operation

_UFUNCS = {
    "abs": np.absolute, "absolute": np.absolute, "acos": np.arccos, "acosh": np.arccosh, "add": np.add, "asin": np.arcsin,
    "asinh": np.arcsinh, "atan": np.arctan, "atan2": np.arctan2, "atanh": np.arctanh, "bitwise_and": np.bitwise_and,
    "bitwise_invert": np.invert, "bitwise_left_shift": np.left_shift, "bitwise_or": np.bitwise_or,
    "bitwise_right_shift": np.right_shift, "bitwise_xor": np.bitwise_xor, "ceil": np.ceil, "conj": np.conjugate,
    "copysign": np.copysign, "cos": np.cos, "cosh": np.cosh, "divide": np.divide, "equal": np.equal, "exp": np.exp,
    "exp2": np.exp2, "expm1": np.expm1, "floor": np.floor, "floor_divide": np.floor_divide, "greater": np.greater,
    "greater_equal": np.greater_equal, "hypot": np.hypot, "isfinite": np.isfinite, "isinf": np.isinf, "isnan": np.isnan,
    "less": np.less, "less_equal": np.less_equal, "log": np.log, "log10": np.log10, "log1p": np.log1p, "log2": np.log2,
    "logaddexp": np.logaddexp, "logical_and": np.logical_and, "logical_not": np.logical_not,
    "logical_or": np.logical_or, "logical_xor": np.logical_xor, "maximum": np.maximum, "minimum": np.minimum,
    "multiply": np.multiply, "negative": np.negative, "nextafter": np.nextafter, "not_equal": np.not_equal,
    "positive": np.positive, "pow": np.power, "reciprocal": np.reciprocal, "remainder": np.remainder, "rint": np.rint,
    "sign": np.sign, "signbit": np.signbit, "sin": np.sin, "sinh": np.sinh, "sqrt": np.sqrt, "square": np.square,
    "subtract": np.subtract, "tan": np.tan, "tanh": np.tanh, "trunc": np.trunc,
}  # fmt: skip
"""Name -> the ufunc that does it."""

_PARTS = ("fft", "linalg", "random")
"""Namespaces of their own."""
_NUMBERS = ("e", "pi", "inf", "nan", "newaxis")
_DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128",
)  # fmt: skip

__array_api_version__ = "2023.12"
__all__ = ["Array", "open", *_PARTS, *_UFUNCS, *FUNCTIONS, *_NUMBERS, *_DTYPES]


def open(source: Any, **options: Any) -> Array:
    """Open a tensor on disk (or in memory) by its header alone: .npy, raw with shape= and dtype=, .npz, zarr, HDF5,
    safetensors, .pt, a folder of .npy blocks. `mode="r+"` allows `x[a:b] = ...`.

    >>> x = outsize.open("x.npy")
    """
    from outsize.array.graph.build import source as make_source
    from outsize.array.store.registry import open_store

    return Array(make_source(open_store(source, **options)))


def _as_function(name: str) -> Callable[..., Array]:
    ufunc = operation(_UFUNCS[name])

    def one(x: Any, /) -> Array:
        return apply(ufunc, x)

    def two(x1: Any, x2: Any, /) -> Array:
        return apply(ufunc, x1, x2)

    function = one if _UFUNCS[name].nin == 1 else two
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"NumPy's `{_UFUNCS[name].__name__}`, element by element."
    return function


def __getattr__(name: str) -> Any:
    if name in _UFUNCS:
        function = _as_function(name)
        globals()[name] = function
        return function
    if name == "__array_namespace_info__":
        return Info
    if name in _PARTS:
        return importlib.import_module(f"outsize.array.api.{name}")
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    if name in _NUMBERS:
        return getattr(np, name)
    if name in _DTYPES:
        return np.dtype(name)
    raise AttributeError(f"module 'outsize.array' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
