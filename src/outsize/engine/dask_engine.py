"""Dask's scheduler as the engine: `outsize.cluster("tcp://host:8786")`, or a `distributed.Client` that exists.

A task is pinned to one worker, and a worker has one task at a time, so that its memory is the task's whatever number of threads
it has. Workers that declare a resource `memory` are also asked for it. Tiles never go through Dask: a task returns a few numbers.
Limits of workers are those that the scheduler knows.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable
from typing import Any

from outsize.core.errors import ClusterError, InputError
from outsize.core.extras import need
from outsize.engine.executor import Executor, Outcome, Task, Worker

_CONNECT = 10
"""Seconds that reaching the scheduler may take."""
_LOOK = 0.25
"""Seconds between two questions to the scheduler."""
_ANSWER = 4
"""Seconds that a worker has to give the answer of a task that it has finished; a dead one never does."""
_SILENCE = 15.0
"""Seconds without an answer after which the scheduler is taken for lost."""


class DaskEngine(Executor):
    """A client of Dask."""

    def __init__(self, where: Any) -> None:
        distributed = need("distributed", f"the cluster of Dask at {where}")
        self._own = isinstance(where, str)
        self._client = self._connect(distributed, where) if self._own else where
        self.name = str(self._client.scheduler.address if self._client.scheduler is not None else where)
        self._ended: queue.SimpleQueue[tuple[str, Worker]] = queue.SimpleQueue()
        self._futures: dict[tuple[str, Worker], Any] = {}
        self._seen: dict[Worker, dict[str, Any]] = {}
        self._alive: list[Worker] = []
        self._looked = self._answered = 0.0
        self._look()

    def _connect(self, distributed: Any, address: str) -> Any:
        import logging

        logger = logging.getLogger("distributed")
        before = logger.level
        logger.setLevel(logging.CRITICAL)
        try:
            return distributed.Client(address, timeout=_CONNECT, set_as_default=False)
        except (OSError, TimeoutError, ValueError) as error:
            raise InputError(
                f"no scheduler of Dask answers at {address} ({type(error).__name__}): check the address, and that this machine "
                "reaches it"
            ) from None
        finally:
            logger.setLevel(before)

    def _look(self) -> None:
        """Ask the scheduler for its workers, not too often."""
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return
        self._looked = now
        told = None
        with contextlib.suppress(Exception):
            if self._client.status == "running":
                told = self._client.sync(self._client.scheduler.identity, n_workers=-1, callback_timeout=5)
        if told is not None:
            self._seen, self._answered = dict(told["workers"]), time.monotonic()
        elif self._client.status == "closed" or (self._answered and now - self._answered > _SILENCE):
            raise ClusterError(
                f"the scheduler at {self.name} is gone: start it again and make the same call, on the cluster or without it; "
                "what is finished is kept"
            )

    def workers(self) -> list[Worker]:
        self._look()
        alive = [name for name, facts in self._seen.items() if facts.get("status", "running") in ("running", "paused")]
        self._alive = self._alive if alive == self._alive else alive
        return self._alive

    def submit(self, task: Task, worker: Worker) -> None:
        has = self._seen.get(worker, {}).get("resources") or {}
        wanted = {"memory": min(task.bytes, has["memory"])} if "memory" in has else None
        try:
            future = self._client.submit(
                task.function, *task.arguments, key=f"{task.key}-{time.monotonic_ns()}", workers=[worker], resources=wanted,
                allow_other_workers=False, pure=False, retries=0,
            )  # fmt: skip
        except Exception:  # the client has noticed the loss of its scheduler: the next look tells
            self._looked = 0.0
            return
        self._futures[task.key, worker] = future
        future.add_done_callback(lambda _, name=(task.key, worker): self._ended.put(name))

    def wait(self, seconds: float) -> list[Outcome]:
        found: list[Outcome] = []
        while True:
            try:
                name = self._ended.get(timeout=0 if found else seconds)
            except queue.Empty:
                return found
            future = self._futures.pop(name, None)
            if future is not None:
                found.append(self._read(*name, future))

    def _read(self, key: str, worker: Worker, future: Any) -> Outcome:
        if future.status == "finished":
            try:
                return Outcome(key=key, worker=worker, value=future.result(timeout=_ANSWER))
            except Exception:  # the worker died with its answer: the task runs again
                return Outcome(key=key, worker=worker, lost=True)
        error = future.exception(timeout=_ANSWER) if future.status == "error" else None
        if error is None or type(error).__name__ in ("KilledWorker", "CancelledError", "FutureCancelledError"):
            return Outcome(key=key, worker=worker, lost=True)
        return Outcome(key=key, worker=worker, error=error)

    def forget(self, key: str, worker: Worker) -> None:
        future = self._futures.pop((key, worker), None)
        if future is not None:
            with contextlib.suppress(Exception):
                future.cancel(force=True)

    def ask_all(self, function: Callable[[], Any]) -> dict[Worker, Any]:
        return dict(self._client.run(function))

    def limit(self, worker: Worker) -> int | None:
        return self._seen[worker].get("memory_limit") or None

    def threads(self, worker: Worker) -> int:
        return int(self._seen[worker]["nthreads"])

    def close(self) -> None:
        if self._own:
            with contextlib.suppress(Exception):
                self._client.close(timeout=2)
