"""What an allocator takes for one request, when nothing is cached: bytes in, a `Take` out."""

from __future__ import annotations

from typing import NamedTuple

from outsize.allocator.replay import replay
from outsize.core.allocation import AllocationEvent, Take
from outsize.core.errors import InputError
from outsize.core.noun import Known
from outsize.core.units import format_bytes

MEMALIGN = 128
"""What asking for aligned memory can cost on top (torch aligns to 64 bytes); counted for every host request."""


class _Row(NamedTuple):
    """One allocator a user can ask about."""

    model: str
    overhead: int
    known: Known
    note: str


TAKERS: dict[str, _Row] = {
    "host": _Row("glibc", MEMALIGN, Known.BOUND, "malloc: a header, alignment and whole pages"),
    "cuda": _Row(
        "cuda", 0, Known.EXACT, "torch: blocks of 512 B out of segments of 2 MiB, 20 MiB or a multiple of 2 MiB"
    ),
    "cuda expandable": _Row("cuda-expandable", 0, Known.EXACT, "torch, expandable_segments: pages of 2 MiB or 20 MiB"),
    "tensorflow": _Row(
        "bfc", 0, Known.EXACT, "regions that double from 2 MiB; all of the limit at once without growth"
    ),
    "pinned": _Row("pinned", 0, Known.EXACT, "torch pin_memory: the next power of two"),
}
"""Name of the allocator -> the model that answers."""


def take(bytes: int, allocator: str) -> Take:
    """What `allocator` takes for one request of `bytes` on an empty cache."""
    row = TAKERS.get(allocator)
    if row is None:
        raise InputError(f"unknown allocator {allocator!r}: one of {', '.join(TAKERS)}")
    if bytes == 0:
        return Take(allocator=allocator, requested=0, allocated=0, reserved=0, known=row.known, note="nothing")
    peak = replay([AllocationEvent(0, True, 0, bytes + row.overhead)], row.model).peak
    note = row.note
    if peak.reserved > peak.allocated:
        note += f"; {format_bytes(peak.reserved - peak.allocated)} stay for later requests"
    return Take(
        allocator=allocator,
        requested=bytes,
        allocated=peak.allocated,
        reserved=peak.reserved,
        known=row.known,
        note=note,
    )
