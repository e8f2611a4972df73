"""The page of a `Shrinking`: size against loss of everything that was measured, as SVG, and a table of the sets."""

from __future__ import annotations

from html import escape

from outsize.core.outcomes.shrinking import Shrinking
from outsize.core.units import format_bytes
from outsize.report.html.page import Page
from outsize.report.html.parts import Drawing, Grid, Sentences
from outsize.report.text.shrinking import TITLES, cells_of, headline, points_of, span_of

WIDE, HIGH = 420, 200
"""Pixels of the picture."""
COLOURS = {"·": "#9a9a9a", "o": "#3d8bd9", "+": "currentColor", "X": "#d9643d"}
RADIUS = {"·": 2.0, "o": 4.0, "+": 4.0, "X": 6.0}
NAMES = {"·": "one candidate alone", "o": "a set", "+": "as it was", "X": "taken"}


def lay_out(plan: Shrinking) -> Page:
    rows = [(*cells_of(plan, one), "taken" if one == plan.chosen else "") for one in plan.sets]
    parts = (
        Drawing(_svg(plan) if points_of(plan) else ""), Grid("Sets", (*TITLES, ""), rows),
        Sentences(title="Notes", lines=plan.notes),
    )  # fmt: skip
    return Page(title=headline(plan).plain, parts=parts)


def _svg(plan: Shrinking) -> str:
    """Size to the right, loss upwards; what lies above the picture is drawn at its top."""
    low, high = span_of(plan)
    dots = []
    for size, loss, mark in points_of(plan):
        x, y = size * WIDE, HIGH * (1 - (min(loss, high) - low) / max(high - low, 1e-12))
        said = f"{NAMES[mark]}: {size:.1%}, loss {loss:.4g}"
        dots.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS[mark]}" fill="{COLOURS[mark]}"><title>{escape(said)}</title></circle>'
        )
    asked = plan.target / max(1, plan.before) * WIDE
    keys = "".join(
        f'<circle cx="{8 + 110 * place}" cy="{HIGH + 32}" r="4" fill="{COLOURS[mark]}"/>'
        f'<text x="{16 + 110 * place}" y="{HIGH + 36}">{name}</text>'
        for place, (mark, name) in enumerate(NAMES.items())
    )
    return (
        f'<svg width="{WIDE + 90}" height="{HIGH + 60}" viewBox="-64 -12 {WIDE + 90} {HIGH + 60}" fill="currentColor" '
        f'font-size="11" font-family="sans-serif" role="img">'
        f'<line x1="0" x2="{WIDE}" y1="{HIGH}" y2="{HIGH}" stroke="currentColor"/>'
        f'<line x1="0" x2="0" y1="0" y2="{HIGH}" stroke="currentColor"/>'
        f'<line x1="{asked:.1f}" x2="{asked:.1f}" y1="0" y2="{HIGH}" stroke="currentColor" stroke-dasharray="3 2"/>'
        f'<text x="{asked + 3:.1f}" y="8">asked</text><text x="-4" y="8" text-anchor="end">{high:.4g}</text>'
        f'<text x="-4" y="{HIGH}" text-anchor="end">{low:.4g}</text><text x="0" y="{HIGH + 14}">0 bytes</text>'
        f'<text x="{WIDE}" y="{HIGH + 14}" text-anchor="end">{format_bytes(plan.before)}</text>{"".join(dots)}{keys}</svg>'
    )
