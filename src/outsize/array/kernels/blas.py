"""The BLAS that NumPy has already loaded, called directly where NumPy's own interface falls short.

`np.matmul` can only overwrite its output, so accumulating a product costs a second pass over C; `gemm` with beta = 1
does not. And its threads have to be told how many they are. Both are reached through the symbols of OpenBLAS, which NumPy's
wheels bring. With another BLAS (MKL, BLIS, Accelerate) NumPy itself multiplies, and `threadpoolctl` sets the threads where
it is installed (`outsize[blas]`). It is not asked first: it takes 29 ms to import, and 130 us for every pass to set and
reset the threads, where a call of the symbols that `gemm` needs anyway takes 8 us.

BLAS copies the matrices it multiplies, piece by piece, into buffers of its own, which it keeps as long as the process
lives: every thread some of the right matrix, and all of them together some columns of all rows of the left one. A plan
counts that as a `Packing`; rows are handed over in strips, so that it stays small beside the budget.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import platform
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from outsize.array.store.base import Block
from outsize.array.tuning import Tuning

_NAMES = (("scipy_", "64_"), ("", "64_"), ("scipy_", ""), ("", ""))
"""Prefix and suffix that builds of OpenBLAS give their symbols; the suffix also tells 64-bit integers."""

_GEMM = {"f": "cblas_sgemm", "d": "cblas_dgemm"}
"""dtype character -> routine."""
_TRSM = {"f": "cblas_strsm", "d": "cblas_dtrsm"}
_GETRF = {"f": "sgetrf_", "d": "dgetrf_", "F": "cgetrf_", "D": "zgetrf_"}

_LARGER = 1 if platform.machine().lower() in ("x86_64", "amd64", "aarch64", "arm64") else 2
_DEPTH = 1024 * _LARGER
"""Columns of the left matrix that are copied at once, at most: OpenBLAS's GEMM_Q is 120 to 512, on POWER 1026."""
_SHARE = {"f": (2 << 20) * _LARGER, "c": (3 << 20) * _LARGER}
"""dtype kind -> bytes of the right matrix that a thread copies at once, at most: GEMM_P * GEMM_Q elements are 0.5 to 1.6 MiB,
3 of complex64 on Sandy Bridge, 4 on POWER."""
_LITTLE = 64 << 10
"""Bytes of a thread whatever it multiplies: pages that are begun, lists of what the others do, its stack."""


class Packing(NamedTuple):
    """What BLAS's own buffers take."""

    call: int = 0
    """Bytes of every call at work."""
    thread: int = 0
    """Bytes of every thread."""

    def total(self, calls: int, threads: int) -> int:
        """Bytes of so many calls at once, which have so many threads to share."""
        return calls * self.call + (calls + threads - 1) * self.thread

    def join(self, other: Packing) -> Packing:
        """Of both, one after the other."""
        return Packing(max(self.call, other.call), max(self.thread, other.thread))


NOTHING = Packing()


def packing(rows: int, columns: int, depth: int, dtype: np.dtype[Any], strip: int = Tuning().strip) -> Packing:
    """What a product of rows x depth by depth x columns takes, its rows in strips of so many bytes."""
    if dtype.kind not in _SHARE or not rows * columns * depth:  # whole numbers are multiplied without BLAS
        return NOTHING
    left = min(rows, strip_rows(depth, dtype.itemsize, strip)) * min(depth, _DEPTH) * dtype.itemsize
    return Packing(left, min(columns * depth * dtype.itemsize, _SHARE[dtype.kind]) + _LITTLE)


def strip_rows(depth: int, itemsize: int, strip: int = Tuning().strip) -> int:
    """Rows of the left matrix that are handed to BLAS at once."""
    return max(1, strip // max(1, min(depth, _DEPTH) * itemsize))


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


def routine(names: dict[str, str], char: str, kinds: str) -> Any:
    """The BLAS routine of a dtype, for arguments of these kinds: choices (c), lengths (n), numbers (r), addresses (p). None where
    there is none, or NumPy's BLAS does not show it."""
    found = find_symbol(names[char]) if char in names else None
    if found is None:
        return None
    function, integer = found
    real = ctypes.c_float if char == "f" else ctypes.c_double
    of = {"c": ctypes.c_int, "n": integer, "r": real, "p": ctypes.c_void_p}
    function.argtypes, function.restype = [of[kind] for kind in kinds], None
    return function


@functools.cache
def _controller() -> Any:
    """threadpoolctl's handle on the libraries of this process, None where the package is not installed."""
    try:
        return importlib.import_module("threadpoolctl").ThreadpoolController()
    except ImportError:
        return None


@contextlib.contextmanager
def blas_threads(count: int) -> Iterator[None]:
    """Let BLAS use `count` threads inside the block."""
    setter, getter = find_symbol("openblas_set_num_threads"), find_symbol("openblas_get_num_threads")
    if setter is None or getter is None:
        controller = _controller()
        with contextlib.nullcontext() if controller is None else controller.limit(limits=count, user_api="blas"):
            yield
        return
    before = int(getter[0]())
    setter[0](ctypes.c_int(count))
    try:
        yield
    finally:
        setter[0](ctypes.c_int(before))


def multiply_add(a: Block, b: Block, c: Block, strip: int = Tuning().strip, scale: float = 1.0) -> None:
    """c += scale * a @ b for matrices; c is C-ordered along its rows, a and b lie any way. Neither what BLAS copies of a at once
    nor, where `gemm` is not found, the product that is added passes `strip` bytes, but for a row."""
    size = max(a.itemsize, c.itemsize)
    rows = strip_rows(a.shape[1], size, strip)
    few = min(rows, max(1, strip // max(1, b.shape[1] * size)))
    start = 0
    while start < c.shape[0]:
        if _gemm(a[start : start + rows], b, c[start : start + rows], scale):
            start += rows
            continue
        part = np.matmul(a[start : start + few], b)
        if scale != 1.0:
            part *= scale
        c[start : start + few] += part
        start += few


def takes(matrices: Block) -> bool:
    """True where matrices can be multiplied as they lie; NumPy would copy others, whole."""
    return matrices.dtype.kind not in _SHARE or 0 in matrices.shape or _leading(matrices) is not None


def _gemm(a: Block, b: Block, c: Block, scale: float) -> bool:
    function = routine(_GEMM, c.dtype.char, "cccnnnrpnpnrpn")
    if function is None or not (a.dtype == b.dtype == c.dtype) or 0 in (*a.shape, *b.shape):
        return False
    a_lead, b_lead, c_lead = _leading(a), _leading(b), _leading(c)
    if a_lead is None or b_lead is None or c_lead is None or c_lead[0] != 111:
        return False
    m, k, n = *a.shape, b.shape[1]
    function(101, a_lead[0], b_lead[0], m, n, k, scale, a.ctypes.data, a_lead[1], b.ctypes.data, b_lead[1], 1.0,
             c.ctypes.data, c_lead[1])  # fmt: skip
    return True


_SIDE, _TRIANGLE, _TURN, _DIAGONAL = (141, 142), (121, 122), (111, 112), (131, 132)
"""What `trsm` calls left and right, upper and lower, plain and transposed, any diagonal and ones."""


def solve_triangle(triangle: Block, right: Block, *, lower: bool, unit: bool = False, turned: bool = False) -> bool:
    """right becomes triangle^-1 right, or right (triangle^T)^-1 where `turned`, in place; the other half of the triangle is not
    read. False where BLAS does not show how, or where they do not lie in rows."""
    function = routine(_TRSM, right.dtype.char, "cccccnnrpnpn")
    leads = _leading(triangle), _leading(right)
    if function is None or triangle.dtype != right.dtype or any(one is None or one[0] != 111 for one in leads):
        return False
    if right.size:
        function(101, _SIDE[turned], _TRIANGLE[lower], _TURN[turned], _DIAGONAL[unit], *right.shape, 1.0, triangle.ctypes.data,
                 leads[0][1], right.ctypes.data, leads[1][1])  # type: ignore[index]  # fmt: skip
    return True


def factor_columns(columns: Block) -> Block | None:
    """LU with partial pivoting in place of a matrix that lies in columns. The answer is the rows it swapped with 0, 1, 2, ... in
    turn; None where LAPACK is not shown."""
    function = routine(_GETRF, columns.dtype.char, "pppppp")
    if function is None:
        return None
    integer = find_symbol(_GETRF[columns.dtype.char])[1]  # type: ignore[index]
    (rows, width), kind = columns.shape, np.int64 if integer is ctypes.c_int64 else np.int32
    pivots = np.zeros(min(rows, width), kind)
    sizes = [integer(rows), integer(width), integer(max(1, columns.strides[1] // columns.itemsize)), integer(0)]
    function(ctypes.byref(sizes[0]), ctypes.byref(sizes[1]), columns.ctypes.data, ctypes.byref(sizes[2]), pivots.ctypes.data,
             ctypes.byref(sizes[3]))  # fmt: skip
    return pivots - 1


def _leading(matrix: Block) -> tuple[int, int] | None:
    """(plain 111 or transposed 112, elements from one row to the next) as BLAS wants it, None where it cannot say
    it."""
    size = matrix.itemsize
    rows, columns = matrix.shape[-2:]
    down, along = matrix.strides[-2:]
    if (along == size or columns == 1) and down % size == 0 and (down >= columns * size or rows == 1):
        return 111, max(down // size, columns, 1)
    if (down == size or rows == 1) and along % size == 0 and (along >= rows * size or columns == 1):
        return 112, max(along // size, rows, 1)
    return None
