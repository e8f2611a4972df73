"""Arrays larger than memory: graph -> plan -> run, inside a budget of bytes. The namespace of the array API standard.

Elementwise functions, creation, manipulation, reductions, running sums, products, indexing, masks, order
statistics, sorting, sets, windows, and in namespaces of their own Fourier transforms (`fft`), linear algebra
(`linalg`) and random numbers (`random`). What has a length that depends on data (masks, `nonzero`, `unique_*`) is counted
at the call. Each module of `functions` says in its `__all__` what of it is public here.
"""

# ruff: noqa: F403  (what the star brings is the module's `__all__`)

from __future__ import annotations

from typing import Any as _Any

import numpy as _np

from outsize.array import fft as fft
from outsize.array import functions as _of
from outsize.array import linalg as linalg
from outsize.array import random as random
from outsize.array.api.lazy import Array as Array
from outsize.array.functions.blockwise import *
from outsize.array.functions.creation import *
from outsize.array.functions.elementwise import *
from outsize.array.functions.histograms import *
from outsize.array.functions.inspection import *
from outsize.array.functions.inspection import Info as __array_namespace_info__  # noqa: F401
from outsize.array.functions.joining import *
from outsize.array.functions.manipulation import *
from outsize.array.functions.numerics import *
from outsize.array.functions.order_statistics import *
from outsize.array.functions.products import *
from outsize.array.functions.reductions import *
from outsize.array.functions.sets import *
from outsize.array.functions.sorting import *
from outsize.array.functions.ufuncs import *
from outsize.array.functions.without_nan import *
from outsize.array.linalg import cross as cross
from outsize.array.linalg import diagonal as diagonal
from outsize.array.linalg import trace as trace

_SUBJECTS = (
    _of.blockwise, _of.creation, _of.elementwise, _of.histograms, _of.inspection, _of.joining, _of.manipulation,
    _of.numerics, _of.order_statistics, _of.products, _of.reductions, _of.sets, _of.sorting, _of.ufuncs, _of.without_nan,
)  # fmt: skip
_NAMES = (
    "Array", "open", "fft", "linalg", "random", "cross", "diagonal", "trace",
    "e", "pi", "inf", "nan", "newaxis", "bool", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip

__array_api_version__ = "2025.12"
__all__ = [*_NAMES, *(name for subject in _SUBJECTS for name in subject.__all__)]

e, pi, inf, nan, newaxis = _np.e, _np.pi, _np.inf, _np.nan, None
int8, int16, int32, int64 = _np.dtype("int8"), _np.dtype("int16"), _np.dtype("int32"), _np.dtype("int64")
uint8, uint16, uint32, uint64 = _np.dtype("uint8"), _np.dtype("uint16"), _np.dtype("uint32"), _np.dtype("uint64")
float16, float32, float64 = _np.dtype("float16"), _np.dtype("float32"), _np.dtype("float64")
complex64, complex128 = _np.dtype("complex64"), _np.dtype("complex128")
bool = _np.dtype("bool")


def open(source: _Any, **options: _Any) -> Array:
    """Open a tensor on disk (or in memory) by its header alone: .npy, raw with shape= and dtype=, .npz, zarr, HDF5,
    safetensors, .pt, a folder of .npy blocks. `mode="r+"` allows `x[a:b] = ...`.

    >>> x = outsize.open("x.npy")
    """
    from outsize.array.graph.build import source as make_source
    from outsize.array.store.registry import open_store

    store = open_store(source, **options)
    made: Array = (store.held_as or Array)(make_source(store))
    return made


def __dir__() -> list[str]:
    return sorted(__all__)
