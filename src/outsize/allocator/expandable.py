"""torch's CUDA caching allocator with `expandable_segments`: one growing segment per stream and pool.

Address space is set aside once (1 1/8 of the device) and pages are mapped into it as blocks ask for them: 2 MiB pages for
small blocks, 20 MiB pages for large ones. What is mapped is what is reserved. Releasing gives back only the pages that lie
wholly inside a free block. Everything else is the native allocator.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from outsize.allocator.cuda import FREE, HELD, QUANTUM, SHIFT, SMALL_SEGMENT, UNMAPPED, CudaCache, Home, Piece
from outsize.allocator.driver import Driver
from outsize.allocator.settings import CudaSettings

UNBOUNDED = 1 << 42
"""Address space of one segment where the device's size is not known."""


class ExpandableCache(CudaCache):
    """The allocator with expandable segments."""

    def __init__(self, driver: Driver, settings: CudaSettings, limit: int | None) -> None:
        super().__init__(driver, settings, limit)
        self.unmapped: dict[int, Piece] = {}

    def page(self, home: Home) -> int:
        return SMALL_SEGMENT if home.small else self.settings.large_segment_size

    def splits(self, home: Home, size: int, rest: int) -> bool:
        return rest >= QUANTUM

    def find(self, home: Home, size: int) -> Piece | None:
        """Best fit, where a block counts for the size it could grow to."""
        if self.collects:
            self.searches += not home.small
        keys, pieces = home.keys, home.pieces
        at = bisect_left(keys, size << SHIFT)
        if at == len(keys):
            return None
        best = pieces[keys[at]]
        if best.next is not None and best.next.state == UNMAPPED:
            while at + 1 < len(keys):
                other = pieces[keys[at + 1]]
                if _reach(other) >= _reach(best):
                    break
                best, at = other, at + 1
        if self.max_split is not None and not self.allows(size, best.size):
            return None
        return pieces.pop(keys.pop(at))

    def ask(self, home: Home, size: int) -> Piece | None:
        """Map pages until a block of this size is there."""
        if self.limit is not None and self.reserved + self.segment_size(home, size) > self.limit:
            return None
        piece = self.room(home, size)
        if piece.state == UNMAPPED:
            mapped = self.map(piece, min(piece.size, size))
            if mapped is None:
                return None
            piece = mapped
        while piece.size < size:
            following = piece.next
            assert following is not None
            mapped = self.map(following, min(size - piece.size, following.size))
            if mapped is None:
                return None
            piece = mapped
        home.remove(piece)
        return piece

    def room(self, home: Home, size: int) -> Piece:
        """The first place by address with this much free or unmapped space in a row; a new segment where there is none."""
        for address in home.unmapped:
            piece = self.unmapped[address]
            if piece.previous is not None and piece.previous.state == FREE:
                piece = piece.previous
            bytes = 0
            reach: Piece | None = piece
            while reach is not None and reach.state != HELD and bytes < size:
                bytes += reach.size
                reach = reach.next
            if bytes >= size:
                return piece
        page = self.page(home)
        capacity = self.driver.capacity
        space = UNBOUNDED if capacity is None else capacity + capacity // 8
        piece = Piece(home, self.driver.place(-(-space // page) * page), -(-space // page) * page, UNMAPPED)
        self.first[piece.address] = piece
        self.set_unmapped(piece)
        return piece

    def map(self, piece: Piece, size: int) -> Piece | None:
        """Map the first pages of an unmapped block and join it to its free neighbours; None where the device is full."""
        page = self.page(piece.home)
        bytes = -(-size // page) * page
        if not self.driver.fits(bytes):
            return None
        self.driver.held += bytes
        self.reserve(bytes)
        self.clear_unmapped(piece)
        if bytes < piece.size:
            self.set_unmapped(self.cut(piece, bytes))
        piece.state = FREE
        return self.settle(piece)

    def release(self) -> None:
        """Unmap every whole page that lies inside a free block."""
        for pool in self.homes:
            for home in pool.values():
                for piece in list(home.pieces.values()):
                    self.unmap(piece)

    def unmap(self, piece: Piece) -> None:
        page = self.page(piece.home)
        origin = self.origin(piece)
        begin = origin + -(-(piece.address - origin) // page) * page
        end = origin + (piece.address + piece.size - origin) // page * page
        if end <= begin:
            return
        piece.home.remove(piece)
        if begin > piece.address:
            before, piece = piece, self.cut(piece, begin - piece.address)
            piece.home.add(before)
        if end - begin < piece.size:
            piece.home.add(self.cut(piece, end - begin))
        self.driver.held -= end - begin
        self.reserved -= end - begin
        self.join_unmapped(piece)

    # -- pieces ----------------------------------------------------------------------------------------------------

    def origin(self, piece: Piece) -> int:
        """Where the segment of a block begins."""
        starts = sorted(self.first)
        return starts[bisect_left(starts, piece.address + 1) - 1]

    def cut(self, piece: Piece, size: int) -> Piece:
        """Shorten a block to `size`; what was behind it becomes a block of its own."""
        rest = Piece(piece.home, piece.address + size, piece.size - size, piece.state)
        rest.previous, rest.next = piece, piece.next
        if piece.next is not None:
            piece.next.previous = rest
        piece.next, piece.size = rest, size
        return rest

    def absorb(self, piece: Piece, following: Piece) -> None:
        piece.size += following.size
        piece.next = following.next
        if following.next is not None:
            following.next.previous = piece

    def settle(self, piece: Piece) -> Piece:
        """Join a free block to its free neighbours and list it."""
        if piece.previous is not None and piece.previous.state == FREE:
            before = piece.previous
            before.home.remove(before)
            self.absorb(before, piece)
            piece = before
        if piece.next is not None and piece.next.state == FREE:
            piece.home.remove(piece.next)
            self.absorb(piece, piece.next)
        piece.born = self.searches
        piece.home.add(piece)
        return piece

    def join_unmapped(self, piece: Piece) -> None:
        if piece.previous is not None and piece.previous.state == UNMAPPED:
            before = piece.previous
            self.clear_unmapped(before)
            self.absorb(before, piece)
            piece = before
        if piece.next is not None and piece.next.state == UNMAPPED:
            self.clear_unmapped(piece.next)
            self.absorb(piece, piece.next)
        self.set_unmapped(piece)
        if piece.previous is None and piece.next is None:
            self.clear_unmapped(piece)
            del self.first[piece.address]

    def set_unmapped(self, piece: Piece) -> None:
        piece.state = UNMAPPED
        insort(piece.home.unmapped, piece.address)
        self.unmapped[piece.address] = piece

    def clear_unmapped(self, piece: Piece) -> None:
        piece.home.unmapped.remove(piece.address)
        del self.unmapped[piece.address]


def _reach(piece: Piece) -> int:
    """Bytes a free block could grow to."""
    following = piece.next
    return piece.size + (following.size if following is not None and following.state == UNMAPPED else 0)
