"""The pages of answers that are a verdict and a table or two: `Sizing`, `Reading`, `Contents`, `Conversion`, `Outcome`,
`ProgramRun` and `MeasuredPeak`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outsize.core.contents import Contents
from outsize.core.memory import PoolReading, Reading
from outsize.core.outcomes.conversion import Conversion
from outsize.core.outcomes.measured_peak import MeasuredPeak
from outsize.core.outcomes.outcome import Outcome
from outsize.core.outcomes.program_run import ProgramRun
from outsize.core.sizing import Sizing
from outsize.core.units import format_bytes
from outsize.report.html.page import Page, Part
from outsize.report.html.parts import Bar, Bars, Grid, Sentences, Tone, Verdict, bars_of
from outsize.report.html.timeline import Layer, Timeline
from outsize.report.text.conversion import cost_rows
from outsize.report.text.outcome import closing, held
from outsize.report.text.program_run import say
from outsize.report.text.reading import limited_by
from outsize.report.text.sizing import SMALL, places_of

_TONES: dict[bool | None, Tone] = {True: "good", False: "bad", None: "unsure"}
_WORDS = {True: "fits:", False: "does not fit:", None: "may fit:"}


def lay_out(noun: Any) -> Page:
    """The noun as a page."""
    makers: dict[type, Callable[[Any], Page]] = {
        Sizing: _sizing, Reading: _reading, Contents: _contents, Conversion: _conversion, Outcome: _outcome,
        ProgramRun: _program_run, MeasuredPeak: _measured_peak,
    }  # fmt: skip
    return makers[type(noun)](noun)


def _sizing(sizing: Sizing) -> Page:
    title = " + ".join(map(str, sizing.specs[:3])) + (" + ..." if len(sizing.specs) > 3 else "")
    exact = f"{sizing.bytes:,} bytes = {format_bytes(sizing.bytes)} (exact)"
    parts: list[Part] = [Verdict(word=_WORDS[sizing.fits], tone=_TONES[sizing.fits], text=exact, more=sizing.advice)]
    marks = {True: "fits", False: "does not fit", None: "unknown"}
    rows = [(name, has, needs, marks[fits], why) for name, has, needs, fits, why in places_of(sizing)]
    parts.append(Grid(title="Where it fits", columns=("place", "has>", "needs>", "fits", "why"), rows=rows))
    if sizing.dtypes and sizing.bytes >= SMALL:
        bars = tuple(Bar(name=one.name, bytes=one.bytes) for one in sizing.dtypes)
        parts.append(Bars(title="In another dtype", rows=bars))
    if sizing.halved and sizing.bytes >= SMALL:
        bars = tuple(Bar(name=one.name, bytes=one.bytes) for one in sizing.halved)
        parts.append(Bars(title="Halving one axis", rows=bars, look=2))
    taken = [(one.allocator, format_bytes(one.reserved), str(one.known), one.note) for one in sizing.takes]
    parts.append(Grid(title="What allocators take", columns=("allocator", "takes>", "known", "why"), rows=taken))
    return Page(title=title, parts=tuple(parts))


def _reading(reading: Reading) -> Page:
    pools = [("RAM", reading.host), *((one.name, one) for one in reading.devices)]
    pools += [("/dev/shm", reading.shm)] if reading.shm is not None else []
    pools += [("scratch disk", reading.disk)]
    rows = [
        (
            name,
            format_bytes(pool.total),
            format_bytes(pool.available),
            _share(pool),
            limited_by(pool),
        )
        for name, pool in pools
        if pool is not None
    ]
    columns = ("memory", "total>", "available>", "in use>", "limited by")
    budget = [(str(one.pool), format_bytes(one.bytes), one.reason) for one in reading.budget.allowances]
    return Page(
        title="Memory of this machine",
        parts=(
            Grid(title="What there is", columns=columns, rows=rows),
            Grid(title="Default budget", columns=("pool", "bytes>", "why"), rows=budget),
            Sentences(title="Notes", lines=(f"this process holds {format_bytes(reading.rss)} of RAM", *reading.notes)),
        ),
    )


def _share(pool: PoolReading) -> str:
    return f"{1 - pool.available / pool.total:.0%}" if pool.total and pool.available is not None else "-"


def _contents(contents: Contents) -> Page:
    disk = "" if contents.on_disk is None else f", {format_bytes(contents.on_disk)} on disk"
    have = f"{format_bytes(contents.bytes)} in memory, of {format_bytes(contents.available)} available{disk}"
    rows = [
        (one.key or "-", one.dtype, " x ".join(map(str, one.shape)) or "scalar", format_bytes(one.bytes),
         " x ".join(map(str, one.chunks)) if one.chunks else "-")
        for one in contents.arrays
    ]  # fmt: skip
    columns = ("array", "dtype", "shape", "in memory>", "chunks")
    parts: list[Part] = [Verdict(word=_WORDS[contents.fits], tone=_TONES[contents.fits], text=have)]
    parts.append(
        Grid(title=f"{contents.count} arrays" if contents.count > 1 else "One array", columns=columns, rows=rows)
    )
    if contents.notes:
        parts.append(Sentences(title="Notes", lines=contents.notes))
    return Page(title=f"{contents.path}: {contents.format}", parts=tuple(parts))


def _conversion(done: Conversion) -> Page:
    sizes = (
        f"{done.dtype_before} {format_bytes(done.bytes_before)} to {done.dtype_after} {format_bytes(done.bytes_after)}"
    )
    word = "the same values:" if done.precision.exact else "measured only:" if done.target is None else "written:"
    parts: list[Part] = [
        Verdict(word=word, tone="good" if done.precision.exact else "plain", text=sizes, more=done.notes)
    ]
    if not done.precision.exact:
        parts.append(Grid(title="What it costs", columns=("", "value>"), rows=cost_rows(done.precision)))
    if done.plan is not None:
        moved = done.plan.read + done.plan.written
        rate = moved / done.seconds if done.seconds > 0 and moved else None
        lines = closing(done.seconds, done.plan.read, done.plan.written, rate, done.plan.distance)
        lines.append(held(done.measured, done.plan.peak(), done.budget).plain)
        parts.append(Sentences(title="The run", lines=tuple(lines)))
    place = "" if done.target is None else f" to {done.target}"
    return Page(title=f"{done.source}{place}", parts=tuple(parts))


def _outcome(outcome: Outcome) -> Page:
    made = [(one.key, one.dtype, " x ".join(map(str, one.shape)), format_bytes(one.bytes)) for one in outcome.results]
    lines = closing(outcome.seconds, outcome.read, outcome.written, outcome.rate, outcome.distance)
    budget = outcome.plan.budgets[0].bytes if outcome.plan.budgets else None
    parts: list[Part] = [
        Verdict(word="done:", tone="good", text=lines[0].removeprefix("done ")),
        Grid(title="Written", columns=("file", "dtype", "shape", "bytes>"), rows=made),
    ]
    peaks = [("measured", outcome.measured), ("planned", outcome.projected)]
    bars = tuple(Bar(name=name, bytes=size) for name, size in peaks if size is not None)
    parts.append(Bars(title="Peak", rows=bars, limit=budget))
    if outcome.step_seconds:
        steps = [
            (step.name, f"{seconds:.3g} s", format_bytes(step.read + step.written))
            for step, seconds in zip(outcome.plan.steps, outcome.step_seconds, strict=False)
        ]
        parts.append(Grid(title="Steps", columns=("step", "took>", "moved>"), rows=steps))
    return Page(title=outcome.plan.name, parts=tuple(parts))


def _program_run(run: ProgramRun) -> Page:
    parts: list[Part] = [Verdict(word="ended:", tone="good" if run.status == 0 else "bad", text=say(run))]
    if len(run.timeline) > 1:
        layer = Layer(name="in use", values=[moment.bytes for moment in run.timeline])
        times = [moment.time for moment in run.timeline]
        parts.append(Timeline(title="Memory over time", times=times, unit="s", layers=(layer,)))
    if run.lines:
        parts.append(Bars(title="Lines that took most", rows=bars_of(run.lines)))
    return Page(title=" ".join(run.command), parts=tuple(parts))


def _measured_peak(peak: MeasuredPeak) -> Page:
    budget = "" if peak.budget is None else f" of {format_bytes(peak.budget)}"
    text = f"{format_bytes(peak.bytes)}{budget} at its peak{'' if peak.line is None else f', at {peak.line}'}"
    parts: list[Part] = [Verdict(word="held:", tone="good" if peak.fits else "bad", text=text, more=(peak.how,))]
    if peak.holders:
        parts.append(Bars(title="Held then by", rows=bars_of(peak.holders), limit=peak.budget))
    return Page(title=peak.name, parts=tuple(parts))
