"""Memory limits of the container: control groups v2 and v1, through all ancestors that can be seen.

In: /proc/self/cgroup and /proc/self/mountinfo, then the files of each group from our own up to the mount. Out: a `Limit`
each. Page cache that the kernel can free is not counted as used. With it (`memory.current`), a container would look
full after reading one large file.
"""

from __future__ import annotations

import itertools
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from outsize.core.memory import Limit
from outsize.machine.system import System


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Names of the files of one version of control groups."""

    version: int
    """1 or 2."""
    limit: str
    """File with the hard limit."""
    usage: str
    """File with what is taken, page cache included."""
    prefix: str
    """What the names in memory.stat begin with."""
    kills: str
    """File that counts kills."""
    peak: str
    """File with the most that was taken, page cache included."""


LAYOUTS = (
    Layout(version=2, limit="memory.max", usage="memory.current", prefix="", kills="memory.events", peak="memory.peak"),
    Layout(
        version=1,
        limit="memory.limit_in_bytes",
        usage="memory.usage_in_bytes",
        prefix="total_",
        kills="memory.oom_control",
        peak="memory.max_usage_in_bytes",
    ),
)


class Counters(NamedTuple):
    """What the kernel counts for our own control group."""

    kills: int | None
    """How often it has killed there for memory."""
    peak: int | None
    """The most bytes the group has held, page cache included."""


def read_counters(system: System) -> Counters:
    """Kills and peak of our own group; None for what it does not report."""
    kills = peak = None
    for layout, folder in _own_groups(system):
        if kills is None:
            kills = read_numbers(system.read_text(f"{folder}/{layout.kills}")).get("oom_kill")
            peak = _number(system.read_text(f"{folder}/{layout.peak}"))
    return Counters(kills, peak)


def read_page_cache(system: System) -> int | None:
    """File pages that the kernel keeps for our own group, None where it does not say."""
    for layout, folder in _own_groups(system):
        stat = read_numbers(system.read_text(f"{folder}/memory.stat"))
        names = (f"{layout.prefix}inactive_file", f"{layout.prefix}active_file")
        if names[0] in stat:
            return sum(stat.get(name, 0) for name in names)
    return None


def read_cgroups(system: System) -> tuple[list[Limit], int | None]:
    """Limits of every group this process is in, and how often the kernel has killed there; none outside Linux."""
    limits: list[Limit] = []
    kills: int | None = None
    for layout in LAYOUTS:
        for folder in _groups(system, layout):
            limits += _read_limits(system, layout, folder)
            if kills is None:
                kills = read_numbers(system.read_text(f"{folder}/{layout.kills}")).get("oom_kill")
    return limits, kills


def is_hidden(system: System) -> bool:
    """True where this process is in a control group and nothing of it can be read."""
    named = [layout for layout in LAYOUTS if _find_path(system, layout.version) is not None]
    return bool(named) and not any(
        system.read_text(f"{folder}/{file}") is not None
        for layout in named
        for folder in _groups(system, layout)
        for file in (layout.usage, "cgroup.procs")
    )


def _own_groups(system: System) -> Iterator[tuple[Layout, str]]:
    return ((layout, folder) for layout in LAYOUTS for folder in itertools.islice(_groups(system, layout), 1))


def _groups(system: System, layout: Layout) -> Iterator[str]:
    """Folders of our group and its ancestors, innermost first."""
    mount = _find_mount(system, layout.version)
    path = _find_path(system, layout.version)
    if mount is None or path is None:
        return
    root, point = mount
    # Inside a container the mount may show only our own subtree: /proc/self/cgroup then still gives the host's path.
    inside = posixpath.relpath(path, root) if root != "/" and path.startswith(root) else path.lstrip("/")
    folder = posixpath.normpath(posixpath.join(point, inside)) if not inside.startswith("..") else point
    if system.read_text(f"{folder}/{layout.usage}") is None and system.read_text(f"{folder}/cgroup.procs") is None:
        folder = point
    while True:
        yield folder
        if folder == point or len(folder) <= len(point):
            return
        folder = posixpath.dirname(folder)


def _find_mount(system: System, version: int) -> tuple[str, str] | None:
    """(root shown, mount point) of the memory controller."""
    for line in (system.read_text("/proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or not kind:
            continue
        is_memory = kind[0] == "cgroup" and "memory" in kind[-1].split(",")
        if (version == 2 and kind[0] == "cgroup2") or (version == 1 and is_memory):
            return fields[3], fields[4]
    return None


def _find_path(system: System, version: int) -> str | None:
    """Our group's path as /proc/self/cgroup gives it."""
    for line in (system.read_text("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (version == 2 and controllers == "") or (version == 1 and "memory" in controllers.split(",")):
            return path
    return None


def _read_limits(system: System, layout: Layout, folder: str) -> Iterator[Limit]:
    stat = read_numbers(system.read_text(f"{folder}/memory.stat"))
    usage = _number(system.read_text(f"{folder}/{layout.usage}"))
    used = None if usage is None else max(0, usage - _reclaimable(stat, layout.prefix))
    names = {layout.limit: "container"} | (
        {"memory.high": "container (throttled above)"} if layout.version == 2 else {}
    )
    for file, name in names.items():
        bytes_ = _number(system.read_text(f"{folder}/{file}"))
        if bytes_ is not None:
            yield Limit(name=name, bytes=bytes_, used=used, source=f"{folder}/{file}")
    # v1 also tells the tightest limit of ancestors that a container cannot see.
    hidden = stat.get("hierarchical_memory_limit")
    if layout.version == 1 and hidden is not None and _is_limit(hidden):
        yield Limit(name="container", bytes=hidden, used=used, source=f"{folder}/memory.stat hierarchical_memory_limit")


def _reclaimable(stat: dict[str, int], prefix: str) -> int:
    """Page cache that the kernel frees before it kills: file pages that no process has mapped."""
    cache = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
    mapped = stat.get(f"{prefix}mapped_file", stat.get("file_mapped", 0))
    return max(0, cache - mapped) + stat.get("slab_reclaimable", 0)


def _number(text: str | None) -> int | None:
    """A limit or a count; None for `max`, for v1's "no limit", and for a missing file."""
    word = (text or "").strip()
    return int(word) if word.isdigit() and _is_limit(int(word)) else None


def _is_limit(value: int) -> bool:
    """Version 1 writes "no limit" as the largest multiple of a page below 2**63."""
    return value < 2**62


def read_numbers(text: str | None) -> dict[str, int]:
    """`name 123` lines."""
    pairs = (line.split() for line in (text or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
