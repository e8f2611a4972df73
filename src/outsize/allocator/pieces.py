"""Pieces of segments and lists of free pieces, for allocators that cut and join blocks.

The free pieces of one pool and stream are one sorted list of whole numbers, with the size in the high bits and the
address in the low ones. So one bisection finds the best fit: the smallest that is large enough, then the lowest
address.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from outsize.core.allocation import Block, Segment

SHIFT = 48
"""A free piece's key is its size shifted above its address."""

USED, FREE, UNMAPPED = 0, 1, 2
"""States of a piece; an unmapped one is address space without memory behind it."""


class Piece:
    """One piece of a segment, linked to its neighbours."""

    __slots__ = ("address", "base", "born", "home", "id", "next", "previous", "requested", "size", "state")

    def __init__(self, home: Home, base: int, address: int, size: int, state: int) -> None:
        self.home = home
        self.base = base
        """Where its segment begins."""
        self.address = address
        self.size = size
        self.state = state
        self.previous: Piece | None = None
        self.next: Piece | None = None
        self.id = 0
        self.requested = 0
        self.born = 0
        """How often its pool had been searched when it became free."""

    def use(self, id: int, requested: int) -> Piece:
        """Hand this piece out."""
        self.state, self.id, self.requested = USED, id, requested
        return self

    def cut(self, size: int) -> Piece:
        """Shorten this piece to `size`; what was behind becomes a piece of its own."""
        rest = Piece(self.home, self.base, self.address + size, self.size - size, self.state)
        rest.previous = self
        after = rest.next = self.next
        if after is not None:
            after.previous = rest
        self.next = rest
        self.size = size
        return rest

    def absorb_next(self) -> None:
        """Join the following piece to this one."""
        following = self.next
        assert following is not None
        self.size += following.size
        after = self.next = following.next
        if after is not None:
            after.previous = self


class Home:
    """The free pieces that may be handed out for the same requests: of one pool and stream."""

    __slots__ = ("keys", "pieces", "small", "stream", "unmapped")

    def __init__(self, small: bool, stream: int) -> None:
        self.small = small
        self.stream = stream
        self.keys: list[int] = []
        self.pieces: dict[int, Piece] = {}
        self.unmapped: dict[int, Piece] = {}
        """Unmapped pieces by address."""

    def add(self, piece: Piece) -> None:
        """List a piece as free."""
        key = piece.size << SHIFT | piece.address
        insort(self.keys, key)
        self.pieces[key] = piece
        piece.state = FREE

    def remove(self, piece: Piece) -> None:
        """Take a free piece out of the list."""
        key = piece.size << SHIFT | piece.address
        keys = self.keys
        del keys[bisect_left(keys, key)]
        del self.pieces[key]

    def settle(self, piece: Piece) -> Piece:
        """Join a piece that became free to its free neighbours and list it."""
        before = piece.previous
        if before is not None and before.state == FREE:
            self.remove(before)
            before.absorb_next()
            piece = before
        after = piece.next
        if after is not None and after.state == FREE:
            self.remove(after)
            piece.absorb_next()
        self.add(piece)
        return piece


def segment_of(run: list[Piece], pool: str) -> Segment:
    """Neighbouring pieces as a `Segment`."""
    start = run[0].address
    return Segment(
        address=start,
        bytes=sum(piece.size for piece in run),
        pool=pool,
        stream=run[0].home.stream,
        blocks=tuple(
            Block(offset=piece.address - start, bytes=piece.size, id=piece.id if piece.state == USED else None)
            for piece in run
        ),
    )
