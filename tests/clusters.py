"""Clusters of Dask and Ray as processes of their own, so that a scheduler or a worker can be killed and a worker can have a
memory limit of the kernel's. Tests and benchmarks share it.

A worker of Dask is a nanny and the process that it watches, one of Ray a node: its raylet, its agents and the processes that they
start. All of a worker is in its control group.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
        """What `outsize.cluster` takes."""
        raise NotImplementedError

    def wait(self, number: int, seconds: float = 600) -> None:
        """Until so many workers are there."""
        raise NotImplementedError

    def _start_scheduler(self) -> subprocess.Popen[bytes]:
        raise NotImplementedError

    def _start_worker(self, number: int) -> subprocess.Popen[bytes]:
        raise NotImplementedError

    def _start(self, command: list[str], group: cgroup.Group | None = None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, *command], env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=None if group is None else group.enter,
        )  # fmt: skip

    def worker_process(self, number: int) -> psutil.Process | None:
        """The process of a worker that works now."""
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self.workers[number].pid).children(recursive=True)
            found = [one for one in children if self.is_working(" ".join(one.cmdline()))]
            return found[0] if found else None
        return None

    def is_working(self, command: str) -> bool:
        """True for the command line of a process that works."""
        raise NotImplementedError

    def standing(self) -> list[int | None]:
        """What is another number, or none, once a worker has died."""
        found = [self.worker_process(number) for number in range(len(self.workers))]
        return [None if one is None else one.pid for one in found]

    def kill_worker(self, number: int) -> bool:
        """SIGKILL the process that works; another is started in its place."""
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


class DaskProcesses(Processes):
    """A scheduler of Dask, nannies and workers."""

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def _start_scheduler(self) -> subprocess.Popen[bytes]:
        command = ["--host", "127.0.0.1", "--port", str(self.port), "--no-dashboard"]
        return self._start(["-m", "distributed.cli.dask_scheduler", *command])

    def _start_worker(self, number: int) -> subprocess.Popen[bytes]:
        command = [
            "-m", "distributed.cli.dask_worker", self.address, "--nthreads", "1", "--memory-limit", str(self.limit),
            "--no-dashboard", "--local-directory", str(self.folder / f"worker-{number}"), "--name", f"worker-{number}",
        ]  # fmt: skip
        return self._start(command, self.groups[number] if self.groups else None)

    def is_working(self, command: str) -> bool:
        return "spawn_main" in command

    def wait(self, number: int, seconds: float = 600) -> None:
        import distributed

        end = time.monotonic() + seconds
        with distributed.Client(self.address, timeout=300, set_as_default=False) as client:
            while len(client.scheduler_info(n_workers=-1)["workers"]) < number:
                assert time.monotonic() < end, "workers did not start"
                time.sleep(0.1)


class RayProcesses(Processes):
    """A head of Ray that works nothing, and nodes of one processor."""

    store = 96 << 20
    """Bytes of a node's object store, which is shared memory."""

    def __init__(self, *given: Any) -> None:
        self.temporary = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # paths of sockets are short
        os.environ["RAY_AUTH_MODE"] = "disabled"  # for those who ask as for those who answer
        super().__init__(*given)

    @property
    def address(self) -> str:
        return f"ray+127.0.0.1:{self.port}"

    def _ray(self, words: list[str], group: cgroup.Group | None = None) -> subprocess.Popen[bytes]:
        ports = ("dashboard-agent-listen", "dashboard-agent-grpc", "metrics-export", "runtime-env-agent")
        free = [word for name in ports for word in (f"--{name}-port", str(_free_port()))]
        command = ["-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *free, *words]
        return self._start([*command, "--object-store-memory", str(self.store)], group)

    def _start_scheduler(self) -> subprocess.Popen[bytes]:
        self.env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        words = ["--head", "--port", str(self.port), "--num-cpus", "0", "--include-dashboard", "false"]
        return self._ray([*words, "--temp-dir", self.temporary])

    def _start_worker(self, number: int) -> subprocess.Popen[bytes]:
        self._wait_for_head()
        words = ["--address", f"127.0.0.1:{self.port}", "--num-cpus", "1", "--memory", str(self.limit)]
        return self._ray(words, self.groups[number] if self.groups else None)

    def _wait_for_head(self) -> None:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.2)
        raise AssertionError("the head of Ray did not start")

    def is_working(self, command: str) -> bool:
        return "ray::" in command and "Agent" not in command

    def wait(self, number: int, seconds: float = 600) -> None:
        import ray

        end = time.monotonic() + seconds
        while not ray.is_initialized():  # a head that has just begun refuses those who ask
            try:
                ray.init(address=f"127.0.0.1:{self.port}", log_to_driver=False, logging_level="ERROR")
            except Exception:
                if time.monotonic() > end:
                    raise
                time.sleep(1)
        try:
            while sum(node["Alive"] for node in ray.nodes()) < number + 1:
                assert time.monotonic() < end, "nodes did not start"
                for place, process in enumerate(self.workers):
                    if process.poll() is not None:  # another process took one of its ports
                        self.workers[place] = self._start_worker(place)
                time.sleep(0.2)
        finally:
            ray.shutdown()

    def standing(self) -> list[int | None]:
        return [
            None if one.poll() is not None else one.pid for one in self.workers
        ]  # each job has processes of its own

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.temporary, ignore_errors=True)


ENGINES = {"dask": DaskProcesses, "ray": RayProcesses}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def processes(
    engine: str, folder: Path, workers: int = 2, limit: int = 1 << 30, *, groups: bool = False, slack: int = 0,
    env: dict[str, str] | None = None,
) -> Iterator[Any]:  # fmt: skip
    """A scheduler and workers that the engine limits to `limit` bytes, and with `groups` the kernel too, at `limit + slack`."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(cgroup.limited(limit + slack)) for _ in range(workers)] if groups else []
        started = ENGINES[engine](folder, workers, limit, made, env or {})
        try:
            started.wait(workers)
            yield started
        finally:
            started.close()


dask_processes = functools.partial(processes, "dask")
