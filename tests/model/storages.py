"""Counts the storages of a real step at the dispatcher, as a plan counts them: a second account beside the allocator's."""

import contextlib
import itertools

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outsize.model.fitting.move import evicted
from outsize.model.tracing.records.ledger import Ledger


class Storages(TorchDispatchMode):
    """One recording: `with storages.counting(): step()`."""

    def __init__(self):
        super().__init__()
        self.ledger = Ledger()
        self.marks = []

    def hold(self, tensors):
        """What is there before the step begins."""
        for tensor in tensors:
            self.ledger.add(tensor, "cpu", "given")

    def phase(self, name):
        """A phase begins."""
        self.marks.append((len(self.ledger.events), name))

    @contextlib.contextmanager
    def counting(self):
        """Count while the block runs."""
        resized = lambda tensor: self.ledger.add(tensor, "cpu", "resize")  # noqa: E731
        evicted.listeners.append(resized)
        try:
            with self:
                yield
        finally:
            evicted.listeners.remove(resized)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.ledger.add(leaf, "cpu", str(func))
        return out

    def peaks(self):
        """Peak of each phase in bytes, as they came."""
        course = list(itertools.accumulate(held.bytes if alloc else -held.bytes for alloc, held in self.ledger.events))
        found = {}
        for (start, name), (stop, _) in itertools.pairwise([*self.marks, (len(course), "")]):
            found[name] = max(found.get(name, 0), max(course[max(0, start - 1) : stop], default=0))
        return found
