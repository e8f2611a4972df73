"""Draws a `MeasuredPeak`: the verdict, where the program was, who held the memory, and how the number is known."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from outsize.core.outcomes.measured_peak import MeasuredPeak
from outsize.core.units import format_bytes
from outsize.report.text.layout import make_table

_PLACES = {"host": "RAM"}


def draw(peak: MeasuredPeak) -> RenderableType:
    lines: list[RenderableType] = [_verdict(peak)]
    if peak.line is not None:
        lines.append(Text(f"at {peak.line}, where {format_bytes(peak.seen)} were seen"))
    if peak.holders or (peak.line is not None and not peak.fits):
        rows = [(format_bytes(part.bytes), part.name) for part in peak.holders]
        rest = peak.seen - sum(part.bytes for part in peak.holders)
        if rest > peak.seen // 20:
            rows.append((format_bytes(rest), "temporaries without a name, memory outside arrays, children"))
        lines.append(make_table(("bytes>", "held then by"), rows))
    lines.append(
        Text(f"{format_bytes(peak.started_with)} were held when it began and are not counted; {peak.how}", style="dim")
    )
    return Group(*lines)


def _verdict(peak: MeasuredPeak) -> Text:
    place = _PLACES.get(peak.pool.kind, str(peak.pool))
    held = f"held {format_bytes(peak.bytes)} of {place} at its peak"
    if peak.budget is None:
        return Text.assemble((f"{peak.name}: ", "bold"), held)
    if peak.fits:
        return Text.assemble((f"{peak.name}: ", "bold"), f"{held}, inside its budget of {format_bytes(peak.budget)}")
    over = f", {format_bytes(peak.bytes - peak.budget)} over its budget of {format_bytes(peak.budget)}"
    return Text.assemble((f"{peak.name}: ", "bold"), held, (over, "bold red"))
