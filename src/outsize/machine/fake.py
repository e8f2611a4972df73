"""A scripted machine: tests every room on memory, limits and cards that this machine does not have.

    with FakeMachine(total="16GiB", container="700MiB", gpus=[("RTX 4090", "24GiB", "23GiB")]):
        outsize.memory()

It writes the files the kernel would show (`/proc/meminfo`, control groups, mounts) and lets the real code read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import outsize.machine
from outsize.core.memory import Holder, Pool, PoolReading
from outsize.core.units import parse_bytes
from outsize.machine.system import DiskSpace, System

Size = int | str


@dataclass
class FakeSystem:
    """Answers from tables."""

    files: dict[str, str]
    rlimits: dict[str, int]
    disk: DiskSpace
    gpus: tuple[PoolReading, ...]
    environ: Mapping[str, str]

    def now(self) -> float:
        """A fixed moment."""
        return 0.0

    def read_text(self, path: str) -> str | None:
        return self.files.get(path)

    def rlimit(self, name: str) -> int | None:
        return self.rlimits.get(name)

    def disk_space(self, folder: str) -> DiskSpace:
        return self.disk

    def devices(self) -> tuple[tuple[PoolReading, ...], tuple[str, ...]]:
        return self.gpus, ()


class FakeMachine:
    """A machine in a `with` block. Sizes as `parse_bytes` takes them."""

    def __init__(
        self,
        *,
        total: Size = "16GiB",
        available: Size | None = None,
        container: Size | None = None,
        container_used: Size = 0,
        container_cache: Size = 0,
        cgroup: int = 2,
        address_space: Size | None = None,
        disk_free: Size = "100GiB",
        overcommit: int = 0,
        gpus: Sequence[tuple[str, Size, Size]] = (),
        holders: Sequence[tuple[int, str, Size]] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        ram = parse_bytes(total)
        left = ram if available is None else parse_bytes(available)
        files = _proc_files(ram, left, overcommit)
        if container is not None:
            files |= _cgroup_files(
                cgroup, parse_bytes(container), parse_bytes(container_used), parse_bytes(container_cache)
            )
        rlimits = {} if address_space is None else {"AS": parse_bytes(address_space)}
        free = parse_bytes(disk_free)
        self.system = FakeSystem(
            files, rlimits, DiskSpace(folder="/scratch", total=2 * free, free=free, direct=True),
            _cards(gpus, holders), {"HOME": "/home/user"} | dict(environ or {}),
        )  # fmt: skip
        self._before: list[System] = []

    def __enter__(self) -> FakeSystem:
        self._before.append(outsize.machine.use_system(self.system))
        return self.system

    def __exit__(self, *_: object) -> None:
        outsize.machine.use_system(self._before.pop())


def _proc_files(total: int, available: int, overcommit: int) -> dict[str, str]:
    return {
        "/proc/meminfo": _kib(
            MemTotal=total,
            MemAvailable=available,
            SwapTotal=0,
            SwapFree=0,
            CommitLimit=total // 2,
            Committed_AS=total // 8,
        ),
        "/proc/self/status": _kib(VmSize=200 << 20, VmData=100 << 20, VmRSS=40 << 20),
        "/proc/sys/vm/overcommit_memory": f"{overcommit}\n",
        "/proc/self/mountinfo": "30 1 8:1 / / rw - ext4 /dev/root rw\n",
    }


def _kib(**sizes: int) -> str:
    return "".join(f"{name}:  {size // 1024} kB\n" for name, size in sizes.items())


def _cgroup_files(version: int, limit: int, used: int, cache: int) -> dict[str, str]:
    mounts = "30 1 8:1 / / rw - ext4 /dev/root rw\n"
    if version == 2:
        group = "/sys/fs/cgroup/job"
        return {
            "/proc/self/mountinfo": mounts + "31 30 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n",
            "/proc/self/cgroup": "0::/job\n",
            f"{group}/cgroup.procs": "1\n",
            f"{group}/memory.max": f"{limit}\n",
            f"{group}/memory.high": "max\n",
            f"{group}/memory.current": f"{used + cache}\n",
            f"{group}/memory.stat": f"anon {used}\ninactive_file {cache}\nactive_file 0\nfile_mapped 0\n",
            f"{group}/memory.events": "oom 0\noom_kill 0\n",
        }
    group = "/sys/fs/cgroup/memory/job"
    return {
        "/proc/self/mountinfo": mounts + "31 30 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
        "/proc/self/cgroup": "4:memory:/job\n",
        f"{group}/cgroup.procs": "1\n",
        f"{group}/memory.limit_in_bytes": f"{limit}\n",
        f"{group}/memory.usage_in_bytes": f"{used + cache}\n",
        f"{group}/memory.stat": f"total_inactive_file {cache}\ntotal_active_file 0\ntotal_mapped_file 0\n",
        f"{group}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }


def _cards(gpus: Sequence[tuple[str, Size, Size]], holders: Sequence[tuple[int, str, Size]]) -> tuple[PoolReading, ...]:
    held = tuple(Holder(pid=pid, name=name, bytes=parse_bytes(size)) for pid, name, size in holders)
    return tuple(
        PoolReading(
            pool=Pool(kind="device", index=index),
            name=name,
            total=parse_bytes(total),
            available=parse_bytes(free),
            holders=held if index == 0 else (),
            source="fake",
        )
        for index, (name, total, free) in enumerate(gpus)
    )
