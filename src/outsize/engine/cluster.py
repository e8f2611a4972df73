"""The cluster that is in use: its engine, and what is known of its workers.

`outsize.cluster` (`array/run/cluster.py`) finds both and sets them here, where planning and running look for them.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass

from outsize.engine.executor import Executor, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """One worker, as it was when the cluster was joined."""

    name: Worker
    room: int
    """Bytes that a task may hold there: what its limits leave beside what it holds already."""
    reason: str
    cores: int
    """Processors that a task may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Workers, and what reaches them."""

    executor: Executor
    workers: tuple[WorkerFacts, ...]
    """Those that were there at first; others may join, and leave, while work runs."""
    spread: int
    """How many workers plans are made for."""
    cores: int
    scratch: str | None = None
    """A folder that all workers reach, for what passes leave to each other; None is beside the output."""

    @property
    def tightest(self) -> WorkerFacts:
        """The worker with the least room."""
        return min(self.workers, key=lambda worker: worker.room)


_in_use: contextvars.ContextVar[Cluster | None] = contextvars.ContextVar("cluster", default=None)


def current_cluster() -> Cluster | None:
    """The cluster in use; None where work runs in this process."""
    return _in_use.get()


def set_cluster(cluster: Cluster | None) -> contextvars.Token[Cluster | None]:
    return _in_use.set(cluster)


def reset_cluster(token: contextvars.Token[Cluster | None]) -> None:
    _in_use.reset(token)


@contextlib.contextmanager
def use_cluster(cluster: Cluster | None) -> Iterator[None]:
    """Use a cluster, or none, inside the block."""
    token = _in_use.set(cluster)
    try:
        yield
    finally:
        _in_use.reset(token)
