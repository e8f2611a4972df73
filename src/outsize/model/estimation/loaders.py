"""What a DataLoader takes on the host: its workers, the batches they keep ready, and pinned copies.

In: a `torch.utils.data.DataLoader`. Out: a `Loading`. The size of a batch comes from batches of one and of two samples
of the user's dataset, made by the loader's own function. Workers x prefetch factor batches are in preparation at any
time, in shared memory until they are pinned. Each worker also holds the samples of the batch it works on.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outsize.core.errors import InputError
from outsize.core.footprint import Loading

CODE = """
import sys, torch
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return torch.zeros(8)

def private(pid):
    keys = ("Private_Clean:", "Private_Dirty:")
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith(keys))

if __name__ == "__main__":
    loader = DataLoader(Rows(), batch_size=4, num_workers=1, persistent_workers=True, multiprocessing_context=sys.argv[1])
    for _ in loader:
        pass
    print(private(loader._iterator._workers[0].pid))
"""


def of(loader: Any) -> Loading:
    """What a loader holds while it prepares batches for the step."""
    dataset, collate = getattr(loader, "dataset", None), getattr(loader, "collate_fn", None)
    if dataset is None or collate is None:
        raise InputError(f"loader= is a torch.utils.data.DataLoader, not {type(loader).__name__}")
    one, two, sample = _batches(loader)
    count = loader.batch_size or getattr(getattr(loader, "batch_sampler", None), "batch_size", None) or 1
    tensors = [first + (second - first) * (count - 1) for first, second in zip(one, two, strict=True)]
    batch, workers = sum(tensors), loader.num_workers
    ahead = workers * (loader.prefetch_factor or 2) if workers else 1
    pinned = loader.pin_memory
    return Loading(
        workers=workers,
        batch=batch,
        ahead=ahead,
        shared=batch * (ahead if workers and not pinned else workers),
        pinned=sum(_power(size) for size in tensors) * (ahead + 1) if pinned else 0,
        making=max(1, workers) * sample * count,
        processes=workers * _worker(_context(loader)) if workers else 0,
    )


def _batches(loader: Any) -> tuple[list[int], list[int], int]:
    """Bytes of each tensor in a batch of one and of two samples, and of a sample."""
    try:
        sample = next(iter(loader.dataset)) if _streams(loader.dataset) else loader.dataset[0]
        if loader.batch_size is None:
            sizes = list(_sizes(sample))
            return sizes, sizes, sum(sizes)
        one, two = (list(_sizes(loader.collate_fn([sample] * count))) for count in (1, 2))
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else ""
        raise InputError(f"the loader's dataset raised {type(error).__name__} for its first sample: {text}") from error
    if len(one) != len(two):
        raise InputError(f"the loader's batches of one and two samples have {len(one)} and {len(two)} tensors")
    return one, two, sum(_sizes(sample))


def _streams(dataset: Any) -> bool:
    from torch.utils.data import IterableDataset

    return isinstance(dataset, IterableDataset)


def _sizes(value: Any) -> Iterator[int]:
    """Bytes of every tensor, array and block of bytes inside a value."""
    if hasattr(value, "nbytes"):
        yield int(value.nbytes)
    elif isinstance(value, bytes | bytearray):
        yield len(value)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _sizes(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _sizes(item)


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length() if size > 0 else 0


def _context(loader: Any) -> str:
    """How the loader starts its workers: `fork`, `spawn` or `forkserver`."""
    context = loader.multiprocessing_context
    found = multiprocessing.get_start_method() if context is None else context.get_start_method()
    return str(found)


@functools.cache
def _worker(context: str) -> int:
    """Private bytes of a worker that does almost nothing, measured once in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "rows.py"
        script.write_text(CODE)
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        words = [sys.executable, str(script), context]
        answer = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    return int(answer.stdout.split()[-1])
