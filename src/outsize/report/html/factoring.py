"""The page of a `Factoring`: what was kept and what it lost, and the singular values of each mode with the cut, as SVG."""

from __future__ import annotations

import math
from html import escape

from outsize.core.outcomes.factoring import Factoring, Spectrum
from outsize.report.html.page import Page
from outsize.report.html.parts import Drawing, Sentences
from outsize.report.text.factoring import facts_of, panel_title, shown_values, title_of

KEPT, CUT = "#3d8bd9", "#9a9a9a"
"""Colours of what stays and what goes, on light and on dark."""
WIDE, HIGH = 220, 110
"""Pixels of a panel in a notebook."""


def lay_out(factoring: Factoring) -> Page:
    panels = "".join(_svg(spectrum) for spectrum in factoring.spectra if shown_values(spectrum))
    parts = (
        Sentences(title="What was kept", lines=tuple(f"{name} {words}" for name, words in facts_of(factoring))),
        Drawing(f'<div style="display:flex;flex-wrap:wrap;gap:1em">{panels}</div>'),
        Sentences(title="Notes", lines=factoring.notes),
    )
    return Page(title=title_of(factoring).plain, parts=parts)


def _svg(spectrum: Spectrum) -> str:
    """Bars on a logarithmic scale, and a line at the cut."""
    values = shown_values(spectrum)
    decades = max(1e-3, -math.log10(min(values)))
    step = WIDE / len(values)
    bars = []
    for place, value in enumerate(values):
        high = max(1.0, HIGH * (1 + math.log10(value) / decades))
        colour = KEPT if place < spectrum.kept else CUT
        bars.append(
            f'<rect x="{place * step:.1f}" y="{HIGH - high:.1f}" width="{max(0.5, step * 0.9):.1f}" '
            f'height="{high:.1f}" fill="{colour}"/>'
        )
    cut = min(spectrum.kept, len(values)) * step
    ticks = f'<text x="-4" y="8" text-anchor="end">1</text><text x="-4" y="{HIGH}" text-anchor="end">{min(values):.0e}</text>'
    return (
        f'<svg width="{WIDE + 50}" height="{HIGH + 34}" viewBox="-44 -18 {WIDE + 50} {HIGH + 34}" fill="currentColor" '
        f'font-size="11" font-family="sans-serif" role="img"><text x="0" y="-6">{escape(panel_title(spectrum))}</text>'
        f'{"".join(bars)}<line x1="{cut:.1f}" x2="{cut:.1f}" y1="0" y2="{HIGH}" stroke="currentColor" stroke-dasharray="3 2"/>'
        f'<line x1="0" x2="{WIDE}" y1="{HIGH}" y2="{HIGH}" stroke="currentColor"/>{ticks}'
        f'<text x="0" y="{HIGH + 13}">singular values, largest first</text></svg>'
    )
