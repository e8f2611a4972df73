"""How many rows a data source reads at once, and how many it holds, inside a budget.

In: stores that share their axis 0, what is held of their rows meanwhile, a budget. Out: a `SizedRows`: the rows of a
stretch (what is read at once) and of the shuffling window. It is sized as passes are (`passes/base.py: size`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outsize.array.graph.frame import Frame
from outsize.array.passes.base import ANY, BARE, Effort, Room, Sizable, Sized, size
from outsize.array.passes.tiling import Grid
from outsize.array.store.base import Region, Store, whole
from outsize.array.tuning import current
from outsize.core.errors import BudgetError
from outsize.core.units import MiB, format_bytes
from outsize.engine.pool import round_to_pages

_STRETCH = 4 * MiB
"""Bytes of rows read at once, where the budget has room: long enough that a disk is at its full rate."""
_DRAWN = 24
"""Bytes per row of a window for the numbers that say which rows are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedRows(Sized):
    """Rows with their sizes."""

    window: int
    """Rows of the shuffling window, 0 where nothing is shuffled."""

    @property
    def stretch(self) -> int:
        """Rows that are read at once."""
        return self.chunk[0]


class RowWork(Sizable):
    """Rows of some stores, read a stretch at a time."""

    rereads = True

    def __init__(
        self, stores: Sequence[Store], length: int, held: int, copies: int, longest: int | None,
        window: int | None = None,
    ) -> None:  # fmt: skip
        """`held` rows are with the caller, and `copies` times a stretch of up to `longest` rows; a window of 0 rows is one that
        fills the budget."""
        super().__init__((), {}, current())
        self.stores, self.length, self.held, self.copies, self.window = stores, length, held, copies, window
        self.row = max(1, sum(math.prod(store.shape[1:]) * store.dtype.itemsize for store in stores))
        self.granule = max(1, *(store.granule[0] for store in stores))
        if longest is None:
            longest = -(-max(1, _STRETCH // self.row) // self.granule) * self.granule
        self.longest = max(1, min(length, longest))

    def label(self) -> str:
        return "rows"

    def measure(self, region: Region, frame: Frame) -> None:
        frame.loose = True  # other stretches may lie less luckily
        for store in self.stores:
            mark = frame.mark()
            frame.read(store, rows_region(store, *region[0]))
            frame.release(mark)

    def efforts(self, room: int) -> list[Effort]:
        return [Effort(1, room), BARE]

    def fit(self, effort: Effort, room: Room, there: int = ANY) -> SizedRows:
        each, stretch = self.row + _DRAWN, 1 if effort.bare else self.longest
        fixed = self.held * self.row + (self.window or 0) * each + sum(store.holds for store in self.stores)
        share = fixed + (room.host - fixed) // 4 if self.window == 0 else room.host
        while stretch > 1 and fixed + self._reading(stretch) > share:
            half = stretch // 2
            stretch = half if stretch <= self.granule else max(self.granule, half // self.granule * self.granule)
        window = self.window
        if window == 0:
            window = max(1, min(self.length, (room.host - fixed - self._reading(stretch)) // each))
            fixed += window * each
        shared = fixed + self.copies * stretch * self.row
        found = self.settle(Grid((self.length,), (stretch,)), (stretch,), 1, 1, 0, room, shared_bytes=shared)
        return found.extended(SizedRows, window=window or 0)

    def _reading(self, rows: int) -> int:
        """Bytes of a stretch that is read, with its copies."""
        return round_to_pages(self.probe(((0, min(self.length, rows)),)).peak) + self.copies * rows * self.row


def size_rows(work: RowWork, budget: int, what: str) -> SizedRows:
    """The sizes, or a `BudgetError` that calls the rows `what`."""
    sized, fits = size(work, Room(budget))
    assert isinstance(sized, SizedRows)
    if not fits:
        raise BudgetError(
            f"{what} hold {format_bytes(sized.peak)}, the budget of the data source is {format_bytes(budget)}; "
            f"the smallest that works is {format_bytes(sized.peak)}",
            needed=sized.peak, budget=budget, smallest=sized.peak, culprit=what,
        )  # fmt: skip
    return sized


def rows_region(store: Store, start: int, stop: int) -> Region:
    """Rows as a region of a store."""
    return ((start, stop), *whole(store.shape)[1:])
