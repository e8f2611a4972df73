"""Workers of a real `DataLoader` that read a list of Python objects copy it page by page; an array is not copied."""

import gc

import numpy as np
import pytest

from outsize.core.outcomes.recording import HostSample, ProcessSample, Sample
from outsize.monitor.leaks.worker_data import find_worker_data
from outsize.monitor.processes.tree import read_private, read_process
from outsize.monitor.tree_growth import TreeGrowth

torch = pytest.importorskip("torch")
COUNT, PARTS = 400_000, 16


class Words(torch.utils.data.Dataset):
    """An item reads a sixteenth of what there is."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return PARTS

    def __getitem__(self, part):
        total = 0
        for word in self.items[part * COUNT // PARTS : (part + 1) * COUNT // PARTS]:
            total += len(str(word))
        return total


def follow(dataset):
    """What is said while one worker reads it all; its bytes are read after each batch, whatever time that takes."""
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=1, num_workers=1, prefetch_factor=1, multiprocessing_context="fork"
    )
    growth, found = TreeGrowth(find_worker_data), []
    gc.collect()
    gc.disable()  # a collection in the worker would copy everything at once
    try:
        batches = iter(loader)
        (worker,) = (process.pid for process in batches._workers)
        for number, _ in enumerate(batches):
            if number == PARTS - 1:  # the worker may have ended
                break
            anonymous = read_process(worker).anonymous
            one = ProcessSample(pid=worker, name="pt_data_worker", anonymous=anonymous, uss=read_private(worker))
            root = ProcessSample(pid=1, name="python", anonymous=0)
            sample = Sample(time=float(number), host=HostSample(rss=0, anonymous=0, shared=0), processes=(root, one))
            found += list(growth.add(sample))
        del batches
    finally:
        gc.enable()
    return found


def test_a_list_of_objects_is_copied_and_named_with_the_line_that_reads_it():
    found = follow(Words([f"a sentence that is number {number} of many others" for number in range(COUNT)]))
    assert [(one.kind, one.name) for one in found] == [("workers", "Words.items")]
    line = Words.__getitem__.__code__.co_firstlineno + 2
    assert found[0].where.endswith(f"test_worker_copies.py:{line}")
    assert "a list of 400,000 objects, is copied page by page into a forked worker" in found[0].text
    assert "NumPy array" in found[0].advice and "shared_memory" in found[0].advice


def test_an_array_is_not_copied():
    assert follow(Words(np.arange(COUNT * 8))) == []
