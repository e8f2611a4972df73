"""The fibres of one mode in a chunk of data, as BLAS likes them: the columns of the mode's unfolding.

In: a block whose axes before and after the mode are each taken together. Where the mode is (nearly) the fastest axis, fibres
are the rows of one matrix; else they are the columns of a stack of matrices. No axis is turned that need not be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.array.kernels.blas import Packing, multiply_add, packing
from outsize.array.store.base import Block

_SHORT = 16
"""Fewer elements than this after the mode make matrices too small for BLAS: fibres become rows instead."""
_DOT = 1 << 16
"""Elements of one sum of products: its rounding stays below 1e-11 whatever the order of its additions."""


@dataclass(frozen=True, slots=True)
class Fibers:
    """Fibres in a block of double precision that may be overwritten."""

    data: Block
    """(fibres, length) or (before, length, after)."""

    @staticmethod
    def shape(chunk: tuple[int, ...], axis: int) -> tuple[int, ...]:
        """The shape of `data` for a chunk."""
        before, after = math.prod(chunk[:axis]), math.prod(chunk[axis + 1 :])
        return (before * after, chunk[axis]) if after < _SHORT else (before, chunk[axis], after)

    @staticmethod
    def lay(data: Block, chunk: tuple[int, ...], axis: int) -> Block:
        """`data` seen with the axes of the chunk, to be filled."""
        if data.ndim == 3:
            return data.reshape(chunk)
        others = (*chunk[:axis], *chunk[axis + 1 :])
        return np.moveaxis(data.reshape(*others, chunk[axis]), -1, axis)

    @property
    def columns(self) -> int:
        return int(self.data.size // max(1, self.data.shape[1]))

    def norm2(self) -> float:
        return sum_squares(self.data)

    def gram(self, total: Block) -> None:
        """total += X X^H."""
        if self.data.ndim == 2:
            total += self.data.T @ self.data.conj()
            return
        for plane in self.data:
            total += plane @ plane.conj().T

    def mix(self, weights: Block, total: Block) -> None:
        """total += X weights."""
        if self.data.ndim == 2:
            multiply_add(self.data.T, weights, total)
            return
        after = self.data.shape[2]
        for place, plane in enumerate(self.data):
            multiply_add(plane, weights[place * after : (place + 1) * after], total)

    def project(self, basis: Block, out: Block | None = None) -> Block:
        """B^H X, its axes as those of `data`."""
        if self.data.ndim == 2:
            return np.matmul(self.data, basis.conj(), out=out)
        return np.matmul(basis.conj().T, self.data, out=out)

    def subtract(self, basis: Block, found: Block) -> None:
        """X -= B found, in place."""
        if self.data.ndim == 2:
            multiply_add(found, -basis.T, self.data)
            return
        for plane, part in zip(self.data, found, strict=True):
            multiply_add(-basis, part, plane)


def sum_squares(array: Block) -> float:
    """Sum of squares of a contiguous array, in pieces whose own rounding is known; not by BLAS, whose threads would wait for
    each other at every piece."""
    flat = array.reshape(-1).view(np.float64)
    return math.fsum(
        float(np.einsum("i,i->", part, part)) for part in (flat[i : i + _DOT] for i in range(0, flat.size, _DOT))
    )


def product_packing(chunk: tuple[int, ...], axis: int, columns: int, dtype: np.dtype[Any]) -> Packing:
    """What BLAS takes for the products of a chunk with a matrix of so many columns, and for its Gram matrix."""
    shape = Fibers.shape(chunk, axis)
    length, fibers = chunk[axis], shape[0] if len(shape) == 2 else shape[2]
    found = packing(length, columns, fibers, dtype)
    for rows, cols, depth in ((fibers, columns, length), (columns, fibers, length), (length, fibers, columns)):
        found = found.join(packing(rows, cols, depth, dtype))
    return found
