"""What every engine of a cluster does for a run: start a task on a worker, and tell how tasks ended.

In: tasks. A task is a function that workers can import and its arguments. It says how many bytes it holds at most, and it may run
twice: it reads from stores, writes into stores and returns a few numbers. Out: outcomes. Which worker gets which task, what runs
again after a loss and which slow task is taken over is decided once for all engines (`barrier.py`), so that an engine is one
short file: `dask_engine.py`, `ray_engine.py`, `local_engine.py`, and `simulated_engine.py`, which has a clock of its own.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Worker = str
"""What an engine calls a worker: an address, the id of a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A piece of work for one worker."""

    key: str
    """Its name, different from that of every other task of the run."""
    function: Callable[..., Any]
    """What runs; workers import it by its name."""
    arguments: tuple[Any, ...]
    """What it is called with: a few names and numbers."""
    bytes: int
    """What it holds at most."""
    moved: int = 0
    """Bytes that it reads from storage and writes to it, as the plan has them."""
    share: float = 0.0
    """Which part of its pass it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a task ended on a worker."""

    key: str
    worker: Worker
    value: Any = None
    error: BaseException | None = None
    lost: bool = False
    """True where the worker went away; the task may run again elsewhere."""


class Executor(abc.ABC):
    """An engine, as a run uses it. One task at a time is given to a worker, which then has all its memory for it."""

    name: str

    @abc.abstractmethod
    def workers(self) -> list[Worker]:
        """Those that are alive now: the same list as long as nobody comes or goes. A `ClusterError` where the engine is gone."""

    @abc.abstractmethod
    def submit(self, task: Task, worker: Worker) -> None:
        """Start a task on a worker."""

    @abc.abstractmethod
    def wait(self, seconds: float) -> list[Outcome]:
        """Tasks that have ended since the last call; waits for the first, but no longer than `seconds`."""

    @abc.abstractmethod
    def forget(self, key: str, worker: Worker) -> None:
        """The end of a task is no longer of interest; it is stopped where the engine can."""

    @abc.abstractmethod
    def ask_all(self, function: Callable[[], Any]) -> dict[Worker, Any]:
        """What a function returns on every worker."""

    def limit(self, worker: Worker) -> int | None:
        """Bytes that the engine lets a worker have, None where it says nothing."""
        return None

    def threads(self, worker: Worker) -> int | None:
        """Processors that a user gave to a worker, None where the worker itself knows."""
        return None

    def now(self) -> float:
        """Seconds, from any beginning."""
        return time.monotonic()

    def close(self) -> None:  # noqa: B027  (some have nothing to let go of)
        """Let go of the engine, and end what was started for this run."""
