"""The memory of a machine: readings of its pools, their limits, who holds them, and the budget Outsize allows
itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from outsize.core.noun import Known, Noun

PoolKind = Literal["host", "pinned", "device", "disk", "shm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool(Noun):
    """A place where bytes can be."""

    kind: PoolKind
    """host RAM, pinned host RAM, a device's memory, disk, or shared memory."""
    index: int | None = None
    """Number of the device, None elsewhere."""

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind} {self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit(Noun):
    """Something that does not allow more than a number of bytes."""

    name: str
    """What it is, as a user would say it: `container`, `ulimit -v`, `memory fraction`."""
    bytes: int
    used: int | None
    """How much of it is taken now, reclaimable cache not counted; None if unknown."""
    source: str
    """Where it was read: a file or a call."""

    @property
    def available(self) -> int:
        """What this limit still leaves."""
        return max(0, self.bytes - (self.used or 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder(Noun):
    """A process that holds memory of a pool."""

    pid: int
    """Process id (seen from inside a container it may be the host's)."""
    name: str | None
    """Command name, None if it cannot be seen from here."""
    bytes: int | None
    """What it holds, None where the driver does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReading(Noun):
    """One pool at one moment."""

    pool: Pool
    name: str
    """What it is: `RAM`, `NVIDIA H200`, a path."""
    total: int | None
    available: int | None
    """Bytes that can be had now, all limits applied."""
    limits: tuple[Limit, ...] = ()
    """Every limit below its total, the one with the least left first."""
    holders: tuple[Holder, ...] = ()
    """Who holds it, largest first; empty if unknown."""
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def biting(self) -> Limit | None:
        """The limit that is reached first; None if the machine itself runs out before any limit."""
        first = self.limits[0] if self.limits else None
        return first if first is not None and first.available <= (self.available or 0) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena(Noun):
    """What the allocator of a framework in this process has of a pool."""

    framework: str
    """As it is written: `JAX`, `TensorFlow`, `PyTorch`."""
    pool: Pool
    in_use: int | None
    peak: int | None = None
    """The most that was in use, None where nobody counts."""
    reserved: int | None = None
    """Bytes that it has taken, used or not; None where nobody counts."""
    limit: int | None = None
    source: str
    """The call that said so."""
    notes: tuple[str, ...] = ()
    """What its settings do, a sentence each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance(Noun):
    """The budget of one pool."""

    pool: Pool
    bytes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget(Noun):
    """What Outsize may use, one number per pool."""

    allowances: tuple[Allowance, ...]
    scratch: str

    def bytes_of(self, pool: Pool) -> int | None:
        """Budget of a pool in bytes, None where it has none."""
        return next((a.bytes for a in self.allowances if a.pool == pool), None)

    said_twice: ClassVar[tuple[str, ...]] = ("host", "disk")

    @property
    def host(self) -> int | None:
        return self.bytes_of(HOST)

    @property
    def disk(self) -> int | None:
        return self.bytes_of(DISK)

    def device(self, index: int = 0) -> int | None:
        return self.bytes_of(Pool(kind="device", index=index))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Reading(Noun):
    """This machine's memory at one moment, seen from inside this process."""

    time: float
    """Seconds since the epoch."""
    host: PoolReading
    """RAM with every limit that applies to this process."""
    devices: tuple[PoolReading, ...]
    disk: PoolReading
    """The scratch folder's disk."""
    shm: PoolReading | None
    """`/dev/shm`, None where there is none."""
    swap_total: int
    swap_free: int
    overcommit: Literal["heuristic", "always", "never"] | None
    """The kernel's policy. With `never` an allocation fails; with `always`, and mostly with `heuristic`, the process
    is killed later."""
    rss: int
    """Bytes of RAM this process holds now."""
    oom_kills: int | None
    """How often the kernel has killed for memory in this container so far."""
    budget: Budget
    """What Outsize would allow itself by default."""
    notes: tuple[str, ...] = ()
    """What could not be read and why."""
    frameworks: tuple[Arena, ...] = ()
    """What frameworks in this process have taken by themselves."""

    said_twice: ClassVar[tuple[str, ...]] = ("pools",)

    @property
    def pools(self) -> tuple[PoolReading, ...]:
        shm = () if self.shm is None else (self.shm,)
        return (self.host, *self.devices, *shm, self.disk)


HOST = Pool(kind="host")
DISK = Pool(kind="disk")
PINNED = Pool(kind="pinned")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(Noun):
    """One named part of a footprint."""

    name: str
    """What holds the bytes: `weights`, `gradients`, `tile of x`."""
    bytes: int
    known: Known
