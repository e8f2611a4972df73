"""The page of a `Plan` or `FitPlan`: the verdict, what each step holds against the budget, its tiles, traffic and remedies."""

from __future__ import annotations

from outsize.core.fitting import FitPlan
from outsize.core.plan import Plan
from outsize.core.units import format_bytes
from outsize.report.html.page import Page, Part
from outsize.report.html.parts import Bar, Bars, Grid, Sentences, Verdict, remedy_bars, verdict_of
from outsize.report.html.tiles import Tiles
from outsize.report.text.plan import held_of


def lay_out(plan: Plan) -> Page:
    worst = max(plan.steps, key=lambda step: step.peak(plan.pool), default=None)
    held = () if worst is None else tuple(Bar(name=one.name, bytes=one.bytes, text=one.known) for one in worst.parts)
    steps = (f"{number}: {note}" for number, step in enumerate(plan.steps, start=1) for note in step.notes)
    parts: tuple[Part, ...] = (
        _verdict(plan),
        *(_peaks(plan, number) for number in range(len(plan.budgets))),
        Tiles(title="Tiles", steps=plan.steps),
        _traffic(plan),
        remedy_bars("Remedies in use", plan.remedies if isinstance(plan, FitPlan) else ()),
        Bars(title=f"Held at the peak, in '{'' if worst is None else worst.name}'", rows=held, look=2),
        Sentences(title="Notes", lines=(*steps, *plan.notes)),
    )
    return Page(title=plan.name, parts=parts)


def _verdict(plan: Plan) -> Verdict:
    more = (
        [f"It reads {format_bytes(plan.read)} and writes {format_bytes(plan.written)}."]
        if plan.read or plan.written
        else []
    )
    if isinstance(plan, FitPlan):
        more.append(
            f"About {plan.slow_down:.2f}x the time of the plain step, which holds {format_bytes(plan.plain)} (an estimate)."
        )
    if plan.smallest is not None:
        more.append(f"The smallest budget that works is {format_bytes(plan.smallest)}.")
    return verdict_of(plan.fits, held_of(plan), tuple(more))


def _peaks(plan: Plan, number: int) -> Bars:
    allowance = plan.budgets[number]
    rows = tuple(
        Bar(name=f"{place}. {step.name}", bytes=step.peak(allowance.pool), text=_known(plan, place - 1, number))
        for place, step in enumerate(plan.steps, start=1)
    )
    title = f"Projected peak of each step ({allowance.pool})"
    return Bars(title=title, rows=rows, limit=allowance.bytes, look=0)


def _known(plan: Plan, step: int, number: int) -> str:
    pool = plan.budgets[number].pool
    return next((str(peak.known) for peak in plan.steps[step].peaks if peak.pool == pool), "")


def _traffic(plan: Plan) -> Grid:
    rows = [
        (
            f"{number}. {step.name}", format_bytes(step.read), format_bytes(step.written), format_bytes(step.floor),
            "-" if step.distance is None else f"{step.distance:.2f}x",
        )
        for number, step in enumerate(plan.steps, start=1)
        if plan.read or plan.written
    ]  # fmt: skip
    return Grid("Traffic", ("step", "reads>", "writes>", "floor>", "distance>"), rows)
