"""The page of a `Replay`: the peaks of an allocator's model and its map at the end."""

from __future__ import annotations

from outsize.core.allocation import Replay, Segment
from outsize.core.units import format_bytes
from outsize.report.html.memory_map import MemoryMap, Row, Stretch
from outsize.report.html.page import Page
from outsize.report.html.parts import Grid, Verdict

MOST = 48
"""Segments that a map draws."""


def lay_out(replay: Replay) -> Page:
    """The replay as a page."""
    end = replay.out_of_memory
    highest = f"{format_bytes(replay.peak.reserved)} reserved at event {replay.peak_event:,} ({replay.known})"
    ran = Verdict(
        word=f"ran out at event {end.event:,}:" if end else "peak:", tone="bad" if end else "plain",
        text=f"{format_bytes(end.requested)} asked for, {format_bytes(end.free)} free" if end else highest,
        more=(f"fragmentation {format_bytes(replay.fragmentation)}, {replay.retries} release and retry",),
    )  # fmt: skip
    rows = [(name, format_bytes(size), f"{size:,}") for name, size in replay.peak._asdict().items()]
    largest = sorted(replay.segments, key=lambda segment: -segment.bytes)
    picture = MemoryMap(
        title="Allocator map at the end", rows=tuple(_row(segment) for segment in largest[:MOST]),
        left_out=len(largest[MOST:]), left_out_bytes=sum(segment.bytes for segment in largest[MOST:]),
    )  # fmt: skip
    peaks = Grid(title="Peaks", columns=("peak", "size>", "bytes>"), rows=rows)
    return Page(title=f"{replay.allocator}, {replay.events:,} events", parts=(ran, peaks, picture))


def _row(segment: Segment) -> Row:
    stretches = tuple(
        Stretch(
            offset=one.offset, bytes=one.bytes, used=0 if one.id is None else one.bytes, text=f"allocation {one.id}"
        )
        for one in segment.blocks
    )
    return Row(name=f"{segment.pool}, stream {segment.stream}", bytes=segment.bytes, stretches=stretches)
