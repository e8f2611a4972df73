"""Clusters of Dask as processes of their own, so that a scheduler or a worker can be killed and a worker can have a memory limit
of the kernel's. Tests and benchmarks share it.

A worker is a nanny of Dask and the process that it watches; both are in the worker's control group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import cgroup
import psutil

_QUIET = {"DASK_DISTRIBUTED__LOGGING__DISTRIBUTED": "critical", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


class Processes:
    """A scheduler and its workers."""

    def __init__(self, folder: Path, workers: int, limit: int, groups: list[cgroup.Group], env: dict[str, str]) -> None:
        self.folder, self.limit, self.groups = folder, limit, groups
        self.env = {**os.environ, **_QUIET, **env}
        self.port = _free_port()
        self.scheduler = self._start_scheduler()
        self.workers = [self._start_worker(number) for number in range(workers)]

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def _start_scheduler(self) -> subprocess.Popen[bytes]:
        command = [
            "-m",
            "distributed.cli.dask_scheduler",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--no-dashboard",
        ]
        return self._start(command)

    def _start_worker(self, number: int) -> subprocess.Popen[bytes]:
        command = [
            "-m", "distributed.cli.dask_worker", self.address, "--nthreads", "1", "--memory-limit", str(self.limit),
            "--no-dashboard", "--local-directory", str(self.folder / f"worker-{number}"), "--name", f"worker-{number}",
        ]  # fmt: skip
        return self._start(command, self.groups[number] if self.groups else None)

    def _start(self, command: list[str], group: cgroup.Group | None = None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, *command], env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=None if group is None else group.enter,
        )  # fmt: skip

    def worker_process(self, number: int) -> psutil.Process | None:
        """The process that a nanny watches now."""
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self.workers[number].pid).children(recursive=True)
            found = [one for one in children if "spawn_main" in " ".join(one.cmdline())]
            return found[0] if found else None
        return None

    def kill_worker(self, number: int) -> bool:
        """SIGKILL the process that works; its nanny starts another."""
        one = self.worker_process(number)
        if one is None:
            return False
        with contextlib.suppress(psutil.Error):
            one.send_signal(signal.SIGKILL)
            return True
        return False

    def kill_scheduler(self) -> None:
        self.scheduler.kill()
        self.scheduler.wait()

    def restart_scheduler(self) -> None:
        """The same address again."""
        self.scheduler = self._start_scheduler()

    def close(self) -> None:
        for process in (*self.workers, self.scheduler):
            tree = []
            with contextlib.suppress(psutil.Error):
                tree = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for child in tree:
                with contextlib.suppress(psutil.Error):
                    child.kill()
        for process in (*self.workers, self.scheduler):
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def dask_processes(
    folder: Path,
    workers: int = 2,
    limit: int = 1 << 30,
    *,
    groups: bool = False,
    slack: int = 0,
    env: dict[str, str] | None = None,
) -> Iterator[Processes]:
    """A scheduler and workers that Dask limits to `limit` bytes, and with `groups` the kernel too, at `limit + slack`."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(cgroup.limited(limit + slack)) for _ in range(workers)] if groups else []
        processes = Processes(folder, workers, limit, made, env or {})
        try:
            _wait_for_workers(processes, workers)
            yield processes
        finally:
            processes.close()


def _wait_for_workers(processes: Processes, number: int, seconds: float = 600) -> None:
    import distributed

    end = time.monotonic() + seconds
    with distributed.Client(processes.address, timeout=300, set_as_default=False) as client:
        while len(client.scheduler_info(n_workers=-1)["workers"]) < number:
            assert time.monotonic() < end, "workers did not start"
            time.sleep(0.1)
