"""A fixed block of device memory through which things pass in turn.

In: sizes. Out: leases, stretches of the block. A new lease may lie where older ones were that have been released; it
then has to wait for the marks they were released with, and says which those are. So the device is never asked for
memory while a step runs, and nothing has to wait for anything but the bytes it replaces.
"""

from __future__ import annotations

import math
from typing import Any

from outsize.model.fitting.move.mover import Mark
from outsize.model.torch_port.objects import storage_key

ALIGNMENT = 512
"""Every tensor begins at a multiple of so many bytes, as in torch's own allocator."""


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Lease:
    __slots__ = ("bytes", "live", "ready", "released", "start", "stop", "waits")

    def __init__(self, start: int, stop: int, block: Any, waits: list[Mark]) -> None:
        self.start = start
        self.stop = stop
        self.bytes = block[start:stop]
        self.waits = waits
        """What must have passed before it is written."""
        self.ready: Mark = None
        """Passes when its contents are there."""
        self.live = True
        """It is in use, so its place is not given to another."""
        self.released: list[Mark] = []
        """What must have passed before another is written in its place."""

    def view(self, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        count = math.prod(shape)
        return self.bytes[offset : offset + count * dtype.itemsize].view(dtype).view(shape)

    def release(self, *marks: Mark) -> None:
        """Its place may be used once these have passed."""
        self.live = False
        self.released.extend(mark for mark in marks if mark is not None)


class Ring:
    """A block and the leases in it."""

    def __init__(self, block: Any) -> None:
        """`block`: flat bytes of the length that `aligned` gives."""
        self.size = int(block.numel())
        self._block = block
        self._head = 0
        self._leases: list[Lease] = []

    @property
    def storage(self) -> int:
        """Identity of its memory."""
        return storage_key(self._block)

    def take(self, size: int) -> Lease | None:
        """A stretch of `size` bytes, None while what is in use leaves no room."""
        size = aligned(size)
        for start in dict.fromkeys((self._head, 0)):
            stop = start + size
            if stop > self.size:
                continue
            under = [lease for lease in self._leases if lease.start < stop and start < lease.stop]
            if any(lease.live for lease in under):
                continue
            rests = [rest for lease in under for rest in self._rests(lease, start, stop)]
            self._leases = [lease for lease in self._leases if lease not in under] + rests
            self._head = stop
            found = Lease(start, stop, self._block, [mark for lease in under for mark in lease.released])
            self._leases.append(found)
            return found
        return None

    def _rests(self, lease: Lease, start: int, stop: int) -> list[Lease]:
        """What stays of a released lease beside its new owner, with the marks it was released with."""
        rests = []
        for first, last in ((lease.start, min(start, lease.stop)), (max(stop, lease.start), lease.stop)):
            if first < last:
                rest = Lease(first, last, self._block, [])
                rest.release(*lease.released)
                rests.append(rest)
        return rests

    def reopen(self, lease: Lease) -> bool:
        """Use a released lease again; False where its place has been given away."""
        if lease not in self._leases:
            return False
        lease.live = True
        return True

    def clear(self) -> None:
        """Forget what is in it; everything has ended."""
        self._leases.clear()
        self._head = 0
