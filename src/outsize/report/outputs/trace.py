"""The timelines of a noun in the trace format that Perfetto and chrome://tracing open: counters, phases and marks.

Where a noun has no clock the number of the event stands for microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from outsize.core.errors import InputError
from outsize.core.noun import Noun
from outsize.report.html import lay_out
from outsize.report.html.timeline import Timeline


def to_trace(noun: Noun) -> str:
    """The noun's timelines as JSON text."""
    page = lay_out(noun)
    timelines = [part for part in page.parts if isinstance(part, Timeline) and part.times] if page is not None else []
    if page is None or not timelines:
        raise InputError(f"this {type(noun).__name__} has no timeline, so there is no trace of it")
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": page.title}}]
    for number, timeline in enumerate(timelines):
        events += _counters(timeline)
        if number == 0:
            events += _marks(timeline)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"), ensure_ascii=False)


def _counters(timeline: Timeline) -> Iterator[dict[str, Any]]:
    scale = 1e6 if timeline.unit == "s" else 1.0
    before: dict[str, int] = {}
    for at, time in enumerate(timeline.times):
        values = {layer.name: layer.values[at] for layer in timeline.layers}
        if values != before:
            yield {"ph": "C", "name": f"{timeline.title} (bytes)", "pid": 1, "ts": time * scale, "args": values}
        before = values
    outline = timeline.outline
    if outline is None:
        return
    last = None
    for time, size in zip(timeline.times, outline.values, strict=True):
        if size != last:
            yield {"ph": "C", "name": f"{outline.name} (bytes)", "pid": 1, "ts": time * scale, "args": {"bytes": size}}
        last = size


def _marks(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """What was going on, as slices; and the named moments."""
    scale = 1e6 if timeline.unit == "s" else 1.0
    begins = [at for at, label in enumerate(timeline.labels) if at == 0 or label != timeline.labels[at - 1]]
    for at, following in pairwise([*begins, len(timeline.labels) - 1] if begins else []):
        if timeline.labels[at]:
            begin, end = timeline.times[at] * scale, timeline.times[following] * scale
            slice_ = {"ph": "X", "name": timeline.labels[at], "pid": 1, "tid": 1, "ts": begin, "dur": end - begin}
            yield slice_ | ({"args": {"line": timeline.lines[at]}} if timeline.lines else {})
    for time, name in timeline.marks:
        yield {"ph": "i", "s": "p", "name": name, "pid": 1, "tid": 1, "ts": time * scale}
