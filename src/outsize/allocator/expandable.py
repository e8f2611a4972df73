"""torch's CUDA caching allocator with `expandable_segments`: one growing segment per stream and pool.

Address space is reserved once (1 1/8 of the device). Pages are mapped into it when blocks need them: 2 MiB pages for
small blocks, 20 MiB pages for large ones. Mapped bytes are reserved bytes. Releasing gives back only pages that lie
wholly inside a free block. Everything else is as in the native allocator.
"""

from __future__ import annotations

from bisect import bisect_left

from outsize.allocator.cuda import QUANTUM, SMALL_SEGMENT, CudaCache
from outsize.allocator.pieces import FREE, SHIFT, UNMAPPED, USED, Home, Piece

UNBOUNDED = 1 << 42
"""Address space of one segment where the device's size is not known."""


class ExpandableCache(CudaCache):
    """The allocator with expandable segments."""

    def page(self, home: Home) -> int:
        """Bytes of a page."""
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
        """Map pages until a block of this size is there; None where the limit or the device does not allow it."""
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
        """The lowest address with this much contiguous free or unmapped space; a new segment if there is none."""
        for address in sorted(home.unmapped):
            piece = home.unmapped[address]
            if piece.previous is not None and piece.previous.state == FREE:
                piece = piece.previous
            bytes = 0
            reach: Piece | None = piece
            while reach is not None and reach.state != USED and bytes < size:
                bytes += reach.size
                reach = reach.next
            if bytes >= size:
                return piece
        page = self.page(home)
        capacity = self.driver.capacity
        space = max(UNBOUNDED, size) if capacity is None else capacity + capacity // 8
        space = -(-space // page) * page
        address = self.driver.place(space)
        piece = self.first[address] = home.unmapped[address] = Piece(home, address, address, space, UNMAPPED)
        return piece

    def map(self, piece: Piece, size: int) -> Piece | None:
        """Map the first pages of an unmapped block and join it to its free neighbours; None where the device is full."""
        home = piece.home
        page = self.page(home)
        bytes = -(-size // page) * page
        if not self.driver.fits(bytes):
            return None
        self.driver.held += bytes
        self.driver.calls += 1
        self.reserve(bytes)
        del home.unmapped[piece.address]
        if bytes < piece.size:
            rest = piece.cut(bytes)
            home.unmapped[rest.address] = rest
        piece = home.settle(piece)
        piece.born = self.searches
        return piece

    def release(self) -> None:
        """Unmap every whole page that lies inside a free block."""
        for pool in self.homes:
            for home in pool.values():
                for piece in list(home.pieces.values()):
                    self.unmap(home, piece)

    def unmap(self, home: Home, piece: Piece) -> None:
        """Give back the whole pages of a free block."""
        page = self.page(home)
        start = piece.address - piece.base
        begin, end = -(-start // page) * page, (start + piece.size) // page * page
        if end <= begin:
            return
        home.remove(piece)
        if begin > start:
            before, piece = piece, piece.cut(begin - start)
            home.add(before)
        if end - begin < piece.size:
            home.add(piece.cut(end - begin))
        self.driver.held -= end - begin
        self.driver.calls += 1
        self.reserved -= end - begin
        piece.state = UNMAPPED
        before_piece = piece.previous
        if before_piece is not None and before_piece.state == UNMAPPED:
            piece = before_piece
            piece.absorb_next()
        if piece.next is not None and piece.next.state == UNMAPPED:
            del home.unmapped[piece.next.address]
            piece.absorb_next()
        home.unmapped[piece.address] = piece
        if piece.previous is None and piece.next is None:
            del home.unmapped[piece.address]
            del self.first[piece.address]


def _reach(piece: Piece) -> int:
    """Bytes a free block could grow to."""
    following = piece.next
    return piece.size + (following.size if following is not None and following.state == UNMAPPED else 0)
