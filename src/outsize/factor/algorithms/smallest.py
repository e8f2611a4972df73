"""The smallest budget of a decomposition: the least in which its own plan fits, found by planning again and again.

In: a plan of the same work in any budget, with any ranks. Out: a budget that was tried, not one that was added up: what a pass
takes depends on the room it has (how wide a mixture is, what stays in memory), so the needs of a plan in one budget say little of
another. Where ranks are asked for, all follows from them. Where an error is asked for, ranks are known after the data were
looked at: so there are two numbers, one that supposes ranks, and one that is enough whatever they are: all data in memory at
once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from outsize.core.errors import BudgetError
from outsize.core.units import GiB, KiB, MiB, TiB, format_bytes
from outsize.factor.algorithms.ranks import Ranks

_FIRST = 64 * KiB
_LAST = 1 << 60
_STEP = 1.6
_NEAR = 1.04
"""The search ends where the budget below, which does not do, is so near."""


class Plan(Protocol):
    """Plans the work inside a budget; a `BudgetError` where it does not fit."""

    def __call__(self, host: int, ranks: Ranks, *, at_once: bool = False) -> object: ...


@dataclass(frozen=True, slots=True)
class Smallest:
    """The smallest budget, as far as it is known."""

    bytes: int | None
    """The least that does, with the ranks that are given, were seen or are supposed; None where no budget does."""
    supposed: str
    """What it supposes, a few words; empty where it supposes nothing."""
    surely: int | None
    """What is enough whatever the ranks; None where `bytes` is, or none is."""

    def words(self) -> str:
        """Half a sentence."""
        if self.bytes is None:
            return "no budget is known to work"
        if not self.supposed:
            return f"the smallest budget that works is {format_bytes(self.bytes)}"
        surely = "" if self.surely is None else f"; {format_bytes(self.surely)} is enough whatever the ranks"
        return f"the smallest budget is {format_bytes(self.bytes)}, which {self.supposed}{surely}"


def find_smallest(plan: Plan, ranks: Ranks, *, given: bool, above: int = 0) -> Smallest:
    """`given`: ranks were asked for, or none are needed; `above`: a budget that is known not to do."""

    def does(budget: int) -> bool:
        return fits(plan, budget, ranks) or fits_at_once(plan, budget)

    at_once = functools.partial(fits_at_once, plan)
    if above and does(above):  # the data have more in them than was seen: only what asks nothing of them is sure
        return Smallest(_least(at_once, above), "", None)
    found = _least(does, above)
    surely = None if given or found is None else _least(at_once, above)
    return Smallest(found, "", None) if surely in (None, found) else Smallest(found, ranks.words(), surely)


def find_way(plan: Plan, ranks: Ranks, host: int) -> tuple[int, bool] | None:
    """(budget, whether all at once) in which the work fits, not above `host`; None where there is none. A larger room is used
    for wider mixtures and more threads, and may be too small for what follows from them: then the work is done as if there were
    less."""
    if fits(plan, host, ranks):
        return host, False
    if fits_at_once(plan, host):
        return host, True
    least = _search(lambda budget: budget > host or fits(plan, budget, ranks), 0)
    return (least, False) if least is not None and least < host and fits(plan, least, ranks) else None


def fits(plan: Plan, budget: int, ranks: Ranks, *, at_once: bool = False) -> bool:
    """True where a plan fits a budget."""
    try:
        plan(budget, ranks, at_once=at_once)
    except BudgetError:
        return False
    return True


def fits_at_once(plan: Plan, budget: int) -> bool:
    """True where the data can be cut in memory at once, whatever their ranks."""
    return fits(plan, budget, Ranks(1.0), at_once=True)


def _least(does: Callable[[int], bool], above: float) -> int | None:
    """The least budget that fits, about, and the same from whatever budget was asked."""
    found = _search(does, 0)
    return found if found is None or found > above else _search(does, above)


def _search(does: Callable[[int], bool], above: float) -> int | None:
    low, high = float(above), round_budget(max(_FIRST, above * _NEAR))
    while not does(high):
        low, high = high, round_budget(high * _STEP)
        if high > _LAST:
            return None
    while high > low * _NEAR:
        middle = round_budget((low + high) / 2)
        if middle >= high:
            break
        if does(middle):
            high = middle
        else:
            low = middle
    return high


def round_budget(size: float) -> int:
    """So many bytes or a few more: a number that stays the same when it is printed and given back as text."""
    whole = math.ceil(size)
    unit = next((unit for unit in (TiB, GiB, MiB) if whole > unit // 1024 * 999), KiB)
    if whole <= unit:
        return unit
    hundredths = whole * 100 // unit
    while hundredths * unit // 100 < whole:
        hundredths += 1
    return hundredths * unit // 100
