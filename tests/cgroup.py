"""Runs a command inside a real memory control group, as a container would, and says how it went.

Tests and benchmarks share it. The hierarchy may be of version 1 (a folder of the memory controller's own) or of version 2
(one folder for all controllers, memory.peak since Linux 5.19): they differ in the names of `VERSIONS` only. Where no group
can be made, `Unavailable` says why, and a test that meets it is skipped with that reason.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
import unittest
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Files:
    """What one version of control groups calls its files, and the lines in them."""

    folder: str
    """Folder of the groups, seen from the mount."""
    limit: str
    """File of the hard limit."""
    swap: str
    """File that takes a 0, so that the limit is not passed by swapping."""
    peak: str
    """File of the highest use, page cache included."""
    kills: str
    """File with a line `oom_kill COUNT`."""
    anonymous: str
    """Line of memory.stat with the anonymous bytes of all processes inside."""


VERSIONS = {
    1: Files(
        "memory",
        "memory.limit_in_bytes",
        "memory.swappiness",
        "memory.max_usage_in_bytes",
        "memory.oom_control",
        "total_rss",
    ),
    2: Files(".", "memory.max", "memory.swap.max", "memory.peak", "memory.events", "anon"),
}


class Unavailable(unittest.SkipTest):
    """No memory control group can be made or read here; pytest skips the test that meets this."""


@dataclass(frozen=True)
class Group:
    """A control group that has been made."""

    path: Path
    files: Files

    @property
    def procs(self) -> Path:
        """A process whose number is written here is inside."""
        return self.path / "cgroup.procs"

    def enter(self) -> None:
        """Move the calling process inside; for `preexec_fn`."""
        self.procs.write_text(str(os.getpid()))

    def peak(self) -> int:
        """Highest use so far in bytes, page cache included."""
        try:
            return int((self.path / self.files.peak).read_text())
        except FileNotFoundError as error:
            raise Unavailable(f"this kernel does not tell the peak of a control group: {error}") from None

    def killed(self) -> bool:
        """True where the kernel has killed a process inside for memory."""
        return self._line(self.files.kills, "oom_kill") > 0

    def anonymous(self) -> int:
        """Anonymous bytes of all processes inside now."""
        return self._line("memory.stat", self.files.anonymous)

    def _line(self, file: str, name: str) -> int:
        with contextlib.suppress(OSError):
            for line in (self.path / file).read_text().splitlines():
                if line.startswith(f"{name} "):
                    return int(line.split()[1])
        return 0


@dataclass(frozen=True)
class Outcome:
    """How a command went."""

    seconds: float
    """Wall time from start to exit."""
    peak: int
    """Highest use of the group in bytes, page cache included."""
    anonymous: int
    """Highest anonymous memory of its processes in bytes, as often as it was looked at."""
    status: int | None
    """Exit status, None where it was stopped for time."""
    killed: bool
    """True where the kernel killed it for memory."""
    stdout: str
    stderr: str

    @property
    def fine(self) -> bool:
        """True where it ended well."""
        return self.status == 0 and not self.killed


@contextlib.contextmanager
def limited(limit: int, mount: Path = MOUNT) -> Iterator[Group]:
    """A control group with a hard limit in bytes."""
    unified = mount / "cgroup.controllers"
    files = VERSIONS[2 if unified.exists() else 1]
    group = Group(mount / files.folder / f"outsize-{uuid.uuid4().hex[:8]}", files)
    try:
        if unified.exists():
            children = mount / "cgroup.subtree_control"
            if "memory" not in children.read_text().split():
                children.write_text("+memory")
        group.path.mkdir()
    except OSError as error:
        raise Unavailable(f"no memory control group can be made here: {error}") from None
    try:
        try:
            (group.path / files.limit).write_text(str(limit))
        except OSError as error:
            raise Unavailable(f"no limit can be given to a control group here: {error}") from None
        with contextlib.suppress(OSError):  # a kernel without swap has no such file
            (group.path / files.swap).write_text("0")
        yield group
    finally:
        for _ in range(100):  # it is busy until its last process is gone
            with contextlib.suppress(OSError):
                group.path.rmdir()
                break
            time.sleep(0.05)


def run(
    command: list[str], limit: int, seconds: float = 600, *, env: dict[str, str] | None = None, cwd: str | None = None
) -> Outcome:
    """Run a command in a group of its own, for at most `seconds`."""
    with limited(limit) as group:
        highest, stop = 0, threading.Event()

        def sample() -> None:
            nonlocal highest
            while not stop.wait(0.01):
                highest = max(highest, group.anonymous())

        begin = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=cwd, preexec_fn=group.enter
        )
        sampler = threading.Thread(target=sample, daemon=True)
        sampler.start()
        status: int | None
        try:
            stdout, stderr = process.communicate(timeout=seconds)
            status = process.returncode
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = process.communicate()
            status = None
        wall = time.perf_counter() - begin
        stop.set()
        sampler.join()
        return Outcome(wall, group.peak(), highest, status, group.killed(), stdout, stderr)
