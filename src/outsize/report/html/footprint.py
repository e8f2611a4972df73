"""The page of a `Footprint`: the verdict, memory over the steps, peaks, phases, and what is alive at the peak."""

from __future__ import annotations

from outsize.core.footprint import Footprint
from outsize.core.units import format_bytes
from outsize.report.html.page import Page, Part
from outsize.report.html.parts import Bars, Grid, Sentences, Tone, Verdict, bars_of
from outsize.report.html.timeline import Layer, Timeline


def lay_out(footprint: Footprint) -> Page:
    """The footprint as a page."""
    parts: list[Part] = [_verdict(footprint)]
    if footprint.timeline:
        parts.append(_timeline(footprint))
    parts.append(_peaks(footprint))
    if footprint.phases:
        rows = [(phase.name, format_bytes(phase.allocated), format_bytes(phase.reserved)) for phase in footprint.phases]
        parts.append(Grid(title="Phases", columns=("phase", "allocated>", "reserved>"), rows=rows))
    for title, held, look in (
        (f"Alive at the peak ({footprint.peak_label}), by kind", footprint.parts, 0),
        ("By module", footprint.modules, 2),
        ("By line of code", footprint.lines, 4),
    ):
        if held:
            parts.append(Bars(title=title, rows=bars_of(held), look=look))
    if footprint.largest:
        found = [
            (row.place, f"{row.largest:,}", format_bytes(row.capacity), format_bytes(row.next_needs), row.known)
            for row in footprint.largest
        ]
        columns = ("place", "largest batch>", "has>", "one more needs>", "known")
        parts.append(Grid(title="Largest batch", columns=columns, rows=found))
    if footprint.fewest:
        cards = [
            (row.sharding, "-" if row.cards is None else f"{row.cards:,}", format_bytes(row.peak), row.known)
            for row in footprint.fewest
        ]
        titles = ("spread as", "cards>", "reserved on each>", "known")
        parts.append(Grid(title="Fewest cards that train it", columns=titles, rows=cards))
    if footprint.notes:
        parts.append(Sentences(title="Notes", lines=footprint.notes))
    return Page(title=footprint.name, parts=tuple(parts))


def _verdict(footprint: Footprint) -> Verdict:
    peak = footprint.peak_reserved
    need = f"{format_bytes(peak.bytes)} reserved at the peak ({peak.known}), at most {format_bytes(peak.bound)}"
    if footprint.capacity is None:
        return Verdict(word="peak:", tone="plain", text=need)
    tones: dict[bool | None, tuple[str, Tone]] = {
        True: ("fits:", "good"), False: ("does not fit:", "bad"),
        None: ("may fit:" if footprint.guesses else "may not fit:", "unsure"),
    }  # fmt: skip
    word, tone = tones[footprint.fits]
    place = "in the budget" if footprint.card is None else f"on the {footprint.card.name}"
    return Verdict(word=word, tone=tone, text=f"{need}, of {format_bytes(footprint.capacity)} {place}")


def _timeline(footprint: Footprint) -> Timeline:
    moments = footprint.timeline
    layers = tuple(
        Layer(name=kind, values=[moment.bytes[number] if number < len(moment.bytes) else 0 for moment in moments])
        for number, kind in enumerate(footprint.kinds)
    )
    begins = [
        (float(moment.time), moment.label)
        for before, moment in zip([None, *moments[:-1]], moments, strict=True)
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
    return Grid(title="Peaks", columns=("peak", "likely>", "bytes>", "at most>", "known"), rows=rows)
