"""Draws a `FitPlan`: whether it fits, what it costs, its remedies, and the plans that were close."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outsize.core.fitting import FitPlan, Neighbour
from outsize.core.units import format_bytes


def draw(plan: FitPlan) -> RenderableType:
    """One screen."""
    blocks: list[RenderableType] = [_headline(plan), Text(), _phases(plan)]
    if plan.seconds:
        blocks += [Text(), _speed(plan)]
    if plan.remedies:
        blocks += [Text(), _remedies(plan)]
    beside = [("faster", plan.cheaper), ("smaller", plan.smaller)]
    if any(neighbour for _, neighbour in beside):
        blocks += [Text(), _beside([(name, neighbour) for name, neighbour in beside if neighbour])]
    if plan.notes:
        blocks += [Text(), Text("notes", style="bold"), *(Padding(note, (0, 0, 0, 2)) for note in plan.notes)]
    return Group(*blocks)


def _headline(plan: FitPlan) -> Text:
    allowance = plan.budgets[0]
    peak = plan.peak(allowance.pool)
    verdict = ("fits", "bold green") if plan.fits else ("does not fit", "bold red")
    away = f"; {format_bytes(plan.away)} wait on the {plan.place}" if plan.away else ""
    return Text.assemble(
        f"{plan.name}: ", (format_bytes(peak), "bold"), f" of {format_bytes(allowance.bytes)} {allowance.pool}  ", verdict,
        f"  about {plan.slow_down:.2f}x the time of the plain step, which holds {format_bytes(plan.plain)}{away}",
    )  # fmt: skip


def _speed(plan: FitPlan) -> Text:
    seconds = plan.seconds or 0.0
    return Text(
        f"{format_bytes(plan.moved)} over the link a step, about {seconds:.2g} s a step, {plan.tokens / seconds:,.0f} tokens "
        "or samples a second (predicted)"
    )


def _phases(plan: FitPlan) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 2), header_style="bold")
    table.add_column("phase")
    table.add_column("where")
    table.add_column("projected peak", justify="right")
    table.add_column("known")
    for step in plan.steps:
        for peak in step.peaks:
            table.add_row(step.name, str(peak.pool), format_bytes(peak.bytes), str(peak.known))
    return table


def _remedies(plan: FitPlan) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 2), header_style="bold")
    for title in ("remedy", "saves", "costs", "exactness", "how"):
        table.add_column(title, justify="right" if title == "saves" else "left")
    for remedy in plan.remedies:
        table.add_row(remedy.name, format_bytes(remedy.saves), remedy.costs, str(remedy.exactness), remedy.how)
    return table


def _beside(rows: list[tuple[str, Neighbour]]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 2), header_style="bold")
    for title in ("beside it", "peak", "time", "known", "remedies"):
        table.add_column(title, justify="right" if title in ("peak", "time") else "left")
    for name, row in rows:
        known = "traced" if row.traced else "predicted"
        table.add_row(name, format_bytes(row.peak), f"{row.slow_down:.2f}x", known, row.name)
    return table
