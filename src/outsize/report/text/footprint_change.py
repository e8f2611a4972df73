"""Draws a `FootprintChange`: the verdict with the culprit, then the peaks and what grew or shrank, then and now."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from outsize.core.footprint_change import Change, FootprintChange
from outsize.core.units import format_bytes
from outsize.report.text.layout import make_table

MOST = 6
"""Rows of each table."""


def draw(change: FootprintChange) -> RenderableType:
    lines: list[RenderableType] = [_verdict(change), _table("peak", change.peaks)]
    for title, changes in (("by kind", change.parts), ("by module", change.modules), ("by line", change.lines)):
        if changes:
            lines.append(_table(title, changes[:MOST]))
    return Group(*lines)


def _verdict(change: FootprintChange) -> Text:
    grown = max(change.peaks, key=lambda peak: peak.bytes)
    worst = grown if grown.bytes > 0 else min(change.peaks, key=lambda peak: peak.bytes)
    by = f"{format_bytes(abs(worst.bytes))} ({_percent(worst)})"
    if change.grew:
        return Text.assemble(
            (f"{change.name}: ", "bold"), (f"grew by {by}", "bold red"), f" {worst.name}, most of it {change.culprit}; "
            f"{100 * change.tolerance:.3g}% was allowed",
        )  # fmt: skip
    told = (
        "no peak has changed"
        if not worst.bytes
        else f"{'grew' if worst.bytes > 0 else 'shrank'} by {by}, which is allowed"
    )
    return Text.assemble((f"{change.name}: ", "bold"), (told, "green"))


def _percent(change: Change) -> str:
    return f"{change.bytes / change.before:+.1%}" if change.before else "new"


def _table(title: str, changes: tuple[Change, ...]) -> RenderableType:
    rows = [
        (
            one.name,
            format_bytes(one.before),
            format_bytes(one.after),
            f"{'+' * (one.bytes > 0)}{format_bytes(one.bytes)}",
            _percent(one),
        )
        for one in changes
    ]
    return make_table((title, "baseline>", "now>", "change>", ">"), rows)
