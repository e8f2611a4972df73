"""The device under an allocator: how many bytes it has left and at which addresses it hands them out.

Ties between free blocks of one size go to the lower address, so addresses decide what a caching allocator does next.
If a recording gives the addresses of the real segments, they are used. Otherwise addresses are assumed, in the way
that cudaMalloc was seen to choose them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

from outsize.core.units import MiB

START = 1 << 46
"""Where assumed addresses begin."""
CHUNK = 32 * MiB
"""cudaMalloc reserves addresses in multiples of this (driver 580, H200)."""


class Driver:
    """Plain memory, at addresses that rise and are not used again."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.held = 0
        self.calls = 0
        """How often memory came from it or went back."""
        self.next = START
        self.invents = False
        """True if an address had to be assumed."""

    def fits(self, size: int) -> bool:
        """Whether the device has this many bytes left."""
        return self.capacity is None or self.held + size <= self.capacity

    def take(self, size: int) -> int | None:
        """The address of new memory, None where the device is full."""
        if not self.fits(size):
            return None
        self.held += size
        self.calls += 1
        return self.place(size)

    def place(self, size: int) -> int:
        """Addresses for this many bytes, with no memory behind them."""
        address = self.next
        self.next += size
        return address

    def give(self, address: int, size: int) -> None:
        """Take memory back."""
        self.held -= size
        self.calls += 1


class CudaDriver(Driver):
    """cudaMalloc and cudaFree: the lowest hole that is large enough, else a new chunk below all others."""

    def __init__(self, capacity: int | None = None, addresses: Iterable[tuple[int, int]] = ()) -> None:
        super().__init__(capacity)
        self.low = START
        self.holes: list[tuple[int, int]] = []
        self.recorded: dict[int, deque[int]] = {}
        for address, size in addresses:
            self.recorded.setdefault(size, deque()).append(address)

    def take(self, size: int) -> int | None:
        if not self.fits(size):
            return None
        self.held += size
        self.calls += 1
        recorded = self.recorded.get(size)
        if recorded:
            return recorded.popleft()
        self.invents = True
        at = next((at for at, hole in enumerate(self.holes) if hole[1] >= size), None)
        if at is not None:
            address, room = self.holes.pop(at)
        else:
            room = -(-size // CHUNK) * CHUNK
            self.low -= room
            address = self.low
        if room > size:
            insort(self.holes, (address + size, room - size))
        return address

    def give(self, address: int, size: int) -> None:
        """Take memory back; its addresses become a hole, joined to its neighbours."""
        self.held -= size
        self.calls += 1
        if not self.invents:
            return
        holes = self.holes
        at = bisect_left(holes, (address, 0))
        if at < len(holes) and holes[at][0] == address + size:
            size += holes.pop(at)[1]
        if at > 0 and sum(holes[at - 1]) == address:
            at -= 1
            before = holes.pop(at)
            address, size = before[0], before[1] + size
        holes.insert(at, (address, size))
