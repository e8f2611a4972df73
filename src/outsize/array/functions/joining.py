"""Joining and splitting as NumPy names it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from outsize.array.api.lazy import Array
from outsize.array.functions.elementwise import asarray
from outsize.array.functions.manipulation import concat, flip, reshape, swapaxes
from outsize.array.graph import build as make
from outsize.core.errors import InputError

__all__ = [
    "append", "array_split", "atleast_1d", "atleast_2d", "atleast_3d", "column_stack", "copy", "dsplit", "dstack", "fliplr",
    "flipud", "hsplit", "hstack", "ravel", "rot90", "split", "vsplit", "vstack",
]  # fmt: skip


def copy(x: Any, order: str = "K", subok: bool = False) -> Array:
    """The array: nothing that is done to one changes another."""
    return Array(asarray(x).node)


def ravel(x: Any, order: str = "C") -> Array:
    """All elements in one axis."""
    if order not in ("C", "K", "A"):
        raise InputError(f"elements are in C order, not {order!r}: transpose the array first")
    return reshape(asarray(x), (-1,))


def append(x: Any, values: Any, axis: int | None = None) -> Array:
    """The array with values behind it."""
    return concat([asarray(x), asarray(values)], axis=axis)


def _at_least(ndim: int, x: Any) -> Array:
    array = asarray(x)
    if array.ndim >= ndim:
        return array
    if ndim == 3 and array.ndim == 2:
        return array[:, :, None]
    if ndim == 3 and array.ndim == 1:
        return array[None, :, None]
    return array[(None,) * (ndim - array.ndim)]


def _each(ndim: int, arrays: Sequence[Any]) -> Array | tuple[Array, ...]:
    found = tuple(_at_least(ndim, array) for array in arrays)
    return found[0] if len(found) == 1 else found


def atleast_1d(*arrays: Any) -> Array | tuple[Array, ...]:
    """With one axis or more."""
    return _each(1, arrays)


def atleast_2d(*arrays: Any) -> Array | tuple[Array, ...]:
    """With two axes or more; new ones come first."""
    return _each(2, arrays)


def atleast_3d(*arrays: Any) -> Array | tuple[Array, ...]:
    """With three axes or more."""
    return _each(3, arrays)


def vstack(arrays: Sequence[Any], *, dtype: Any = None) -> Array:
    """Rows below each other."""
    return _typed(concat([_at_least(2, array) for array in arrays], axis=0), dtype)


def hstack(arrays: Sequence[Any], *, dtype: Any = None) -> Array:
    """Columns beside each other; vectors one after another."""
    found = [_at_least(1, array) for array in arrays]
    return _typed(concat(found, axis=0 if found and found[0].ndim == 1 else 1), dtype)


def dstack(arrays: Sequence[Any]) -> Array:
    """Behind each other, along the third axis."""
    return concat([_at_least(3, array) for array in arrays], axis=2)


def column_stack(arrays: Sequence[Any]) -> Array:
    """Vectors as columns, beside matrices."""
    found = [asarray(array) for array in arrays]
    return concat([array if array.ndim > 1 else reshape(array, (-1, 1)) for array in found], axis=1)


def _typed(array: Array, dtype: Any) -> Array:
    return array if dtype is None else array.astype(dtype)


def array_split(x: Any, indices_or_sections: Any, axis: int = 0) -> list[Array]:
    """In so many parts, the first ones longer by one where that does not go evenly; or before each of these indices."""
    array = asarray(x)
    place = make.axis_index(axis, array.ndim)
    length = array.shape[place]
    if np.ndim(indices_or_sections):
        edges = [0, *(int(edge) for edge in indices_or_sections), length]
        ends = [slice(a, b) for a, b in itertools.pairwise(edges)]
        ends[-1] = slice(edges[-2], None)
    else:
        parts = make.whole("the number of parts", indices_or_sections)
        if parts <= 0:
            raise InputError(f"an axis is split in 1 part or more, not in {parts}")
        sizes = [length // parts + (part < length % parts) for part in range(parts)]
        starts = np.cumsum([0, *sizes]).tolist()
        ends = [slice(a, b) for a, b in itertools.pairwise(starts)]
    return [array[(slice(None),) * place + (part,)] for part in ends]


def split(x: Any, indices_or_sections: Any, axis: int = 0) -> list[Array]:
    """In so many equal parts, or before each of these indices."""
    array = asarray(x)
    if not np.ndim(indices_or_sections):
        length = array.shape[make.axis_index(axis, array.ndim)]
        parts = make.whole("the number of parts", indices_or_sections)
        if parts <= 0 or length % parts:
            raise InputError(f"{length} elements do not make {parts} equal parts: array_split makes some longer by one")
    return array_split(array, indices_or_sections, axis)


def hsplit(x: Any, indices_or_sections: Any) -> list[Array]:
    """Split along the second axis, a vector along its only one."""
    return split(x, indices_or_sections, 0 if asarray(x).ndim == 1 else 1)


def vsplit(x: Any, indices_or_sections: Any) -> list[Array]:
    """Split along the first axis of two or more."""
    if asarray(x).ndim < 2:
        raise InputError("vsplit needs two dimensions or more: use split")
    return split(x, indices_or_sections, 0)


def dsplit(x: Any, indices_or_sections: Any) -> list[Array]:
    """Split along the third axis."""
    if asarray(x).ndim < 3:
        raise InputError("dsplit needs three dimensions or more: use split")
    return split(x, indices_or_sections, 2)


def fliplr(x: Any) -> Array:
    """Reversed along the second axis."""
    return flip(asarray(x), axis=1)


def flipud(x: Any) -> Array:
    """Reversed along the first axis."""
    return flip(asarray(x), axis=0)


def rot90(x: Any, k: int = 1, axes: Any = (0, 1)) -> Array:
    """Turned by quarters, from the first axis towards the second."""
    array = asarray(x)
    one, two = (make.axis_index(axis, array.ndim) for axis in axes)
    if one == two:
        raise InputError(f"rot90 needs two different axes, not {tuple(axes)}")
    turns = k % 4
    if turns == 2:
        return flip(array, axis=(one, two))
    if turns == 1:
        return swapaxes(flip(array, axis=two), one, two)
    return flip(swapaxes(array, one, two), axis=two) if turns else array
