"""Which saved tensors to make again: ladders over the calls of a forward pass.

In: a `Survey`: every call, what it took and made, what autograd saves. Out: ladders of `Rung`s, each a set of calls that run
again, from the cheapest byte to the dearest. A call that runs again needs what it took: saved tensors that stay, memory that
is there anyway, or what other calls make again; where that would take long, the tensor is held, although autograd would not.
Calls that need each other run together, and what they make is there at once in the backward pass. So each ladder has a limit
for that: none runs the whole pass again.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from outsize.core.noun import Noun
from outsize.model.fitting.recipes.survey import Row, Survey

SHARES = (2, 6, 16, 48)
"""Ladders in which calls that run together make at most one part in so many of the saved bytes."""

LEAST = 20000
"""A call that frees less than one part in so many of the saved bytes, or less than a page, is not worth a recipe."""

PAGE = 4096

RUNGS = 24
"""Rungs of a ladder."""

NOTE = 2e-5
"""Seconds of the processor to note a call and to make it again, beside the operator."""

STALE = 0.9
"""A call whose worth has fallen to less than this part of what it was waits for its turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung(Noun):
    """A set of calls that run again."""

    sites: tuple[str, ...]
    freed: int
    """Bytes that are not held between the passes."""
    again: int
    """Most bytes that are there at once when they are made again."""
    seconds: float
    """Time of these calls, as a part of the survey's."""


class Found(NamedTuple):
    """What it takes to run one more call again."""

    worth: float
    """Bytes that it frees for a second."""
    net: int
    """Those bytes."""
    rows: set[int]
    """Calls that have to run again."""
    held: set[int]
    """Items that have to be held."""


class Ladder:
    def __init__(self, survey: Survey, most: int) -> None:
        self.rows = survey.rows
        self.sizes = survey.sizes
        self._most = most
        """Bytes that calls which run together may make."""
        self._maker = {item: number for number, row in enumerate(self.rows) for item in row.makes}
        made = {item for row in self.rows for item in row.all_made}
        self._kept = {item for item in survey.saved if item in made}
        """Items of this pass that are there after it."""
        self._given = set(range(len(self.sizes))) - made
        """Items that are there anyway."""
        self._takers: dict[int, list[int]] = {}
        for number, row in enumerate(self.rows):
            for item in row.takes:
                self._takers.setdefault(item, []).append(number)
        self._again: set[int] = set()
        self._parents: dict[int, int] = {}
        self._bytes: dict[int, int] = {}
        saved = sum(self.sizes[item] for item in self._kept)
        self._rate = saved / max(1e-9, sum(row.seconds for row in self.rows))
        """Bytes that a second of the forward pass leaves behind: what they cost."""
        self._least = max(PAGE, saved // LEAST)

    def build(self) -> tuple[Rung, ...]:
        """Take calls, the cheapest bytes first."""
        heap = []
        for number in range(len(self.rows)):
            found = self._weigh(number)
            if found is not None:
                heap.append((-found.worth, number))
        heapq.heapify(heap)
        found_rungs: list[Rung] = []
        freed, seconds, again = 0, 0.0, 0
        while heap:
            worth, number = heapq.heappop(heap)
            found = self._weigh(number)
            if found is None:
                continue
            if found.worth < -STALE * worth:
                heapq.heappush(heap, (-found.worth, number))
                continue
            freed, seconds = freed + found.net, seconds + sum(self.rows[row].seconds for row in found.rows)
            again = max(again, self._take(found.rows, found.held))
            found_rungs.append(
                Rung(
                    sites=tuple(self.rows[row].site for row in sorted(self._again)),
                    freed=freed,
                    again=again,
                    seconds=seconds,
                )
            )
        return tuple(_thinned(found_rungs))

    def _weigh(self, number: int) -> Found | None:
        """What it takes to run a call again, None where that frees nothing.

        What it needs and nobody keeps is made again where that takes less time than its bytes are worth, and held otherwise.
        Where nothing would be freed so, all of it is made again.
        """
        freed = sum(self.sizes[item] for item in self.rows[number].makes if item in self._kept)
        if freed <= self._least or number in self._again:
            return None
        for worth in (1.0, math.inf):
            rows: set[int] = set()
            held: set[int] = set()
            if not self._reach(number, rows, held, worth / self._rate):
                return None
            gone = sum(self.sizes[item] for row in rows for item in self.rows[row].makes if item in self._kept)
            net = gone - sum(self.sizes[item] for item in held)
            if net > self._least and self._together(rows) <= self._most:
                return Found(net / (sum(self.rows[row].seconds for row in rows) + NOTE * len(rows)), net, rows, held)
        return None

    def _reach(self, number: int, rows: set[int], held: set[int], price: float) -> bool:
        """All that has to run so that a call can; False where it cannot. `price`: seconds that a byte is worth."""
        stack = [number]
        while stack:
            row = self.rows[stack.pop()]
            current = self._index(row)
            if current in rows or current in self._again:
                continue
            rows.add(current)
            for item in row.takes:
                maker = self._maker.get(item)
                if item == row.over:
                    if maker is None:
                        return False
                    stack.append(maker)
                elif item in self._given or item in self._kept or item in held:
                    continue
                elif maker is None:
                    held.add(item)
                elif maker not in rows and maker not in self._again:
                    chain = self._chain(item, rows, self.sizes[item] * price)
                    if chain is None:
                        held.add(item)
                    else:
                        rows |= chain
        return True

    def _chain(self, item: int, rows: set[int], limit: float) -> set[int] | None:
        """Calls that make an item that nobody keeps; None where they take longer than it is worth."""
        found: set[int] = set()
        spent = 0.0
        stack = [item]
        while stack:
            needed = stack.pop()
            if needed in self._given or needed in self._kept:
                continue
            maker = self._maker.get(needed)
            if maker is None:
                return None
            if maker in found or maker in rows or maker in self._again:
                continue
            spent += self.rows[maker].seconds + NOTE
            if spent > limit:
                return None
            found.add(maker)
            over = self.rows[maker].over
            if over is not None and (over in self._given or over not in self._maker):
                return None
            stack += self.rows[maker].takes
        return found

    def _index(self, row: Row) -> int:
        return self._maker[row.makes[0]]

    def _neighbours(self, rows: Iterable[int]) -> set[int]:
        """Groups of calls that run again and give to, or take from, these."""
        near = set()
        for row in rows:
            makers = (self._maker.get(item) for item in self.rows[row].takes)
            takers = (taker for item in self.rows[row].makes for taker in self._takers.get(item, ()))
            near |= {self._root(other) for other in (*makers, *takers) if other in self._again}
        return near

    def _together(self, rows: set[int]) -> int:
        """Saved bytes that would be made at once."""
        mine = sum(self.sizes[item] for row in rows for item in self.rows[row].makes if item in self._kept)
        return mine + sum(self._bytes[root] for root in self._neighbours(rows))

    def _take(self, rows: set[int], held: set[int]) -> int:
        """These calls run again; the bytes of their group."""
        size, near, root = self._together(rows), self._neighbours(rows), min(rows)
        for row in rows:
            self._parents[row] = root
        for other in near:
            self._parents[other] = root
        self._bytes[root] = size
        self._again |= rows
        self._kept = self._kept - {item for row in rows for item in self.rows[row].makes} | held
        return size

    def _root(self, row: int) -> int:
        while self._parents[row] != row:
            self._parents[row] = row = self._parents[self._parents[row]]
        return row


def _thinned(rungs: list[Rung]) -> list[Rung]:
    """A few, at about equal steps of freed bytes."""
    if not rungs:
        return []
    step, found = rungs[-1].freed / RUNGS, []
    for rung, following in zip(rungs, [*rungs[1:], None], strict=True):
        if following is None or rung.freed // step != following.freed // step:
            found.append(rung)
    return found


def build_ladders(survey: Survey) -> tuple[tuple[Rung, ...], ...]:
    """One ladder for each limit of what is made at once."""
    saved = sum(survey.sizes[item] for item in survey.saved)
    found = {Ladder(survey, saved // share).build(): None for share in SHARES}
    return tuple(ladder for ladder in found if ladder)
