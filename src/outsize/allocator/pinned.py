"""torch's pinned host allocator (`CachingHostAllocator`): blocks of a power of two, kept for reuse, never cut or joined.

A request takes a free block of exactly its rounded size, or a new one; 20.4 GiB takes 32 GiB. Freed blocks stay with the
process until `empty_cache`, unless `pinned_max_cached_size_mb` sends them back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from outsize.allocator.driver import Driver
from outsize.allocator.model import Model
from outsize.allocator.settings import CudaSettings
from outsize.core.allocation import Block, Segment

PAGE = 4096
"""A block of the reserved segment is rounded up to a multiple of this."""


class _UsedBlock(NamedTuple):
    """A block and what was asked of it."""

    address: int
    size: int
    requested: int
    own: bool
    """False for a part of the reserved segment."""


class Pinned(Model[_UsedBlock]):
    """The allocator of one process; streams share its blocks."""

    def __init__(self, driver: Driver, settings: CudaSettings) -> None:
        super().__init__(driver)
        self.settings = settings
        self.cached: dict[int, list[tuple[int, bool]]] = {}
        """Size -> free blocks of it."""
        self.aside: tuple[int, int] | None = None
        """What is left of the reserved segment: address, bytes."""

    def malloc(self, id: int, requested: int, stream: int) -> bool:
        size = self.round(requested)
        cached = self.cached.get(size)
        if size == 0:
            address, own = 0, True
        elif cached:
            address, own = cached.pop()
        else:
            got = self.from_aside(size) or self.from_system(size)
            if got is None:
                return False
            address, own = got
        return self.hold(id, _UsedBlock(address, size, requested, own))

    def free(self, id: int) -> None:
        """Keep a block for the next request of its size."""
        held = self.let_go(id)
        assert held is not None, "every request gets a block"
        most = self.settings.pinned_max_cached_size
        if most is not None and held.size > most and held.own:
            self.give_to_system(held.address, held.size)
        elif held.size:
            self.cached.setdefault(held.size, []).append((held.address, held.own))

    def release(self) -> None:
        """Give back every free block that is not part of the reserved segment."""
        for size, blocks in self.cached.items():
            for address, own in blocks:
                if own:
                    self.give_to_system(address, size)
            blocks[:] = [block for block in blocks if not block[1]]

    def round(self, requested: int) -> int:
        """Bytes of the block for a request: the next power of two."""
        most = self.settings.pinned_max_round_threshold
        if requested == 0 or (most is not None and requested > most):
            return requested
        return 1 << (requested - 1).bit_length()

    def from_aside(self, size: int) -> tuple[int, bool] | None:
        """The next bytes of the reserved segment, which is taken at the first request."""
        if self.aside is None and self.settings.pinned_reserve_segment_size:
            got = self.from_system(self.settings.pinned_reserve_segment_size)
            self.aside = (got[0], self.settings.pinned_reserve_segment_size) if got is not None else (0, 0)
        bytes = -(-size // PAGE) * PAGE
        if self.aside is None or self.aside[1] < bytes:
            return None
        address, left = self.aside
        self.aside = (address + bytes, left - bytes)
        return address, False

    def from_system(self, size: int) -> tuple[int, bool] | None:
        address = self.driver.take(size)
        if address is None:
            return None
        self.reserve(size)
        return address, True

    def segments(self) -> Iterator[Segment]:
        """One segment per block; the reserved segment is shown as the blocks cut from it and the rest."""
        held = self.live | self.waiting
        found = [(block.address, block.size, id) for id, block in held.items() if block and block.size]
        blocks: list[tuple[int, int, int | None]] = [*found]
        blocks += [(address, size, None) for size, free in self.cached.items() for address, _ in free]
        if self.aside is not None and self.aside[1]:
            blocks.append((*self.aside, None))
        for address, size, holder in sorted(blocks, key=lambda block: block[0]):
            block = Block(offset=0, bytes=size, id=holder)
            yield Segment(address=address, bytes=size, pool="pinned", stream=0, blocks=(block,))
