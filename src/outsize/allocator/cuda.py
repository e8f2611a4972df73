"""torch's CUDA caching allocator, native segments: requests in, blocks and segments out, to the byte.

The rules are those of torch 2.11 (`c10/cuda/CUDACachingAllocator.cpp`), checked against recordings of the real one. A
request is rounded up. It takes the best free block of its stream and pool: the smallest that fits, then the lowest
address. If the rest of the block is worth keeping, the block is cut. If no block fits, the driver is asked.
Freed blocks join their free neighbours and stay reserved. Not modelled: the private pools of CUDA graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from outsize.allocator.driver import Driver
from outsize.allocator.model import Model
from outsize.allocator.pieces import SHIFT, UNMAPPED, USED, Home, Piece, segment_of
from outsize.allocator.settings import INTERVALS, CudaSettings
from outsize.core.allocation import Segment
from outsize.core.units import MiB

QUANTUM = 512
"""Every block is a multiple of this."""
SMALL_REQUEST = MiB
"""Largest rounded request of the small pool."""
SMALL_SEGMENT = 2 * MiB
"""Segment of the small pool."""
LARGE_REQUEST = 10 * MiB
"""Smallest rounded request that gets a segment of its own."""
LARGE_STEP = 2 * MiB
"""Such a segment is a multiple of this."""


class CudaCache(Model[Piece]):
    """The native allocator on one device."""

    def __init__(self, driver: Driver, settings: CudaSettings, limit: int | None) -> None:
        super().__init__(driver)
        self.settings = settings
        self.limit = limit
        self.homes: tuple[dict[int, Home], dict[int, Home]] = ({}, {})
        """Large and small pool: stream -> its free blocks."""
        self.first: dict[int, Piece] = {}
        """First block of each segment, by address."""
        self.max_split = settings.max_split_size
        self.divisions = settings.roundup_power2_divisions
        self.collects = limit is not None and settings.garbage_collection_threshold > 0
        self.searches = 0

    # -- the common path -----------------------------------------------------------------------------------------

    def malloc(self, id: int, requested: int, stream: int) -> bool:
        size = self.round(requested) if self.divisions else (requested + QUANTUM - 1) & -QUANTUM
        if size == 0:
            self.live[id] = None
            return True
        small = size <= SMALL_REQUEST
        home = self.homes[small].get(stream)
        if home is None:
            home = self.homes[small][stream] = Home(small, stream)
        piece = self.find(home, size) or self.grow(home, size)
        if piece is None:
            return False
        if piece.size > size and self.splits(home, size, piece.size - size):
            rest = piece.cut(size)
            rest.born = self.searches
            home.add(rest)
        return self.hold(id, piece.use(id, requested))

    def free(self, id: int) -> None:
        """Take a block back and join it to its free neighbours."""
        piece = self.let_go(id)
        if piece is not None:
            piece = piece.home.settle(piece)
            piece.born = self.searches

    # -- the rules -----------------------------------------------------------------------------------------------

    def round(self, requested: int) -> int:
        """Bytes of the block for a request, with `roundup_power2_divisions`."""
        interval = min(max(requested.bit_length() - 21, 0), INTERVALS - 1)
        divisions = self.divisions[interval]
        if divisions > 1 and requested > QUANTUM * divisions:
            step = 1 << (requested.bit_length() - 1) >> (divisions.bit_length() - 1)
            return (requested + step - 1) & -step
        return (requested + QUANTUM - 1) & -QUANTUM

    def splits(self, home: Home, size: int, rest: int) -> bool:
        """Whether what is left over of a block is cut off."""
        if home.small:
            return rest >= QUANTUM
        return rest > SMALL_REQUEST and (self.max_split is None or size < self.max_split)

    def segment_size(self, home: Home, size: int) -> int:
        """Bytes asked from the driver for a rounded request."""
        if home.small:
            return SMALL_SEGMENT
        if size < LARGE_REQUEST:
            return self.settings.large_segment_size
        return -(-size // LARGE_STEP) * LARGE_STEP

    def find(self, home: Home, size: int) -> Piece | None:
        """The best free block, taken out of its list."""
        if self.collects:
            self.searches += not home.small
        keys = home.keys
        at = bisect_left(keys, size << SHIFT)
        if at == len(keys):
            return None
        if self.max_split is not None and not self.allows(size, keys[at] >> SHIFT):
            return None
        piece = home.pieces.pop(keys.pop(at))
        if self.driver.invents and not self.guessed and at < len(keys) and keys[at] >> SHIFT == piece.size:
            self.guessed = home.pieces[keys[at]].base != piece.base
        return piece

    def allows(self, size: int, block: int) -> bool:
        """With `max_split_size`: blocks above it are for requests above it, and for those of about their size."""
        assert self.max_split is not None
        if size < self.max_split:
            return block < self.max_split
        rounding = self.settings.max_non_split_rounding
        return block < size + (self.settings.large_segment_size if rounding is None else rounding)

    # -- the driver ----------------------------------------------------------------------------------------------

    def grow(self, home: Home, size: int) -> Piece | None:
        """A block from the driver; the cache is given back and the driver asked again before giving up."""
        if self.collects:
            self.collect()
        piece = self.ask(home, size)
        if piece is None and self.max_split is not None and self.release_oversize(home, size):
            piece = self.ask(home, size)
        if piece is None:
            self.release()
            self.retries += 1
            piece = self.ask(home, size)
        return piece

    def ask(self, home: Home, size: int) -> Piece | None:
        """A new segment, None where the limit or the device does not allow it."""
        bytes = self.segment_size(home, size)
        if self.limit is not None and self.reserved + bytes > self.limit:
            return None
        address = self.driver.take(bytes)
        if address is None:
            return None
        piece = self.first[address] = Piece(home, address, address, bytes, USED)
        self.reserve(bytes)
        return piece

    def give_back(self, piece: Piece) -> None:
        """Return a segment that is one free block."""
        piece.home.remove(piece)
        del self.first[piece.address]
        self.give_to_system(piece.address, piece.size)

    def whole(self, home: Home) -> list[Piece]:
        """Free blocks that are a whole segment, in order of size."""
        pieces = (home.pieces[key] for key in home.keys)
        return [piece for piece in pieces if piece.previous is None and piece.next is None]

    def release(self) -> None:
        """Give back every segment that is one free block (`empty_cache`)."""
        for pool in self.homes:
            for home in pool.values():
                for piece in self.whole(home):
                    self.give_back(piece)

    def release_oversize(self, home: Home, size: int) -> bool:
        """With `max_split_size`: give back one oversize block that is large enough, else the largest until they are."""
        assert self.max_split is not None
        wanted = max(size, self.max_split)
        at = bisect_left(home.keys, wanted << SHIFT)
        if at < len(home.keys):
            self.give_back(home.pieces[home.keys[at]])
            return True
        released = 0
        while released < wanted and home.keys and home.keys[-1] >> SHIFT >= self.max_split:
            piece = home.pieces[home.keys[-1]]
            released += piece.size
            self.give_back(piece)
        return released >= wanted

    def collect(self) -> None:
        """`garbage_collection_threshold`: give back the large segments that were unused for longest."""
        assert self.limit is not None
        target = self.reserved - int(self.settings.garbage_collection_threshold * self.limit)
        if target <= 0:
            return
        candidates = [piece for home in self.homes[False].values() for piece in self.whole(home)]
        reclaimed = 0
        while candidates and reclaimed < target:
            ages = [(piece, self.searches - piece.born) for piece in candidates]
            threshold = sum(age for _, age in ages) / len(ages)
            candidates = []
            for piece, age in ages:
                if age >= threshold:
                    reclaimed += piece.size
                    self.give_back(piece)
                else:
                    candidates.append(piece)

    # -- the picture ---------------------------------------------------------------------------------------------

    def segments(self) -> Iterator[Segment]:
        """The segment map, by address; each run of mapped pages of an expandable segment is one entry."""
        for address in sorted(self.first):
            run: list[Piece] = []
            piece: Piece | None = self.first[address]
            while piece is not None:
                if piece.state != UNMAPPED:
                    run.append(piece)
                if run and (piece.state == UNMAPPED or piece.next is None):
                    yield segment_of(run, "small" if run[0].home.small else "large")
                    run = []
                piece = piece.next
