"""RAM as this process may use it: what the kernel has left, under every limit that applies."""

from __future__ import annotations

import os
import resource
from typing import Literal

from outsize.core.memory import HOST, Limit, Pool, PoolReading
from outsize.machine.cgroup import read_cgroups
from outsize.machine.system import System

_OVERCOMMIT: dict[str, Literal["heuristic", "always", "never"]] = {"0": "heuristic", "1": "always", "2": "never"}


def read_host(system: System) -> tuple[PoolReading, int | None]:
    """The host pool, and how often the kernel has killed in this container."""
    info = read_kib_table(system, "/proc/meminfo")
    total, free = (info["MemTotal"], info["MemAvailable"]) if "MemAvailable" in info else _ask_psutil()
    groups, kills = read_cgroups(system)
    caps = _distinct([*groups, *_process_limits(system, info)])
    limits = [limit for limit in caps if limit.bytes < total or limit.available < free]  # address space can pass RAM
    limits.sort(key=lambda limit: limit.available)
    available = min([free, *(limit.available for limit in limits)])
    source = "/proc/meminfo" if info else "psutil"
    reading = PoolReading(pool=HOST, name="RAM", total=total, available=available, limits=tuple(limits), source=source)
    return reading, kills


def _distinct(limits: list[Limit]) -> list[Limit]:
    """Limits without repetition: a parent group with the limit and use of its child adds nothing."""
    seen: dict[tuple[int, int | None], Limit] = {}
    for limit in limits:
        seen.setdefault((limit.bytes, limit.used), limit)
    return list(seen.values())


def _process_limits(system: System, info: dict[str, int]) -> list[Limit]:
    """`ulimit` and the kernel's commit limit."""
    status = read_kib_table(system, "/proc/self/status")
    limits = []
    for name, field, said in (("AS", "VmSize", "ulimit -v"), ("DATA", "VmData", "ulimit -d")):
        cap = system.rlimit(name)
        if cap is not None:
            limits.append(Limit(name=said, bytes=cap, used=status.get(field), source=f"RLIMIT_{name}"))
    if read_overcommit(system) == "never" and "CommitLimit" in info:
        limits.append(
            Limit(
                name="commit limit (overcommit is off)",
                bytes=info["CommitLimit"],
                used=info.get("Committed_AS"),
                source="/proc/meminfo CommitLimit",
            )
        )
    return limits


def read_overcommit(system: System) -> Literal["heuristic", "always", "never"] | None:
    """The kernel's policy on promising more memory than it has."""
    return _OVERCOMMIT.get((system.read_text("/proc/sys/vm/overcommit_memory") or "").strip())


def read_kib_table(system: System, path: str) -> dict[str, int]:
    """`Name:  123 kB` lines in bytes."""
    table = {}
    for line in (system.read_text(path) or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            table[name] = int(words[0]) * 1024
    return table


def read_swap(system: System) -> tuple[int, int]:
    """(total, free) bytes of swap."""
    info = read_kib_table(system, "/proc/meminfo")
    return info.get("SwapTotal", 0), info.get("SwapFree", 0)


def read_rss(system: System) -> int:
    """Bytes of RAM this process holds."""
    status = read_kib_table(system, "/proc/self/status")
    if "VmRSS" in status:
        return status["VmRSS"]
    import psutil

    try:
        return int(psutil.Process().memory_info().rss)
    except (OSError, psutil.Error):  # without /proc
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read_shm(system: System) -> PoolReading | None:
    """`/dev/shm`, where DataLoader workers pass tensors; None where there is none."""
    mounts = system.read_text("/proc/self/mountinfo") or ""
    if " /dev/shm " not in mounts:
        return None
    space = system.disk_space("/dev/shm")
    return PoolReading(
        pool=Pool(kind="shm"), name="/dev/shm", total=space.total, available=space.free, source="statvfs /dev/shm",
        notes=("bytes there are RAM too and count against the container",),
    )  # fmt: skip


def _ask_psutil() -> tuple[int, int]:
    import psutil

    try:
        memory = psutil.virtual_memory()
        return int(memory.total), int(memory.available)
    except OSError:  # without /proc: pages that are free, without the page cache that could be
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
