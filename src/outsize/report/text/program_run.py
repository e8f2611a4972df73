"""Draws a `ProgramRun`: how it ended and its peak, memory over time, and the lines that took most."""

from __future__ import annotations

import os
import shlex

from rich.console import Group, RenderableType
from rich.text import Text

from outsize.core.outcomes.program_run import ProgramRun
from outsize.core.units import format_bytes, format_seconds
from outsize.report.text.layout import ByWidth
from outsize.report.text.recording import draw_chart

_SHORT = 5
"""A course of fewer readings is no picture."""


def draw(run: ProgramRun) -> RenderableType:
    """A line, and a picture where it ran long enough for one."""
    return Group(Text(say(run)), draw_course(run))


def draw_course(run: ProgramRun) -> RenderableType:
    """Memory over time, and the lines that took most."""
    lines: list[RenderableType] = []
    if len(run.timeline) >= _SHORT:
        held = [(moment.time, moment.bytes) for moment in run.timeline]
        lines.append(ByWidth(lambda columns: Group(*draw_chart(held, None, columns))))
    for part in run.lines:
        lines.append(Text(f"  grew by {format_bytes(part.bytes)} at {part.name}"))
    return Group(*lines)


def say(run: ProgramRun) -> str:
    """How it ended and what it held, in one line."""
    words = [os.path.basename(word) if number == 0 else word for number, word in enumerate(run.command)]
    name = shlex.join(words)
    ended = f"{name if len(name) <= 60 else name[:57] + '...'} ended with status {run.status} after {format_seconds(run.seconds)}"
    if not run.peak:
        return f"{ended}; it ended before its memory could be read"
    if run.processes == 1 and run.largest is not None:
        return f"{ended}; peak of {format_bytes(run.largest)} of RAM (exact)"
    return f"{ended}; peak of at least {format_bytes(run.peak)} of RAM in {run.processes} processes"
