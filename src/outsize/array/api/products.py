"""Products and norms: all end in one matrix product, or in one reduction."""

from __future__ import annotations

import builtins
import math
from typing import Any

import numpy as np

from outsize.array.api.elementwise import asarray
from outsize.array.api.lazy import Array, _as_node, apply
from outsize.array.api.manipulation import broadcast_arrays, permute_dims
from outsize.array.graph import build as make
from outsize.array.graph.elementwise import operation
from outsize.core.errors import InputError

__all__ = ["cov", "dot", "einsum", "matmul", "norm", "outer", "tensordot", "vecdot", "vector_norm"]


def matmul(x1: Any, x2: Any, /) -> Array:
    """x1 @ x2."""
    return Array(make.matmul(_as_node(x1), _as_node(x2)))


def tensordot(x1: Any, x2: Any, /, *, axes: Any = 2) -> Array:
    """Sum over pairs of axes."""
    a, b = _as_node(x1), _as_node(x2)
    if isinstance(axes, int | np.integer):
        left, right = list(range(a.ndim - axes, a.ndim)), list(range(axes))
    else:
        left = [make.axis_index(i, a.ndim) for i in np.atleast_1d(axes[0])]
        right = [make.axis_index(i, b.ndim) for i in np.atleast_1d(axes[1])]
    if (
        len(left) != len(right)
        or len(set(left)) != len(left)
        or len(set(right)) != len(right)
        or min(left, default=0) < 0
    ):
        raise InputError(
            f"tensordot sums pairs of axes, and axes={axes!r} of {a.ndim} and {b.ndim} dimensions are none"
        )
    rows = [i for i in range(a.ndim) if i not in left]
    columns = [i for i in range(b.ndim) if i not in right]
    if not left:
        wide = make.insert_axes(a, range(a.ndim, a.ndim + b.ndim))
        return apply(operation(np.multiply), wide, b)
    return Array(make.contract(make.permute(a, rows + left), make.permute(b, right + columns), 0, len(left)))


def vecdot(x1: Any, x2: Any, /, *, axis: int = -1) -> Array:
    """Sum of products along an axis, the first conjugated."""
    lengths = [a.shape[make.axis_index(axis, a.ndim)] for a in (asarray(x1), asarray(x2))]
    if lengths[0] != lengths[1]:
        raise InputError(f"vecdot needs vectors of one length, not of {lengths[0]} and {lengths[1]}")
    first, second = broadcast_arrays(x1, x2)
    if first.dtype.kind == "c":
        first = apply(operation(np.conjugate), first)
    dtype = np.result_type(first.dtype, second.dtype)
    return (first * second).sum(axis).astype(dtype)


def dot(x1: Any, x2: Any) -> Array:
    """NumPy's dot: scalars, vectors and matrices."""
    a, b = asarray(x1), asarray(x2)
    if a.ndim == 0 or b.ndim == 0:
        return apply(operation(np.multiply), a, b)
    return tensordot(a, b, axes=((-1,), (-2 if b.ndim > 1 else -1,)))


def outer(x1: Any, x2: Any) -> Array:
    """Every product of two elements."""
    return apply(operation(np.multiply), asarray(x1).reshape(-1)[:, None], asarray(x2).reshape(-1)[None, :])


def einsum(subscripts: str, *operands: Any) -> Array:
    """Einstein's summation of one or two arrays (more are taken two at a time from the left), without repeated
    letters."""
    if not isinstance(subscripts, str):
        raise InputError(f"einsum begins with its letters, such as 'ij,jk->ik', not with {type(subscripts).__name__}")
    inputs, arrow, output = subscripts.replace(" ", "").partition("->")
    labels, arrays = inputs.split(","), [asarray(o) for o in operands]
    if "." in subscripts or len(labels) != len(arrays) or builtins.any(len(set(t)) != len(t) for t in labels):
        raise InputError(f"einsum {subscripts!r}: one term an array, each letter once in it, no '...'")
    for term, array in zip(labels, arrays, strict=True):
        if len(term) != array.ndim:
            raise InputError(f"einsum {subscripts!r}: {term!r} names {len(term)} axes of an array of {array.ndim}")
    if not arrow:
        joined = "".join(labels)
        output = "".join(sorted(c for c in set(joined) if joined.count(c) == 1))
    if set(output) - set(inputs) or len(set(output)) != len(output):
        raise InputError(f"einsum {subscripts!r}: {output!r} has a letter that no array has, or one twice")
    term, result = labels[0], arrays[0]
    for position in range(1, len(arrays)):
        later = set("".join(labels[position + 1 :]) + output)
        term, result = _einsum_pair(term, result, labels[position], arrays[position], later)
    extra = [i for i, letter in enumerate(term) if letter not in output]
    if extra:
        result = result.sum(tuple(extra)).astype(result.dtype)
        term = "".join(letter for letter in term if letter in output)
    return permute_dims(result, [term.index(letter) for letter in output]) if term else result


def _einsum_pair(a_term: str, a: Array, b_term: str, b: Array, keep: set[str]) -> tuple[str, Array]:
    for own, other in ((a_term, b_term), (b_term, a_term)):
        lonely = [i for i, letter in enumerate(own) if letter not in other and letter not in keep]
        if lonely and own is a_term:
            a, a_term = a.sum(tuple(lonely)).astype(a.dtype), "".join(c for i, c in enumerate(own) if i not in lonely)
        elif lonely:
            b, b_term = b.sum(tuple(lonely)).astype(b.dtype), "".join(c for i, c in enumerate(own) if i not in lonely)
    batch = [c for c in a_term if c in b_term and c in keep]
    summed = [c for c in a_term if c in b_term and c not in keep]
    rows = [c for c in a_term if c not in b_term]
    columns = [c for c in b_term if c not in a_term]
    left = make.permute(a.node, [a_term.index(c) for c in (*batch, *rows, *summed)])
    right = make.permute(b.node, [b_term.index(c) for c in (*batch, *summed, *columns)])
    if not summed:  # a plain product: line the axes up and multiply
        left = make.insert_axes(left, range(left.ndim, left.ndim + len(columns)))
        right = make.insert_axes(right, range(len(batch), len(batch) + len(rows)))
        return "".join((*batch, *rows, *columns)), apply(operation(np.multiply), left, right)
    return "".join((*batch, *rows, *columns)), Array(make.contract(left, right, len(batch), len(summed)))


def cov(m: Any, /, *, rowvar: bool = True, ddof: int = 1) -> Array:
    """Covariance of variables in rows (or, with rowvar=False, columns): one pass for the means, one product."""
    x = asarray(m).astype(np.result_type(asarray(m).dtype, np.float64))
    x = x if rowvar else x.T
    centred = x - x.mean(axis=1, keepdims=True)
    other = apply(operation(np.conjugate), centred).T if x.dtype.kind == "c" else centred.T
    return matmul(centred, other) / (x.shape[1] - ddof)


def vector_norm(x: Array, /, *, axis: Any = None, keepdims: bool = False, ord: float = 2) -> Array:
    """Norm of vectors; any order. Whole numbers are float64 before they are squared."""
    x = x if x.dtype.kind in "fc" else x.astype(np.float64)
    size = apply(operation(np.absolute), x)
    if ord == math.inf:
        return size.max(axis, keepdims=keepdims)
    if ord == -math.inf:
        return size.min(axis, keepdims=keepdims)
    if ord == 0:
        return (x != 0).sum(axis, keepdims=keepdims).astype(size.dtype)
    if ord == 1:
        return size.sum(axis, keepdims=keepdims)
    if ord == 2:
        return apply(operation(np.sqrt), (size * size).sum(axis, keepdims=keepdims))
    return (size**ord).sum(axis, keepdims=keepdims) ** (1 / ord)


norm = vector_norm
