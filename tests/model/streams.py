"""CUDA streams in host memory: kernels run at once, copies on the other stream as late as the waits that were said allow.

What a copy will fill is spoilt until it has run. A copy whose memory was let go before it ran is a mistake, except where
`record_stream` told the allocator.
"""

import contextlib
import random
import weakref

import torch
from torch.utils._python_dispatch import _disable_current_modes


class Copy:
    def __init__(self, into, source):
        self.ends = [weakref.ref(tensor.untyped_storage()) for tensor in (into, source)]
        self.places = [(t.storage_offset(), t.numel(), t.data_ptr()) for t in (into, source)]
        self.told = [False, False]
        self.kept = None

    def tell(self, tensor):
        """The allocator keeps this memory until the copy has ended."""
        storage = tensor.untyped_storage()
        for number, end in enumerate(self.ends):
            if end() is storage:
                self.told[number] = True
                if number == 1:
                    with _disable_current_modes():
                        self.kept = tensor.clone()

    def run(self):
        into, source = (self._end(number) for number in (0, 1))
        if into is not None and (source is not None or self.kept is not None):
            into[:] = self.kept if self.kept is not None else source

    def _end(self, number):
        storage, (offset, size, address) = self.ends[number](), self.places[number]
        if storage is not None and storage.nbytes() >= offset + size:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage, offset, (size,), (1,))
            if flat.data_ptr() == address:
                return flat
        assert self.told[number], "memory was let go while a copy still used it"
        return None


class Streams:
    """Two streams: kernels' (the processor itself) and copies'."""

    def __init__(self, seed, eager=0.3):
        self.queue = []
        self.random = random.Random(seed)
        self.eager = eager
        self.copying = False

    # the calls of torch.cuda that a store makes, for both streams and for events

    def Stream(self, device=None):
        return Side(self)

    def Event(self):
        return Mark(self)

    def current_stream(self, device=None):
        return Main(self)

    @contextlib.contextmanager
    def stream(self, stream):
        self.copying = True
        yield
        self.copying = False

    def copy(self, into, source):
        into.fill_(255)
        self.queue.append(Copy(into, source))
        self.advance()

    def advance(self):
        while self.queue and self.random.random() < self.eager:
            self.step()

    def step(self):
        with _disable_current_modes():
            self.queue.pop(0).run()

    def drain(self):
        while self.queue:
            self.step()


class Main:
    def __init__(self, streams):
        self.streams = streams

    def wait_event(self, event):
        event.wait()

    def wait_stream(self, stream):
        self.streams.drain()


class Side(Main):
    def wait_stream(self, stream):
        """Kernels have run already."""

    def synchronize(self):
        self.streams.drain()


class Mark:
    def __init__(self, streams):
        self.streams, self.after = streams, None

    def record(self, stream):
        self.after = self.streams.queue[-1] if self.streams.queue else None

    def wait(self):
        while self.after in self.streams.queue:
            self.streams.step()


@contextlib.contextmanager
def installed(monkeypatch, streams):
    """torch.cuda as these streams, for stores of tensors in host memory."""
    empty, copy_ = torch.empty, torch.Tensor.copy_

    def copied(self, source, non_blocking=False):
        return streams.copy(self, source) if streams.copying else copy_(self, source)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *size, pin_memory=False, **said: empty(*size, **said))
        patch.setattr(torch.Tensor, "copy_", copied)
        patch.setattr(
            torch.Tensor, "record_stream", lambda self, stream: [copy.tell(self) for copy in streams.queue[-1:]]
        )
        for name in ("Stream", "Event", "current_stream", "stream"):
            patch.setattr(torch.cuda, name, getattr(streams, name))
        yield
