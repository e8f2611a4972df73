"""Draws a `Simulation`: the verdict, then a line per step."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from outsize.core.simulation import Simulation
from outsize.core.units import format_bytes
from outsize.report.text.layout import make_table
from outsize.report.text.outcome import took


def draw(made: Simulation) -> RenderableType:
    cost = "" if made.cost is None else f", cost {made.cost:,.2f}"
    lines: list[RenderableType] = [
        Text(
            f"{made.name} on {made.workers:,} workers (estimate): {took(made.seconds)}{cost}; each holds "
            f"{format_bytes(made.peak)}"
        ),
        Text(
            f"{format_bytes(made.moved)} go through storage (the plan reads {format_bytes(made.read)} and writes "
            f"{format_bytes(made.written)}); workers are busy {made.busy:.0%} of the time; limited by {made.limited_by}"
        ),
    ]
    rows = [
        (str(place), step.name, took(step.seconds), f"{step.tasks:,}") for place, step in enumerate(made.steps, start=1)
    ]
    lines.append(make_table(("", "step", "takes>", "tasks>"), rows))
    if made.lost or made.taken_over:
        lines.append(
            Text(f"{made.lost:,} tasks of lost workers run again, {made.taken_over:,} of slow ones are taken over")
        )
    return Group(*lines)
