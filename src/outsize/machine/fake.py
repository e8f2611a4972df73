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
from outsize.machine.cgroup import LAYOUTS
from outsize.machine.system import DiskSpace, System

Size = int | str
ROOT_MOUNT = "30 1 8:1 / / rw - ext4 /dev/root rw\n"


@dataclass
class FakeSystem:
    """Answers from tables."""

    files: dict[str, str]
    rlimits: dict[str, int]
    disk: DiskSpace
    gpus: tuple[PoolReading, ...]
    environ: Mapping[str, str]

    def now(self) -> float:
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
        "/proc/self/mountinfo": ROOT_MOUNT,
    }


def _kib(**sizes: int) -> str:
    return "".join(f"{name}:  {size // 1024} kB\n" for name, size in sizes.items())


def _cgroup_files(version: int, limit: int, used: int, cache: int) -> dict[str, str]:
    layout = next(layout for layout in LAYOUTS if layout.version == version)
    mounted, kind, ours = {
        1: ("/sys/fs/cgroup/memory", "cgroup cgroup rw,memory", "4:memory:/job"),
        2: ("/sys/fs/cgroup", "cgroup2 cgroup rw", "0::/job"),
    }[version]
    counts = {"inactive_file": cache, "active_file": 0, "mapped_file": 0}
    files = {
        "cgroup.procs": "1", layout.limit: limit, layout.usage: used + cache, layout.kills: "oom_kill 0",
        "memory.stat": "\n".join(f"{layout.prefix}{name} {size}" for name, size in counts.items()),
    }  # fmt: skip
    return {
        "/proc/self/mountinfo": f"{ROOT_MOUNT}31 30 0:26 / {mounted} rw - {kind}\n",
        "/proc/self/cgroup": f"{ours}\n",
        f"{mounted}/{layout.limit}": "9223372036854771712\n",
        **{f"{mounted}/job/{name}": f"{text}\n" for name, text in files.items()},
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
