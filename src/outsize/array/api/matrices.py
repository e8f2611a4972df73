"""Functions of whole matrices, which lie in the last two axes of an array.

In: an array and a function of LAPACK's, through NumPy. Out: lazy arrays of its results, for stacks of any length.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from outsize.array.api.lanes import in_lanes
from outsize.array.api.lazy import Array
from outsize.array.graph import build as make
from outsize.array.kernels.blas import packing
from outsize.array.store.base import Block
from outsize.core.errors import InputError


def matrix_of(x: Array) -> tuple[int, int]:
    """Rows and columns."""
    if not isinstance(x, Array):
        raise InputError(f"linear algebra takes lazy arrays, not {type(x).__name__}: give outsize.array.asarray(x)")
    if x.ndim < 2:
        raise InputError(f"an array of {x.ndim} dimensions holds no matrices: two are needed, rows and columns")
    return x.shape[-2], x.shape[-1]


def square_of(x: Array) -> int:
    """Rows of square matrices."""
    rows, columns = matrix_of(x)
    if rows != columns:
        raise InputError(f"matrices of {rows} rows and {columns} columns are not square")
    return rows


def solved_in(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which LAPACK works on elements of this one."""
    if dtype.kind not in "biufc":
        raise InputError(f"linear algebra takes numbers and not {dtype}")
    found: np.dtype[Any] = np.linalg.inv(np.eye(1, dtype=dtype)).dtype
    return found


def each_matrix(
    name: str, x: Array, function: Callable[[Block], Any], cores: Sequence[tuple[int, ...]], memory: float,
    element: np.dtype[Any] | None = None,
) -> tuple[Array, ...]:  # fmt: skip
    """function(matrices) -> one or several results; `cores` are their shapes for one matrix, `element` is their dtype.

    A matrix is a lane of its elements, and so are its results, one after another: they are made once, whoever asks.
    """
    rows, columns = matrix_of(x)
    lanes = (*x.shape[:-2], rows * columns)
    node = (
        x.reshape(lanes).node if rows * columns else make.fill((*lanes[:-1], 1), 0, x.dtype)
    )  # memory is counted by input
    worked = np.result_type(solved_in(x.dtype), np.float64)  # NumPy widens every matrix that it gives to LAPACK
    element = element or solved_in(x.dtype)
    sizes = [math.prod(core) for core in cores]
    work = functools.partial(
        _of_matrices, name=name.split()[0], function=function, shape=(rows, columns), sizes=sizes, element=element
    )
    wide = worked.itemsize / x.dtype.itemsize
    longer, shorter = max(rows, columns), min(rows, columns)
    grown = (memory + 2 * sum(sizes) / max(1, rows * columns)) * wide
    packed = Array(
        in_lanes(
            node, node.ndim - 1, work, name=f"{name} {rows}x{columns}", length=sum(sizes), dtype=element,
            memory=grown, packing=packing(longer, longer if sum(sizes) > longer * shorter else shorter, shorter, worked),
        )
    )  # fmt: skip
    ends = np.cumsum(sizes).tolist()
    return tuple(
        packed[..., end - size : end].reshape((*x.shape[:-2], *core))
        for end, size, core in zip(ends, sizes, cores, strict=True)
    )


def _of_matrices(
    block: Block, axis: int, name: str, function: Callable[[Block], Any], shape: tuple[int, int], sizes: list[int],
    element: np.dtype[Any],
) -> Block:  # fmt: skip
    """The results of a function of the matrices that lie in lanes, one after another in lanes."""
    lanes = block.shape[:-1]
    try:
        made = function(block[..., : math.prod(shape)].reshape((*lanes, *shape)))
    except np.linalg.LinAlgError as error:
        raise InputError(f"{name} of one of the matrices failed: {error}") from None
    parts = made if isinstance(made, tuple) else (made,)
    flat = [np.asarray(part).reshape((*lanes, size)) for part, size in zip(parts, sizes, strict=True)]
    found: Block = (np.concatenate(flat, axis=-1) if len(flat) > 1 else flat[0]).astype(element, copy=False)
    return found
