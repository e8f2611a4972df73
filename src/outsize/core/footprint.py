"""What work takes in memory, before or after it runs: parts, peaks, and their course over time."""

from __future__ import annotations

from dataclasses import dataclass

from outsize.core.memory import Part, Pool
from outsize.core.noun import Known, Noun


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment(Noun):
    """One point of a timeline."""

    time: float
    """Seconds, or the number of the event where no clock ran."""
    bytes: int
    """Bytes held then."""
    label: str = ""
    """What was going on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount(Noun):
    """A number of bytes with how it is known and a bound above it."""

    bytes: int
    """The point: the most likely value."""
    bound: int
    """Never below the truth; equal to `bytes` where that is exact."""
    known: Known
    """How `bytes` is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint(Noun):
    """What some work holds in one pool."""

    pool: Pool
    """Where."""
    parts: tuple[Part, ...]
    """What is alive at the peak; the bytes add up to `peak.bytes`."""
    peak: Amount
    """The highest moment."""
    timeline: tuple[Moment, ...] = ()
    """Bytes over time, empty where only the peak is known."""
