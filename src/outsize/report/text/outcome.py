"""Draws an `Outcome`: where the results are, how fast it was, what it held beside what was planned, and each step if asked."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from outsize.core.memory import HOST
from outsize.core.outcomes.outcome import Outcome
from outsize.core.units import format_bytes, format_seconds
from outsize.report.text.layout import Rows, make_table


def draw(outcome: Outcome) -> RenderableType:
    """A few lines, or one screen with the steps."""
    lines: list[RenderableType] = [
        Text.assemble((one.key, "bold"), f": {one.dtype}[{', '.join(map(str, one.shape))}], {format_bytes(one.bytes)}")
        for one in outcome.results
    ]
    lines += [
        Text(line) for line in closing(outcome.seconds, outcome.read, outcome.written, outcome.rate, outcome.distance)
    ]
    if outcome.resumed:
        lines.append(Text(f"an interrupted run had already moved {format_bytes(outcome.resumed)} of that"))
    budget = outcome.plan.budgets[0].bytes if outcome.plan.budgets else None
    lines.append(Text(held(outcome.measured, outcome.projected, budget)))
    if outcome.step_seconds:
        lines += [Text(), make_table(*steps_of(outcome))]
    return Group(*lines)


def closing(seconds: float, read: int, written: int, rate: float | None, distance: float | None) -> list[str]:
    """What every verb that moves data says at its end."""
    speed = "" if rate is None else f", {format_bytes(int(rate))}/s"
    moved = f"{format_bytes(read)} read, {format_bytes(written)} written"
    best = "" if distance is None else f"; {distance:.2f}x the fewest bytes possible"
    return [f"done in {took(seconds)}: {moved}{speed}{best}"]


def took(seconds: float) -> str:
    """A time, with two digits where it is short."""
    return f"{seconds:.2g} s" if seconds < 1 else format_seconds(seconds)


def held(measured: int | None, projected: int | None, budget: int | None) -> str:
    """The peak: measured, planned, allowed."""
    seen = "" if measured is None else f"{format_bytes(measured)} measured (the process grew by that), "
    said = "not planned" if projected is None else f"{format_bytes(projected)} planned"
    return f"peak {seen}{said}" + ("" if budget is None else f", {format_bytes(budget)} allowed")


def steps_of(outcome: Outcome) -> Rows:
    """What each step took and moved."""
    rows = []
    for step, seconds in zip(outcome.plan.steps, outcome.step_seconds, strict=False):
        moved = step.read + step.written
        rate = f"{format_bytes(int(moved / seconds))}/s" if seconds > 0 else "-"
        cells = (
            step.name,
            f"{seconds:.3g} s",
            format_bytes(moved),
            rate,
            format_bytes(step.peak(HOST)),
            str(step.tiles),
        )
        rows.append(cells)
    return ("step", "took>", "moved>", "rate>", "planned peak>", "tiles>"), rows
