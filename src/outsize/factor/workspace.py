"""The memory in which a region is rebuilt: one buffer, handed out from its front.

In: a buffer, or none. Out: blocks inside it. Without a buffer nothing is computed: the same lines that rebuild a region then
count what that takes, of the buffer and of BLAS.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from outsize.array.kernels.blas import NOTHING, packing, strip_rows
from outsize.array.store.base import Block, Buffer, block_in, round_up


class Workspace:
    """Memory of one rebuild; dry where `buffer` is None."""

    def __init__(self, dtype: np.dtype[Any], buffer: Buffer | None = None) -> None:
        self.dtype, self.buffer = dtype, buffer
        self.used = 0
        self.packing = NOTHING
        """What BLAS takes for its own buffers."""
        self.operations = 0

    @property
    def dry(self) -> bool:
        """True where it only counts."""
        return self.buffer is None

    def array(self, shape: tuple[int, ...]) -> Block:
        """An uninitialised block."""
        start, size = self.used, math.prod(shape) * self.dtype.itemsize
        self.used += round_up(size, 64)
        if self.buffer is None:
            return np.broadcast_to(np.zeros((), self.dtype), shape)
        return block_in(self.buffer[start : start + size], shape, self.dtype)

    def copy(self, array: Block) -> Block:
        made = self.array(array.shape)
        if not self.dry:
            np.copyto(made, array)
        return made

    def fill(self, shape: tuple[int, ...], value: float) -> Block:
        made = self.array(shape)
        if not self.dry:
            made[...] = value
        return made

    def scale(self, a: Block, b: Block) -> Block:
        """a * b, broadcast."""
        made = self.array(np.broadcast_shapes(a.shape, b.shape))
        self.operations += made.size
        if not self.dry:
            np.multiply(a, b, out=made)
        return made

    def multiply(self, a: Block, b: Block) -> Block:
        """a @ b, of matrices or of stacks of them; rows are handed to BLAS in strips, so that it copies little at once."""
        rows, depth, columns = a.shape[-2], a.shape[-1], b.shape[-1]
        made = self.array((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), rows, columns))
        self.packing = self.packing.join(packing(rows, columns, depth, self.dtype))
        self.operations += made.size * depth
        if not self.dry:
            step = strip_rows(depth, self.dtype.itemsize)
            for row in range(0, rows, step):
                np.matmul(a[..., row : row + step, :], b, out=made[..., row : row + step, :])
        return made
