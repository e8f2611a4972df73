"""Linear algebra: `outsize.array.linalg`, with the names of the array API standard.

In: matrices in the last two axes, vectors in one. Out: lazy arrays. Norms, traces, products and powers stream like
everything else. Decompositions, inverses and solutions are LAPACK's through NumPy, a whole matrix at a time: stacks of any
length stream, a single matrix has to fit into the budget (the plan says how much that is).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from outsize.array.api.creation import zeros
from outsize.array.api.elementwise import real, where
from outsize.array.api.lanes import in_lanes
from outsize.array.api.lazy import Array, _as_node, lazy
from outsize.array.api.manipulation import broadcast_to, concat, expand_dims, matrix_transpose, moveaxis, squeeze, stack
from outsize.array.api.products import matmul, tensordot, vecdot
from outsize.array.graph.build import axis_index, axis_tuple, whole
from outsize.array.kernels.blas import packing
from outsize.array.store.base import Block
from outsize.core.errors import InputError

__all__ = [
    "cholesky", "cross", "det", "diagonal", "eigh", "eigvalsh", "inv", "matmul", "matrix_norm", "matrix_power", "matrix_rank",
    "matrix_transpose", "norm", "outer", "pinv", "qr", "slogdet", "solve", "svd", "svdvals", "tensordot", "trace", "vecdot",
    "vector_norm",
]  # fmt: skip

Core = tuple[int, ...]


class EighResult(NamedTuple):
    """What `eigh` gives."""

    eigenvalues: Array
    eigenvectors: Array


class QRResult(NamedTuple):
    """What `qr` gives."""

    Q: Array
    R: Array


class SlogdetResult(NamedTuple):
    """What `slogdet` gives."""

    sign: Array
    logabsdet: Array


class SVDResult(NamedTuple):
    """What `svd` gives."""

    U: Array
    S: Array
    Vh: Array


# what streams


def outer(x1: Any, x2: Any, /) -> Array:
    """Every element of one vector times every element of another."""
    a, b = Array(_as_node(x1)), Array(_as_node(x2))
    if a.ndim != 1 or b.ndim != 1:
        raise InputError(f"outer takes two vectors, not arrays of {a.ndim} and {b.ndim} dimensions")
    return lazy(a[:, None] * b[None, :])


def cross(x1: Any, x2: Any, /, *, axis: int = -1) -> Array:
    """The vector across two others, three numbers along an axis."""
    a, b = Array(_as_node(x1)), Array(_as_node(x2))
    if not -min(a.ndim, b.ndim) <= axis < 0 and not (a.ndim == b.ndim and 0 <= axis < a.ndim):
        axis_index(axis, min(a.ndim, b.ndim))
    a, b = moveaxis(a, axis, -1), moveaxis(b, axis, -1)
    if a.shape[-1] != 3 or b.shape[-1] != 3:
        raise InputError(f"cross takes three numbers along the axis, not {a.shape[-1]} and {b.shape[-1]}")
    parts = [a[..., i] * b[..., j] - a[..., j] * b[..., i] for i, j in ((1, 2), (2, 0), (0, 1))]
    return moveaxis(stack(parts, axis=-1), -1, axis)


def diagonal(x: Array, /, *, offset: int = 0) -> Array:
    """The diagonal of each matrix, or one beside it."""
    rows, columns = _matrix(x)
    first = offset if offset >= 0 else -offset * columns
    length = max(0, min(rows + min(0, offset), columns - max(0, offset)))
    flat = x.reshape((*x.shape[:-2], rows * columns))
    return lazy(flat[..., first : first + length * (columns + 1) : columns + 1] if length else flat[..., :0])


def trace(x: Array, /, *, offset: int = 0, dtype: Any = None) -> Array:
    """The sum of each matrix's diagonal."""
    return lazy(diagonal(x, offset=offset).sum(axis=-1, dtype=dtype))


def vector_norm(x: Array, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Array:
    """The norm of vectors along axes, left out of the whole array as one vector."""
    x = _inexact(x)
    size = abs(x)
    axes = axis_tuple(axis, x.ndim)
    if ord in (math.inf, -math.inf):
        return lazy((size.max if ord > 0 else size.min)(axis=axes, keepdims=keepdims))
    if ord == 0:
        return lazy((x != 0).astype(size.dtype).sum(axis=axes, keepdims=keepdims))
    if ord == 1:
        return lazy(size.sum(axis=axes, keepdims=keepdims))
    if ord == 2:
        return lazy(np.sqrt((size * size).sum(axis=axes, keepdims=keepdims)))
    return lazy(((size**ord).sum(axis=axes, keepdims=keepdims) ** (1 / ord)).astype(size.dtype))


def matrix_norm(x: Array, /, *, keepdims: bool = False, ord: Any = "fro") -> Array:
    """The norm of each matrix: `fro`, `nuc`, 1, -1, 2, -2, inf, -inf."""
    _matrix(x)
    x = _inexact(x)
    if ord == "fro":
        return vector_norm(x, axis=(-2, -1), keepdims=keepdims)
    if ord in ("nuc", 2, -2):
        values = svdvals(x)
        found = {"nuc": values.sum, 2: values.max, -2: values.min}[ord](axis=-1)
    elif ord in (1, -1, math.inf, -math.inf):
        sums = abs(x).sum(axis=-2 if abs(ord) == 1 else -1)
        found = (sums.max if ord > 0 else sums.min)(axis=-1)
    else:
        raise InputError(f"matrix_norm has no ord {ord!r}: 'fro', 'nuc', 1, -1, 2, -2, inf or -inf")
    return expand_dims(expand_dims(found, axis=-1), axis=-1) if keepdims else lazy(found)


def norm(x: Array, /, *, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Array:
    """NumPy's norm: of all elements where nothing is said, of vectors along one axis, of matrices in two."""
    if ord is None and axis is None:
        return vector_norm(x, keepdims=keepdims)
    axes = axis_tuple(axis, x.ndim)
    if len(axes) == 1 and not isinstance(ord, str):
        return vector_norm(x, axis=axes, keepdims=keepdims, ord=2 if ord is None else ord)
    if len(axes) != 2:
        raise InputError(f"norm of ord {ord!r} is of vectors in one axis or matrices in two, not of {len(axes)} axes")
    order = axes if axis is None else tuple(axis_index(place, x.ndim) for place in axis)
    found = matrix_norm(moveaxis(x, order, (-2, -1)), ord="fro" if ord is None else ord)
    return expand_dims(found, axis=tuple(sorted(axes))) if keepdims else found


def matrix_power(x: Array, n: int, /) -> Array:
    """Each matrix multiplied by itself; of a negative number, its inverse."""
    rows, n = _square(x), whole("a power of matrices", n)
    if n < 0:
        x, n = inv(x), -n
    if n == 0:
        one = np.eye(rows, dtype=x.dtype)
        return broadcast_to(Array(_as_node(one)), x.shape)
    found = None
    while n:
        if n & 1:
            found = x if found is None else matmul(found, x)
        n >>= 1
        x = matmul(x, x) if n else x
    assert found is not None
    return found


# what takes a whole matrix at a time


def cholesky(x: Array, /, *, upper: bool = False) -> Array:
    """The triangular factor of positive definite matrices."""
    n = _square(x)

    def factor(a: Block) -> Block:
        found = np.linalg.cholesky(a)
        return np.conjugate(np.swapaxes(found, -1, -2)) if upper else found

    return _each(f"cholesky {upper}", x, lambda a: (factor(a),), ((n, n),), 3)[0]


def det(x: Array, /) -> Array:
    """Determinants."""
    _square(x)
    return _each("det", x, lambda a: (np.linalg.det(a),), ((),), 3)[0]


def inv(x: Array, /) -> Array:
    """Inverses."""
    n = _square(x)
    return _each("inv", x, lambda a: (np.linalg.inv(a),), ((n, n),), 4)[0]


def pinv(x: Array, /, *, rtol: Any = None) -> Array:
    """Inverses in the sense of Moore and Penrose; singular values below `rtol` of the largest count as zero."""
    u, s, vh = svd(x, full_matrices=False)
    kept = s > _limits(x, s, rtol)
    scale = where(kept, 1 / where(kept, s, 1.0), 0.0).astype(s.dtype)
    return matmul(_adjoint(vh) * scale[..., None, :], _adjoint(u))


def matrix_rank(x: Array, /, *, rtol: Any = None) -> Array:
    """How many singular values are above `rtol` of the largest."""
    values = svdvals(x)
    return lazy((values > _limits(x, values, rtol)).astype(np.int64).sum(axis=-1))


def eigh(x: Array, /) -> EighResult:
    """Eigenvalues and eigenvectors of Hermitian matrices."""
    n = _square(x)
    values, vectors = _each("eigh", x, np.linalg.eigh, ((n,), (n, n)), 6)
    return EighResult(_real(values), vectors)


def eigvalsh(x: Array, /) -> Array:
    """Eigenvalues of Hermitian matrices."""
    n = _square(x)
    return _real(_each("eigvalsh", x, lambda a: (np.linalg.eigvalsh(a),), ((n,),), 4)[0])


def qr(x: Array, /, *, mode: str = "reduced") -> QRResult:
    """A unitary matrix and a triangular one whose product the matrix is."""
    rows, columns = _matrix(x)
    if mode not in ("reduced", "complete"):
        raise InputError(f"qr mode {mode!r} is neither 'reduced' nor 'complete'")
    inner = rows if mode == "complete" else min(rows, columns)
    made = _each(f"qr {mode}", x, lambda a: np.linalg.qr(a, mode), ((rows, inner), (inner, columns)), 6)  # type: ignore[call-overload]
    return QRResult(*made)


def slogdet(x: Array, /) -> SlogdetResult:
    """Sign and logarithm of determinants."""
    _square(x)
    sign, size = _each("slogdet", x, np.linalg.slogdet, ((), ()), 3)
    return SlogdetResult(sign, _real(size))


def svd(x: Array, /, *, full_matrices: bool = True) -> SVDResult:
    """Singular vectors and values."""
    rows, columns = _matrix(x)
    inner = min(rows, columns)
    left, right = (rows, columns) if full_matrices else (inner, inner)
    cores = ((rows, left), (inner,), (right, columns))
    u, s, vh = _each(f"svd {full_matrices}", x, lambda a: np.linalg.svd(a, full_matrices), cores, 8)
    return SVDResult(u, _real(s), vh)


def svdvals(x: Array, /) -> Array:
    """Singular values, the largest first."""
    inner = min(_matrix(x))
    return _real(_each("svdvals", x, lambda a: (np.linalg.svd(a, compute_uv=False),), ((inner,),), 5)[0])


def solve(x1: Array, x2: Array, /) -> Array:
    """x with `x1 @ x = x2`, for a vector or the columns of matrices."""
    a, b = Array(_as_node(x1)), Array(_as_node(x2))
    n = _square(a)
    vector = b.ndim == 1
    b = b[:, None] if vector else b
    if b.shape[-2] != n:
        raise InputError(f"solve has {n} equations and right sides of length {b.shape[-2]}")
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    element = np.result_type(_solved_in(a.dtype), _solved_in(b.dtype))
    columns = b.shape[-1]
    both = concat(
        [broadcast_to(a.astype(element), (*lead, n, n)), broadcast_to(b.astype(element), (*lead, n, columns))], axis=-1
    )

    def solved(block: Block) -> tuple[Block]:
        return (np.linalg.solve(block[..., :n], block[..., n:]),)

    found = _each("solve", both, solved, ((n, columns),), 4)[0]
    return squeeze(found, axis=-1) if vector else found


# inside


def _matrix(x: Array) -> tuple[int, int]:
    """Rows and columns."""
    if not isinstance(x, Array):
        raise InputError(f"linear algebra takes lazy arrays, not {type(x).__name__}: give outsize.array.asarray(x)")
    if x.ndim < 2:
        raise InputError(f"an array of {x.ndim} dimensions holds no matrices: two are needed, rows and columns")
    return x.shape[-2], x.shape[-1]


def _square(x: Array) -> int:
    rows, columns = _matrix(x)
    if rows != columns:
        raise InputError(f"matrices of {rows} rows and {columns} columns are not square")
    return rows


def _real(x: Array) -> Array:
    """Numbers that are real, whatever they were carried in."""
    return real(x) if x.dtype.kind == "c" else x


def _inexact(x: Array) -> Array:
    """Whole numbers as floats: their squares and sums leave a narrow dtype."""
    return x if x.dtype.kind in "fc" else x.astype(np.float64)


def _solved_in(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which LAPACK works on elements of this one."""
    if dtype.kind not in "biufc":
        raise InputError(f"linear algebra takes numbers and not {dtype}")
    found: np.dtype[Any] = np.linalg.inv(np.eye(1, dtype=dtype)).dtype
    return found


def _adjoint(x: Array) -> Array:
    return matrix_transpose(lazy(np.conjugate(x)))


def _limits(x: Array, values: Array, rtol: Any) -> Array:
    """What singular values have to be above; `rtol` may be a number for each matrix."""
    if not values.shape[-1]:
        return values
    if rtol is None:
        element = x.dtype if x.dtype.kind in "fc" else np.dtype(np.float64)
        rtol = max(_matrix(x)) * float(np.finfo(element).eps)
    largest = values.max(axis=-1, keepdims=True)
    if isinstance(rtol, int | float):
        return lazy(largest * rtol)
    return lazy(largest * Array(_as_node(rtol))[..., None])


def _each(
    name: str, x: Array, function: Callable[[Block], Any], cores: Sequence[Core], memory: float
) -> tuple[Array, ...]:
    """function(matrices) -> several results; `cores` are their shapes for one matrix.

    A matrix is a lane of its elements, and so are its results, one after another: they are made once, whoever asks.
    """
    rows, columns = _matrix(x)
    flat = x.reshape((*x.shape[:-2], rows * columns))
    node = _as_node(flat if rows * columns else zeros((*x.shape[:-2], 1), dtype=x.dtype))  # memory is counted by input
    element = _solved_in(x.dtype)
    sizes = [math.prod(core) for core in cores]

    def transform(block: Block, axis: int) -> Block:
        stack_ = block[..., : rows * columns].reshape((*block.shape[:-1], rows, columns))
        try:
            made = function(stack_)
        except np.linalg.LinAlgError as error:
            raise InputError(f"{name.split()[0]} of one of the matrices failed: {error}") from None
        flat = [np.asarray(part).reshape((*block.shape[:-1], size)) for part, size in zip(made, sizes, strict=True)]
        found: Block = np.concatenate(flat, axis=-1).astype(element, copy=False)
        return found

    worked = np.result_type(element, np.float64)  # NumPy widens every matrix that it gives to LAPACK
    wide = worked.itemsize / x.dtype.itemsize
    longer, shorter = max(rows, columns), min(rows, columns)
    grown = (memory + 2 * sum(sizes) / max(1, rows * columns)) * wide
    packed = Array(
        in_lanes(
            node, node.ndim - 1, transform, name=f"{name} {rows}x{columns}", length=sum(sizes), dtype=element,
            memory=grown, packing=packing(longer, longer if sum(sizes) > longer * shorter else shorter, shorter, worked),
        )
    )  # fmt: skip
    ends = np.cumsum(sizes).tolist()
    return tuple(
        lazy(packed[..., end - size : end].reshape((*x.shape[:-2], *core)))
        for end, size, core in zip(ends, sizes, cores, strict=True)
    )
