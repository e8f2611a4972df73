"""Other processes of a script, as threads of the one that is followed.

In: `multiprocessing` as a script uses it. Out: rows for `patches.replaced`. A process with a new target runs as a thread. A
further one with the same target does the same work in memory of its own: it is not run, and a note says so. Queues hand over the
objects themselves, and sharing a tensor changes nothing.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import multiprocessing.context
import multiprocessing.pool
import multiprocessing.process
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from outsize.model.torch_port.patches import Row
from outsize.model.tracing.tracer import Tracer

QUEUES = ("Queue", "SimpleQueue", "JoinableQueue")


def rows(tracer: Tracer, failed: Callable[[BaseException], None]) -> list[Row]:
    """All of them; `failed` gets what a process raised."""
    started = _Started(tracer, failed)
    process = multiprocessing.process.BaseProcess
    found: list[Row] = [
        (process, "start", lambda process: started.start(process)),
        (process, "join", lambda process, timeout=None: started.join(process, timeout)),
        (process, "is_alive", lambda process: started.is_alive(process)),
        (process, "exitcode", property(lambda process: None if started.is_alive(process) else 0)),
        (process, "terminate", lambda process: None),
        (process, "kill", lambda process: None),
        (process, "close", lambda process: None),
        (torch.Tensor, "share_memory_", lambda tensor: tensor),
        (torch.nn.Module, "share_memory", lambda module: module),
        (concurrent.futures, "ProcessPoolExecutor", lambda *args, **kwargs: concurrent.futures.ThreadPoolExecutor(1)),
    ]
    for owner in (multiprocessing, torch.multiprocessing):
        found += [(owner, "Pool", _one_thread), *((owner, name, _Handover) for name in QUEUES)]
    context = multiprocessing.context.BaseContext
    own = [name for name in QUEUES if name != "SimpleQueue"]  # a pool of threads waits at the pipe of a real one
    return [*found, *((context, name, lambda context, maxsize=0, **_: _Handover(maxsize)) for name in own)]


def _one_thread(processes: int | None = None, *args: Any, **kwargs: Any) -> Any:
    """A pool of processes as one thread of this process."""
    return multiprocessing.pool.ThreadPool(1, *args[:2])


class _Handover(queue.Queue):  # type: ignore[type-arg]
    """A queue between processes that are threads."""

    def close(self) -> None:
        pass

    join_thread = cancel_join_thread = close


class _Started:
    """The processes that a script has started."""

    def __init__(self, tracer: Tracer, failed: Callable[[BaseException], None]) -> None:
        self.tracer, self.failed = tracer, failed
        self.threads: dict[int, threading.Thread] = {}
        self.targets: set[Any] = set()

    def start(self, process: Any) -> None:
        target = getattr(process, "_target", None) or type(process).run
        if target in self.targets:
            self.tracer.note(
                f"of the processes that do the same work ({getattr(target, '__name__', target)}) one is followed: each of the "
                "others takes as much again"
            )
            return
        self.targets.add(target)
        self.threads[id(process)] = threading.Thread(target=self._run, args=(process,), daemon=True)
        self.threads[id(process)].start()

    def _run(self, process: Any) -> None:
        try:
            process.run()
        except BaseException as error:
            self.failed(error)

    def join(self, process: Any, timeout: float | None = None) -> None:
        if id(process) in self.threads:
            self.threads[id(process)].join(timeout)

    def is_alive(self, process: Any) -> bool:
        return id(process) in self.threads and self.threads[id(process)].is_alive()
