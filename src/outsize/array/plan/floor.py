"""The fewest bytes that any schedule could move for the whole of a plan inside its budget, and what would close the gap to it.

In: the graph, the sinks, the passes that were chosen, the budget. Out: a bound, and sentences. Every source is read once and
every result written once. A source is read again where a result needs it after a reduction of it that no tile can hold: of
what was read before, at most the budget is still there (`x - x.mean(axis=0)` of a file twice the budget moves a half of it
twice). A product moves what its own bound says (2mnk/sqrt S), a sort that does not fit writes its runs and reads them back.
Sources of the bounds: Hong and Kung 1981, Aggarwal and Vitter 1988, Smith et al. 2017.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from outsize.array.graph.barrier import Barrier, Contract, Reduce
from outsize.array.graph.external_sort import Runs
from outsize.array.graph.local import Together
from outsize.array.graph.node import Source, walk
from outsize.array.plan.residency import Head
from outsize.array.store.base import Sink, Store, whole
from outsize.core.units import format_bytes

_PAGE = 4096
_CLOSE = 1.05
"""A plan up to this many times its floor is as good as there."""


def find_floor(
    top: Together, sinks: Sequence[Sink], passes: Sequence[Any], host: int, generous: Callable[[], int]
) -> tuple[int, str | None]:  # fmt: skip
    """(the floor in bytes, a sentence about what would move less or None). `passes` are scheduled passes; `generous` says what
    the largest of them would like to hold."""
    moved, sources = _moved(passes), {node.store for node in walk(top) if isinstance(node, Source)}
    once = {store: min(store.traffic(whole(store.shape)), moved[store]) for store in sources if moved[store]}
    visits = _visits(top, host)
    written = sum(sink.traffic(whole(sink.shape)) for sink in sinks)
    again = sum((visits[store] - 1) * size for store, size in once.items() if visits[store] > 1)
    stays = host * (max((visits[store] for store in once), default=1) - 1)
    sorted_ = sum(2 * max(0, node.nbytes - host) for node in walk(top) if isinstance(node, Runs))
    least = sum(once.values()) + written
    floor = least + max(0, again - stays) + sorted_ + _of_products(passes)
    return floor, _closer(passes, least, host, generous)


def _moved(passes: Sequence[Any]) -> Counter[Store]:
    """Bytes that are read of every store."""
    moved: Counter[Store] = Counter()
    for one in passes:
        for frame, number in one.sized.work.frames(one.sized):
            for (store, region), times in frame.reads.items():
                moved[store.inner if isinstance(store, Head) else store] += number * times * store.traffic(region)
    return moved


def _visits(top: Together, host: int) -> Counter[Store]:
    """How many times each source has to be gone through, one after another."""
    before: dict[int, dict[Store, int]] = {}
    """Visits that are over before a node can be had."""
    plainly: dict[int, frozenset[Store]] = {}
    """Sources that are read for a node as it is made."""
    for node in walk(top):
        over: dict[Store, int] = {}
        for child in node.inputs:
            for store, number in before[id(child)].items():
                over[store] = max(over.get(store, 0), number)
        reads = frozenset().union(*(plainly[id(child)] for child in node.inputs))
        if isinstance(node, Source) and not node.store.resident:
            reads = frozenset([node.store])
        if isinstance(node, Reduce) and _spreads(node, host):
            over.update({store: over.get(store, 0) + 1 for store in reads})
            reads = frozenset()
        before[id(node)], plainly[id(node)] = over, reads
    stores = before[id(top)].keys() | plainly[id(top)]
    return Counter({store: before[id(top)].get(store, 0) + (store in plainly[id(top)]) for store in stores})


def _spreads(node: Barrier, host: int) -> bool:
    """True where the pages that hold one whole lane are more than the budget."""
    child = node.inputs[0]
    if 0 in child.shape:
        return False
    axes = node.lane or (child.ndim - 1,)
    size, page = child.dtype.itemsize, _PAGE
    for axis in reversed(range(child.ndim)):
        length = child.shape[axis]
        size *= length if axis in axes else min(length, -(-page // size)) if size < page else 1
    return size > host


def _of_products(passes: Sequence[Any]) -> int:
    """What the most demanding product moves beside its operands and its result, each once."""
    most = 0
    for one in passes:
        work, sized = one.sized.work, one.sized
        if any(isinstance(node, Contract) for node, _ in work.outputs):
            floor = work.floor(sized) or 0
            most = max(most, floor - min(work.sources(sized), work.reads(sized)) - work.writes())
    return most


def _closer(passes: Sequence[Any], least: int, host: int, generous: Callable[[], int]) -> str | None:
    """What would move less: a budget that keeps what is now read again or goes to scratch files."""
    moves = sum(one.sized.work.reads(one.sized) + one.sized.work.writes() for one in passes)
    if moves <= _CLOSE * least:
        return None
    held = max(sum(part.bytes for part in one.resident) for one in passes)
    needed = math.ceil(1.05 * (held + moves - least + generous()))
    if needed <= host:
        return None
    return f"moves {format_bytes(moves)}: a budget of about {format_bytes(needed)} would keep more and move {format_bytes(least)}"
