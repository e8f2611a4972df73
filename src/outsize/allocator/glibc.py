"""An estimate of glibc's malloc (main arena): what stays with the process after arrays are freed.

Requests of at least the mmap threshold are mapped on their own and returned at once when freed. The threshold starts
at 128 KiB. It rises to the size of the largest mapped block freed so far, at most 32 MiB. Everything below lives on the
heap: best fit, cut and joined, grown at its end, and trimmed only where its top is free. Not modelled: per-thread caches
and fast bins (chunks up to 1 KiB that are not joined at once) and the arenas of further threads. Whether a page counts
as resident depends on whether it was ever written; here every reserved page does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from outsize.allocator.driver import Driver
from outsize.allocator.model import AllocatorSettings, Model
from outsize.allocator.pieces import FREE, SHIFT, USED, Home, Piece, segment_of
from outsize.core.allocation import Segment
from outsize.core.units import KiB, MiB

PAGE = 4096
ALIGNMENT = 16
HEADER = 8
"""Bytes before each chunk on the heap; a mapped one has twice as many."""
SMALLEST = 32
"""Smallest chunk."""
PAD = 128 * KiB
"""What the heap grows beyond the request, and what a trim leaves at its top."""
CONSOLIDATES = 64 * KiB
"""Freeing a chunk of this size and more looks whether the heap can be trimmed."""
LARGEST_THRESHOLD = 32 * MiB
"""Where the mmap threshold stops rising."""
LEADER = 64
"""Bytes cut off before an aligned chunk. A chunk this small goes to the caches, where a small request may take it
forever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlibcSettings(AllocatorSettings):
    """Settings of glibc's malloc; setting either threshold stops both from moving."""

    mmap_threshold: int | None = None
    """`MALLOC_MMAP_THRESHOLD_`: bytes from which a request is mapped on its own; None for 128 KiB and rising."""
    trim_threshold: int | None = None
    """`MALLOC_TRIM_THRESHOLD_`: bytes free at the heap's top from which they are returned; None for 128 KiB and rising."""

    strays: int | None = None
    """One in this many aligned chunks of at least a page loses the bytes before it to a small object that stays. It
    can then no longer be joined to the chunk before it. None for never."""


class Glibc(Model[Piece]):
    """One process with one arena; streams make no difference."""

    def __init__(self, driver: Driver, settings: GlibcSettings) -> None:
        super().__init__(driver)
        self.fixed = settings.mmap_threshold is not None or settings.trim_threshold is not None
        self.threshold = 128 * KiB if settings.mmap_threshold is None else settings.mmap_threshold
        self.trim_threshold = 128 * KiB if settings.trim_threshold is None else settings.trim_threshold
        self.strays = settings.strays
        self.aligned = 0
        self.heap = Home(True, 0)
        self.mapped = Home(False, 0)
        self.start = driver.place(1 << 46)
        self.last: Piece | None = None
        """The highest chunk of the heap; where it is free it is the heap's top."""

    def malloc(self, id: int, requested: int, stream: int) -> bool:
        size = max(SMALLEST, (requested + HEADER + ALIGNMENT - 1) & -ALIGNMENT)
        leader = self.leader(requested)
        piece = self.find(size + leader)
        if piece is None:
            piece = self.map(size) if size >= self.threshold else self.extend(size + leader)
        if piece is None:
            return False
        if piece.home is self.heap and leader:
            piece.state = USED
            piece = self.cut(piece, leader)
        if piece.home is self.heap and piece.size - size >= SMALLEST:
            self.heap.add(self.cut(piece, size))
        return self.hold(id, piece.use(id, requested))

    def free(self, id: int) -> None:
        """Unmap a mapped chunk, or join one of the heap to its free neighbours and trim the top."""
        piece = self.let_go(id)
        assert piece is not None, "every request gets a chunk"
        if piece.home is self.mapped:
            self.give_to_system(piece.address, piece.size)
            if not self.fixed and self.threshold < piece.size <= LARGEST_THRESHOLD:
                self.threshold = piece.size
                self.trim_threshold = 2 * piece.size
            return
        at_end = piece is self.last or piece.next is self.last
        piece = self.heap.settle(piece)
        if at_end and piece.next is None:
            self.last = piece
        if piece.size >= CONSOLIDATES:
            self.trim(self.trim_threshold)

    def release(self) -> None:
        """`malloc_trim(0)`, at the heap's top."""
        self.trim(0)

    def leader(self, requested: int) -> int:
        """Bytes before this chunk that are lost."""
        if self.strays is None or requested < PAGE:
            return 0
        self.aligned += 1
        return 0 if self.aligned % self.strays else LEADER

    def cut(self, piece: Piece, size: int) -> Piece:
        """What is left of a chunk beyond its first bytes."""
        rest = piece.cut(size)
        if self.last is piece:
            self.last = rest
        return rest

    def find(self, size: int) -> Piece | None:
        """The best free chunk, taken out of the list; the top comes last whatever its size."""
        keys, pieces = self.heap.keys, self.heap.pieces
        at = bisect_left(keys, size << SHIFT)
        if at < len(keys) and pieces[keys[at]] is self.last and at + 1 < len(keys):
            at += 1
        return pieces.pop(keys.pop(at)) if at < len(keys) else None

    def map(self, size: int) -> Piece | None:
        """A chunk of its own, in whole pages."""
        bytes = -(-(size + HEADER) // PAGE) * PAGE
        address = self.driver.take(bytes)
        if address is None:
            return None
        self.reserve(bytes)
        return Piece(self.mapped, address, address, bytes, USED)

    def extend(self, size: int) -> Piece | None:
        """Grow the heap at its end, by what is missing and a pad."""
        top = self.last if self.last is not None and self.last.state == FREE else None
        bytes = -(-(size + PAD + SMALLEST - (top.size if top else 0)) // PAGE) * PAGE
        if self.driver.take(bytes) is None:
            return None
        self.reserve(bytes)
        if top is not None:
            self.heap.remove(top)
            top.size += bytes
            return top
        end = self.last.address + self.last.size if self.last is not None else self.start
        piece = Piece(self.heap, self.start, end, bytes, FREE)
        piece.previous = self.last
        if self.last is not None:
            self.last.next = piece
        self.last = piece
        return piece

    def trim(self, threshold: int) -> None:
        """Return the pages at the heap's top beyond the pad, where the top has grown past the threshold."""
        top = self.last
        if top is None or top.state != FREE or top.size < threshold:
            return
        pad = PAD if threshold else 0
        bytes = (top.size - SMALLEST - 1 - pad) // PAGE * PAGE
        if bytes <= 0:
            return
        self.heap.remove(top)
        top.size -= bytes
        self.heap.add(top)
        self.give_to_system(top.address + top.size, bytes)

    def segments(self) -> Iterator[Segment]:
        """The heap, then every mapped chunk."""
        run: list[Piece] = []
        piece = self.last
        while piece is not None:
            run.append(piece)
            piece = piece.previous
        if run:
            yield segment_of(run[::-1], "heap")
        mapped = [
            piece for piece in (self.live | self.waiting).values() if piece is not None and piece.home is self.mapped
        ]
        for piece in sorted(mapped, key=lambda piece: piece.address):
            yield segment_of([piece], "mmap")
