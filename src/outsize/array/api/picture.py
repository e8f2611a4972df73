"""A notebook's view of an array: its facts, and a drawing of its last two axes with the tiles in which it would be
written."""

from __future__ import annotations

import html

from outsize.array.graph.node import Node
from outsize.array.run.results import plan_node
from outsize.core.errors import OutsizeError
from outsize.core.units import format_bytes

_SIDE = 120
"""Pixels of the longer side."""
_MOST = 40
"""Lines drawn along an axis; more would be a grey patch."""


def draw_html(node: Node) -> str:
    """Facts and picture as HTML."""
    rows = {"shape": str(node.shape), "dtype": str(node.dtype), "bytes": format_bytes(node.nbytes)}
    tile: tuple[int, ...] = node.shape
    try:
        plan = plan_node(node)
        tile = plan.steps[-1].tile if plan.steps else node.shape
        rows |= {"passes": str(len(plan.steps)), "peak": format_bytes(plan.peak()), "tile": str(tile)}
        rows |= {"reads": format_bytes(plan.read), "smallest budget": format_bytes(plan.smallest)}
    except OutsizeError as error:
        rows["plan"] = str(error)
    table = "".join(f"<tr><th>{name}</th><td>{html.escape(value)}</td></tr>" for name, value in rows.items())
    return (
        f'<div style="display:flex;gap:1.5em;align-items:center"><table>{table}</table>{_svg(node.shape, tile)}</div>'
    )


def _svg(shape: tuple[int, ...], tile: tuple[int, ...]) -> str:
    height, width = (1, *shape)[-2:] if shape else (1, 1)
    if not height or not width or len(tile) != len(shape):
        return ""
    steps = (1, *tile)[-2:] if shape else (1, 1)
    longest = max(height, width)
    high, wide = max(12.0, _SIDE * height / longest), max(12.0, _SIDE * width / longest)
    lines = []
    for count, length, along in ((-(-height // steps[0]), high, "y"), (-(-width // steps[1]), wide, "x")):
        shown = min(count, _MOST)
        for i in range(shown + 1):
            at = length * i / shown
            a, b = ((0, at), (wide, at)) if along == "y" else ((at, 0), (at, high))
            lines.append(f'<line x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{b[0]:.1f}" y2="{b[1]:.1f}"/>')
    body = "".join(lines)
    return (
        f'<svg width="{wide + 2:.0f}" height="{high + 2:.0f}" viewBox="-1 -1 {wide + 2:.0f} {high + 2:.0f}" '
        f'stroke="#555" stroke-width="0.7"><rect width="{wide:.1f}" height="{high:.1f}" fill="#8bd"/>{body}</svg>'
    )
