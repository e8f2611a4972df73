"""What an allocator takes for one request, when nothing is cached: bytes in, a `Take` out."""

from __future__ import annotations

from typing import NamedTuple

from outsize.allocator.replay import replay
from outsize.core.allocation import AllocationEvent, Take
from outsize.core.errors import InputError
from outsize.core.noun import Known

MEMALIGN = 128
"""What asking for aligned memory can cost on top (torch aligns to 64 bytes); counted for every host request."""


class _Row(NamedTuple):
    """One allocator a user can ask about."""

    model: str
    overhead: int
    known: Known
    note: str


TAKERS: dict[str, _Row] = {
    "host": _Row("glibc", MEMALIGN, Known.BOUND, "malloc: header and whole pages"),
    "cuda": _Row("cuda", 0, Known.EXACT, "torch: segments of 2 MiB steps"),
    "cuda expandable": _Row("cuda-expandable", 0, Known.EXACT, "torch: pages of 2 or 20 MiB"),
    "tensorflow": _Row("bfc", 0, Known.EXACT, "regions double from 2 MiB (growth on)"),
    "pinned": _Row("pinned", 0, Known.EXACT, "torch: the next power of two"),
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
    return Take(
        allocator=allocator,
        requested=bytes,
        allocated=peak.allocated,
        reserved=peak.reserved,
        known=row.known,
        note=row.note,
    )
