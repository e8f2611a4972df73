"""The only way to the operating system: everything this room reads comes through a `System`.

`LiveSystem` asks the kernel, `fake.FakeSystem` answers from tables. So tests of containers, limits and budgets use the
same code that runs on a user's machine.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from outsize.core.memory import PoolReading


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpace:
    """Space of the disk under a folder."""

    folder: str
    """Nearest folder that exists."""
    total: int
    free: int
    """Bytes this user may still write."""
    direct: bool | None
    """Whether direct I/O works there; None if it could not be tried."""


class System(Protocol):
    """What this room asks the operating system."""

    @property
    def environ(self) -> Mapping[str, str]:
        """Environment of this process."""

    def now(self) -> float:
        """Seconds since the epoch."""

    def read_text(self, path: str) -> str | None:
        """A file of /proc or /sys; None where it is missing or may not be read."""

    def rlimit(self, name: str) -> int | None:
        """Soft limit `AS` or `DATA` in bytes, None where there is none."""

    def disk_space(self, folder: str) -> DiskSpace:
        """Space under a folder."""

    def devices(self) -> tuple[tuple[PoolReading, ...], tuple[str, ...]]:
        """GPUs, and notes on what could not be read."""


class LiveSystem:
    """This machine."""

    @property
    def environ(self) -> Mapping[str, str]:
        return os.environ

    def now(self) -> float:
        return time.time()

    def read_text(self, path: str) -> str | None:
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read()
        except OSError:
            return None

    def rlimit(self, name: str) -> int | None:
        return soft_limit(name)

    def disk_space(self, folder: str) -> DiskSpace:
        """Space under a folder, which need not exist yet."""
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder) or os.sep
        space = os.statvfs(folder)
        return DiskSpace(
            folder=folder, total=space.f_frsize * space.f_blocks, free=space.f_frsize * space.f_bavail,
            direct=_direct_io(folder),
        )  # fmt: skip

    def devices(self) -> tuple[tuple[PoolReading, ...], tuple[str, ...]]:
        from outsize.machine.gpu import read_devices

        return read_devices(self)


class ReadOnce:
    """Another system, each file of which is read once: for one reading, whose parts then agree with each other."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._texts: dict[str, str | None] = {}
        self.environ = system.environ
        self.now, self.rlimit, self.disk_space, self.devices = (
            system.now, system.rlimit, system.disk_space, system.devices,
        )  # fmt: skip

    def read_text(self, path: str) -> str | None:
        """A file, as it was when it was first asked for."""
        if path not in self._texts:
            self._texts[path] = self._system.read_text(path)
        return self._texts[path]


def soft_limit(name: str, pid: int = 0) -> int | None:
    """Soft limit `AS` or `DATA` of a process (0: of this one); None where there is none or it may not be read."""
    try:
        import resource

        soft, _ = resource.prlimit(pid, getattr(resource, f"RLIMIT_{name}"))
    except (ImportError, OSError):  # Windows has no limits
        return None
    return None if soft == resource.RLIM_INFINITY else soft


_tried: dict[tuple[str, int], bool] = {}
"""(folder, its device) -> whether direct I/O works there: tried once, since it writes a file."""


def _direct_io(folder: str) -> bool | None:
    try:
        key = (folder, os.stat(folder).st_dev)
    except OSError:
        return None
    if key not in _tried:
        found = direct_io_works(folder)
        if found is None:
            return None
        _tried[key] = found
    return _tried[key]


def direct_io_works(folder: str) -> bool | None:
    """Try one direct write and read of a page in an unnamed file; None where the folder cannot be written."""
    import mmap
    import tempfile

    if not hasattr(os, "O_DIRECT"):
        return False
    try:
        probe = tempfile.NamedTemporaryFile(dir=folder, prefix=".outsize-probe-")  # noqa: SIM115
    except OSError:
        return None
    with probe, contextlib.closing(mmap.mmap(-1, 4096)) as page:
        try:
            file = os.open(probe.name, os.O_RDWR | os.O_DIRECT)
        except OSError:
            return False
        try:
            return os.pwritev(file, [page], 0) == 4096 and os.preadv(file, [page], 0) == 4096
        except OSError:
            return False
        finally:
            os.close(file)
