"""A pretended device on the processor: a hard limit in bytes, and streams whose work runs late and in any allowed order.

Work is only put down when it is submitted; it runs when somebody waits for an event, stream by stream in an order drawn
from a seed that keeps to the events and to nothing else. So a copy that nobody waited for reads memory that has been
used again, a kernel that does not follow its copy reads rubbish, and the results show it: what passes here for many
seeds does not depend on luck on a real card.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from outsize.array.device.base import STREAMS, Device, Event, Kernels, Rates, Stream
from outsize.array.store.base import Block
from outsize.core.errors import OutOfMemory
from outsize.core.memory import Pool
from outsize.core.units import format_bytes


class FakeEvent:
    """A moment in a pretended stream."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.done = False

    def come(self) -> bool:
        """Whether it has come; asking is what makes time pass, by one piece of work."""
        return self._device.run_some(self)

    def wait(self) -> None:
        """Run streams, in any allowed order, until it has come."""
        self._device.run_until(self)


class FakeDevice(Device):
    """Pretends to be a device of a few bytes."""

    outside = 0

    def __init__(self, kernels: Kernels, *, limit: int, seed: int = 0, in_place: bool = False) -> None:
        super().__init__()
        self.name, self.pool, self.kernels = "fake", Pool(kind="device", index=0), kernels
        self.size, self.in_place = limit, in_place
        self.most = 0
        """Most bytes that were reserved at once."""
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._queues: dict[Stream, deque[Callable[[], None] | FakeEvent | tuple[FakeEvent]]] = {}

    def available(self) -> tuple[int, str]:
        return self.size, "the pretended device's limit"

    def rates(self) -> Rates:
        flops = {"f": 5e13, "d": 6e13, "tf32": 4e14, "F": 1e13, "D": 1e13}
        return Rates(link_in=5.5e10, link_out=5.5e10, memory=4e12, flops=flops, source="pretended")

    def reaches(self, block: Block) -> bool:
        return self.in_place

    def open(self, size: int, tf32: bool | None = None) -> None:
        if size > self.size:
            raise OutOfMemory(f"{self.name} has {format_bytes(self.size)} and {format_bytes(size)} were asked for")
        self.most = max(self.most, size)
        self.slab = self.kernels.reserve(size)
        self._queues = {stream: deque() for stream in STREAMS}

    def close(self) -> None:
        with self._lock:  # what nobody has waited for was given up with the run
            self._queues = {stream: deque() for stream in STREAMS}
        self.slab = None
        self._views.clear()

    def submit(self, stream: Stream, work: Callable[[], None]) -> None:
        with self._lock:
            self._queues[stream].append(work)

    def record(self, stream: Stream) -> Event:
        event = FakeEvent(self)
        with self._lock:
            self._queues[stream].append(event)
        return event

    def follow(self, stream: Stream, event: Any) -> None:
        with self._lock:
            self._queues[stream].append((event,))

    def run_until(self, event: FakeEvent) -> None:
        """Run single pieces of work until the event has come."""
        with self._lock, np.errstate(all="ignore"):
            while not event.done:
                self._step()

    def run_some(self, event: FakeEvent) -> bool:
        """Run a piece of work where the event has not come; whether it had."""
        with self._lock, np.errstate(all="ignore"):
            come = event.done
            if not come:
                self._step()
            return come

    def _step(self) -> None:
        heads = {stream: queue[0] for stream, queue in self._queues.items() if queue}
        ready = [stream for stream, head in heads.items() if not isinstance(head, tuple) or head[0].done]
        item = self._queues[self._random.choice(ready)].popleft()
        if isinstance(item, FakeEvent):
            item.done = True
        elif not isinstance(item, tuple):
            item()
