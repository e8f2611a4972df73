"""How much memory work takes, before or after it runs: parts, peaks, and memory over time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from outsize.core.cards import Card
from outsize.core.errors import InputError
from outsize.core.memory import Part, Pool
from outsize.core.noun import Known, Noun


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment(Noun):
    """One point of a timeline."""

    time: float
    """Seconds, or the number of the event where no clock ran."""
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount(Noun):
    """A number of bytes with how it is known and a bound above it."""

    bytes: int
    """The most likely value."""
    bound: int
    """Never below the truth; equal to `bytes` where that is exact."""
    known: Known


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers(Noun):
    """The highest moment of one part of a step, by kind."""

    time: int
    """Number of the allocator event."""
    label: str
    """`build`, `step 1 forward`, `step 1 backward`, `step 1 optimizer`, ..."""
    bytes: tuple[int, ...]
    """Bytes of each of the footprint's `kinds`."""
    reserved: int
    """Bytes the allocator held from the system."""
    line: str = ""
    """The line of code (in a backward pass the module) whose allocation made this moment the highest; empty if unknown."""

    @property
    def total(self) -> int:
        return sum(self.bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth(Noun):
    """How a peak grows with one size, fitted through traces and checked against one that was left out."""

    size: str
    """What grows: `batch`, `sequence`."""
    traced: tuple[tuple[int, int], ...]
    """(size, peak reserved bytes) of every trace."""
    fixed: int
    """Bytes that do not depend on the size."""
    each: int
    """Bytes for each further one."""
    error: float
    """How far this is from the trace that was left out, as a fraction of it."""
    square: float = 0.0
    """Factor of the size's square in bytes; 0 if memory grows along a line."""

    def at(self, size: int) -> int:
        return round(self.fixed + self.each * size + self.square * size * size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest(Noun):
    """The largest size that fits in one place."""

    place: str
    """A card's name, or a number of bytes."""
    capacity: int
    """Bytes there for this process's tensors."""
    size: str
    """What was varied: `batch`."""
    largest: int
    """The largest that fits, 0 where not even one does."""
    next_needs: int | None
    """Bytes reserved with a batch larger by one, None if that was not traced."""
    known: Known
    """`bound` if the largest size was traced, `estimate` if it was computed from the fitted line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FewestCards(Noun):
    """How many cards of one kind train a step, spread over them in one way."""

    sharding: str
    """How the model is spread: `ddp`, `zero1`, `zero2`, `fsdp`, `hsdp`, `offload`, `tensor parallel`, `pipeline`."""
    cards: int | None
    """The fewest that fit, among powers of two; None: not even `most`."""
    peak: int
    """Bytes that the first rank reserves with so many; with `most` where none fit."""
    most: int
    """The largest number that was tried."""
    known: Known
    """`bound` if that many were traced and even the bound fits, `estimate` if it is arithmetic on the step of one card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading(Noun):
    """What a DataLoader holds on the host while it prepares batches for the step."""

    workers: int
    """Processes that make batches; 0 where the step's own process does."""
    batch: int
    """Bytes of one batch."""
    ahead: int
    """Batches that are ready or being made: workers times the prefetch factor."""
    shared: int
    """Bytes of batches in shared memory (`/dev/shm`)."""
    pinned: int
    """Bytes of batches in pinned memory, each tensor rounded up to a power of two."""
    making: int
    """Bytes of samples that workers hold while they put a batch together."""
    processes: int
    """Bytes of the workers themselves."""

    @property
    def total(self) -> int:
        return self.shared + self.pinned + self.making + self.processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase(Noun):
    """A part of a script, and the highest moments in it."""

    name: str
    """`build`, `first step`, `steady step` or `evaluation`."""
    allocated: int
    """Most bytes in the allocator's blocks."""
    reserved: int
    """Most bytes that the allocator held from the system. It keeps what earlier phases needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WayOut(Noun):
    """The same step with one change, traced like the step itself."""

    name: str
    """What is changed."""
    exactness: str
    """Whether the results are `bitwise` the same, the `same up to rounding`, `approximate`, or those of `another training`."""
    how: str
    """What to type or write."""
    peak: Amount
    """Bytes reserved at the peak."""
    fits: bool | None = None
    """As in `Footprint`."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Footprint(Noun):
    """What a step holds on one device, at its peak and over time."""

    name: str
    pool: Pool
    steps: int
    peak_requested: Amount
    """Bytes asked for and not yet freed, at the highest moment."""
    peak_allocated: Amount
    """Bytes in the allocator's blocks (`torch.cuda.max_memory_allocated`)."""
    peak_reserved: Amount
    """Bytes the allocator holds from the system (`torch.cuda.max_memory_reserved`): what has to fit."""
    device_use: Amount
    """What `nvidia-smi` shows: reserved plus the CUDA context and loaded kernels. On the host, the process's resident bytes."""
    parts: tuple[Part, ...]
    """What is alive at the peak, by kind; adds up to `peak_allocated.bytes`."""
    modules: tuple[Part, ...]
    """The same by module, largest first."""
    lines: tuple[Part, ...]
    """The same by line of code, largest first."""
    kinds: tuple[str, ...]
    """Names of the layers of the timeline."""
    timeline: tuple[Layers, ...]
    peak_label: str
    """When the peak is: `step 2 backward`."""
    host: Amount | None = None
    """Bytes of host tensors at their highest moment, pinned copies and the loader counted; None where the step is on the host
    itself."""
    loading: Loading | None = None
    """What the DataLoader holds on the host, where one was given."""
    card: Card | None = None
    capacity: int | None = None
    """Bytes that the step may reserve there."""
    fits: bool | None = None
    """True if even the bound fits the capacity, after the allocator has given back its cache. False if the likely
    value does not fit. None in between, if sizes depend on a guess, or without a capacity."""
    phases: tuple[Phase, ...] = ()
    """Peaks of the parts of a script, where one was followed."""
    growth: tuple[Growth, ...] = ()
    """How the peak grows with the sizes that were given."""
    largest: tuple[Largest, ...] = ()
    """Largest batch per card, where a batch size was given."""
    ways: tuple[WayOut, ...] = ()
    """The step with one change each, where it does not fit or other precisions were asked for."""
    ranks: int = 1
    """Over so many ranks the step is spread; these are the numbers of the one that holds most."""
    sharding: str = ""
    """How: `ddp`, `fsdp`, ..., `own` where the step's own code says; empty for one process."""
    fewest: tuple[FewestCards, ...] = ()
    """The fewest cards that train it, by sharding, where that was asked for."""
    notes: tuple[str, ...] = ()
    """What was assumed, a sentence each; none means that the step was followed exactly."""
    guesses: tuple[str, ...] = ()
    """The notes that the size may depend on. If there are any, `fits` is never True."""
    printed: tuple[str, ...] = ()
    """Lines that the script printed, where one was followed."""

    said_twice: ClassVar[tuple[str, ...]] = ("amounts",)

    @property
    def fragmentation(self) -> int:
        """Peak of reserved bytes less peak of allocated bytes."""
        return max(0, self.peak_reserved.bytes - self.peak_allocated.bytes)

    @property
    def amounts(self) -> dict[str, Amount]:
        """Every peak that is known, by its name."""
        use = "resident" if self.pool.kind == "host" else "on the device"
        found = {
            "requested": self.peak_requested, "allocated": self.peak_allocated, "reserved": self.peak_reserved,
            use: self.device_use, "host tensors": self.host,
        }  # fmt: skip
        return {name: amount for name, amount in found.items() if amount is not None}

    def compare(self, measured: Mapping[str, Any] | None = None, **named: int) -> Receipt:
        """Compare with a real run: `compare(torch.cuda.memory_stats())`, or any of `allocated=`, `reserved=`, `used=` in bytes.

        `used` is what `nvidia-smi` shows for the process; for a step on the CPU, the process's highest resident bytes.
        """
        found = {**(measured or {}), **named}
        allocated = found.get("allocated", found.get("allocated_bytes.all.peak"))
        reserved = found.get("reserved", found.get("reserved_bytes.all.peak"))
        used = found.get("used")
        if allocated is None and reserved is None and used is None:
            raise InputError(
                "nothing to compare with: give torch.cuda.memory_stats(), or allocated=, reserved= or used= in bytes"
            )
        return Receipt(
            name=self.name, card=None if self.card is None else self.card.name,
            projected_allocated=self.peak_allocated, projected_reserved=self.peak_reserved,
            measured_allocated=allocated, measured_reserved=reserved, projected_use=self.device_use, measured_use=used,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt(Noun):
    """A projection beside what was measured."""

    name: str
    card: str | None
    projected_allocated: Amount
    projected_reserved: Amount
    measured_allocated: int | None
    measured_reserved: int | None

    projected_use: Amount | None = None
    """As projected: on the device with its context, or resident on the host."""
    measured_use: int | None = None

    @property
    def allocated_error(self) -> float | None:
        return _error(self.projected_allocated, self.measured_allocated)

    @property
    def reserved_error(self) -> float | None:
        return _error(self.projected_reserved, self.measured_reserved)

    @property
    def use_error(self) -> float | None:
        return _error(self.projected_use, self.measured_use)

    @property
    def held(self) -> bool:
        """True where no measured number is above its bound."""
        measured = (self.measured_allocated, self.measured_reserved, self.measured_use)
        projected = (self.projected_allocated, self.projected_reserved, self.projected_use)
        return all((one or 0) <= two.bound for one, two in zip(measured, projected, strict=True) if two is not None)


def _error(projected: Amount | None, measured: int | None) -> float | None:
    return None if projected is None or not measured else projected.bytes / measured - 1
