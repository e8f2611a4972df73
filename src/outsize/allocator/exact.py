"""No allocator at all: what was asked for is what is held. The floor under every other model."""

from __future__ import annotations

from collections.abc import Iterator

from outsize.allocator.driver import Driver
from outsize.core.allocation import Block, Segment


class Exact:
    """Every request is one segment of its own, given back when it is freed."""

    def __init__(self, driver: Driver, quantum: int = 1) -> None:
        self.driver = driver
        self.quantum = quantum
        self.requested = 0
        self.allocated = 0
        self.active = 0
        self.reserved = 0
        self.reserved_peak = 0
        self.retries = 0
        self.guessed = False
        self.live: dict[int, tuple[int, int, int, int]] = {}
        self.waiting: dict[int, tuple[int, int, int, int]] = {}

    def malloc(self, id: int, requested: int, stream: int) -> bool:
        """Hand out a block; False where memory ran out."""
        size = -(-requested // self.quantum) * self.quantum
        address = self.driver.take(size)
        if address is None:
            return False
        self.live[id] = (address, size, requested, stream)
        self.requested += requested
        self.allocated += size
        self.active += size
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        return True

    def free(self, id: int) -> None:
        """Give a block back to the system."""
        waited = id in self.waiting
        address, size, requested, _ = self.waiting.pop(id) if waited else self.live.pop(id)
        self.requested -= requested
        self.allocated -= 0 if waited else size
        self.active -= size
        self.reserved -= size
        self.driver.give(address, size)

    def wait(self, id: int) -> None:
        """The program freed a block that another stream still uses."""
        self.waiting[id] = self.live.pop(id)
        self.allocated -= self.waiting[id][1]

    def release(self) -> None:
        """Nothing is cached, so nothing is given back."""

    def segments(self) -> Iterator[Segment]:
        """One segment for each live block."""
        for id, (address, size, _, stream) in sorted((self.live | self.waiting).items(), key=lambda item: item[1]):
            block = Block(offset=0, bytes=size, id=id)
            yield Segment(address=address, bytes=size, pool="own", stream=stream, blocks=(block,))
