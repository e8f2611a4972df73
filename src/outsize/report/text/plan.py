"""Draws a `Plan`: the verdict, then one line per step with what it holds, reads and writes, and its distance from the
floor."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outsize.core.memory import HOST
from outsize.core.plan import Plan, Step
from outsize.core.units import format_bytes
from outsize.report.text.layout import ByWidth, draw_fits, make_table

WIDE, NARROW = 96, 72
"""Screen widths: from WIDE on all of a step's numbers are shown, below NARROW only the most important."""


def draw(plan: Plan) -> RenderableType:
    lines: list[RenderableType] = [_verdict(plan), *_workers(plan), ByWidth(lambda columns: _steps(plan, columns))]
    for number, step in enumerate(plan.steps, start=1):
        lines += [Padding(f"{number}: {note}", (0, 0, 0, 2)) for note in step.notes]
        if step.levels:
            lines.append(Padding(_levels(step), (0, 0, 0, 5)))
    lines += [Padding(note, (0, 0, 0, 2)) for note in plan.notes]
    worst = max(plan.steps, key=lambda step: step.peak(HOST), default=None)
    if worst is not None and worst.parts:
        held = ", ".join(f"{part.name} {format_bytes(part.bytes)} ({part.known})" for part in worst.parts)
        lines.append(Padding(f"held at the peak, in '{worst.name}': {held}", (0, 0, 0, 2)))
    if plan.smallest is not None:
        device = "" if plan.smallest_device is None else f", {format_bytes(plan.smallest_device)} of the device"
        lines.append(Text(f"smallest budget that works: {format_bytes(plan.smallest)}{device}"))
    return Group(*lines)


def _levels(step: Step) -> Table:
    """Traffic per level, and which one binds."""
    rows = []
    for level in step.levels:
        show = _operations if level.name == "arithmetic" else format_bytes
        rate, binds = f"{show(int(level.rate))}/s", "binds" if level.name == step.binds else ""
        rows.append((level.name, show(level.amount), show(level.floor), rate, f"{level.seconds:.3g} s", binds))
    return make_table(("level", "moves>", "floor>", "rate>", "takes>", ""), rows)


def _operations(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e12:,.3g} TFLOP"


def _verdict(plan: Plan) -> Text:
    moved = f"reads {format_bytes(plan.read)}, writes {format_bytes(plan.written)}"
    if plan.distance is not None:
        moved += f": {plan.distance:.2f}x the floor of {format_bytes(plan.floor)}"
    return Text.assemble(f"{plan.name}: ", draw_fits(plan.fits, weight="bold"), f": {held_of(plan)}; {moved}")


def held_of(plan: Plan) -> str:
    """What it holds of each budget."""
    return ", ".join(
        f"{format_bytes(plan.peak(one.pool))} of {format_bytes(one.bytes)} {one.pool}" for one in plan.budgets
    )


def _workers(plan: Plan) -> list[Text]:
    """How a cluster shares it."""
    if plan.workers is None:
        return []
    through = format_bytes(plan.read + plan.written)
    more = f"; up to {plan.useful_workers:,} have something to do in the largest step" if plan.useful_workers else ""
    held = f"each holds at most {format_bytes(plan.peak())} of its {format_bytes(plan.budgets[0].bytes)}"
    return [Text(f"on {plan.workers:,} workers: {held}; {through} go through storage{more}")]


def _steps(plan: Plan, columns: int) -> Table:
    """One row per step. On a narrow screen `floor` and then `tiles` are left out."""
    left_out = () if columns >= WIDE else ("floor",) if columns >= NARROW else ("floor", "tiles")
    table = Table(box=None, padding=(0, 1, 0, 0 if columns < NARROW else 2), header_style="bold")
    titles = [
        name for name in ("", "step", "peak", "reads", "writes", "tiles", "floor", "distance") if name not in left_out
    ]
    for title in titles:
        text = title in ("step", "tiles")
        table.add_column(title, justify="left" if title == "step" else "right", no_wrap=not text, overflow="fold")
    for number, step in enumerate(plan.steps, start=1):
        distance = "-" if step.distance is None else f"{step.distance:.2f}x"
        cells = {
            "": str(number), "step": step.name, "peak": format_bytes(step.peak(HOST)), "reads": format_bytes(step.read),
            "writes": format_bytes(step.written), "tiles": _tiles(step), "floor": format_bytes(step.floor), "distance": distance,
        }  # fmt: skip
        table.add_row(*(cells[title] for title in titles))
    return table


def _tiles(step: Step) -> str:
    shape = "x".join(map(str, step.tile))
    return f"{step.tiles:,}{f' of {shape}' if shape else ''}"
