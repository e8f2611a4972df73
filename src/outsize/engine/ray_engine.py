"""Ray as the engine: `outsize.cluster("ray://host:10001")`, or `outsize.cluster("ray")` for the cluster of this machine.

A worker is a node of Ray. It has one task at a time, which asks for its bytes with `memory=`. Tiles never go through the object
store: a task returns a few numbers.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any

from outsize.core.errors import ClusterError, InputError
from outsize.core.extras import need
from outsize.engine.executor import Executor, Outcome, Task, Worker

_LOOK = 0.5
"""Seconds between two questions for the nodes."""
_ANSWER = 10
"""Seconds in which an address answers."""
_SMALLEST = 1 << 20
"""Bytes: Ray refuses requests of no memory."""


def _knock(address: str) -> None:
    """An `OSError` where nothing listens: Ray itself goes on asking for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER).close()


class RayEngine(Executor):
    """A driver of Ray."""

    def __init__(self, where: str) -> None:
        ray = need("ray", f"the cluster of Ray at {where}")
        self._ray, self.name, self._own = ray, where, not ray.is_initialized()
        if self._own:
            address = where if where.startswith("ray://") else where.removeprefix("ray").removeprefix("+") or "auto"
            try:
                _knock(address.removeprefix("ray://"))
                ray.init(address=address, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
            except Exception as error:
                raise InputError(
                    f"no cluster of Ray answers at {where} ({type(error).__name__}): check the address, and start it with "
                    "`ray start --head`"
                ) from None
        self._running: dict[Any, tuple[str, Worker]] = {}
        self._nodes: dict[Worker, dict[str, Any]] = {}
        self._alive: list[Worker] = []
        self._looked = 0.0
        self._look()

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return
        self._looked = now
        try:
            self._nodes = {
                node["NodeID"]: node
                for node in self._ray.nodes()
                if node["Alive"] and node["Resources"].get("CPU", 0) >= 1
            }
        except Exception as error:
            raise ClusterError(
                f"the cluster of Ray at {self.name} is gone ({type(error).__name__}): start it again and make the same call, on "
                "the cluster or without it; what is finished is kept"
            ) from None

    def workers(self) -> list[Worker]:
        self._look()
        self._alive = self._alive if list(self._nodes) == self._alive else list(self._nodes)
        return self._alive

    def submit(self, task: Task, worker: Worker) -> None:
        self._running[self._start(task.function, task.arguments, worker, task.bytes)] = (task.key, worker)

    def _start(self, function: Callable[..., Any], arguments: tuple[Any, ...], worker: Worker, size: int) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        size = min(max(size, _SMALLEST), self.limit(worker) or size)
        there = NodeAffinitySchedulingStrategy(node_id=worker, soft=False)
        remote = self._ray.remote(function).options(num_cpus=1, memory=size, max_retries=0, scheduling_strategy=there)
        return remote.remote(*arguments)

    def wait(self, seconds: float) -> list[Outcome]:
        if not self._running:
            time.sleep(seconds)
            return []
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=seconds)
        more = [one for one in self._running if one not in ready]
        if ready and more:
            ready += self._ray.wait(more, num_returns=len(more), timeout=0)[0]
        return [self._read(one, *self._running.pop(one)) for one in ready]

    def _read(self, reference: Any, key: str, worker: Worker) -> Outcome:
        try:
            return Outcome(key=key, worker=worker, value=self._ray.get(reference))
        except self._ray.exceptions.RayTaskError as error:
            cause = getattr(error, "cause", None)
            return Outcome(key=key, worker=worker, error=cause if isinstance(cause, BaseException) else error)
        except self._ray.exceptions.RayError:  # the process or its node is gone, or was killed for memory
            self._looked = 0.0
            return Outcome(key=key, worker=worker, lost=True)

    def forget(self, key: str, worker: Worker) -> None:
        for reference in [one for one, name in self._running.items() if name == (key, worker)]:
            del self._running[reference]
            with contextlib.suppress(Exception):
                self._ray.cancel(reference, force=True)

    def ask_all(self, function: Callable[[], Any]) -> dict[Worker, Any]:
        asked = {worker: self._start(function, (), worker, _SMALLEST) for worker in self._nodes}
        return {worker: self._ray.get(reference, timeout=120) for worker, reference in asked.items()}

    def limit(self, worker: Worker) -> int | None:
        return int(self._nodes[worker]["Resources"].get("memory", 0)) or None

    def threads(self, worker: Worker) -> int:
        return int(self._nodes[worker]["Resources"]["CPU"])

    def close(self) -> None:
        if self._own:
            with contextlib.suppress(Exception):
                self._ray.shutdown()
