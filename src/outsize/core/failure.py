"""A failure as its message states it, its cause with evidence, and what to do about it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from outsize.core.footprint import Moment
from outsize.core.memory import Part
from outsize.core.noun import Known, Noun
from outsize.core.outcomes.allocator_history import AllocatorHistory


class Exactness(enum.StrEnum):
    """What a remedy does to the user's results."""

    BITWISE = "bitwise"
    """The same bits."""
    ROUNDING = "same up to rounding"
    """The same mathematics, summed in another order."""
    DISTRIBUTION = "same in distribution"
    """Other random draws, same law."""
    APPROXIMATE = "approximate"
    """Other results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy(Noun):
    """One thing to do about it."""

    name: str
    """What to do, in a few words."""
    saves: int | None
    """Bytes it saves, None if unknown."""
    known: Known
    costs: str
    """What it costs in time, disk or accuracy."""
    exactness: Exactness
    how: str
    """The exact line, setting or command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(Noun):
    """What a message says, exactly; None where it does not say."""

    framework: str
    """Who failed: `pytorch`, `tensorflow`, `jax`, `numpy`, `linux`, ..."""
    requested_bytes: int | None = None
    """Size of the allocation that failed."""
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    """Its dtype as spelled in the message."""
    device: str | None = None
    """`cuda:0`, `cuda`, `hip:0`, `mps`, `tpu`, `cpu`, ..."""
    total_bytes: int | None = None
    """Capacity of the device."""
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    """In use through the framework's allocator."""
    reserved_bytes: int | None = None
    """Total reserved by it."""
    limit_bytes: int | None = None
    """A limit other than the capacity."""
    pid: int | None = None
    """Process that was killed."""
    process: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further readings, by format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence(Noun):
    """One reason to believe a cause."""

    kind: Literal["message", "machine", "inferred"]
    """Said by the message, read off the machine now, or concluded from both."""
    text: str


class CauseName(enum.StrEnum):
    """Every reason for which memory runs out."""

    IMPOSSIBLE = "impossible request"
    """More bytes than any machine can address."""
    NOT_MEMORY = "not a lack of memory"
    """Another resource ran out, or something broke; the diagnosis then has no failure."""
    WARNING = "warning only"
    """A warning of an allocator; the program goes on."""
    BROADCAST = "broadcast explosion"
    """Two long vectors made a matrix."""
    LARGER_THAN_DEVICE = "request larger than the device"
    LARGER_THAN_MACHINE = "request larger than the machine"
    LARGER_THAN_LIMIT = "request larger than the limit"
    FRAGMENTATION = "fragmentation"
    """Enough is unused, but not in one piece."""
    MEMORY_FRACTION = "memory fraction"
    """A limit that the program set itself."""
    OTHER_PROCESS = "other process"
    """Other processes hold the device's memory."""
    OTHER_ALLOCATIONS = "other allocations"
    """This process holds the memory, outside the framework's allocator."""
    GRAPH_POOLS = "CUDA graph pools"
    """CUDA graphs keep what they captured."""
    REFUSED = "refused though free"
    """More was free than was asked for."""
    PREALLOCATION = "preallocation"
    """The framework takes the whole device at start, and could not."""
    SHARED_MEMORY = "shared memory"
    """`/dev/shm` is full."""
    LIMIT = "limit"
    """A container, a job or the program's own setting allows no more."""
    ADDRESS_SPACE = "address space"
    """`ulimit -v` allows no more."""
    MACHINE = "machine out of memory"
    """RAM and swap are full."""
    KILLED = "killed"
    """SIGKILL without an explanation."""
    LEAK = "leak"
    """Memory that should be freed is kept."""
    ALREADY_FULL = "memory already full"
    """The request that came last is too small to be the reason."""
    TRUE_NEED = "true need"
    """The program holds what it needs, and needs more than there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause(Noun):
    """Why it ran out."""

    name: CauseName
    text: str
    certain: bool
    """True where the evidence decides; False for a candidate."""
    decide: str = ""
    """For a candidate: what would decide it."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Diagnosis(Noun):
    """A failure explained."""

    failure: Failure | None
    """What the message says; None where it is not an out-of-memory failure."""
    cause: Cause | None
    """The cause, or the likeliest candidate; None where nothing is known of the text."""
    candidates: tuple[Cause, ...] = ()
    """Other causes that the evidence leaves open, likeliest first."""
    evidence: tuple[Evidence, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    """What to do, most bytes first."""
    holders: tuple[Part, ...] = ()
    """Who holds memory, largest first: live tensors, allocation stacks, processes, growing lines."""
    timeline: tuple[Moment, ...] = ()
    """Bytes over the time before the failure, if they were recorded."""
    history: AllocatorHistory | None = field(default=None, repr=False, compare=False)
    """What the allocator did, where the diagnosis is of a snapshot: for pictures, left out of text and JSON."""
