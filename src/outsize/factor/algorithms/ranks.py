"""What is known of ranks: what surveys said of each mode so far, and what is supposed where none has spoken yet.

A plan is a run without data, so it needs a rank wherever the run would look at them. It takes what an earlier run has seen, where
there was one; else a share of the length. Both come as a `Survey`, so the lines that decide are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from outsize.array.store.base import Block
from outsize.factor.algorithms.sampling import count_needed

Key = tuple[str, int]
"""`("mode", 1)` of Tucker, `("cut", 1)` of a tensor train."""
GUESS = 1 / 8
"""Share of a length that is supposed to be its rank."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What a mixture says of a mode."""

    axis: int
    basis: Block
    """Orthonormal columns."""
    energy: Block
    """Share of all squares along each."""
    squares: float
    """All squares, about."""
    length: int
    """Of the mode."""
    complete: bool
    """True where the basis spans all fibres there can be."""
    key: Key
    """What is cut there."""
    most: int | None = None
    """In a plan: the largest rank that a mixture of this width could tell."""

    def told(self, allowed: float) -> int | None:
        """Columns that lose at most this share of the squares; None where it cannot say."""
        mixed = None if self.complete else len(self.energy)
        found = count_needed(self.energy, allowed, self.length, mixed)
        return None if found is None or (self.most is not None and found > self.most) else max(1, found)

    def needed(self, allowed: float) -> int:
        """The same; all where it cannot say."""
        return self.told(allowed) or self.length


class Ranks:
    """What a run has seen, for the plans that follow it."""

    def __init__(self, share: float = GUESS) -> None:
        self.share = share
        self.seen: dict[tuple[Key, int], Survey] = {}
        """By what is cut and the length that was surveyed: both sides of a cut may be."""
        self.again: set[Key] = set()
        """Where a sample did not stand for all data, so that all were looked at."""
        self.coded: float | None = None
        """Bytes that zfp takes for an element."""
        self._least: dict[Key, int] = {}

    def note(self, found: Survey, allowed: float, *, hopeless: bool) -> None:
        """A survey has spoken. Where it could not say, the rank is taken to be all of the length if a wider one would not
        help, else twice its columns. What nobody has looked at is then taken to be no better."""
        if found.told(allowed) is not None:
            self.seen[found.key, found.length] = replace(found, basis=np.zeros((found.length, 0)))
        elif hopeless:
            self.note_rank(found.key, found.length, found.length)
        else:
            self._least[found.key] = 2 * len(found.energy)
        rank = found.told(allowed) or self.supposed(found.key, found.length).needed(allowed)
        self.share = max(self.share, rank / found.length)

    def note_rank(self, key: Key, length: int, rank: int) -> None:
        """A rank is what it is."""
        self.seen[key, length] = _level(key, length, rank)

    def supposed(self, key: Key, length: int, most: int | None = None) -> Survey:
        """What a plan takes for a mode; its rank is at most `most`."""
        known = self.seen.get((key, length))
        if known is not None:
            return known
        rank = max(-int(-length * self.share // 1), self._least.get(key, 1))
        return _level(key, length, min(rank, most or length))

    def words(self) -> str:
        """What a plan supposes."""
        if self.seen or self._least or self.coded:
            return "supposes what was seen of the data so far"
        return "supposes ranks of an eighth of each length"


def _level(key: Key, length: int, rank: int) -> Survey:
    """So many columns, none of which may go."""
    rank = max(1, min(length, rank))
    return Survey(0, np.zeros((length, 0)), np.full(rank, 1 / rank), 1.0, length, True, key)
