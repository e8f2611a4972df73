"""A plan as a table: one row a pass, what it holds, reads and writes, and how far that is from the least possible."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outsize.core.memory import DISK, HOST
from outsize.core.plan import Plan, Step
from outsize.core.units import format_bytes


def draw(plan: Plan) -> RenderableType:
    """The plan's heading, its passes, and what decides."""
    budget = next((a for a in plan.budgets if a.pool == HOST), None)
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("pass")
    for heading in ("holds", "reads", "writes", "tiles", "x least I/O"):
        table.add_column(heading, justify="right")
    table.add_column("a tile")
    for number, step in enumerate(plan.steps, 1):
        table.add_row(*_row(number, step, budget.bytes if budget else None))
    lines: list[RenderableType] = [Text(plan.name, style="bold"), table, _verdict(plan)]
    worst = max(plan.steps, key=Step.peak, default=None)
    if worst is not None and worst.parts:
        held = ", ".join(f"{part.name} {format_bytes(part.bytes)}" for part in worst.parts)
        lines.append(Text(f"at the peak: {held}", style="dim"))
    lines += [Text(f"{step.name}: {note}", style="dim") for step in plan.steps for note in step.notes]
    return Group(*lines)


def _row(number: int, step: Step, budget: int | None) -> list[str | Text]:
    peak = step.peak(HOST)
    style = "red" if budget is not None and peak > budget else ""
    distance = "-" if step.distance is None else f"{step.distance:.2f}"
    shape = " x ".join(map(str, step.tile)) or "-"
    return [
        f"{number}. {step.name}", Text(format_bytes(peak), style=style), format_bytes(step.read), format_bytes(step.written),
        f"{step.tiles:,}", distance, shape,
    ]  # fmt: skip


def _verdict(plan: Plan) -> Text:
    budget = next((a for a in plan.budgets if a.pool == HOST), None)
    text = Text(
        f"reads {format_bytes(plan.read)}, writes {format_bytes(plan.written)}, holds {format_bytes(plan.peak())}"
    )
    if budget is not None:
        text.append(f" of a budget of {format_bytes(budget.bytes)} ({budget.reason})")
    scratch = plan.peak(DISK)
    if scratch:
        text.append(f"; scratch on disk {format_bytes(scratch)}")
    if plan.smallest is not None:
        text.append(f"; smallest budget that works {format_bytes(plan.smallest)}")
    if not plan.fits:
        text.append("  does not fit", style="red")
    return text
