"""No allocator: exactly the requested bytes are held. No other model can hold less."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from outsize.allocator.driver import Driver
from outsize.allocator.model import Model
from outsize.core.allocation import Block, Segment


class _UsedBlock(NamedTuple):
    """A block and what was asked of it."""

    address: int
    size: int
    requested: int
    stream: int


class Exact(Model[_UsedBlock]):
    """Every request is one segment of its own, given back when it is freed."""

    def __init__(self, driver: Driver, quantum: int = 1) -> None:
        super().__init__(driver)
        self.quantum = quantum

    def malloc(self, id: int, requested: int, stream: int) -> bool:
        size = -(-requested // self.quantum) * self.quantum
        address = self.driver.take(size)
        if address is None:
            return False
        self.reserve(size)
        return self.hold(id, _UsedBlock(address, size, requested, stream))

    def free(self, id: int) -> None:
        block = self.let_go(id)
        assert block is not None, "every request gets a block"
        self.give_to_system(block.address, block.size)

    def release(self) -> None:
        """Nothing is cached, so nothing is given back."""

    def segments(self) -> Iterator[Segment]:
        """One segment for each live block."""
        held = [(block, id) for id, block in (self.live | self.waiting).items() if block is not None]
        for (address, size, _, stream), id in sorted(held):
            block = Block(offset=0, bytes=size, id=id)
            yield Segment(address=address, bytes=size, pool="own", stream=stream, blocks=(block,))
