"""Copying blocks, also across a transposition, without leaving the cache.

NumPy copies a transposed block along the target's rows, touching a new cache line of the source for every element: 0.8
GB/s on the 2-core machine this was measured on. In strips of 16 rows it does 3.8, and OpenBLAS's `omatcopy`, which
NumPy's wheels carry, 13. So that is used for floats where it is found (it multiplies by one, which a signalling NaN
does not survive unchanged: integers take the strips).
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np

from outsize.array.kernels.blas import routine
from outsize.array.store.base import Block

_SMALL = 1 << 14
"""Elements below which a plain copy is as good."""
_STRIP = 16

_OMATCOPY = {"f": "cblas_somatcopy", "d": "cblas_domatcopy"}
"""dtype character -> routine that transposes it."""


def copy_block(target: Block, block: Block) -> None:
    """target[...] = block."""
    if target.size == 0:
        return
    if target.ndim < 2 or target.size < _SMALL or target.shape != block.shape:
        np.copyto(target, block, casting="unsafe")
        return
    fast_in, fast_out = _fastest(block), _fastest(target)
    if fast_in is None or fast_out is None or fast_in == fast_out:
        np.copyto(target, block, casting="unsafe")
        return
    others = [axis for axis in range(target.ndim) if axis not in (fast_in, fast_out)]
    order = (*others, fast_in, fast_out)
    source, sink = block.transpose(order), target.transpose(order)
    for index in itertools.product(*(range(length) for length in source.shape[:-2])):
        plane, into = source[index], sink[index]  # contiguous along axis 0, and along axis 1
        if target.dtype == block.dtype and _by_blas(into, plane):
            continue
        for start in range(0, plane.shape[1], _STRIP):
            np.copyto(into[:, start : start + _STRIP], plane[:, start : start + _STRIP], casting="unsafe")


def _fastest(block: Block) -> int | None:
    """The axis whose neighbours lie side by side; None where there is none (broadcast or strided)."""
    for axis, (length, stride) in enumerate(zip(block.shape, block.strides, strict=True)):
        if length > 1 and stride == block.itemsize:
            return axis
    return None


def _by_blas(target: Block, block: Block) -> bool:
    size = block.itemsize
    transpose = _routine(block.dtype.char) if block.dtype.isnative else None
    rows, columns = block.shape[1], block.shape[0]  # the source as a C-ordered matrix: its rows run along axis 1
    lead_in, lead_out = block.strides[1], target.strides[0]
    if transpose is None or lead_in < columns * size or lead_out < rows * size or lead_in % size or lead_out % size:
        return False
    row_major, transposed = 101, 112
    transpose(row_major, transposed, rows, columns, 1.0, block.ctypes.data, lead_in // size, target.ctypes.data,
              lead_out // size)  # fmt: skip
    return True


@functools.cache
def _routine(char: str) -> Any:
    return routine(_OMATCOPY, char, "ccnnrpnpn")
