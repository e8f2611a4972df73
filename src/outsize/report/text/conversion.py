"""How a conversion looks: what it saves beside what it costs."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Column
from rich.text import Text

from outsize.core.outcomes.conversion import Conversion, Precision
from outsize.core.plan import Plan
from outsize.core.units import format_bytes
from outsize.report.text.layout import make_list
from outsize.report.text.outcome import closing, held, took


def draw(conversion: Conversion) -> RenderableType:
    """One line of what was done, a table of what it cost, and notes."""
    shape = " x ".join(map(str, conversion.shape)) or "scalar"
    place = "measured only, nothing was written" if conversion.target is None else f"-> {conversion.target}"
    head = Text.assemble((conversion.source, "bold"), f"  {shape}  {place}")
    sizes = Text(
        f"{conversion.dtype_before} {format_bytes(conversion.bytes_before)} -> "
        f"{conversion.dtype_after} {format_bytes(conversion.bytes_after)}"
    )
    notes = (Text(note, style="yellow") for note in conversion.notes)
    return Group(head, sizes, _draw_cost(conversion), *_draw_run(conversion), *notes)


def _draw_run(conversion: Conversion) -> list[RenderableType]:
    plan = conversion.plan
    if plan is None:
        return [Text(f"done in {took(conversion.seconds)}")]
    return [*map(Text, run_of(conversion, plan))]


def run_of(conversion: Conversion, plan: Plan) -> tuple[str, ...]:
    """How long it took, what it moved and what it held."""
    moved = plan.read + plan.written
    rate = moved / conversion.seconds if conversion.seconds > 0 and moved else None
    lines = closing(conversion.seconds, plan.read, plan.written, rate, plan.distance)
    return (*lines, held(conversion.measured, plan.peak(), conversion.budget))


def _draw_cost(conversion: Conversion) -> RenderableType:
    cost = conversion.precision
    if cost.exact:
        return Text(f"exact: all {cost.elements:,} values are the same", style="green")
    return make_list(cost_rows(cost), Column(), Column(justify="right"))


def cost_rows(cost: Precision) -> list[tuple[str, str]]:
    """(what, how much) for each number of a cast's cost."""
    return [
        ("largest absolute error", f"{cost.max_abs:.3g}"),
        ("largest relative error", f"{cost.max_rel:.3g}"),
        ("RMS error", f"{cost.rms:.3g}"),
        ("values changed", _share(cost.changed, cost.elements)),
        ("overflowed", _share(cost.overflowed, cost.elements)),
        ("flushed to zero", _share(cost.flushed, cost.elements)),
        ("NaN created", _share(cost.nans_created, cost.elements)),
    ]


def _share(count: int, of: int) -> str:
    return "none" if not count else f"{count:,} of {of:,} ({100 * count / of:.3g} %)"
