"""Runs Python code in a fresh process inside a real memory control group, as a container would.

`run_limited(code, limit)` skips the calling test with a reason where no group can be made (no root, no v1 controller).
"""

import contextlib
import os
import pathlib
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

CONTROLLER = pathlib.Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True)
class Outcome:
    """What became of a limited process."""

    status: int
    stdout: str
    stderr: str
    peak: int
    """Peak of the group in bytes, page cache included."""
    killed: bool


@contextlib.contextmanager
def limited_group(limit: int) -> Iterator[pathlib.Path]:
    """A control group with a hard limit."""
    group = CONTROLLER / f"outsize-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit))
    except OSError as error:
        pytest.skip(f"no memory control group can be made here: {error}")
    with contextlib.suppress(OSError):
        (group / "memory.swappiness").write_text("0")
    try:
        yield group
    finally:
        for _ in range(100):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)


def run_limited(code: str, limit: int, *, cwd: str | None = None, timeout: float = 120) -> Outcome:
    """Run `python -c code` in a group of its own."""
    with limited_group(limit) as group:
        procs = group / "cgroup.procs"
        done = subprocess.run(
            [sys.executable, "-c", code],
            preexec_fn=lambda: procs.write_text(str(os.getpid())) and None,
            capture_output=True, text=True, cwd=cwd, timeout=timeout,
        )  # fmt: skip
        counts = dict(line.split() for line in (group / "memory.oom_control").read_text().splitlines())
        peak = int((group / "memory.max_usage_in_bytes").read_text())
        return Outcome(done.returncode, done.stdout, done.stderr, peak, int(counts.get("oom_kill", 0)) > 0)
