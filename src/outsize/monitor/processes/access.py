"""What may not be seen here, and why: one sentence each. A watch says it once and goes on with what it can read."""

from __future__ import annotations

import os

from outsize.machine.cgroup import is_hidden
from outsize.machine.system import System
from outsize.monitor.processes.tree import read_process

_FIRST_NAMESPACE = 0xEFFFFFFC
"""Inode of the process ids of the machine itself, which every kernel gives them."""
NO_PROC = "/proc cannot be read here: processes and what they hold are not known"


def why_unseen(pid: int) -> str:
    """Why a process cannot be watched."""
    if read_process(os.getpid()) is None:
        return NO_PROC
    try:
        os.kill(pid, 0)
    except PermissionError:
        return f"process {pid} is there, and /proc hides it (hidepid): watch it as its own user or as root"
    except (ProcessLookupError, OverflowError):
        pass
    beyond = "" if _sees_all_processes() else ": a container sees its own processes only"
    return f"there is no process {pid}{beyond}"


def find_troubles(system: System, pid: int | None) -> list[str]:
    """What is not known of a process, or of the machine where `pid` is None."""
    troubles = []
    if read_process(os.getpid()) is None:
        return [NO_PROC]
    if pid is None and not os.path.exists("/proc/1"):
        troubles.append("/proc hides the processes of other users (hidepid): only those of this user are named")
    if is_hidden(system):
        troubles.append("the limit of the container is not known: its control group cannot be read (/sys/fs/cgroup)")
    return troubles


def _sees_all_processes() -> bool:
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _FIRST_NAMESPACE
    except OSError:
        return True
