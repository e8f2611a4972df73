"""What is alive at a moment, and memory over time, of whatever notes a step's allocations: torch's ledger, TensorFlow's buffers.

In: events (True at an allocation, False at a free; what), in order. Out: what is alive after one of them, its sums as parts, and
the highest moments of equal stretches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from outsize.core.allocation import Sample
from outsize.core.footprint import Layers
from outsize.core.memory import Part
from outsize.core.noun import Known

STRETCHES = 400
"""Points of a timeline."""


class Record(Protocol):
    id: int
    bytes: int
    kind: str


R = TypeVar("R", bound=Record)


def alive_at(events: Sequence[tuple[bool, R]], event: int) -> list[R]:
    """Records that are alive after an event."""
    alive: dict[int, R] = {}
    for alloc, record in events[: event + 1]:
        if alloc:
            alive[record.id] = record
        else:
            alive.pop(record.id, None)
    return list(alive.values())


def by_kind(
    alive: Iterable[Record], kinds: Sequence[str], allocated: int, known: Callable[[str], Known]
) -> tuple[Part, ...]:
    """Parts that add up to what the allocator handed out: its rounding is a part of its own."""
    sums = _sum(alive, lambda record: record.kind)
    parts = [Part(name=kind, bytes=sums[kind], known=known(kind)) for kind in kinds if sums.get(kind)]
    rounding = allocated - sum(sums.values())
    return (*parts, Part(name="rounding", bytes=rounding, known=Known.ESTIMATE)) if rounding > 0 else tuple(parts)


def largest(alive: Iterable[R], key: Callable[[R], str], known: Known, count: int = 12) -> tuple[Part, ...]:
    """The largest sums, by module or line."""
    sums = sorted(((size, name) for name, size in _sum(alive, key).items() if name), reverse=True)
    return tuple(Part(name=name, bytes=size, known=known) for size, name in sums[:count])


def _sum(records: Iterable[R], key: Callable[[R], str]) -> dict[str, int]:
    sums: dict[str, int] = defaultdict(int)
    for record in records:
        sums[key(record)] += record.bytes
    return sums


def timeline(
    events: Sequence[tuple[bool, R]], samples: Sequence[Sample], kinds: Sequence[str], label: Callable[[R], str],
    line: Callable[[R], str],
) -> tuple[Layers, ...]:  # fmt: skip
    """The highest moment in each of `STRETCHES` equal parts of the trace."""
    width = max(1, -(-len(events) // STRETCHES))
    now, total = dict.fromkeys(kinds, 0), 0
    out: list[Layers] = []
    best: tuple[int, int, tuple[int, ...]] = (-1, 0, ())
    for number, (alloc, record) in enumerate(events):
        change = record.bytes if alloc else -record.bytes
        now[record.kind] = now.get(record.kind, 0) + change
        total += change
        if total > best[0]:
            best = (total, number, tuple(now[kind] for kind in kinds))
        if number % width == width - 1 or number == len(events) - 1:
            at, reserved = events[best[1]][1], samples[best[1]].reserved
            out.append(Layers(time=best[1], label=label(at), bytes=best[2], reserved=reserved, line=line(at)))
            best = (-1, number, ())
    return tuple(out)
