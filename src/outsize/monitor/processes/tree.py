"""A process and its children -> `TreeReading`: what they hold now, and what limits them.

Anonymous memory is summed over the tree. Shared memory is counted once, at its largest, because the processes map the
same pages. File pages are not counted, because the kernel frees them before it kills. A reading takes about 30
microseconds per process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from outsize.core.noun import Noun
from outsize.core.outcomes.recording import ProcessSample


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReading(ProcessSample):
    """One process at one moment, with what a sample leaves out."""

    address_space: int
    """Bytes of address space it has taken, what `ulimit -v` counts."""
    highest: int = 0
    """The most bytes of RAM it has held since it began, between readings too; the file pages it maps now are left out."""
    asked: int = 0
    """Bytes of memory of its own that it has asked for, touched or not."""
    ended: int | None = None
    """Its exit status if it has ended and was not waited for yet; negative for a signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeReading(Noun):
    """A process tree at one moment."""

    time: float
    """Seconds since the epoch."""
    processes: tuple[ProcessReading, ...]
    """The root first; those that have ended and were not waited for are among them."""

    @property
    def bytes(self) -> int:
        """RAM the tree holds."""
        shared = max((process.shared for process in self.processes), default=0)
        return sum(process.anonymous for process in self.processes) + shared


def read_tree(root: int) -> TreeReading:
    """The tree under a process; empty where it has gone."""
    found: list[ProcessReading] = []
    queue = [root]
    while queue:
        pid = queue.pop(0)
        process = read_process(pid)
        if process is not None:
            found.append(process)
            queue += children_of(pid)
    return TreeReading(time=time.time(), processes=tuple(found))


def read_process(pid: int) -> ProcessReading | None:
    """One process, None where it has gone."""
    text = read_proc(f"/proc/{pid}/status")
    if not text:
        return None
    files = _kib(_field(text, "RssFile"))
    return ProcessReading(
        pid=pid,
        name=_field(text, "Name") or "",
        anonymous=_kib(_field(text, "RssAnon")),
        shared=_kib(_field(text, "RssShmem")),
        address_space=_kib(_field(text, "VmSize")),
        highest=_kib(_field(text, "VmHWM")) - files,
        files=files,
        asked=_kib(_field(text, "VmData")),
        swap=_kib(_field(text, "VmSwap")),
        ended=_exit_status(pid) if (_field(text, "State") or "")[:1] in ("Z", "X") else None,
    )


def read_all() -> TreeReading:
    """Every process of this machine that can be seen, as if they were one tree."""
    try:
        pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    except OSError:
        pids = []
    found = [process for pid in pids if (process := read_process(pid)) is not None]
    return TreeReading(time=time.time(), processes=tuple(found))


_ALONE = ("Private_Clean", "Private_Dirty", "Private_Hugetlb")


def read_private(pid: int, names: Sequence[str] = _ALONE) -> int | None:
    """Bytes that would be free if a process ended; None where it has gone or may not be looked at. The kernel walks all its
    pages for this: about a millisecond for each gigabyte."""
    table = dict(
        line.split(":", 1) for line in (read_proc(f"/proc/{pid}/smaps_rollup") or "").splitlines() if ":" in line
    )
    return sum(_kib(table.get(name)) for name in names) if names[0] in table else None


def _exit_status(pid: int) -> int:
    """Exit status of a process that has ended and was not waited for; 0 where the kernel does not say."""
    words = (read_proc(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    return os.waitstatus_to_exitcode(int(words[49])) if len(words) > 49 else 0


_LIBRARIES = {"libtorch": "pytorch", "tensorflow_framework": "tensorflow", "xla_extension": "jax", "libjax": "jax"}


def read_library(pid: int) -> str | None:
    """The framework for tensors that a process has loaded, None where it has none or may not be looked at."""
    maps = read_proc(f"/proc/{pid}/maps") or ""
    return next((name for file, name in _LIBRARIES.items() if file in maps), None)


def read_kills() -> int | None:
    """How often the kernel has killed for memory on this machine since it started; None where it does not say."""
    for line in (read_proc("/proc/vmstat") or "").splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return None


def children_of(pid: int) -> list[int]:
    """The processes that a process has started and that are its children now."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    children = []
    for thread in threads:
        children += [int(word) for word in (read_proc(f"/proc/{pid}/task/{thread}/children") or "").split()]
    return children


def _field(text: str, name: str) -> str | None:
    """What stands behind `Name:` at the beginning of a line; the first line is the process's name."""
    begin = 0 if text.startswith(f"{name}:") else text.find(f"\n{name}:") + 1
    if not begin and not text.startswith(f"{name}:"):
        return None
    end = text.find("\n", begin)
    return text[begin + len(name) + 1 : end if end >= 0 else None].strip()


def _kib(text: str | None) -> int:
    return 0 if text is None else int(text.split()[0]) * 1024


def read_proc(path: str) -> str | None:
    """A file of /proc; None where it has gone or may not be read. Python's own files take several times as long."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    parts = []
    try:
        while part := os.read(file, 65536):
            parts.append(part)
    except OSError:  # the process ended meanwhile
        return None
    finally:
        os.close(file)
    return b"".join(parts).decode("utf-8", "replace")
