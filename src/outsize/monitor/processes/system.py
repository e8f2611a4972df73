"""A `System` seen from another process: its control group, its limits. Everything else is this machine's."""

from __future__ import annotations

from outsize.machine.system import System


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
        """Soft limit `AS` or `DATA` of the other process, None where there is none or it may not be read."""
        import resource

        try:
            soft, _ = resource.prlimit(self._pid, getattr(resource, f"RLIMIT_{name}"))
        except OSError:
            return None
        return None if soft == resource.RLIM_INFINITY else soft
