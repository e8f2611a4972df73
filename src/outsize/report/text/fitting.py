"""Draws a `FitPlan`: whether it fits, what it costs, its remedies, and the plans that were close."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outsize.core.fitting import FitPlan, Neighbour
from outsize.core.units import format_bytes
from outsize.report.text.layout import draw_fits, make_table


def draw(plan: FitPlan) -> RenderableType:
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
    verdict = draw_fits(plan.fits, weight="bold")
    away = f"; {format_bytes(plan.away)} wait on the {plan.place}" if plan.away else ""
    if plan.away and plan.seconds is not None and plan.place == "host":
        away = f"; the host holds {format_bytes(plan.away)}"  # all of this process, not only what waits
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
    peaks = [(step.name, peak) for step in plan.steps for peak in step.peaks]
    rows = [(name, str(peak.pool), format_bytes(peak.bytes), str(peak.known)) for name, peak in peaks]
    return make_table(("phase", "where", "projected peak>", "known"), rows)


def _remedies(plan: FitPlan) -> Table:
    rows = [(one.name, format_bytes(one.saves), one.costs, str(one.exactness), one.how) for one in plan.remedies]
    return make_table(("remedy", "saves>", "costs", "exactness", "how"), rows)


def _beside(rows: list[tuple[str, Neighbour]]) -> Table:
    shown = [
        (name, format_bytes(row.peak), f"{row.slow_down:.2f}x", "traced" if row.traced else "predicted", row.name)
        for name, row in rows
    ]
    return make_table(("beside it", "peak>", "time>", "known", "remedies"), shown)
