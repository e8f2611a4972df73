"""Products and norms: all end in one matrix product, or in one reduction."""

from __future__ import annotations

import builtins
import math
import string
from typing import Any

import numpy as np

from outsize.array.api.lazy import Array, apply, as_node
from outsize.array.functions.elementwise import asarray
from outsize.array.functions.manipulation import broadcast_arrays, concat, permute_dims
from outsize.array.graph import build as make
from outsize.array.graph.elementwise import operation
from outsize.core.errors import InputError

__all__ = ["cov", "dot", "einsum", "matmul", "norm", "outer", "tensordot", "vecdot", "vector_norm"]


_ALPHABET = string.ascii_letters


def matmul(x1: Any, x2: Any, /) -> Array:
    """x1 @ x2."""
    return Array(make.matmul(as_node(x1), as_node(x2)))


def tensordot(x1: Any, x2: Any, /, *, axes: Any = 2) -> Array:
    """Sum over pairs of axes."""
    a, b = as_node(x1), as_node(x2)
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
        raise InputError(f"tensordot cannot pair axes={axes!r} of arrays with {a.ndim} and {b.ndim} dimensions")
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
    """Einstein's summation of one or two arrays; more are taken two at a time from the left. A letter twice in a term is a
    diagonal, `...` stands for the axes that are not named."""
    if not isinstance(subscripts, str):
        raise InputError(f"einsum begins with its letters, such as 'ij,jk->ik', not with {type(subscripts).__name__}")
    arrays = [asarray(o) for o in operands]
    labels, output = _letters(subscripts, arrays)
    pairs = [_diagonals(term, array) for term, array in zip(labels, arrays, strict=True)]
    lengths: dict[str, int] = {}
    for term, array in pairs:
        for letter, length in zip(term, array.shape, strict=True):
            if lengths.setdefault(letter, length) == 1:
                lengths[letter] = length
    pairs = [_dropped(term, array, lengths) for term, array in pairs]
    term, result = pairs[0]
    for position in range(1, len(pairs)):
        later = {*"".join(other for other, _ in pairs[position + 1 :]), *output}
        term, result = _einsum_pair(term, result, *pairs[position], later)
    term, result = _only(term, result, set(output))
    return permute_dims(result, [term.index(letter) for letter in output]) if term else result


def _letters(subscripts: str, arrays: list[Array]) -> tuple[list[str], str]:
    """(the letters of each array's axes, those of the result's), with letters for `...`."""
    inputs, arrow, output = subscripts.replace(" ", "").partition("->")
    labels = inputs.split(",")
    if len(labels) != len(arrays):
        raise InputError(f"einsum {subscripts!r} names {len(labels)} arrays, and {len(arrays)} are given")
    extra = [array.ndim - len(term.replace("...", "")) for term, array in zip(labels, arrays, strict=True)]
    for term, array, more in zip(labels, arrays, extra, strict=True):
        if more < 0 or (more and "..." not in term) or "." in term.replace("...", "", 1):
            raise InputError(f"einsum {subscripts!r}: {term!r} does not name the {array.ndim} axes of its array")
    free = [letter for letter in _ALPHABET if letter not in subscripts]
    most = builtins.max((more for term, more in zip(labels, extra, strict=True) if "..." in term), default=0)
    dots = "".join(free[:most])
    labels = [term.replace("...", dots[most - more :]) for term, more in zip(labels, extra, strict=True)]
    joined = "".join(labels)
    if not arrow:
        output = dots + "".join(sorted(c for c in set(joined) - set(dots) if joined.count(c) == 1))
    else:
        output = output.replace("...", dots)
    if set(output) - set(joined) or len(set(output)) != len(output):
        raise InputError(f"einsum {subscripts!r}: the result has a letter that no array has, or one twice")
    return labels, output


def _diagonals(term: str, array: Array) -> tuple[str, Array]:
    """Of axes with the same letter, their diagonal."""
    for letter in sorted(set(term)):
        while term.count(letter) > 1:
            one, two = [place for place, other in enumerate(term) if other == letter][:2]
            if array.shape[one] != array.shape[two]:
                raise InputError(f"einsum: {letter!r} names axes of lengths {array.shape[one]} and {array.shape[two]}")
            rest = [place for place in range(array.ndim) if place not in (one, two)]
            length = array.shape[one]
            flat = permute_dims(array, [*rest, one, two]).reshape((*(array.shape[a] for a in rest), length * length))
            array = flat[..., :: length + 1]
            term = "".join(term[place] for place in rest) + letter
    return term, array


def _dropped(term: str, array: Array, lengths: dict[str, int]) -> tuple[str, Array]:
    """Without axes of length 1 that are longer elsewhere; those broadcast."""
    for letter, length in zip(term, array.shape, strict=True):
        if length not in (1, lengths[letter]):
            raise InputError(f"einsum: {letter!r} is {length} long in one array and {lengths[letter]} in another")
    short = tuple(place for place, letter in enumerate(term) if array.shape[place] == 1 != lengths[letter])
    key = tuple(0 if place in short else slice(None) for place in range(array.ndim))
    return "".join(letter for place, letter in enumerate(term) if place not in short), array[key] if short else array


def _only(term: str, array: Array, letters: set[str]) -> tuple[str, Array]:
    """The array with its other letters summed over."""
    lonely = tuple(place for place, letter in enumerate(term) if letter not in letters)
    if lonely:
        array = array.sum(lonely).astype(array.dtype)
    return "".join(letter for letter in term if letter in letters), array


def _einsum_pair(a_term: str, a: Array, b_term: str, b: Array, keep: set[str]) -> tuple[str, Array]:
    (a_term, a), (b_term, b) = _only(a_term, a, {*b_term, *keep}), _only(b_term, b, {*a_term, *keep})
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


def cov(
    m: Any, y: Any = None, *, rowvar: bool = True, bias: bool = False, ddof: int | None = None, dtype: Any = None
) -> Array:
    """Covariance of variables in rows (or, with rowvar=False, columns): one pass for the means, one product. A single variable
    has a variance, without dimensions."""
    given = [asarray(part) for part in (m, y) if part is not None]
    element = np.dtype(dtype) if dtype is not None else np.result_type(*(part.dtype for part in given), np.float64)
    rows = []
    for part in given:
        if part.ndim > 2:
            raise InputError(f"cov takes variables in rows and samples in columns, not {part.ndim} dimensions")
        table = part.astype(element).reshape((1, -1)) if part.ndim < 2 else part.astype(element)
        rows.append(table if rowvar or part.ndim < 2 else table.T)
    x = concat(rows, axis=0)
    if not x.shape[0]:
        return asarray(np.zeros((0, 0), element))
    taken = (0 if bias else 1) if ddof is None else ddof
    if x.shape[1] - taken <= 0:  # as NumPy's: nothing to divide by
        return asarray(np.squeeze(np.full((x.shape[0],) * 2, np.nan, element)))
    centred = x - x.mean(axis=1, keepdims=True)
    other = apply(operation(np.conjugate), centred).T if x.dtype.kind == "c" else centred.T
    found = matmul(centred, other) / (x.shape[1] - taken)
    return found[0, 0] if x.shape[0] == 1 else found


def vector_norm(x: Array, /, *, axis: Any = None, keepdims: bool = False, ord: float = 2) -> Array:
    """The norm of vectors along axes, left out of the whole array as one vector. Whole numbers are float64 before they are
    squared."""
    x = x if x.dtype.kind in "fc" else x.astype(np.float64)
    size = apply(operation(np.absolute), x)
    axes = make.axis_tuple(axis, x.ndim)
    if ord == math.inf and 0 in (x.shape[a] for a in axes):  # the norm of nothing is 0
        return size.sum(axis, keepdims=keepdims)
    if ord in (math.inf, -math.inf):
        return (size.max if ord > 0 else size.min)(axis, keepdims=keepdims)
    if ord == 0:
        return (x != 0).sum(axis, keepdims=keepdims).astype(size.dtype)
    if ord == 1:
        return size.sum(axis, keepdims=keepdims)
    if ord == 2:
        return apply(operation(np.sqrt), (size * size).sum(axis, keepdims=keepdims))
    return ((size**ord).sum(axis, keepdims=keepdims) ** (1 / ord)).astype(size.dtype)


norm = vector_norm
