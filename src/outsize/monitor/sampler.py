"""A process tree or the whole machine -> `Sample`, again and again, at a bounded cost.

What each process holds is read each time. What changes slowly or costs much is read less often and carried over: new processes,
the limits and the page cache, bytes that only one process has (USS) and the processes of the whole machine, as their cost allows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

from outsize.core.memory import Limit
from outsize.core.outcomes.recording import AllocatorSample, HostSample, ProcessSample, Sample
from outsize.machine import current_system
from outsize.machine.cgroup import read_page_cache
from outsize.machine.host import read_host, read_kib_table
from outsize.machine.system import ReadOnce, System
from outsize.monitor.gpus import Gpus
from outsize.monitor.pace import Paced
from outsize.monitor.processes.access import find_troubles
from outsize.monitor.processes.follower import TreeFollower
from outsize.monitor.processes.system import ProcessSystem
from outsize.monitor.processes.tree import ProcessReading, TreeReading, read_all, read_private

SHOWN = 8
"""Processes that a sample names."""


class Sampler:
    """Reads one process tree, or the whole machine where `pid` is None."""

    def __init__(
        self,
        pid: int | None,
        started: float,
        allocators: Callable[[], tuple[AllocatorSample, ...]] = tuple,
    ) -> None:
        self.notes: list[str] = []
        """What could not be read and why, a sentence each."""
        self._pid, self._started, self._allocators = pid, started, allocators
        self._system: System = (
            current_system() if pid in (None, os.getpid()) else ProcessSystem(current_system(), pid or 0)
        )
        self._gpus = Gpus()
        self._troubles = find_troubles(self._system, pid)
        self._tree = None if pid is None else TreeFollower(pid)
        self._limits = Paced(self._read_limits, every=0.5, share=0.0005)
        self._private = Paced(self._read_private, every=2.0, share=0.0005)
        self._everyone = Paced(read_all, every=1.0, share=0.004)
        self._processes: tuple[ProcessReading, ...] = ()
        self._host = HostSample(rss=0, anonymous=0, shared=0)
        self._held_then = 0
        self._last: tuple[tuple[ProcessReading, ...], HostSample, tuple[ProcessSample, ...]] | None = None

    def read(self, tree: TreeReading | None = None, step: int | None = None, phase: str = "") -> Sample | None:
        """One sample; None where the process has gone. `tree` is a reading that was just taken, if one was."""
        now = time.monotonic()
        if self._tree is not None:
            tree = tree if tree is not None else self._tree.read()
            self._processes = tuple(process for process in tree.processes if process.ended is None)
            if not self._processes:
                return None
        elif (everyone := self._everyone(now)) is not None:
            self._processes = everyone.processes
        fresh = self._limits(now)
        if fresh is not None:
            self._host, self._held_then = fresh, TreeReading(time=now, processes=self._processes).bytes
        private = self._private(now) if self._pid is not None else None
        if fresh is not None or private is not None or self._last is None or not _same(self._last[0], self._processes):
            self._last = (self._processes, self._sum_up(private), self._show(private or {}))
        _, host, shown = self._last
        if private is not None:
            self._last = None  # what a process has alone belongs to this moment only
        return Sample(
            time=time.time() - self._started,
            host=host,
            gpus=self._gpus.read(now),
            allocators=self._allocators(),
            processes=shown,
            process_count=len(self._processes),
            step=step,
            phase=phase,
        )

    def news(self) -> list[str]:
        """What could not be read, said once."""
        fresh = [text for text in (*self._troubles, *self._gpus.notes) if text not in self.notes]
        self.notes += fresh
        return fresh

    def _show(self, private: dict[int, int]) -> tuple[ProcessSample, ...]:
        """The largest processes."""
        largest = sorted(self._processes, key=lambda process: -process.anonymous - process.shared)[:SHOWN]
        return tuple(
            ProcessSample(
                pid=one.pid, name=one.name, anonymous=one.anonymous, shared=one.shared, files=one.files, swap=one.swap,
                uss=private.get(one.pid),
            )
            for one in largest
        )  # fmt: skip

    def _sum_up(self, private: dict[int, int] | None) -> HostSample:
        """The tree's bytes beside what was last read of the machine and its limits."""
        host = self._host
        if self._pid is None:
            return host
        shared = max((process.shared for process in self._processes), default=0)
        anonymous = sum(process.anonymous for process in self._processes)
        files = max((process.files for process in self._processes), default=0)
        return replace(
            host, rss=anonymous + shared + files, anonymous=anonymous, shared=shared,
            uss=sum(private.values()) if private else None, swap=sum(process.swap for process in self._processes),
            used=None if host.used is None else max(0, host.used + anonymous + shared - self._held_then),
        )  # fmt: skip

    def _read_limits(self) -> HostSample:
        system = ReadOnce(self._system)
        info = read_kib_table(system, "/proc/meminfo")
        host, _ = read_host(system)
        total = host.total or 0
        taken = total - info.get("MemAvailable", host.available or 0)
        limit = host.biting or Limit(name="RAM", bytes=total, used=taken, source=host.source)
        return HostSample(
            rss=taken,
            anonymous=info.get("AnonPages", taken),
            shared=info.get("Shmem", 0),
            swap=info.get("SwapTotal", 0) - info.get("SwapFree", 0),
            page_cache=read_page_cache(system) or info.get("Cached"),
            used=limit.used,
            limit=limit.bytes,
            limit_name=limit.name,
        )

    def _read_private(self) -> dict[int, int]:
        """USS of the largest processes; a thousand would take seconds."""
        largest = sorted(self._processes, key=lambda process: -process.anonymous)[:32]
        found = {process.pid: read_private(process.pid) for process in largest}
        if (
            largest
            and found[largest[0].pid] is None
            and (text := _HIDDEN.format(pid=largest[0].pid)) not in self._troubles
        ):
            self._troubles.append(text)
        return {pid: value for pid, value in found.items() if value is not None}


_HIDDEN = (
    "what only process {pid} holds (USS) is not shown: this user may not look at its pages (/proc/{pid}/smaps_rollup)"
)


def _same(before: tuple[ProcessReading, ...], now: tuple[ProcessReading, ...]) -> bool:
    """True where nothing has changed: the follower then gives the same objects."""
    return len(before) == len(now) and all(one is other for one, other in zip(before, now, strict=True))
