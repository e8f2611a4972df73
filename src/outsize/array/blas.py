"""The BLAS that NumPy has already loaded, called directly where NumPy's own interface falls short.

`np.matmul` can only overwrite its output, so accumulating a product costs a second pass over C; `gemm` with beta = 1
does not. And its threads have to be told how many they are. Both are reached through the library's symbols; where they
are not found (another BLAS, a static build) NumPy itself does the work, a strip at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from outsize.array.store.base import Block

_NAMES = (("scipy_", "64_"), ("", "64_"), ("scipy_", ""), ("", ""))
"""Prefix and suffix that builds of OpenBLAS give their symbols; the suffix also tells 64-bit integers."""

_GEMM = {"f": ("cblas_sgemm", ctypes.c_float), "d": ("cblas_dgemm", ctypes.c_double)}
"""dtype character -> routine and its scalar type."""

STRIP_BYTES = 32 << 20
"""Memory of the product strip where `gemm` is not found."""


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The OpenBLAS that is mapped into this process, None if there is none."""
    np.dot(np.ones(1), np.ones(1))
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(None, 5)[-1].strip() for line in maps if "blas" in line.lower()}
    except OSError:
        return None
    for path in sorted(path for path in paths if path.startswith("/") and "numpy" in path):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path)
    return None


@functools.cache
def find_symbol(name: str) -> tuple[Any, Any] | None:
    """(function, its integer type) of a BLAS routine, None where NumPy's BLAS does not show it."""
    library = _library()
    if library is None:
        return None
    for prefix, suffix in _NAMES:
        with contextlib.suppress(AttributeError):
            return getattr(library, prefix + name + suffix), (ctypes.c_int64 if suffix else ctypes.c_int)
    return None


@contextlib.contextmanager
def blas_threads(count: int) -> Iterator[None]:
    """Let BLAS use `count` threads inside the block."""
    setter, getter = find_symbol("openblas_set_num_threads"), find_symbol("openblas_get_num_threads")
    if setter is None or getter is None:
        yield
        return
    before = int(getter[0]())
    setter[0](ctypes.c_int(count))
    try:
        yield
    finally:
        setter[0](ctypes.c_int(before))


def multiply_add(a: Block, b: Block, c: Block) -> None:
    """c += a @ b for matrices; c is C-ordered along its rows, a and b lie any way."""
    if _gemm(a, b, c):
        return
    rows = max(1, STRIP_BYTES // max(1, b.shape[1] * c.itemsize))
    for start in range(0, c.shape[0], rows):
        c[start : start + rows] += np.matmul(a[start : start + rows], b)


def _gemm(a: Block, b: Block, c: Block) -> bool:
    row = _GEMM.get(c.dtype.char)
    found = find_symbol(row[0]) if row else None
    if row is None or found is None or not (a.dtype == b.dtype == c.dtype) or 0 in (*a.shape, *b.shape):
        return False
    a_lead, b_lead, c_lead = _leading(a), _leading(b), _leading(c)
    if a_lead is None or b_lead is None or c_lead is None or c_lead[0] != 111:
        return False
    function, integer = found
    real, pointer = row[1], ctypes.c_void_p
    function.argtypes = (
        [ctypes.c_int] * 3 + [integer] * 3 + [real, pointer, integer, pointer, integer, real, pointer, integer]
    )
    function.restype = None
    m, k, n = *a.shape, b.shape[1]
    function(101, a_lead[0], b_lead[0], m, n, k, 1.0, a.ctypes.data, a_lead[1], b.ctypes.data, b_lead[1], 1.0,
             c.ctypes.data, c_lead[1])  # fmt: skip
    return True


def _leading(matrix: Block) -> tuple[int, int] | None:
    """(plain 111 or transposed 112, elements from one row to the next) as BLAS wants it, None where it cannot say
    it."""
    size = matrix.itemsize
    rows, columns = matrix.shape
    down, along = matrix.strides
    if (along == size or columns == 1) and down % size == 0 and (down >= columns * size or rows == 1):
        return 111, max(down // size, columns, 1)
    if (down == size or rows == 1) and along % size == 0 and (along >= rows * size or columns == 1):
        return 112, max(along // size, rows, 1)
    return None
