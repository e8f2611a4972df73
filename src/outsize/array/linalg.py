"""Linear algebra: `outsize.array.linalg`, with the names of the array API standard.

In: matrices in the last two axes, vectors in one. Out: lazy arrays. Norms, traces, products and powers stream like
everything else. Decompositions, inverses and solutions of matrices that fit are LAPACK's through NumPy, a whole matrix at a time;
stacks of any length stream. A tall or wide matrix (`qr`, `svd`, `svdvals`, `pinv`, `lstsq`) is worked on block by block of its
rows, whatever its length. A square matrix larger than the budget is factored at the call, in panels of columns
(`api/large_matrices.py`): `cholesky`, `solve`, `inv`, `det`, `slogdet`. The others have to fit; the plan says how much that is.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from outsize.array.api import large_matrices as large
from outsize.array.api.lazy import Array
from outsize.array.api.matrices import each_matrix, matrix_of, solved_in, square_of
from outsize.array.functions.creation import eye, tril, zeros
from outsize.array.functions.elementwise import asarray, real, where
from outsize.array.functions.manipulation import (
    broadcast_to,
    concat,
    expand_dims,
    matrix_transpose,
    moveaxis,
    pad,
    squeeze,
    stack,
)
from outsize.array.functions.products import matmul, tensordot, vecdot, vector_norm
from outsize.array.functions.ufuncs import conj
from outsize.array.graph.build import axis_index, axis_tuple, whole
from outsize.array.plan.prepare import resolve_budget
from outsize.array.random import default_rng
from outsize.array.store.base import Block
from outsize.array.tuning import current
from outsize.core.errors import InputError

__all__ = [
    "cholesky", "cross", "det", "diagonal", "eig", "eigh", "eigvals", "eigvalsh", "inv", "lstsq", "matmul", "matrix_norm",
    "matrix_power", "matrix_rank",
    "matrix_transpose", "norm", "outer", "pinv", "qr", "slogdet", "solve", "svd", "svd_lowrank",
    "svdvals", "tensordot", "trace", "vecdot",
    "vector_norm",
]  # fmt: skip


class EigResult(NamedTuple):
    eigenvalues: Array
    eigenvectors: Array


class EighResult(NamedTuple):
    eigenvalues: Array
    eigenvectors: Array


class QRResult(NamedTuple):
    Q: Array
    R: Array


class SlogdetResult(NamedTuple):
    sign: Array
    logabsdet: Array


class SVDResult(NamedTuple):
    U: Array
    S: Array
    Vh: Array


# what streams


def outer(x1: Any, x2: Any, /) -> Array:
    """Every element of one vector times every element of another."""
    a, b = asarray(x1), asarray(x2)
    if a.ndim != 1 or b.ndim != 1:
        raise InputError(f"outer takes two vectors, not arrays of {a.ndim} and {b.ndim} dimensions")
    return a[:, None] * b[None, :]


def cross(x1: Any, x2: Any, /, *, axis: int = -1) -> Array:
    """The vector across two others, three numbers along an axis."""
    a, b = asarray(x1), asarray(x2)
    if not -min(a.ndim, b.ndim) <= axis < 0 and not (a.ndim == b.ndim and 0 <= axis < a.ndim):
        axis_index(axis, min(a.ndim, b.ndim))
    a, b = moveaxis(a, axis, -1), moveaxis(b, axis, -1)
    if a.shape[-1] != 3 or b.shape[-1] != 3:
        raise InputError(f"cross takes three numbers along the axis, not {a.shape[-1]} and {b.shape[-1]}")
    parts = [a[..., i] * b[..., j] - a[..., j] * b[..., i] for i, j in ((1, 2), (2, 0), (0, 1))]
    return moveaxis(stack(parts, axis=-1), -1, axis)


def diagonal(x: Array, /, *, offset: int = 0) -> Array:
    """The diagonal of each matrix, or one beside it."""
    rows, columns = matrix_of(x)
    first = offset if offset >= 0 else -offset * columns
    length = max(0, min(rows + min(0, offset), columns - max(0, offset)))
    flat = x.reshape((*x.shape[:-2], rows * columns))
    return flat[..., first : first + length * (columns + 1) : columns + 1] if length else flat[..., :0]


def trace(x: Array, /, *, offset: int = 0, dtype: Any = None) -> Array:
    """The sum of each matrix's diagonal."""
    return diagonal(x, offset=offset).sum(axis=-1, dtype=dtype)


def matrix_norm(x: Array, /, *, keepdims: bool = False, ord: Any = "fro") -> Array:
    """The norm of each matrix: `fro`, `nuc`, 1, -1, 2, -2, inf, -inf."""
    matrix_of(x)
    x = x if x.dtype.kind in "fc" else x.astype(np.float64)
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
    return expand_dims(expand_dims(found, axis=-1), axis=-1) if keepdims else found


def norm(x: Array, /, *, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Array:
    """NumPy's norm: of all elements where nothing is said, of vectors along one axis, of matrices in two."""
    if ord is None and axis is None:
        return vector_norm(x, keepdims=keepdims)
    axes = axis_tuple(axis, x.ndim)
    if len(axes) == 1 and not isinstance(ord, str):
        return vector_norm(x, axis=axes, keepdims=keepdims, ord=2 if ord is None else ord)
    if len(axes) != 2:
        raise InputError(f"norm with ord={ord!r} takes one axis (vectors) or two (matrices), not {len(axes)}")
    order = axes if axis is None else tuple(axis_index(place, x.ndim) for place in axis)
    found = matrix_norm(moveaxis(x, order, (-2, -1)), ord="fro" if ord is None else ord)
    return expand_dims(found, axis=tuple(sorted(axes))) if keepdims else found


def matrix_power(x: Array, n: int, /) -> Array:
    """Each matrix multiplied by itself; of a negative number, its inverse."""
    rows, n = square_of(x), whole("a power of matrices", n)
    if n < 0:
        x, n = inv(x), -n
    if n == 0:
        one = np.eye(rows, dtype=x.dtype)
        return broadcast_to(asarray(one), x.shape)
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
    n = square_of(x)
    if _is_large(x, 3 + 2):
        return _large_cholesky(x, upper)
    return each_matrix(f"cholesky {upper}", x, functools.partial(np.linalg.cholesky, upper=upper), ((n, n),), 3)[0]


def det(x: Array, /) -> Array:
    """Determinants."""
    square_of(x)
    if _is_large(x, 3):
        turn, logarithm = large.log_determinant(large.factor(x.astype(solved_in(x.dtype))))
        return asarray(np.asarray(turn * np.exp(logarithm), solved_in(x.dtype)))
    return each_matrix("det", x, np.linalg.det, ((),), 3)[0]


def inv(x: Array, /) -> Array:
    """Inverses."""
    n = square_of(x)
    if _is_large(x, 4 + 2):
        return solve(x, eye(n, dtype=solved_in(x.dtype)))
    return each_matrix("inv", x, np.linalg.inv, ((n, n),), 4)[0]


def pinv(x: Array, /, *, rtol: Any = None) -> Array:
    """Inverses in the sense of Moore and Penrose; singular values below `rtol` of the largest count as zero."""
    u, s, vh = svd(x, full_matrices=False)
    kept = s > _limits(x, s, rtol)
    scale = where(kept, 1 / where(kept, s, 1.0), 0.0).astype(s.dtype)
    return matmul(_adjoint(vh) * scale[..., None, :], _adjoint(u))


def matrix_rank(x: Array, /, *, rtol: Any = None) -> Array:
    """How many singular values are above `rtol` of the largest."""
    values = svdvals(x)
    return (values > _limits(x, values, rtol)).astype(np.int64).sum(axis=-1)


def eig(x: Array, /) -> EigResult:
    """Eigenvalues and eigenvectors of any square matrices; complex, whatever the matrices are."""
    n = square_of(x)
    return EigResult(*each_matrix("eig", _as_complex(x), np.linalg.eig, ((n,), (n, n)), 8))


def eigvals(x: Array, /) -> Array:
    """Eigenvalues of any square matrices; complex."""
    n = square_of(x)
    return each_matrix("eigvals", _as_complex(x), np.linalg.eigvals, ((n,),), 5)[0]


def _as_complex(x: Array) -> Array:
    return x.astype(np.complex64 if solved_in(x.dtype).itemsize == 4 else np.complex128) if x.dtype.kind != "c" else x


def eigh(x: Array, /) -> EighResult:
    """Eigenvalues and eigenvectors of Hermitian matrices."""
    n = square_of(x)
    values, vectors = each_matrix("eigh", x, np.linalg.eigh, ((n,), (n, n)), 6)
    return EighResult(_real(values), vectors)


def eigvalsh(x: Array, /) -> Array:
    """Eigenvalues of Hermitian matrices."""
    n = square_of(x)
    return _real(each_matrix("eigvalsh", x, np.linalg.eigvalsh, ((n,),), 4)[0])


def qr(x: Array, /, *, mode: str = "reduced") -> QRResult:
    """A unitary matrix and a triangular one whose product the matrix is."""
    rows, columns = matrix_of(x)
    if mode not in ("reduced", "complete"):
        raise InputError(f"qr mode {mode!r} is neither 'reduced' nor 'complete'")
    inner = rows if mode == "complete" else min(rows, columns)
    if mode == "reduced" and _is_tall(x):
        element = solved_in(x.dtype)
        return _tall_qr(x.astype(np.result_type(element, np.float64)), element)
    function: Any = functools.partial(np.linalg.qr, mode=mode)
    return QRResult(*each_matrix(f"qr {mode}", x, function, ((rows, inner), (inner, columns)), 6))


def slogdet(x: Array, /) -> SlogdetResult:
    """Sign and logarithm of determinants."""
    square_of(x)
    if _is_large(x, 3):
        element = solved_in(x.dtype)
        turn, logarithm = large.log_determinant(large.factor(x.astype(element)))
        return SlogdetResult(asarray(np.asarray(turn, element)), _real(asarray(np.asarray(logarithm, element))))
    sign, size = each_matrix("slogdet", x, np.linalg.slogdet, ((), ()), 3)
    return SlogdetResult(sign, _real(size))


def svd(x: Array, /, *, full_matrices: bool = True) -> SVDResult:
    """Singular vectors and values."""
    rows, columns = matrix_of(x)
    inner = min(rows, columns)
    if not full_matrices and _is_tall(x):
        q, r = qr(x)
        u, s, vh = svd(r, full_matrices=False)
        return SVDResult(matmul(q, u), s, vh)
    if not full_matrices and x.ndim == 2 and _is_tall(x.T):
        v, s, uh = svd(_adjoint(x), full_matrices=False)
        return SVDResult(_adjoint(uh), s, _adjoint(v))
    left, right = (rows, columns) if full_matrices else (inner, inner)
    cores = ((rows, left), (inner,), (right, columns))
    function = functools.partial(np.linalg.svd, full_matrices=full_matrices)
    u, s, vh = each_matrix(f"svd {full_matrices}", x, function, cores, 8)
    return SVDResult(u, _real(s), vh)


def svdvals(x: Array, /) -> Array:
    """Singular values, the largest first."""
    inner = min(matrix_of(x))
    if x.ndim == 2 and (_is_tall(x) or _is_tall(x.T)):
        return svdvals(_tall_r((x if x.shape[0] > x.shape[1] else x.T).astype(solved_in(x.dtype))))
    return _real(each_matrix("svdvals", x, functools.partial(np.linalg.svd, compute_uv=False), ((inner,),), 5)[0])


def solve(x1: Array, x2: Array, /) -> Array:
    """x with `x1 @ x = x2`, for a vector or the columns of matrices."""
    a, b = asarray(x1), asarray(x2)
    n = square_of(a)
    vector = b.ndim == 1
    b = b[:, None] if vector else b
    if b.shape[-2] != n:
        raise InputError(f"solve has {n} equations and right sides of length {b.shape[-2]}")
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    element = np.result_type(solved_in(a.dtype), solved_in(b.dtype))
    columns = b.shape[-1]
    if a.ndim == b.ndim == 2 and _is_large(a, 4 + 4):
        parts = large.solve_columns(large.factor(a.astype(element)), b.astype(element))
        found = concat(parts, axis=1) if parts else b.astype(element)
        return squeeze(found, axis=-1) if vector else found
    both = concat(
        [broadcast_to(a.astype(element), (*lead, n, n)), broadcast_to(b.astype(element), (*lead, n, columns))], axis=-1
    )
    found = each_matrix("solve", both, functools.partial(_solved, n=n), ((n, columns),), 4)[0]
    return squeeze(found, axis=-1) if vector else found


def _solved(block: Block, n: int) -> Block:
    return np.linalg.solve(block[..., :n], block[..., n:])


def lstsq(x1: Array, x2: Any, /, rcond: float | None = None) -> tuple[Array, Array, Array, Array]:
    """(x with the smallest `|x1 @ x - x2|`, the squares of what is left, the rank, the singular values), as NumPy's. The rank is
    found at the call."""
    a, b = asarray(x1), asarray(x2)
    rows, columns = matrix_of(a)
    if a.ndim != 2 or b.ndim not in (1, 2) or b.shape[0] != rows:
        raise InputError(f"lstsq takes a matrix and right sides of its {rows} rows, not {a.shape} and {b.shape}")
    u, s, vh = svd(a.astype(np.result_type(solved_in(a.dtype), np.float64)), full_matrices=False)
    limit = max(rows, columns) * float(np.finfo(s.dtype).eps) if rcond is None else rcond
    kept = s > limit * s.max() if s.size else s > 0
    scale = where(kept, 1 / where(kept, s, 1.0), 0.0)
    right = b[:, None] if b.ndim == 1 else b
    found = matmul(_adjoint(vh), scale[:, None] * matmul(_adjoint(u), right))
    rank = kept.sum()
    full = rows > columns and int(rank) == columns
    left = right - matmul(a, found)
    residuals = (abs(left) ** 2).sum(axis=0) if full else zeros((0,), dtype=s.dtype)
    return (found[:, 0] if b.ndim == 1 else found), residuals, rank.astype(np.int32), s


def svd_lowrank(x: Array, rank: int, /, *, oversampling: int = 10, iterations: int = 2, seed: int = 0) -> SVDResult:
    """The largest `rank` singular values and their vectors, by random projection (Halko, Martinsson and Tropp, 2011).

    The matrix is read 2 + 2 * `iterations` times. The error `|x - u s vh|` is expected to be at most
    `(1 + 4 * sqrt(2 * min(rows, columns) / (rank - 1))) ** (1 / (2 * iterations + 1))` times the next singular value.
    """
    rows, columns = matrix_of(x)
    if x.ndim != 2 or not 1 <= rank <= min(rows, columns):
        raise InputError(f"a matrix of {rows} rows and {columns} columns has no first {rank} singular values")
    element = solved_in(x.dtype)
    wide = min(rank + oversampling, min(rows, columns))
    x = x.astype(element)
    draw = default_rng(seed).normal(size=(columns, wide)).astype(element)
    basis = qr(matmul(x, draw)).Q
    for _ in range(iterations):
        other = qr(matmul(_adjoint(x), basis)).Q
        basis = qr(matmul(x, other)).Q
    u, s, vh = svd(matmul(_adjoint(basis), x), full_matrices=False)
    return SVDResult(matmul(basis, u[:, :rank]), s[:rank], vh[:rank])


# tall matrices, block by block of their rows


def _is_tall(x: Array) -> bool:
    """True for one long matrix of few columns that is not small."""
    return (
        x.ndim == 2 and x.shape[0] >= 4 * x.shape[1] > 0 and x.nbytes > current().made_now and x.nbytes > _tall_limit()
    )


def _tall_limit() -> int:
    """Bytes of a tall matrix that LAPACK takes whole: it and NumPy hold a score of copies of a matrix of float32."""
    return min(current().tall_matrix, (resolve_budget(None).host or 0) // 32)


def _row_blocks(x: Array) -> Array:
    """A tall matrix as a stack of shorter ones, with rows of zeros at its end."""
    rows, columns = x.shape
    height = max(4 * columns, _tall_limit() // 4 // (columns * x.dtype.itemsize))
    number = -(-rows // height)
    return pad(x, ((0, number * height - rows), (0, 0))).reshape((number, height, columns))


def _tall_r(x: Array) -> Array:
    """The triangular factor of a tall matrix: of the triangles of its blocks, and so on."""
    if not _is_tall(x):
        return each_matrix("qr r", x, _triangle, ((min(x.shape), x.shape[1]),), 6)[0]
    return _tall_r(_triangles(_row_blocks(x)).reshape((-1, x.shape[1])))


def _triangles(blocks: Array) -> Array:
    """The triangular factors of blocks of a tall matrix."""
    return each_matrix("qr r", blocks, _triangle, ((blocks.shape[2],) * 2,), 2.25)[0]


def _triangle(block: Block) -> Block:
    found: Any = np.linalg.qr(block, mode="r")
    return np.asarray(found)


def _tall_qr(x: Array, element: np.dtype[Any]) -> QRResult:
    """QR of a tall matrix (Demmel, Grigori, Hoemmen and Langou, 2012): the blocks' own, then that of their triangles, in double
    precision. Where the result is in single, the matrix over its triangular factor is orthogonal enough, unless the factor is
    nearly singular; that takes a sixth of the time of the blocks' own factors."""
    rows, columns = x.shape
    blocks = _row_blocks(x)
    number, height, _ = blocks.shape
    second, r = qr(_triangles(blocks).reshape((-1, columns)))
    parts = [blocks, second.reshape((number, columns, columns))]
    if element.itemsize < x.dtype.itemsize:
        inverse = each_matrix("inverse r", r, functools.partial(_inverse, element=element), ((columns, columns),), 4)[0]
        parts.append(broadcast_to(inverse, (number, columns, columns)))
    work = functools.partial(_tall_q, height=height)
    q = each_matrix("qr q", concat(parts, axis=1), work, ((height, columns),), 4.25, element)[0]
    return QRResult(q.reshape((number * height, columns))[:rows], r.astype(element))


def _inverse(triangle: Block, element: np.dtype[Any]) -> Block:
    """The inverse of a triangular factor; zeros where what is multiplied by it would not be orthogonal to the last digits but
    three of this dtype."""
    found = np.zeros_like(triangle)
    if not (triangle.diagonal(axis1=-2, axis2=-1) == 0).any():
        made = np.linalg.inv(triangle)
        condition = np.linalg.norm(made, axis=(-2, -1)) * np.linalg.norm(triangle, axis=(-2, -1))
        if (condition * np.finfo(triangle.dtype).eps < np.finfo(element).eps / 8).all():
            found = made
    return found


def _tall_q(block: Block, height: int) -> Block:
    columns = block.shape[-1]
    inverse = block[..., height + columns :, :]
    if inverse.any():
        return block[..., :height, :] @ inverse
    found: Block = np.linalg.qr(block[..., :height, :])[0] @ block[..., height : height + columns, :]
    return found


# square matrices larger than the budget


def _is_large(x: Array, copies: float) -> bool:
    """True for one matrix of which LAPACK and its copies do not fit into the current budget."""
    if x.ndim != 2 or x.nbytes <= current().made_now:
        return False
    worked = x.size * np.result_type(solved_in(x.dtype), np.float64).itemsize
    return copies * worked + _BLAS > (resolve_budget(None).host or 0)


_BLAS = 4 << 20
"""Bytes that BLAS and LAPACK take for themselves, nearly."""


def _large_cholesky(x: Array, upper: bool) -> Array:
    element = solved_in(x.dtype)
    x = _adjoint(x) if upper else x
    panels = large.cholesky_panels(x.astype(element))
    parts = [pad(part, ((x.shape[0] - part.shape[0], 0), (0, 0))) for part in panels]
    found = tril(concat(parts, axis=1))
    return _adjoint(found) if upper else found


def _real(x: Array) -> Array:
    """Numbers that are real, whatever they were carried in."""
    return real(x) if x.dtype.kind == "c" else x


def _adjoint(x: Array) -> Array:
    return matrix_transpose(conj(x))


def _limits(x: Array, values: Array, rtol: Any) -> Array:
    """What singular values have to be above; `rtol` may be a number for each matrix."""
    if not values.shape[-1]:
        return values
    if rtol is None:
        element = x.dtype if x.dtype.kind in "fc" else np.dtype(np.float64)
        rtol = max(matrix_of(x)) * float(np.finfo(element).eps)
    largest = values.max(axis=-1, keepdims=True)
    if isinstance(rtol, int | float):
        return largest * rtol
    return largest * asarray(rtol)[..., None]
