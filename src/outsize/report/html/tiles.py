"""Tiles of a pass over an array: how its output is cut, to scale, with the order in which the tiles are made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from outsize.core.plan import Step
from outsize.report.html.patterns import fill

LARGEST = 220
"""Longest side of a picture."""
MOST = 24
"""Tiles drawn along a side; more are told in numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """The tiles of all passes."""

    title: str
    steps: tuple[Step, ...]

    def html(self, small: bool) -> str:
        """A picture a pass, side by side."""
        body = "".join(
            f"<figure>{_draw(number, step)}<figcaption>{number}. {escape(_told(step))}</figcaption></figure>"
            for number, step in enumerate(self.steps, start=1)
            if step.tile
        )
        return body and f'<section class="tiles"><h2>{escape(self.title)}</h2><div class="row">{body}</div></section>'


def _told(step: Step) -> str:
    tile = " x ".join(map(str, step.tile)) or "all of it"
    whole = f" of {' x '.join(map(str, step.shape))}" if step.shape else ""
    return f"{step.name}: {step.tiles:,} tile{'s' * (step.tiles != 1)} of {tile}{whole}"


def _draw(number: int, step: Step) -> str:
    """The last two axes as a grid; the axes before them are told, and drawn as sheets behind it."""
    shape = step.shape if len(step.shape) == len(step.tile) else ()
    if not shape:
        return ""
    rows, columns = (1, *shape)[-2:]
    tile_rows, tile_columns = (1, *step.tile)[-2:]
    down, across = math.ceil(rows / max(1, tile_rows)) or 1, math.ceil(columns / max(1, tile_columns)) or 1
    width = LARGEST if columns >= rows else max(24, LARGEST * columns / max(1, rows))
    height = LARGEST if rows > columns else max(24, LARGEST * rows / max(1, columns))
    sheets = min(3, math.prod(-(-one // max(1, size)) for one, size in zip(shape[:-2], step.tile[:-2], strict=True)))
    pieces = [
        f'<rect x="{4 * back}" y="{4 * (3 - back)}" width="{width:.1f}" height="{height:.1f}" class="segment"/>'
        for back in range(sheets - 1, 0, -1)
    ]
    shown_down, shown_across = min(down, MOST), min(across, MOST)
    for row in range(shown_down):
        for column in range(shown_across):
            place = f'x="{width * column / shown_across:.1f}" y="{12 + height * row / shown_down:.1f}"'
            size = f'width="{width / shown_across:.1f}" height="{height / shown_down:.1f}"'
            tip = escape(_tile_tip(step, row, column, row * across + column))
            pieces.append(
                f'<rect {place} {size} fill="{fill(2 * ((row + column) % 2))}" class="tile" data-tip="{tip}"/>'
            )
    if (down, across) != (shown_down, shown_across):
        pieces.append(f'<text x="0" y="{height + 26:.0f}">drawn coarser: {down:,} x {across:,} tiles</text>')
    view = f'viewBox="-1 -1 {width + 14:.0f} {height + 32:.0f}" width="{width + 14:.0f}"'
    return f'<svg {view} role="img" aria-label="tiles of {number}. {escape(step.name)}">{"".join(pieces)}</svg>'


def _tile_tip(step: Step, row: int, column: int, number: int) -> str:
    spans = []
    for place, size, whole in zip((row, column)[-len(step.tile) :], step.tile[-2:], step.shape[-2:], strict=False):
        spans.append(f"{place * size:,}:{min(whole, (place + 1) * size):,}")
    return f"tile {number + 1:,} of {step.tiles:,}\n[{', '.join(spans)}]"
