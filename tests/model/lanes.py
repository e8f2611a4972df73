"""A device for the tests of hosted steps: host memory behind a hard limit, with copies that are as late as they may be."""

import random
import threading

import torch

from outsize.model.fitting.move.mover import Mover


class Full(RuntimeError):
    pass


class Copy:
    """A copy that was asked for: done when somebody waits for it, or at any moment before."""

    lock = threading.RLock()
    """The host waits in more than one thread."""

    def __init__(self, stream, into, source, after):
        self.stream, self.into, self.source = stream, into, source
        self.after = [mark for mark in after if mark is not None]
        self.done = False

    def run(self):
        with self.lock:
            if self.done:
                return
            while self.stream[0] is not self:  # a stream keeps its order
                self.stream[0].run()
            for mark in self.after:
                mark.run()
            self.into.copy_(self.source)
            self.done = True
            self.stream.remove(self)


class LateLane(Mover):
    """Copies run when they are waited for. What a copy will overwrite is spoilt as soon as it may be overwritten."""

    def __init__(self, seed=0, limit=None):
        super().__init__(torch.device("cpu"))
        self._in, self._out = [], []
        self._random = random.Random(seed)
        self.limit, self.taken = limit, 0

    def empty(self, size):
        self.taken += size
        if self.limit is not None and self.taken > self.limit:
            raise Full(f"{self.taken} bytes of {self.limit}: out of memory")
        return torch.full((size,), 255, dtype=torch.uint8)

    def bring(self, into, source, after=()):
        copy = Copy(self._in, into, source, after)
        with Copy.lock:
            self._in.append(copy)
            if all(mark.done for mark in copy.after):
                into.fill_(255)
            return self._maybe(copy)

    def send(self, into, source, hold=False, after=(), landed=None):
        copy = Copy(self._out, into, source, after)
        with Copy.lock:
            self._out.append(copy)
            into.fill_(255)
            return self._maybe(copy)

    def _maybe(self, copy):
        if self._random.random() < 0.3:
            copy.run()
        return copy

    def wait(self, mark):
        if mark is not None:
            mark.run()

    sync = wait

    def drain(self):
        with Copy.lock:
            for stream in (self._in, self._out):
                while stream:
                    stream[0].run()
