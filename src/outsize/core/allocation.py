"""Allocations over time, and the memory that an allocator takes for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from outsize.core.noun import Known, Noun


class AllocationEvent(NamedTuple):
    """One allocation or free. A plain tuple: a million of them pass through a replay."""

    time: float
    """Seconds, microseconds or a running number; only the order matters."""
    alloc: bool
    """True for an allocation, False for the free of the same id."""
    id: int
    """Names the block from its allocation to its free; may be used again afterwards."""
    bytes: int
    """Bytes asked for; ignored at a free."""
    stream: int = 0
    """Stream (queue) the block belongs to; blocks are not shared between streams."""
    waits: bool = False
    """At a free: another stream still uses the block; it counts as active until a second free of the same id."""


EMPTY_CACHE = -1
"""The id of a free that means `empty_cache()`: the allocator gives back what it does not use."""


class Sample(NamedTuple):
    """State of an allocator after one event."""

    requested: int
    """Bytes asked for and not yet freed."""
    allocated: int
    """Bytes in blocks handed out: rounding counted."""
    active: int
    """Allocated, plus blocks that are free but wait for another stream."""
    reserved: int
    """Bytes the allocator holds from the system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block(Noun):
    """A piece of a segment."""

    offset: int
    """Bytes from the segment's start."""
    bytes: int
    id: int | None
    """Allocation that holds it, None where it is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment(Noun):
    """One piece of memory got from the system."""

    address: int
    """Where it starts (the model's own address space)."""
    bytes: int
    """Its length; of an expandable segment, what is mapped."""
    pool: str
    """`small`, `large`, ..."""
    stream: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Take(Noun):
    """What an allocator takes for one request on an empty cache."""

    allocator: str
    """`host`, `cuda`, `cuda expandable`, `tensorflow`, `pinned`."""
    requested: int
    allocated: int
    """Bytes of the block handed out."""
    reserved: int
    """Bytes the allocator gets from the system for it."""
    known: Known
    note: str = ""
    """Why it is more than was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemoryPoint(Noun):
    """Where a replay ran out."""

    event: int
    requested: int
    free: int | None
    """Bytes that the device still had; None where a limit was reached on a device without an end."""
    reserved_unallocated: int
    """Bytes the allocator held without using them: the fragmentation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay(Noun):
    """The result of replaying events through a model of an allocator."""

    allocator: str
    """Which model, with the settings that differ from the default."""
    events: int
    peak: Sample
    """Highest value of each number; these may be at different moments."""
    peak_event: int
    """Number of the event at which reserved first reached its peak."""
    samples: tuple[Sample, ...]
    """State after every event; empty unless asked for."""
    segments: tuple[Segment, ...]
    """The segment map at the end."""
    retries: int
    """How often the cache was released and the system asked again."""
    out_of_memory: OutOfMemoryPoint | None
    """Where it ran out, None if it did not; the replay ends there."""
    known: Known
    """How the reserved bytes are known: exact if no choice depended on an address that had to be assumed."""

    @property
    def fragmentation(self) -> int:
        """Bytes by which the reserved peak is above the allocated peak."""
        return self.peak.reserved - self.peak.allocated
