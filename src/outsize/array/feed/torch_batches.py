"""Batches of a data source as PyTorch's loader wants them; imported only where torch is used.

The loader's workers each take a share of the stretches of rows, and of the budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from outsize.array.feed.source import Batch, DataSource


class TorchBatches(IterableDataset):  # type: ignore[misc]
    """Whole batches: give it to `DataLoader(..., batch_size=None)`. Call `set_epoch` for another shuffle."""

    def __init__(self, source: DataSource, *, shard: tuple[int, int], **options: Any) -> None:
        self.source, self._shard, self._options = source, shard, options
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Shuffle differently from now on; the same epoch and seed give the same order."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        index, shares = self._shard
        source = self.source.with_budget(self.source.budget // count)
        for batch in source.batches(epoch=self._epoch, shard=(index * count + number, shares * count), **self._options):
            yield _to_torch(batch)


def _to_torch(batch: Batch) -> Any:
    if isinstance(batch, tuple):
        return tuple(_to_torch(part) for part in batch)
    return torch.from_numpy(np.ascontiguousarray(batch))
