"""Runs a command inside a Linux memory cgroup with a hard limit, as a container would, and says how it went."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True)
class Outcome:
    """How a command went."""

    seconds: float
    """Wall time from start to exit."""
    peak: int
    """Highest use of the cgroup in bytes, page cache included."""
    anonymous: int
    """Highest anonymous memory of its processes in bytes."""
    status: int | None
    """Exit status, None where it was stopped for time."""
    killed: bool
    """True where the kernel killed it for memory."""
    output: str
    """What it printed, the last part."""

    @property
    def fine(self) -> bool:
        """True where it ended well."""
        return self.status == 0 and not self.killed


def available() -> bool:
    """True where a v1 memory cgroup can be made here."""
    return os.access(ROOT, os.W_OK) and (ROOT / "memory.limit_in_bytes").exists()


def run(command: list[str], limit: int, seconds: float, env: dict[str, str] | None = None) -> Outcome:
    """Run a command under a limit of bytes, for at most `seconds`."""
    group = ROOT / f"outsize-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        (group / "memory.swappiness").write_text("0")
        (group / "memory.limit_in_bytes").write_text(str(limit))
        return _watch(command, group, seconds, env)
    finally:
        _remove(group)


def _watch(command: list[str], group: Path, seconds: float, env: dict[str, str] | None) -> Outcome:
    anonymous, stop = 0, threading.Event()

    def sample() -> None:
        nonlocal anonymous
        while not stop.wait(0.01):
            anonymous = max(anonymous, _number(group / "memory.stat", "total_rss"))

    procs = group / "cgroup.procs"
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env,
        preexec_fn=lambda: procs.write_text(str(os.getpid())) and None,
    )  # fmt: skip
    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    status: int | None
    try:
        output, _ = process.communicate(timeout=seconds)
        status = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        output, status = process.communicate()[0], None
    wall = time.perf_counter() - begin
    stop.set()
    sampler.join()
    peak = int((group / "memory.max_usage_in_bytes").read_text())
    killed = _number(group / "memory.oom_control", "oom_kill") > 0
    return Outcome(wall, peak, anonymous, status, killed, (output or "")[-2000:])


def _number(path: Path, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0


def _remove(group: Path) -> None:
    for _ in range(100):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.05)
