"""Page-locked host memory that a device copies by itself, and tensors in it."""

from __future__ import annotations

import math
from typing import Any

import torch

from outsize.engine.pinned import Pinned, lock_memory


class Block:
    """One page-locked block and the tensors in it."""

    def __init__(self, size: int) -> None:
        self._memory: Pinned = lock_memory(size)
        self.bytes = self._memory.tensor()
        """All of it."""
        self.array = self._memory.array
        """All of it, for whoever fills it without torch."""

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """A tensor with a storage of its own, on this memory."""
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        array = self._memory.array[offset : offset + count * dtype.itemsize]
        return torch.frombuffer(array, dtype=dtype, count=count).view(shape)

    def unlock(self) -> None:
        """Ordinary memory from now on; no copy may be under way."""
        self._memory.close()
