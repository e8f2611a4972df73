"""The page of a `Footprint`: the verdict, memory over the steps, peaks, phases, and what is alive at the peak."""

from __future__ import annotations

from outsize.core.footprint import Footprint
from outsize.core.units import format_bytes
from outsize.report.html.page import Page
from outsize.report.html.parts import Bars, Grid, Sentences, Verdict, bars_of, verdict_of
from outsize.report.html.timeline import Layer, Timeline
from outsize.report.text.footprint import fewest_of, phases_of


def lay_out(footprint: Footprint) -> Page:
    largest = [
        (row.place, f"{row.largest:,}", format_bytes(row.capacity), format_bytes(row.next_needs), row.known)
        for row in footprint.largest
    ]
    parts = (
        _verdict(footprint),
        _timeline(footprint),
        _peaks(footprint),
        Grid("Phases", *phases_of(footprint)),
        Bars(title=f"Alive at the peak ({footprint.peak_label}), by kind", rows=bars_of(footprint.parts)),
        Bars(title="By module", rows=bars_of(footprint.modules), look=2),
        Bars(title="By line of code", rows=bars_of(footprint.lines), look=4),
        Grid("Largest batch", ("place", "largest batch>", "has>", "one more needs>", "known"), largest),
        Grid("Fewest cards that train it", *fewest_of(footprint)),
        Sentences(title="Notes", lines=footprint.notes),
    )
    return Page(title=footprint.name, parts=parts)


def _verdict(footprint: Footprint) -> Verdict:
    peak = footprint.peak_reserved
    need = f"{format_bytes(peak.bytes)} reserved at the peak ({peak.known}), at most {format_bytes(peak.bound)}"
    if footprint.capacity is None:
        return Verdict(word="peak:", tone="plain", text=need)
    place = "in the budget" if footprint.card is None else f"on the {footprint.card.name}"
    text, unsure = (
        f"{need}, of {format_bytes(footprint.capacity)} {place}",
        "may fit" if footprint.guesses else "may not fit",
    )
    return verdict_of(footprint.fits, text, unsure=unsure)


def _timeline(footprint: Footprint) -> Timeline:
    moments = footprint.timeline
    layers = tuple(
        Layer(name=kind, values=[moment.bytes[number] if number < len(moment.bytes) else 0 for moment in moments])
        for number, kind in enumerate(footprint.kinds)
    )
    begins = [
        (float(moment.time), moment.label)
        for before, moment in zip([None, *moments], moments, strict=False)
        if before is None or before.label != moment.label
    ]
    place = "capacity" if footprint.card is None else f"capacity of the {footprint.card.name}"
    return Timeline(
        title="Memory over the steps, by kind", times=[float(moment.time) for moment in moments], unit="event",
        layers=layers, outline=Layer(name="reserved by the allocator", values=[moment.reserved for moment in moments]),
        labels=[moment.label for moment in moments], lines=[moment.line for moment in moments],
        limit=footprint.capacity, limit_name=place, marks=tuple(begins),
    )  # fmt: skip


def _peaks(footprint: Footprint) -> Grid:
    rows = [
        (name, format_bytes(one.bytes), f"{one.bytes:,}", format_bytes(one.bound), one.known)
        for name, one in footprint.amounts.items()
    ]
    return Grid("Peaks", ("peak", "likely>", "bytes>", "at most>", "known"), rows)
