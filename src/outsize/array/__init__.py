"""Arrays larger than memory: graph -> plan -> run, inside a budget of bytes. The namespace of the array API standard.

Elementwise functions, creation, manipulation, reductions, running sums, products, indexing, masks, order
statistics, sorting, sets, windows, and in namespaces of their own Fourier transforms (`fft`), linear algebra
(`linalg`) and random numbers (`random`). What has a length that depends on data (masks, `nonzero`, `unique_*`) is counted
at the call. Each module of `api` says in its `__all__` what of it is public here.
"""

# ruff: noqa: F403  (what the star brings is the module's `__all__`)

from __future__ import annotations

from typing import Any as _Any

import numpy as _np

from outsize.array import api as _api
from outsize.array import fft as fft
from outsize.array import linalg as linalg
from outsize.array import random as random
from outsize.array.api.blockwise import *
from outsize.array.api.creation import *
from outsize.array.api.elementwise import *
from outsize.array.api.histograms import *
from outsize.array.api.inspection import *
from outsize.array.api.inspection import Info as __array_namespace_info__  # noqa: F401
from outsize.array.api.joining import *
from outsize.array.api.lazy import Array as Array
from outsize.array.api.manipulation import *
from outsize.array.api.numerics import *
from outsize.array.api.order_statistics import *
from outsize.array.api.products import *
from outsize.array.api.reductions import *
from outsize.array.api.sets import *
from outsize.array.api.sorting import *
from outsize.array.api.ufuncs import *
from outsize.array.api.without_nan import *
from outsize.array.linalg import cross as cross
from outsize.array.linalg import diagonal as diagonal
from outsize.array.linalg import trace as trace

_SUBJECTS = (
    _api.blockwise, _api.creation, _api.elementwise, _api.histograms, _api.inspection, _api.joining, _api.manipulation,
    _api.numerics, _api.order_statistics, _api.products, _api.reductions, _api.sets, _api.sorting, _api.ufuncs, _api.without_nan,
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
