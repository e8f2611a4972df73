"""Growth that is seen from outside a process: workers that copy what they read, and growth that is no leak.

A forked worker shares its parent's pages until one of them writes to them. Python writes a reference count into every
object it reads, so a long list that workers read is copied page by page: the bytes that a worker has alone (USS) grow
while its RAM as a whole does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

from outsize.core.outcomes.rates import median_slope
from outsize.core.outcomes.recording import HOST_DEVICE, Finding, Sample
from outsize.core.units import format_bytes
from outsize.monitor.leaks.worker_data import WorkerData, nothing_known
from outsize.monitor.trend import LEAST, Trend

_POINTS = 256
_FEWEST = 5
_NOTABLE = 32 * 2**20
"""Bytes of growth that are worth a note."""


class TreeGrowth:
    """Follows the processes of the samples."""

    def __init__(self, find_data: Callable[[], WorkerData] = nothing_known) -> None:
        self._find_data = find_data
        self._alone: dict[int, list[tuple[float, int, int]]] = {}
        self._found: set[int] = set()
        self._first: Sample | None = None
        self._last: Sample | None = None

    def add(self, sample: Sample) -> Iterator[Finding]:
        """Take one sample; gives findings about workers."""
        self._first = self._first or sample
        self._last = sample
        root = min((process.pid for process in sample.processes), default=0)
        for process in sample.processes:
            if process.uss is None or process.pid == root or process.pid in self._found:
                continue
            points = self._alone.setdefault(process.pid, [])
            points.append((sample.time, process.uss, process.anonymous))
            del points[:-_POINTS]
            if _copies(points):
                self._found.add(process.pid)
                yield _describe(points, len(self._found), self._find_data())

    def explain(self, trends: Mapping[tuple[str, str, str], Trend]) -> Iterator[str]:
        """What grew and is no leak."""
        if self._first is None or self._last is None:
            return
        first, last = self._first.host, self._last.host
        cache = (last.page_cache or 0) - (first.page_cache or 0)
        if cache >= _NOTABLE:
            yield f"the page cache grew by {format_bytes(cache)}: no leak, the kernel frees it before it kills"
        asked = [_requested(sample) for sample in (self._first, self._last)]
        if asked[0] is not None and asked[1] is not None and not any(device == HOST_DEVICE for device, _, _ in trends):
            kept = last.anonymous - first.anonymous - max(0, asked[1] - asked[0])
            if kept >= _NOTABLE and last.anonymous - first.anonymous >= 2 * (asked[1] - asked[0]):
                yield (
                    f"the allocator keeps {format_bytes(kept)} that the program has given back (arenas, fragments): no leak, "
                    "it is used again"
                )


def _requested(sample: Sample) -> int | None:
    return next((one.requested for one in sample.allocators if one.device == HOST_DEVICE), None)


def _copies(points: list[tuple[float, int, int]]) -> bool:
    """True where the bytes a process has alone grow for good, and the RAM it maps does not."""
    settled = points[1:]
    if len(settled) < _FEWEST:
        return False
    alone = settled[-1][1] - settled[0][1]
    whole = settled[-1][2] - settled[0][2]
    rises = [later[1] - earlier[1] for earlier, later in pairwise(settled)]
    return alone >= max(8 * 2**20, 2 * LEAST) and whole < 0.5 * alone and sum(rise > 0 for rise in rises[-4:]) >= 3


def _describe(points: list[tuple[float, int, int]], workers: int, data: WorkerData) -> Finding:
    rate = median_slope([(time, alone) for time, alone, _ in points[1:]])
    grown = points[-1][1] - points[1][1]
    name, where, text = data
    held = f"{text} is copied" if text else "what its parent holds is copied"
    return Finding(
        kind="workers",
        device=HOST_DEVICE,
        text=f"{held} page by page into {'a' if workers == 1 else f'{workers}'} forked worker{'' if workers == 1 else 's'}: "
        f"{format_bytes(grown)} so far, {format_bytes(round(rate))} more each second",
        advice="keep it in one NumPy array or tensor, or in a list in shared memory (`multiprocessing.shared_memory`): reading a "
        "Python object writes its reference count, and so copies its page",
        name=name,
        where=where,
        grown=grown,
        per_second=rate,
    )
