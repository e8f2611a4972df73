"""A cluster that is not there: the tasks of a run on workers with given links, storage, failures and slow moments, and a clock of
its own.

In: `Machines`. A task takes as long as its bytes take: on its worker's link or in its processor, whichever is slower, and through
the storage that all running tasks share evenly. All workers are alike, so the bytes that any running task has had up to now are
one number that grows with time (`_served`), and a task ends when that number reaches its own. Out: the same outcomes that a real
engine tells, in no time: faults are cured by the same lines (`barrier.py`).
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outsize.engine.executor import Executor, Outcome, Task, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Workers and what lies between them. Rates are bytes a second, times are seconds."""

    workers: int
    link: float
    """What one worker reads and writes, and works through."""
    storage: float = math.inf
    """What the shared storage gives to all of them together."""
    begin: float = 0.05
    """What a task costs beside its bytes: it is sent, it opens files, it tells its end."""
    dispatch: float = 0.001
    """What the driver needs to send a task; it sends one after another."""
    failures: float = 0.0
    """Times that a worker is lost in an hour."""
    restart: float = 60.0
    """How long a lost worker is away."""
    slow: float = 0.0
    """Share of the tasks that meet a slow moment of their worker."""
    slowness: float = 5.0
    """How many times longer these take."""
    seed: int = 0
    """Of the random numbers: the same seed is the same run."""


class SimulatedEngine(Executor):
    """Runs tasks on paper."""

    name = "a simulated cluster"

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self._draw = random.Random(machines.seed)
        self._alive = [f"worker {number}" for number in range(machines.workers)]
        self._now = self._served = 0.0
        self._ends: list[tuple[float, str, Worker]] = []
        """(what `_served` must reach, task, worker)."""
        self._running: dict[Worker, tuple[str, float]] = {}
        """Worker -> its task, and what that one's `_ends` has."""
        self._changes: list[tuple[float, Worker, bool]] = []
        """(when, worker, True where it comes back)."""
        self.moved = 0
        """Bytes that all tasks have asked for, those in vain too."""
        self.busy = 0.0
        """Seconds of all workers with a task."""
        self.full = 0.0
        """Seconds in which the storage was what tasks waited for."""
        for worker in self._alive:
            self._plan_failure(worker)

    def _plan_failure(self, worker: Worker) -> None:
        if self.machines.failures:
            heapq.heappush(
                self._changes, (self._now + self._draw.expovariate(self.machines.failures / 3600), worker, False)
            )

    def _rate(self) -> float:
        """Bytes a second of every running task."""
        return min(self.machines.link, self.machines.storage / max(1, len(self._running)))

    def _go_to(self, when: float) -> None:
        passed = max(0.0, when - self._now)
        self.busy += passed * len(self._running)
        if self.machines.storage < self.machines.link * len(self._running):
            self.full += passed
        self._served += passed * self._rate()
        self._now = max(self._now, when)

    def workers(self) -> list[Worker]:
        return self._alive

    def submit(self, task: Task, worker: Worker) -> None:
        self._go_to(self._now + self.machines.dispatch)
        size: float = task.moved + self.machines.begin * self.machines.link
        if self._draw.random() < self.machines.slow:
            size *= self.machines.slowness
        end = self._served + size
        self.moved += task.moved
        self._running[worker] = task.key, end
        heapq.heappush(self._ends, (end, task.key, worker))

    def wait(self, seconds: float) -> list[Outcome]:
        while self._ends and self._running.get(self._ends[0][2]) != (self._ends[0][1], self._ends[0][0]):
            heapq.heappop(self._ends)  # it was forgotten, or lost
        limit = self._now + seconds
        end = self._now + (self._ends[0][0] - self._served) / self._rate() if self._ends else math.inf
        change = self._changes[0][0] if self._changes else math.inf
        if min(end, change) > limit:
            self._go_to(limit)
            return []
        if change <= end:
            self._go_to(change)
            return self._change(*heapq.heappop(self._changes)[1:])
        self._go_to(end)
        _, key, worker = heapq.heappop(self._ends)
        del self._running[worker]
        return [Outcome(key=key, worker=worker)]

    def _change(self, worker: Worker, back: bool) -> list[Outcome]:
        """A worker is lost, or there again."""
        if back:
            self._alive = [*self._alive, worker]
            self._plan_failure(worker)
            return []
        self._alive = [other for other in self._alive if other != worker]
        heapq.heappush(self._changes, (self._now + self.machines.restart, worker, True))
        lost = self._running.pop(worker, None)
        return [] if lost is None else [Outcome(key=lost[0], worker=worker, lost=True)]

    def forget(self, key: str, worker: Worker) -> None:
        if self._running.get(worker, ("", 0.0))[0] == key:
            del self._running[worker]

    def ask_all(self, function: Callable[[], Any]) -> dict[Worker, Any]:
        return {worker: function() for worker in self._alive}

    def now(self) -> float:
        return self._now
