"""Memory over time: layers on top of each other, a line for what is reserved, a dashed line for the limit.

The picture is SVG that stands by itself. A page also carries the numbers, as differences from one moment to the next, and
`page.js` draws any stretch of them again: zoom, hover, layers switched off. Moments that share a column show the highest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, Literal

from outsize.core.units import format_bytes
from outsize.report.html.patterns import fill, swatch

WIDTH, HEIGHT = 960, 300
LEFT, RIGHT, TOP, BOTTOM = 92, 10, 12, 34
"""Room around the picture, in its own units; `page.js` has the same numbers."""
COLUMNS = 480
"""Most moments that the standing picture draws."""
MOMENTS = 8000
"""Most moments that a page carries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of a timeline."""

    name: str
    values: Sequence[int]
    detail: str = ""
    """More about it, several lines: a stack, say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Layers over time."""

    title: str
    times: Sequence[float]
    """Seconds, or numbers of events, rising."""
    unit: Literal["s", "event"]
    layers: tuple[Layer, ...]
    """From the bottom up."""
    outline: Layer | None = None
    """A line over the layers: what an allocator holds, used or not."""
    labels: Sequence[str] = ()
    """What was going on at each moment; empty if unknown."""
    lines: Sequence[str] = ()
    """The line of code at each moment; empty if unknown."""
    limit: int | None = None
    """Bytes that should not be passed."""
    limit_name: str = "limit"
    marks: tuple[tuple[float, str], ...] = ()

    def html(self, small: bool) -> str:
        """The picture with its legend; on a page the numbers too."""
        if not self.times or not self.layers:
            return ""
        kept = _thin(self, COLUMNS)
        table = "" if small else f'<script type="application/json">{_dump(_thin(self, MOMENTS))}</script>'
        picture = (
            f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" aria-label="{escape(self.title)}">'
            f'<g class="drawing">{_draw(kept)}</g></svg>'
        )
        return (
            f'<section class="timeline"><h2>{escape(self.title)}</h2><div class="tools"></div>{picture}'
            f'<div class="legend">{_legend(self)}</div>{table}</section>'
        )


def _totals(timeline: Timeline) -> list[int]:
    return [sum(column) for column in zip(*(layer.values for layer in timeline.layers), strict=True)]


def _thin(timeline: Timeline, most: int) -> Timeline:
    """At most `most` moments: the highest and the lowest of each stretch, so that no peak is lost."""
    count = len(timeline.times)
    if count <= most:
        return timeline
    totals, stretches, kept = _totals(timeline), most // 2, [0]
    for number in range(stretches):
        stretch = range(count * number // stretches, count * (number + 1) // stretches)
        kept += sorted({max(stretch, key=totals.__getitem__), min(stretch, key=totals.__getitem__)})
    if timeline.outline is not None:
        values = timeline.outline.values
        kept.append(max(range(count), key=values.__getitem__))
    chosen = sorted({*kept, count - 1})

    def pick(values: Sequence[Any]) -> list[Any]:
        return [values[at] for at in chosen] if values else []

    outline = timeline.outline and replace(timeline.outline, values=pick(timeline.outline.values))
    layers = tuple(replace(layer, values=pick(layer.values)) for layer in timeline.layers)
    lines, labels = pick(timeline.lines), pick(timeline.labels)
    return replace(timeline, times=pick(timeline.times), layers=layers, outline=outline, labels=labels, lines=lines)


def _draw(timeline: Timeline) -> str:
    times, totals = timeline.times, _totals(timeline)
    outline = timeline.outline.values if timeline.outline else ()
    highest = max([*totals, *outline, 1])
    top = highest if timeline.limit is None or timeline.limit > 1.5 * highest else max(highest, timeline.limit)
    first, span = times[0], (times[-1] - times[0]) or 1
    xs = [LEFT + (WIDTH - LEFT - RIGHT) * (time - first) / span for time in times] + [WIDTH - RIGHT]

    def y(size: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * size / (top * 1.04)

    shapes, below = [], [0] * len(times)
    for number, layer in enumerate(timeline.layers):
        above = [low + size for low, size in zip(below, layer.values, strict=True)]
        if above != below:
            shapes.append(
                f'<path d="{_area(xs, [y(v) for v in below], [y(v) for v in above])}" fill="{fill(number)}"/>'
            )
        below = above
    if timeline.outline is not None:
        shapes.append(f'<path class="outline" d="M{_steps(xs, [y(v) for v in timeline.outline.values])}"/>')
    if timeline.limit is not None and timeline.limit <= top:
        level = y(timeline.limit)
        shapes.append(f'<path class="limit" d="M{LEFT} {level:.1f}H{WIDTH - RIGHT}"/>')
    return _axes(timeline, top, y) + "".join(shapes)


def _steps(xs: list[float], ys: list[float]) -> str:
    """A line that holds each value until the next moment."""
    return "".join(f"{'L' if i else ''}{xs[i]:.1f} {y:.1f}H{xs[i + 1]:.1f}" for i, y in enumerate(ys))


def _area(xs: list[float], below: list[float], above: list[float]) -> str:
    back = "".join(f"L{xs[i + 1]:.1f} {below[i]:.1f}H{xs[i]:.1f}" for i in range(len(below) - 1, -1, -1))
    return f"M{_steps(xs, above)}{back}Z"


def _axes(timeline: Timeline, top: int, y: Any) -> str:
    rows = []
    for part in range(5):
        size = round(top * part / 4)
        rows.append(
            f'<path class="tick" d="M{LEFT} {y(size):.1f}H{WIDTH - RIGHT}"/>'
            f'<text x="{LEFT - 6}" y="{y(size) + 4:.1f}" text-anchor="end">{format_bytes(size)}</text>'
        )
    first, last = timeline.times[0], timeline.times[-1]
    for part in range(5):
        place = LEFT + (WIDTH - LEFT - RIGHT) * part / 4
        anchor = ("start", "middle", "middle", "middle", "end")[part]
        told = _time(first + (last - first) * part / 4, timeline.unit)
        rows.append(f'<text x="{place:.0f}" y="{HEIGHT - 18}" text-anchor="{anchor}">{told}</text>')
    return "".join(rows)


def _time(time: float, unit: str) -> str:
    return f"{time:,.3g} s" if unit == "s" else f"event {time:,.0f}"


def _legend(timeline: Timeline) -> str:
    seen = [(number, layer) for number, layer in enumerate(timeline.layers) if any(layer.values)]
    rows = [
        f'<button type="button" data-layer="{number}" data-tip="{escape(layer.detail or layer.name)}" aria-pressed="true">'
        f"{swatch(number)} {escape(layer.name)}</button>"
        for number, layer in seen
    ]
    if timeline.outline is not None:
        rows.append(f'<span><span class="line" aria-hidden="true"></span> {escape(timeline.outline.name)}</span>')
    if timeline.limit is not None:
        told = f"{timeline.limit_name}: {format_bytes(timeline.limit)}"
        rows.append(f'<span><span class="line dashed" aria-hidden="true"></span> {escape(told)}</span>')
    return "".join(rows)


def _dump(timeline: Timeline) -> str:
    """The numbers for the script, safe inside a page."""
    labels, at = _numbered(timeline.labels)
    lines, line_at = _numbered(timeline.lines)
    layers = [
        {"name": layer.name, "detail": layer.detail, "values": _changes(layer.values)} for layer in timeline.layers
    ]
    outline = timeline.outline and {"name": timeline.outline.name, "values": _changes(timeline.outline.values)}
    scale = 1e6 if timeline.unit == "s" else 1
    table = {
        "unit": timeline.unit, "scale": scale, "times": _changes([round(time * scale) for time in timeline.times]),
        "layers": layers, "outline": outline, "labels": labels, "at": at, "lines": lines, "lineAt": line_at,
        "limit": timeline.limit, "limitName": timeline.limit_name, "marks": timeline.marks,
    }  # fmt: skip
    return json.dumps(table, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _changes(values: Sequence[int]) -> list[int]:
    """Each value less the one before."""
    return [now - before for now, before in zip(values, [0, *values[:-1]], strict=True)]


def _numbered(texts: Sequence[str]) -> tuple[list[str], list[int]]:
    """The different texts, and the number of each moment's."""
    numbers: dict[str, int] = {}
    at = [numbers.setdefault(text, len(numbers)) for text in texts]
    return list(numbers), at
