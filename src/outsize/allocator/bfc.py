"""The best-fit-with-coalescing allocator of TensorFlow, XLA and JAX (`xla/tsl/framework/bfc_allocator.cc`).

Memory comes in regions: the whole limit at once (JAX, TensorFlow without growth), or regions that double. A request is
rounded to 256 bytes and takes the smallest free chunk that fits, lowest address first. The chunk is cut if it is twice
the request or leaves 128 MiB over. The bins of the original only speed up its search; one sorted list finds the same
chunk.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from outsize.allocator.driver import Driver
from outsize.allocator.model import AllocatorSettings, Model
from outsize.allocator.pieces import FREE, SHIFT, Home, Piece, segment_of
from outsize.core.allocation import Segment
from outsize.core.errors import InputError
from outsize.core.units import MiB

QUANTUM = 256
"""Every chunk is a multiple of this."""
FIRST_REGION = 2 * MiB
"""The first region, where memory grows."""
WASTE = 128 * MiB
"""A chunk that leaves this much over is cut."""
BACKPEDAL = 0.9
"""Where the system refuses a region, the next smaller one that is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BfcSettings(AllocatorSettings):
    """Settings of the BFC allocator; the defaults are those of TensorFlow with memory growth on."""

    growth: bool = True
    """Regions that double; False takes the whole limit at once (JAX, and TensorFlow's default)."""
    limit: int | None = None
    """Bytes it may take; None for the device's capacity."""
    garbage_collection: bool = True
    """Give whole unused regions back before failing, as TensorFlow does; False for JAX."""
    fragmentation_fraction: float = 0.0
    """Share of the limit above which what is left over is cut off; 0 for 128 MiB."""


class Bfc(Model[Piece]):
    """The allocator on one device. Streams share its chunks."""

    def __init__(self, driver: Driver, settings: BfcSettings) -> None:
        super().__init__(driver)
        self.settings = settings
        limit = settings.limit if settings.limit is not None else driver.capacity
        if limit is None and not settings.growth:
            raise InputError(
                "the BFC allocator without growth takes its whole limit at once: give a limit or a capacity"
            )
        self.limit = limit
        first = (limit or FIRST_REGION) if not settings.growth else min(limit or FIRST_REGION, FIRST_REGION)
        self.region = _rounded(first)
        self.waste = (
            int(settings.fragmentation_fraction * limit) if settings.fragmentation_fraction and limit else WASTE
        )
        self.home = Home(False, 0)
        self.first: dict[int, Piece] = {}

    def malloc(self, id: int, requested: int, stream: int) -> bool:
        if requested == 0:
            self.live[id] = None
            return True
        size = _rounded(requested)
        piece = self.find(size)
        if piece is None and self.extend(size):
            piece = self.find(size)
        if piece is None and self.collect(size) and self.extend(size):
            self.retries += 1
            piece = self.find(size)
        if piece is None:
            return False
        if piece.size >= 2 * size or piece.size - size >= self.waste:
            self.home.add(piece.cut(size))
        return self.hold(id, piece.use(id, requested))

    def free(self, id: int) -> None:
        """Take a chunk back and join it to its free neighbours."""
        piece = self.let_go(id)
        if piece is not None:
            self.home.settle(piece)

    def release(self) -> None:
        """Nothing: this allocator gives memory back only to avoid failing."""

    def find(self, size: int) -> Piece | None:
        """The best free chunk, taken out of the list."""
        keys = self.home.keys
        at = bisect_left(keys, size << SHIFT)
        return self.home.pieces.pop(keys.pop(at)) if at < len(keys) else None

    def extend(self, size: int) -> bool:
        """A further region: doubled until the request fits, at most what is left of the limit."""
        left = None if self.limit is None else (self.limit - self.reserved) // QUANTUM * QUANTUM
        if left is not None and size > left:
            return False
        doubled = False
        while size > self.region:
            self.region *= 2
            doubled = True
        bytes = self.region if left is None else min(self.region, left)
        address = self.driver.take(bytes)
        while address is None:
            bytes = min(_rounded(int(bytes * BACKPEDAL)), bytes - QUANTUM)
            if bytes < size:
                return False
            address = self.driver.take(bytes)
        if not doubled:
            self.region *= 2
        self.first[address] = Piece(self.home, address, address, bytes, FREE)
        self.home.add(self.first[address])
        self.reserve(bytes)
        return True

    def collect(self, size: int) -> bool:
        """With `garbage_collection`: give back every region that is wholly free, if that can help."""
        if not self.settings.garbage_collection:
            return False
        unused = [piece for piece in self.first.values() if piece.state == FREE and piece.next is None]
        bytes = sum(piece.size for piece in unused)
        if not bytes or (self.limit is not None and size > self.limit - self.reserved + bytes):
            return False
        for piece in unused:
            self.home.remove(piece)
            del self.first[piece.address]
            self.give_to_system(piece.address, piece.size)
        return True

    def segments(self) -> Iterator[Segment]:
        """The regions, by address."""
        for address in sorted(self.first):
            run = [self.first[address]]
            while run[-1].next is not None:
                run.append(run[-1].next)
            yield segment_of(run, "bfc")


def most_lost(requested: int) -> int:
    """Most bytes that a request's chunk has above it: a free chunk is cut from twice the request on, or where `WASTE` is left."""
    size = _rounded(requested)
    return size - requested + max(0, min(size, WASTE) - QUANTUM)


def _rounded(bytes: int) -> int:
    return -(-bytes // QUANTUM) * QUANTUM
