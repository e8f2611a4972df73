"""Draws a `Reading`: the memory of each pool, what limits it, who holds it, and the default budget."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from outsize.core.memory import Arena, PoolReading, Reading
from outsize.core.units import format_bytes
from outsize.report.text.layout import draw_share, make_table

COLUMNS = ("memory", "total>", "available>", "in use>", "limited by")


def draw(reading: Reading) -> RenderableType:
    rows = [
        (title_of(pool), format_bytes(pool.total), format_bytes(pool.available), _bar(pool), limited_by(pool))
        for pool in reading.pools
    ]
    table = make_table(COLUMNS, rows, padding=(0, 2, 0, 0))
    lines: list[RenderableType] = [table, Text()]
    for pool in reading.pools:
        lines += [Padding(line, (0, 0, 0, 2)) for line in _details(pool)]
    lines += [Padding(line, (0, 0, 0, 2)) for arena in reading.frameworks for line in _arena(arena)]
    lines += [Padding(line, (0, 0, 0, 2)) for line in _policies(reading)]
    lines += [Padding(Text(note, style="yellow"), (0, 0, 0, 2)) for note in reading.notes]
    lines += [Text(), Text("default budget", style="bold")]
    for allowance in reading.budget.allowances:
        lines.append(Text(f"  {allowance.pool}: {format_bytes(allowance.bytes)} = {allowance.reason}"))
    return Group(*lines)


def title_of(pool: PoolReading) -> str:
    prefix = f"GPU {pool.pool.index} " if pool.pool.kind == "device" else ""
    return prefix + ("scratch disk" if pool.pool.kind == "disk" else pool.name)


def taken_of(pool: PoolReading) -> float | None:
    """The used share of what may be used."""
    cap = pool.biting.bytes if pool.biting else pool.total
    return min(1.0, max(0.0, 1 - pool.available / cap)) if cap and pool.available is not None else None


def _bar(pool: PoolReading) -> Text:
    taken = taken_of(pool)
    return Text("-") if taken is None else draw_share(taken).append(f" {taken:4.0%}")


def limited_by(pool: PoolReading) -> str:
    if pool.biting is not None:
        return f"{pool.biting.name}: {format_bytes(pool.biting.bytes)}"
    return _PHYSICAL.get(pool.pool.kind, "its size") if pool.total is not None else "-"


_PHYSICAL = {"host": "physical RAM", "device": "the card's memory", "disk": "free disk space"}
"""The name of a pool's own size, when nothing else limits it."""


def _details(pool: PoolReading) -> list[str]:
    lines = [
        f"{limit.name}: {format_bytes(limit.bytes)}, {format_bytes(limit.used)} of it taken ({limit.source})"
        for limit in pool.limits
    ]
    for holder in pool.holders:
        lines.append(f"GPU {pool.pool.index}: pid {holder.pid} {holder.name or '-'} holds {format_bytes(holder.bytes)}")
    if pool.pool.kind == "disk":
        lines.append(f"scratch: {pool.name} ({', '.join(pool.notes)})")
    elif pool.pool.kind == "device":
        lines += [f"GPU {pool.pool.index}: {note}" for note in pool.notes]
    return lines


def _arena(arena: Arena) -> list[str]:
    place = f"GPU {arena.pool.index}" if arena.pool.kind == "device" else "RAM"
    counts = (("in use", arena.in_use), ("at most", arena.peak), ("taken", arena.reserved), ("may take", arena.limit))
    told = ", ".join(f"{word} {format_bytes(size)}" for word, size in counts if size is not None)
    return [f"{arena.framework} in this process, {place}: {told} ({arena.source})", *arena.notes]


_OVERCOMMIT = {
    "heuristic": "overcommit is heuristic: a request beyond RAM and swap fails, others may be killed later",
    "always": "overcommit is always on: no request fails, the process is killed when memory runs out",
    "never": "overcommit is off: a request fails when the commit limit is reached, touched or not",
}


def _policies(reading: Reading) -> list[str]:
    lines = [f"this process holds {format_bytes(reading.rss)} of RAM"]
    if reading.swap_total:
        lines.append(f"swap: {format_bytes(reading.swap_free)} of {format_bytes(reading.swap_total)} free")
    else:
        lines.append("no swap")
    if reading.overcommit:
        lines.append(_OVERCOMMIT[reading.overcommit])
    if reading.oom_kills:
        lines.append(f"the kernel has killed {reading.oom_kills} time(s) for memory here so far")
    if not reading.devices:
        lines.append("no GPU seen")
    return lines
