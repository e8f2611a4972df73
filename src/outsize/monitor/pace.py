"""How often something may be read so that the reading costs at most a share of one processor.

A reading of a tree of a thousand processes takes tens of milliseconds; at ten a second it would take half a processor. So
the pause after a reading follows from what it cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

SHARE = 0.009
"""Part of one processor that a watcher may take with all that it does: reading, drawing, writing."""


class Pause:
    """How long to wait after a reading, so that readings take at most a share of a processor on average."""

    def __init__(self, interval: float, share: float = SHARE) -> None:
        self.seconds = interval
        """Seconds to wait now."""
        self._interval, self._share = interval, share
        self._costs: list[float] = []
        self._loaded = False

    def note(self, cost: float) -> None:
        """A reading took this many seconds of processor time. The first says nothing: it loads what later ones have. Of the
        last ones the mean counts, without the highest: any may be interrupted."""
        if not self._loaded:
            self._loaded = True
            return
        self._costs = [*self._costs[-31:], cost]
        counted = sorted(self._costs)[: max(1, len(self._costs) - 1)]
        self.seconds = max(self._interval, sum(counted) / len(counted) / self._share)


class Paced(Generic[T]):
    """A function that is called when its time has come, and otherwise answers with nothing."""

    def __init__(self, read: Callable[[], T], every: float, share: float) -> None:
        self._read, self._every, self._share = read, every, share
        self._next = 0.0

    def __call__(self, now: float) -> T | None:
        """The reading at `now` (seconds of any clock), or None where it is too early."""
        if now < self._next:
            return None
        began = time.thread_time()
        answer = self._read()
        self._next = now + max(self._every, (time.thread_time() - began) / self._share)
        return answer
