"""The page of a `Replay`: the peaks of an allocator's model and its map at the end."""

from __future__ import annotations

from outsize.core.allocation import Replay, Segment
from outsize.core.outcomes.allocator_history import HeldBlock, HeldSegment
from outsize.core.units import format_bytes
from outsize.report.html.memory_map import MemoryMap
from outsize.report.html.page import Page
from outsize.report.html.parts import Grid, Verdict

MOST = 48
"""Segments that a map draws."""


def lay_out(replay: Replay) -> Page:
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
        title="Allocator map at the end", rows=tuple(_held(segment) for segment in largest[:MOST]),
        left_out=len(largest[MOST:]), left_out_bytes=sum(segment.bytes for segment in largest[MOST:]),
    )  # fmt: skip
    peaks = Grid("Peaks", ("peak", "size>", "bytes>"), rows)
    return Page(title=f"{replay.allocator}, {replay.events:,} events", parts=(ran, peaks, picture))


def _held(segment: Segment) -> HeldSegment:
    blocks = tuple(
        HeldBlock(
            offset=one.offset, bytes=one.bytes, used=0 if one.id is None else one.bytes, blocks=1, line=f"allocation {one.id}"
        )
        for one in segment.blocks
    )  # fmt: skip
    return HeldSegment(pool=f"{segment.pool}, stream {segment.stream}", bytes=segment.bytes, blocks=blocks)
