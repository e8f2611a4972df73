"""The page of an `AllocatorHistory`: memory by line of code over time, the lines at the peak, and the map of segments."""

from __future__ import annotations

from outsize.core.outcomes.allocator_history import AllocatorHistory
from outsize.core.units import format_bytes
from outsize.report.html.memory_map import MemoryMap
from outsize.report.html.page import Page, Part
from outsize.report.html.parts import Grid, Verdict
from outsize.report.html.timeline import Layer, Timeline


def lay_out(history: AllocatorHistory) -> Page:
    peak = (
        f"{format_bytes(history.peak_bytes)} in use at the peak, {format_bytes(history.reserved)} reserved at the end"
    )
    return Page(
        title=f"{history.device}: memory history",
        parts=(Verdict(word="peak:", tone="plain", text=peak), *over_time(history), map_of(history)),
    )


def over_time(history: AllocatorHistory) -> tuple[Part, ...]:
    """Timeline and peak table."""
    layers = tuple(Layer(name=one.name, values=one.bytes, detail=one.stack or one.name) for one in history.layers)
    when = f"{history.peak_time:,.3f} s" if history.unit == "s" else f"event {history.peak_time:,.0f}"
    rows = [(format_bytes(one.bytes), f"{one.blocks:,}", one.line) for one in history.at_peak]
    title = f"In use at the peak ({format_bytes(history.peak_bytes)} at {when}), by line"
    course = Timeline(
        title=f"{history.device}: memory over {history.events:,} events, by line of code", times=history.times,
        unit=history.unit, layers=layers, lines=[history.lines[at] for at in history.line_at],
        outline=Layer(name="reserved by the allocator", values=history.reserved_over_time),
    )  # fmt: skip
    return course, Grid(title, ("bytes>", "blocks>", "line#"), rows)


def map_of(history: AllocatorHistory) -> MemoryMap:
    return MemoryMap(
        title="Allocator map at the end", rows=history.segments,
        left_out=history.segments_left_out, left_out_bytes=history.bytes_left_out,
    )  # fmt: skip
