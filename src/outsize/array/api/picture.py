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
_ROOM = 120
"""Pixels beside the picture, for the length of an axis."""
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
    counts = [-(-length // step) for length, step in zip((height, width), steps, strict=True)]
    labels = (
        f'<text x="{wide / 2:.1f}" y="{high + 14:.1f}" text-anchor="middle">{_axis(width, counts[1])}</text>'
        f'<text x="{wide + 6:.1f}" y="{high / 2 + 4:.1f}">{_axis(height, counts[0])}</text>'
    )
    before = (
        "" if len(shape) < 3 else f'<text x="0" y="{high + 30:.1f}">{" x ".join(map(str, shape[:-2]))} of these</text>'
    )
    room = f'viewBox="-{_ROOM // 4} -1 {wide + _ROOM + _ROOM // 4:.0f} {high + 36:.0f}"'
    return (
        f'<svg width="{wide + _ROOM + _ROOM // 4:.0f}" height="{high + 36:.0f}" {room} font-size="11" fill="currentColor">'
        f'<g stroke="currentColor" stroke-width="0.7"><rect width="{wide:.1f}" height="{high:.1f}" fill="#8bd" '
        f'fill-opacity="0.6"/>{body}</g>{labels}{before}</svg>'
    )


def _axis(length: int, tiles: int) -> str:
    """The length of an axis, and into how many tiles it is cut."""
    return f"{length:,}" if tiles <= 1 else f"{length:,} in {tiles} tiles"
