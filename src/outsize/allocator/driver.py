"""The device under an allocator: how many bytes it has left and at which addresses it hands them out.

Ties between free blocks of one size go to the lower address, so addresses decide what a caching allocator does next. Where
a recording says at which addresses the real driver put its segments, they are used; where not, they are invented.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

START = 1 << 44
"""Where invented addresses begin."""


class Driver:
    """Plain allocation: cudaMalloc and cudaFree, or what maps memory on the host."""

    def __init__(self, capacity: int | None = None, addresses: Iterable[tuple[int, int]] = ()) -> None:
        self.capacity = capacity
        self.held = 0
        self.next = START
        self.recorded: dict[int, deque[int]] = {}
        for address, size in addresses:
            self.recorded.setdefault(size, deque()).append(address)

    def fits(self, size: int) -> bool:
        """Whether the device has this many bytes left."""
        return self.capacity is None or self.held + size <= self.capacity

    def take(self, size: int) -> int | None:
        """The address of new memory, None where the device is full."""
        if not self.fits(size):
            return None
        self.held += size
        recorded = self.recorded.get(size)
        if recorded:
            return recorded.popleft()
        return self.place(size)

    def place(self, size: int) -> int:
        """Addresses for this many bytes, with no memory behind them."""
        address = self.next
        self.next += size
        return address

    def give(self, size: int) -> None:
        """Take memory back; its addresses are not used again."""
        self.held -= size
