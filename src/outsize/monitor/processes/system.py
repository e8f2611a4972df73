"""A `System` seen from another process: its control group, its limits. Everything else is this machine's."""

from __future__ import annotations

from outsize.machine.system import System, soft_limit


class ProcessSystem:
    """This machine, with `/proc/self` and the limits of another process; the environment is ours."""

    def __init__(self, system: System, pid: int) -> None:
        self._system, self._pid = system, pid
        self.environ = system.environ
        self.now, self.disk_space, self.devices = system.now, system.disk_space, system.devices

    def read_text(self, path: str) -> str | None:
        """A file of /proc or /sys; the mounts are ours, since we open the files."""
        if path.startswith("/proc/self/") and path != "/proc/self/mountinfo":
            path = f"/proc/{self._pid}/{path.removeprefix('/proc/self/')}"
        return self._system.read_text(path)

    def rlimit(self, name: str) -> int | None:
        return soft_limit(name, self._pid)
