"""Runs a set of tasks on the workers of a cluster until all are done: submit, and barrier.

In: tasks in order, an executor. Each idle worker gets the next task. A task whose worker is lost runs again on another. A task
that fails for a reason that may pass (a store's timeout, a broken connection) runs again after a pause that doubles. When no task
is left to start, the slowest running one is also given to an idle worker, and the first to finish counts. Out: `finished` is
called with every task once and with what it returned; `Faults` tells what went wrong on the way.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from outsize.core.errors import ClusterError
from outsize.engine.executor import Executor, Outcome, Task, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a run bears with faults. Times are in seconds."""

    losses: int = 8
    """Workers that one task may lose before it is taken for the cause."""
    retries: int = 6
    """How often a task is tried again after a passing error."""
    pause: float = 0.25
    """Before the first of these; each later pause is twice as long."""
    slow: float = 3.0
    """A task that runs so many times longer than the median of its kind is taken over."""
    least: float = 2.0
    """No task is taken over before it has run so long."""
    empty: float = 60.0
    """How long to wait for a worker where none is left."""
    look: float = 0.5
    """Between two looks at the workers."""


@dataclass(slots=True)
class Faults:
    """What went wrong in a run and was cured."""

    lost: int = 0
    """Tasks whose worker was lost."""
    taken_over: int = 0
    """Tasks of slow workers that another finished first."""
    retried: Counter[str] = field(default_factory=Counter)
    """Passing errors, and how often each came."""

    def told(self) -> str:
        """All of it in a sentence; empty where nothing went wrong."""
        said = []
        if self.lost:
            said.append(f"{self.lost} tasks of lost workers ran again")
        if self.taken_over:
            said.append(f"{self.taken_over} tasks of slow workers were taken over")
        said += [f"tried again {count} times: {error}" for error, count in self.retried.items()]
        return "; ".join(said)


def run_tasks(
    executor: Executor, tasks: Iterable[Task], finished: Callable[[Task, Any], None], faults: Faults,
    patience: Patience = Patience(),
) -> None:  # fmt: skip
    """Run all tasks; returns when each is done once."""
    run = _Barrier(executor, list(tasks), finished, faults, patience)
    try:
        run.go()
    finally:
        run.stop()


class _Barrier:
    def __init__(
        self, executor: Executor, tasks: list[Task], finished: Callable[[Task, Any], None], faults: Faults,
        patience: Patience,
    ) -> None:  # fmt: skip
        self.executor, self.finished, self.faults, self.patience = executor, finished, faults, patience
        self.tasks = {task.key: task for task in tasks}
        self.waiting = deque(task.key for task in tasks)
        self.paused: list[tuple[float, int, str]] = []
        """(when it may run again, order, task)."""
        self.order = itertools.count()
        self.running: dict[Worker, tuple[str, float]] = {}
        """Worker -> its task, and since when."""
        self.alive: list[Worker] = []
        self.idle: deque[Worker] = deque()
        self.done: set[str] = set()
        self.twice: set[str] = set()
        """Tasks that were given to a second worker."""
        self.times: list[float] = []
        """How long tasks took, shortest first."""
        self.losses: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.empty_since: float | None = None

    def go(self) -> None:
        while len(self.done) < len(self.tasks):
            self._start_all(self.executor.workers())
            for outcome in self.executor.wait(self._next_look()):
                self._end(outcome)

    def stop(self) -> None:
        for worker, (key, _) in self.running.items():
            self.executor.forget(key, worker)

    def _next_look(self) -> float:
        now = self.executor.now()
        return max(0.0, min(self.patience.look, self.paused[0][0] - now)) if self.paused else self.patience.look

    def _start_all(self, alive: list[Worker]) -> None:
        """Give every idle worker something to do."""
        if alive is not self.alive:
            self._see(alive)
        now = self.executor.now()
        while self.paused and self.paused[0][0] <= now:
            self.waiting.append(heapq.heappop(self.paused)[2])
        while self.idle:
            chosen = self._next_task(now)
            if chosen is None:
                break
            worker = self.idle.popleft()
            self.running[worker] = chosen, now
            self.executor.submit(self.tasks[chosen], worker)
        self._check_empty(alive, now)

    def _see(self, alive: list[Worker]) -> None:
        """Workers have come or gone."""
        self.alive, there = alive, set(alive)
        for worker in [worker for worker in self.running if worker not in there]:
            key, _ = self.running[worker]
            self.executor.forget(key, worker)
            self._end(Outcome(key=key, worker=worker, lost=True))
        self.idle = deque(worker for worker in alive if worker not in self.running)

    def _next_task(self, now: float) -> str | None:
        while self.waiting:
            key = self.waiting.popleft()
            if key not in self.done:
                return key
        return self._slowest(now)

    def _slowest(self, now: float) -> str | None:
        """A task that runs on one worker only and takes much longer than others did."""
        if not self.times or self.paused:
            return None
        bound = max(self.patience.least, self.patience.slow * self.times[len(self.times) // 2])
        slow = [(since, key) for key, since in self.running.values()
                if key not in self.done and key not in self.twice and now - since > bound]  # fmt: skip
        if not slow:
            return None
        self.twice.add(min(slow)[1])
        return min(slow)[1]

    def _check_empty(self, alive: list[Worker], now: float) -> None:
        if alive:
            self.empty_since = None
            return
        self.empty_since = now if self.empty_since is None else self.empty_since
        if now - self.empty_since > self.patience.empty:
            raise ClusterError(
                f"no worker has been left at {self.executor.name} for {self.patience.empty:.0f} s: start some, and make the same "
                "call again; what is finished is kept"
            )

    def _end(self, outcome: Outcome) -> None:
        held = self.running.get(outcome.worker)
        if held is None or held[0] != outcome.key:
            return  # it was forgotten meanwhile
        now = self.executor.now()
        del self.running[outcome.worker]
        if outcome.lost:
            self.alive = []  # look again who is there: a process may be lost on a worker that stays
        else:
            self.idle.append(outcome.worker)
        key = outcome.key
        if key in self.done:
            return  # another worker was faster
        if outcome.lost:
            self._lose(outcome)
        elif outcome.error is not None:
            self._fail(outcome, now)
        else:
            bisect.insort(self.times, now - held[1])
            self.done.add(key)
            self.faults.taken_over += key in self.twice
            self.finished(self.tasks[key], outcome.value)

    def _lose(self, outcome: Outcome) -> None:
        key = outcome.key
        self.faults.lost += 1
        self.losses[key] += 1
        if self.losses[key] >= self.patience.losses:
            raise ClusterError(
                f"{self.losses[key]} workers of {self.executor.name} died with {key}, the last one was {outcome.worker}: look at "
                "their logs; a worker that is killed for memory needs a smaller budget"
            )
        if all(other != key for other, _ in self.running.values()):
            self.waiting.appendleft(key)

    def _fail(self, outcome: Outcome, now: float) -> None:
        error, key = outcome.error, outcome.key
        assert error is not None
        if not is_passing(error) or self.errors[key] >= self.patience.retries:
            raise error
        self.faults.retried[f"{type(error).__name__}: {error}"] += 1
        heapq.heappush(self.paused, (now + self.patience.pause * 2 ** self.errors[key], next(self.order), key))
        self.errors[key] += 1


_PASSING = {
    "EAGAIN", "EIO", "ETIMEDOUT", "ECONNRESET", "ECONNABORTED", "EPIPE", "ESTALE", "ENETDOWN", "EHOSTUNREACH", "EBUSY",
}  # fmt: skip
_WORDS = (
    "timeout", "timed out", "slowdown", "slow down", "service unavailable", "serviceunavailable", "internal error",
    "internalerror", "connection reset", "connection aborted", "too many requests", "endpointconnection", "503", "throttl",
    "server disconnected", "500 internal",
)  # fmt: skip
"""What object stores say when the same request may succeed a moment later."""


def is_passing(error: BaseException | None) -> bool:
    """True for an error of a store or a network that may be gone a moment later."""
    import errno

    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, ConnectionError | TimeoutError):
            return True
        if isinstance(error, OSError):
            if errno.errorcode.get(error.errno or 0) in _PASSING:
                return True
            if any(word in f"{type(error).__name__} {error}".lower() for word in _WORDS):
                return True
        error = error.__cause__ or error.__context__
    return False
