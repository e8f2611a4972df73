"""Draws a `Replay`: the peaks, what the allocator held without using it, and the segment map at the end."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from outsize.core.allocation import Replay, Segment
from outsize.core.units import format_bytes
from outsize.report.text.layout import make_table

MOST_SEGMENTS = 16
"""Segments drawn; the largest come first."""


def draw(replay: Replay) -> RenderableType:
    rows = [(name, f"{value:,}", format_bytes(value)) for name, value in replay.peak._asdict().items()]
    table = make_table(("peak", "bytes>", ">"), rows, padding=(0, 2, 0, 0))
    lines: list[RenderableType] = [
        Text(
            f"{replay.allocator}: {replay.events:,} events, reserved peak at event {replay.peak_event:,} ({replay.known})"
        ),
        table,
        Text(f"fragmentation {format_bytes(replay.fragmentation)}, {replay.retries} release and retry"),
    ]
    if replay.out_of_memory is not None:
        end = replay.out_of_memory
        lines.append(
            Text(
                f"ran out at event {end.event:,}: {format_bytes(end.requested)} asked for, {format_bytes(end.free)} free, "
                f"{format_bytes(end.reserved_unallocated)} held unused",
                style="red",
            )
        )
    largest = sorted(replay.segments, key=lambda segment: -segment.bytes)
    if largest:
        lines += [Text(), Text("segments at the end (█ in use, ░ held unused)", style="bold")]
        lines += [_draw_segment(segment) for segment in largest[:MOST_SEGMENTS]]
        if len(largest) > MOST_SEGMENTS:
            rest = sum(segment.bytes for segment in largest[MOST_SEGMENTS:])
            lines.append(Text(f"  and {len(largest) - MOST_SEGMENTS} more with {format_bytes(rest)}"))
    return Group(*lines)


def _draw_segment(segment: Segment, width: int = 48) -> Text:
    """The segment's blocks to scale."""
    cells = [0] * width
    for block in segment.blocks:
        if block.id is not None:
            first = block.offset * width // segment.bytes
            last = (block.offset + block.bytes - 1) * width // segment.bytes
            cells[first : last + 1] = [1] * (last - first + 1)
    bar = "".join("█" if cell else "░" for cell in cells)
    return Text(f"  {bar} {format_bytes(segment.bytes):>12} {segment.pool}")
