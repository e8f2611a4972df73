"""What an allocator did over time and holds at the end, by line of code, short enough to be drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outsize.core.noun import Noun


@dataclass(frozen=True, slots=True, kw_only=True)
class LineLayer(Noun):
    """The bytes of one line of code over time."""

    name: str
    """The line, as `train.py:12 in step`, or what stands for several."""
    bytes: tuple[int, ...]
    stack: str = ""
    """The stack of its first allocation, innermost first, one frame a line; empty if none was recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineAtPeak(Noun):
    """What one line of code held at the highest moment."""

    line: str
    bytes: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBlock(Noun):
    """One block of a segment, or several small ones side by side."""

    offset: int
    """Bytes from the segment's start."""
    bytes: int
    used: int
    blocks: int
    """How many blocks in use this stands for; 0 if it is free."""
    line: str = ""
    """The line that asked for the largest of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSegment(Noun):
    """One segment at the end."""

    pool: str
    """`large`, `small`, `private`, with the stream where it is not the first."""
    bytes: int
    blocks: tuple[HeldBlock, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class AllocatorHistory(Noun):
    """The history of an allocator on one device. Of each stretch of events the highest and the lowest moment are kept."""

    device: str
    """`cuda:0`."""
    events: int
    unit: Literal["s", "event"]
    """What times are: seconds since the first event, or numbers of events where no clock ran."""
    times: tuple[float, ...]
    layers: tuple[LineLayer, ...]
    """Bytes by line, those that hold most at the peak first."""
    reserved_over_time: tuple[int, ...]
    """Bytes that the allocator held from the system at each moment."""
    lines: tuple[str, ...]
    """Lines of code that made the moments."""
    line_at: tuple[int, ...]
    """For each moment, the number of its line in `lines`."""
    peak_bytes: int
    """Bytes in use at the highest moment, exact."""
    peak_time: float
    at_peak: tuple[LineAtPeak, ...]
    """What was in use then by line, the largest first."""
    reserved: int
    """Bytes held from the system at the end."""
    segments: tuple[HeldSegment, ...]
    """The longest segments at the end."""
    segments_left_out: int = 0
    """How many shorter ones there are."""
    bytes_left_out: int = 0
