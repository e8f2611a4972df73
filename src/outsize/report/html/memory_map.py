"""A map of an allocator's memory: one row a segment, to scale; what is in use, what is held unused, and who asked for it."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from outsize.core.outcomes.allocator_history import HeldSegment
from outsize.core.units import format_bytes
from outsize.report.html.patterns import fill

ROW, GAP, SCALE = 16, 3, 840
"""Height of a row, room between rows, and width of the longest segment, in units of the picture."""
FEW = 8
"""Segments of a small map."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMap:
    """Segments, the longest first."""

    title: str
    rows: tuple[HeldSegment, ...]
    left_out: int = 0
    """Segments that are not drawn."""
    left_out_bytes: int = 0

    def html(self, small: bool) -> str:
        """Rows of SVG. Solid is in use, hatched is partly in use, empty is held unused."""
        shown = self.rows[:FEW] if small else self.rows
        if not shown:
            return ""
        longest = max(row.bytes for row in shown) or 1
        body = "".join(_draw(row, number * (ROW + GAP), longest) for number, row in enumerate(shown))
        height = len(shown) * (ROW + GAP)
        rest = self.left_out + len(self.rows) - len(shown)
        rest_bytes = self.left_out_bytes + sum(row.bytes for row in self.rows[len(shown) :])
        more = f"<p class=quiet>and {rest:,} smaller segments with {format_bytes(rest_bytes)}</p>" if rest else ""
        told = "blue: in use; hatched: small blocks, partly in use; empty: held and not used"
        return (
            f'<section class="map"><h2>{escape(self.title)}</h2><p class=quiet>{told}</p>'
            f'<svg viewBox="0 0 960 {height}" role="img" aria-label="{escape(self.title)}">{body}</svg>{more}</section>'
        )


def _draw(row: HeldSegment, top: int, longest: int) -> str:
    width = SCALE * row.bytes / longest
    used = sum(block.used for block in row.blocks)
    tip = f"{row.pool}\n{format_bytes(row.bytes)}, {format_bytes(used)} in use"
    pieces = [f'<rect class="segment" y="{top}" width="{width:.1f}" height="{ROW}" data-tip="{escape(tip)}"/>']
    for block in row.blocks:
        if not block.used:
            continue
        place, size = SCALE * block.offset / longest, SCALE * block.bytes / longest
        look = 0 if block.used == block.bytes else 1
        tip = f"{format_bytes(block.bytes)}" + ("" if not look else f", {format_bytes(block.used)} in use")
        told = block.line if block.blocks == 1 else f"{block.blocks} blocks, the largest from {block.line}"
        pieces.append(
            f'<rect x="{place:.1f}" y="{top}" width="{max(0.3, size - 0.2):.1f}" height="{ROW}" fill="{fill(look)}" '
            f'data-tip="{escape(f"{tip}{chr(10)}{told}")}"/>'
        )
    label = f'<text x="{width + 6:.1f}" y="{top + 12}">{format_bytes(row.bytes)} {escape(row.pool)}</text>'
    return "".join(pieces) + label
