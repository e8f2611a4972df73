"""CUDA streams in host memory: kernels run at once, copies on other streams as late as the waits that were said allow.

What a copy will fill is spoilt from the moment at which it might begin until it has run. A copy that was not told to follow
the kernels, or whose memory is let go before it ran, is a mistake, except where `record_stream` told the allocator: then the
memory lingers until the copy has run, which a ledger can be told.
"""

import contextlib
import random
import weakref

import torch
from torch.utils._python_dispatch import _disable_current_modes

from outsize.model.fitting.move import evicted


class Copy:
    def __init__(self, into, source):
        self.ends = [weakref.ref(tensor.untyped_storage()) for tensor in (into, source)]
        self.places = [(t.storage_offset(), t.numel(), t.data_ptr()) for t in (into, source)]
        self.told = [False, False]
        self.kept = None
        self.after = lambda: None

    def tell(self, tensor):
        """The allocator keeps this memory until the copy has ended."""
        storage = tensor.untyped_storage()
        for number, end in enumerate(self.ends):
            if end() is storage:
                self.told[number] = True
                if number == 1:
                    with _disable_current_modes():
                        self.kept = tensor.clone()

    def let_go(self, storage):
        """Number of bytes that linger, where a storage was emptied that this copy needs."""
        numbers = [number for number, end in enumerate(self.ends) if end() is storage]
        assert all(self.told[number] for number in numbers), "memory was let go while a copy still used it"
        return self.places[numbers[0]][1] if numbers else 0

    def run(self):
        into, source = (self._end(number) for number in (0, 1))
        if into is not None and (source is not None or self.kept is not None):
            into[:] = self.kept if self.kept is not None else source
        self.after()

    def _end(self, number):
        storage, (offset, size, address) = self.ends[number](), self.places[number]
        if storage is not None and storage.nbytes() >= offset + size:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage, offset, (size,), (1,))
            if flat.data_ptr() == address:
                return flat
        assert self.told[number], "memory was let go while a copy still used it"
        return None


class Streams:
    """The kernels' stream, which is the processor itself, and those of copies."""

    def __init__(self, seed, eager=0.3, ledger=None):
        self.sides = []
        self.random = random.Random(seed)
        self.eager = eager
        self.ledger = ledger
        self.copying = None
        self.pinned = set()
        self.both = 0
        """How often copies of two streams were on their way at once."""

    # the calls of torch.cuda that a mover makes

    def Stream(self, device=None):
        self.sides.append(Side(self))
        return self.sides[-1]

    def current_stream(self, device=None):
        return Main()

    @contextlib.contextmanager
    def stream(self, stream):
        self.copying = stream
        yield
        self.copying = None

    def copy(self, into, source):
        with _disable_current_modes():
            self.copying.copy(into, source)
        self.both += all(side.queue for side in self.sides)
        while any(side.queue for side in self.sides) and self.random.random() < self.eager:
            self.random.choice([side for side in self.sides if side.queue]).step()

    def emptied(self, tensor):
        storage = tensor.untyped_storage()
        for copy in [] if storage.nbytes() else [op for side in self.sides for op in side.queue if type(op) is Copy]:
            size = copy.let_go(storage)
            if size and self.ledger is not None:
                held = self.ledger.allocate(size, "cpu", "lingers")
                copy.after = lambda held=held: self.ledger.free(held)


class Main:
    def wait_event(self, event):
        event.reach()

    def record_event(self):
        """The kernels so far have run already."""
        return self


class Side:
    def __init__(self, streams):
        self.streams, self.queue, self.ran, self.follows = streams, [], 0, False

    def wait_event(self, mark):
        if type(mark) is Main:
            self.follows = True
        else:
            self.queue.append(mark)

    def record_event(self):
        return Mark(self)

    def copy(self, into, source):
        assert self.follows, "a copy began before the kernels that it must follow"
        self.follows = False
        waits = any(type(op) is Mark and not op.reached for op in self.queue)
        if not (waits and into.data_ptr() in self.streams.pinned):
            into.fill_(255)
        self.queue.append(Copy(into, source))

    def step(self):
        op = self.queue[0]
        with _disable_current_modes():
            op.reach() if type(op) is Mark else op.run()
        self.queue.pop(0)
        self.ran += 1

    def drain(self):
        while self.queue:
            self.step()


class Mark:
    def __init__(self, stream):
        self.side, self.number = stream, stream.ran + len(stream.queue)

    @property
    def reached(self):
        return self.side.ran >= self.number

    def reach(self):
        while not self.reached:
            self.side.step()

    synchronize = reach


@contextlib.contextmanager
def installed(monkeypatch, streams):
    """torch.cuda as these streams, for stores of tensors in host memory."""
    empty, copy_ = torch.empty, torch.Tensor.copy_

    def emptied(*size, pin_memory=False, **said):
        if not pin_memory:
            return empty(*size, **said)
        with _disable_current_modes():
            made = empty(*size, **said)
        streams.pinned.add(made.data_ptr())
        return made

    def copied(self, source, non_blocking=False):
        return streams.copy(self, source) if streams.copying else copy_(self, source)

    copied.__name__ = copy_.__name__  # which tensors of classes of ours are told

    def told(self, stream):
        for op in stream.queue[-1:]:
            op.tell(self)

    evicted.listeners.append(streams.emptied)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", emptied)
            patch.setattr(torch.Tensor, "copy_", copied)
            patch.setattr(torch.Tensor, "record_stream", told)
            for name in ("Stream", "current_stream", "stream"):
                patch.setattr(torch.cuda, name, getattr(streams, name))
            yield
    finally:
        evicted.listeners.remove(streams.emptied)
