"""Draws a `Shrinking`: the size and loss that were reached, size against loss of everything that was tried, and the sets.

In the picture the size grows to the right and the loss upwards. `html/shrinking.py` draws the same for pages and notebooks.
"""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from outsize.core.outcomes.shrinking import Shrinking, ShrinkSet
from outsize.core.units import format_bytes
from outsize.report.text.layout import ByWidth, make_table

HEIGHT = 10
"""Lines of the picture."""
AXIS = 9
"""Columns left of the picture: the loss and the axis."""
NOTES = 8
"""Notes that are shown."""


def draw(plan: Shrinking) -> RenderableType:
    blocks: list[RenderableType] = [headline(plan)]
    if points_of(plan):
        blocks += [Text(), ByWidth(lambda columns: _picture(plan, columns))]
    if plan.sets:
        blocks += [Text(), _sets(plan)]
    shown = list(plan.notes[:NOTES])
    if len(plan.notes) > NOTES:
        shown.append(f"and {len(plan.notes) - NOTES} more (--json has all)")
    if shown:
        blocks += [Text(), *(Padding(note, (0, 0, 0, 2)) for note in shown)]
    return Group(*blocks)


def headline(plan: Shrinking) -> Text:
    """What was reached, or what comes nearest."""
    asked = f"{format_bytes(plan.target)} ({plan.target / max(1, plan.before):.0%}) asked"
    what = "" if plan.of == "weights" else " of a training step (without activations)"
    start = f"{format_bytes(plan.before)}{what}, loss {plan.loss:.4g} on {plan.batches} batches"
    if plan.chosen is not None:
        return Text.assemble(
            start, " -> ", (f"{format_bytes(plan.chosen.bytes)} ({plan.share:.0%})", "bold"),
            f", loss {_loss(plan.chosen)} ({rise_of(plan, plan.chosen)})  ", ("fits", "bold green"), f"  {asked}", _on_card(plan),
        )  # fmt: skip
    near = plan.nearest
    nearest = ""
    if near is not None:
        share = near.bytes / max(1, plan.before)
        nearest = f"; nearest within {plan.within:.2%}: {format_bytes(near.bytes)} ({share:.0%}), loss {_loss(near)}"
    return Text.assemble(start, "  ", ("cannot be reached", "bold red"), f"  {asked}{nearest}")


def _on_card(plan: Shrinking) -> str:
    return (
        ""
        if plan.peak is None
        else f"; a step reserves at most {format_bytes(plan.peak)} on the {plan.card} (estimate)"
    )


def _loss(one: ShrinkSet) -> str:
    return f"{one.loss:.4g}" if one.healed is None else f"{one.healed:.4g} healed from {one.loss:.4g}"


def rise_of(plan: Shrinking, one: ShrinkSet) -> str:
    """`+0.31 %`"""
    if not plan.loss or not math.isfinite(one.best_loss):
        return f"{one.best_loss - plan.loss:+.3g}"
    return f"{(one.best_loss - plan.loss) / abs(plan.loss):+.2%}"


TITLES = ("set", "bytes>", "share>", "loss>", "change>", "time>", "what (places)")


def cells_of(plan: Shrinking, one: ShrinkSet) -> tuple[str, ...]:
    """A row of the table of sets."""
    time = f"{one.seconds / plan.seconds:.2f}x" if plan.seconds and math.isfinite(one.seconds) else "-"
    share = f"{one.bytes / max(1, plan.before):.1%}"
    return one.name, format_bytes(one.bytes), share, _loss(one), rise_of(plan, one), time, ", ".join(one.parts)


def _sets(plan: Shrinking) -> Table:
    rows = []
    for one in plan.sets:
        style = "bold" if one == plan.chosen else "dim" if one.bytes > plan.target else ""
        rows.append([Text(cell, style=style) for cell in cells_of(plan, one)])
    return make_table(TITLES, rows)


def points_of(plan: Shrinking) -> list[tuple[float, float, str]]:
    """(share of the bytes, loss, mark) of all that was measured: the last marks lie on top."""
    found = [(one.bytes, one.loss, "·") for one in plan.candidates]
    found += [(one.bytes, one.best_loss, "o") for one in plan.sets]
    found.append((plan.before, plan.loss, "+"))
    if plan.chosen is not None:
        found.append((plan.chosen.bytes, plan.chosen.best_loss, "X"))
    return [(size / max(1, plan.before), loss, mark) for size, loss, mark in found if math.isfinite(loss)]


def span_of(plan: Shrinking) -> tuple[float, float]:
    """Lowest and highest loss of the picture: three times what the best set costs is enough, higher ones are drawn at the top."""
    losses = [loss for _, loss, _ in points_of(plan)]
    marked = [one.best_loss for one in (plan.chosen, plan.cheapest, plan.nearest) if one is not None]
    least = min(losses)
    reach = max(
        [abs(loss - plan.loss) for loss in marked if math.isfinite(loss)] + [abs(plan.loss) * plan.within, 1e-12]
    )
    return least, min(max([*losses, least + 1e-12]), plan.loss + 3 * reach)


def _picture(plan: Shrinking, columns: int) -> Group:
    """Size to the right, loss upwards."""
    wide = max(20, min(72, columns - AXIS - 1))
    low, high = span_of(plan)
    cells = [[" "] * wide for _ in range(HEIGHT)]
    edge = min(wide - 1, int(plan.target / max(1, plan.before) * (wide - 1)))
    for line in cells:
        line[edge] = "┊"
    for size, loss, mark in points_of(plan):
        place = min(wide - 1, max(0, int(size * (wide - 1))))
        level = (min(loss, high) - low) / max(high - low, 1e-12)
        cells[HEIGHT - 1 - round(level * (HEIGHT - 1))][place] = mark
    lines = []
    for number, line in enumerate(cells):
        label = f"{high:.4g}" if number == 0 else f"{low:.4g}" if number == HEIGHT - 1 else ""
        lines.append(Text(f"{label:>{AXIS - 2}} │{''.join(line)}", no_wrap=True, overflow="crop"))
    scale = "0" + " " * max(1, edge - 1) + "┊ asked" if edge < wide - 12 else "0"
    lines.append(Text(" " * (AXIS - 1) + "└" + "─" * wide))
    lines.append(Text(" " * AXIS + f"{scale:<{wide - 6}}{format_bytes(plan.before):>6}", no_wrap=True, overflow="crop"))
    lines.append(
        Text(" " * AXIS + "loss against size: + as it was, · one candidate alone, o a set, X taken", style="dim")
    )
    return Group(*lines)
