"""The page of a `Diagnosis`: the cause, memory before the failure, why, what to do, who holds it, and the allocator's map."""

from __future__ import annotations

from outsize.core.failure import Diagnosis, Failure
from outsize.core.units import format_bytes
from outsize.report.html.history import map_of, over_time
from outsize.report.html.page import Page, Part
from outsize.report.html.parts import Bars, Grid, Verdict, bars_of, remedy_bars
from outsize.report.html.timeline import Layer, Timeline
from outsize.report.text.diagnosis import evidence_rows


def lay_out(diagnosis: Diagnosis) -> Page:
    history, failure = diagnosis.history, diagnosis.failure
    parts: list[Part] = [
        _verdict(diagnosis),
        *([_timeline(diagnosis)] if history is None else over_time(history)),
        remedy_bars("What to do, most bytes first", diagnosis.remedies),
        Grid("Why", ("", "evidence"), evidence_rows(diagnosis.evidence)),
        Bars(title="Who holds it", rows=bars_of(diagnosis.holders)),
    ]
    parts += [] if history is None else [map_of(history)]
    parts += [] if failure is None else [_failure(failure)]
    return Page(title="Memory" if failure is None else f"Out of memory: {failure.framework}", parts=tuple(parts))


def _verdict(diagnosis: Diagnosis) -> Verdict:
    cause = diagnosis.cause
    if cause is None:
        return Verdict(word="no failure:", tone="plain", text="not an out-of-memory failure, as far as this says")
    others = tuple(
        f"or {one.name}: {one.text} {f'Decided by: {one.decide}.' if one.decide else ''}"
        for one in diagnosis.candidates
    )
    decide = (f"What would decide it: {cause.decide}",) if cause.decide and not cause.certain else ()
    word = f"cause: {cause.name}{'' if cause.certain else ' (likely)'}."
    return Verdict(word=word, tone="bad" if cause.certain else "unsure", text=cause.text, more=(*decide, *others))


def _timeline(diagnosis: Diagnosis) -> Timeline:
    moments = diagnosis.timeline
    failure = diagnosis.failure
    return Timeline(
        title="Memory before the failure", times=[moment.time for moment in moments], unit="s",
        layers=(Layer(name="in use", values=[moment.bytes for moment in moments]),),
        limit=None if failure is None else failure.limit_bytes or failure.total_bytes,
    )  # fmt: skip


def _failure(failure: Failure) -> Grid:
    named = (
        ("asked for", failure.requested_bytes), ("total", failure.total_bytes), ("free", failure.free_bytes),
        ("allocated", failure.allocated_bytes), ("reserved", failure.reserved_bytes), ("limit", failure.limit_bytes),
    )  # fmt: skip
    rows = [(name, format_bytes(size), f"{size:,}") for name, size in named if size is not None]
    rows += [(name, str(value), "") for name, value in (("device", failure.device), ("dtype", failure.dtype)) if value]
    return Grid("What the message says", ("", "value>", "bytes>"), rows)
