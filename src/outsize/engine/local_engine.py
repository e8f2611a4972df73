"""This process as the only worker: tasks run here, one after another, each with its own threads (`threads.py`).

Work that began on a cluster goes on here with the same tasks, and so with the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from outsize.engine.executor import Executor, Outcome, Task, Worker

_HERE = "this process"
_ALL = [_HERE]


class LocalEngine(Executor):
    """Runs a task when it is waited for."""

    name = "local"

    def __init__(self) -> None:
        self._next: Task | None = None

    def workers(self) -> list[Worker]:
        return _ALL

    def submit(self, task: Task, worker: Worker) -> None:
        assert self._next is None, "one task at a time"
        self._next = task

    def wait(self, seconds: float) -> list[Outcome]:
        task, self._next = self._next, None
        if task is None:
            time.sleep(seconds)  # all are paused
            return []
        try:
            return [Outcome(key=task.key, worker=_HERE, value=task.function(*task.arguments))]
        except Exception as error:
            return [Outcome(key=task.key, worker=_HERE, error=error)]

    def forget(self, key: str, worker: Worker) -> None:
        self._next = None

    def ask_all(self, function: Callable[[], Any]) -> dict[Worker, Any]:
        return {_HERE: function()}
