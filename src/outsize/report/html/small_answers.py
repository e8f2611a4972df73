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
from outsize.report.html.page import Page
from outsize.report.html.parts import Bar, Bars, Grid, Sentences, Verdict, bars_of, verdict_of
from outsize.report.html.timeline import Layer, Timeline
from outsize.report.text.contents import arrays_of
from outsize.report.text.conversion import cost_rows, run_of
from outsize.report.text.outcome import closing, steps_of
from outsize.report.text.program_run import say
from outsize.report.text.reading import COLUMNS, limited_by, taken_of, title_of
from outsize.report.text.sizing import SMALL, places_of, takes_of


def lay_out(noun: Any) -> Page:
    makers: dict[type, Callable[[Any], Page]] = {
        Sizing: _sizing, Reading: _reading, Contents: _contents, Conversion: _conversion, Outcome: _outcome,
        ProgramRun: _program_run, MeasuredPeak: _measured_peak,
    }  # fmt: skip
    return makers[type(noun)](noun)


def _sizing(sizing: Sizing) -> Page:
    title = " + ".join(map(str, sizing.specs[:3])) + (" + ..." if len(sizing.specs) > 3 else "")
    exact = f"{sizing.bytes:,} bytes = {format_bytes(sizing.bytes)} (exact)"
    marks = {True: "fits", False: "does not fit", None: "unknown"}
    rows = [(name, has, needs, marks[fits], why) for name, has, needs, fits, why in places_of(sizing)]
    dtypes, halved = (
        tuple(Bar(name=one.name, bytes=one.bytes) for one in ways if sizing.bytes >= SMALL)
        for ways in (sizing.dtypes, sizing.halved)
    )
    parts = (
        verdict_of(sizing.fits, exact, sizing.advice),
        Grid("Where it fits", ("place", "has>", "needs>", "fits", "why"), rows),
        Bars(title="In another dtype", rows=dtypes),
        Bars(title="Halving one axis", rows=halved, look=2),
        Grid("What allocators take", *takes_of(sizing)),
    )
    return Page(title=title, parts=parts)


def _reading(reading: Reading) -> Page:
    rows = [
        (title_of(pool), format_bytes(pool.total), format_bytes(pool.available), _share(pool), limited_by(pool))
        for pool in reading.pools
    ]
    budget = [(str(one.pool), format_bytes(one.bytes), one.reason) for one in reading.budget.allowances]
    return Page(
        title="Memory of this machine",
        parts=(
            Grid("What there is", COLUMNS, rows),
            Grid("Default budget", ("pool", "bytes>", "why"), budget),
            Sentences(title="Notes", lines=(f"this process holds {format_bytes(reading.rss)} of RAM", *reading.notes)),
        ),
    )


def _share(pool: PoolReading) -> str:
    taken = taken_of(pool)
    return "-" if taken is None else f"{taken:.0%}"


def _contents(contents: Contents) -> Page:
    disk = "" if contents.on_disk is None else f", {format_bytes(contents.on_disk)} on disk"
    have = f"{format_bytes(contents.bytes)} in memory, of {format_bytes(contents.available)} available{disk}"
    table = Grid(f"{contents.count} arrays" if contents.count > 1 else "One array", *arrays_of(contents))
    parts = (verdict_of(contents.fits, have), table, Sentences(title="Notes", lines=contents.notes))
    return Page(title=f"{contents.path}: {contents.format}", parts=parts)


def _conversion(done: Conversion) -> Page:
    sizes = (
        f"{done.dtype_before} {format_bytes(done.bytes_before)} to {done.dtype_after} {format_bytes(done.bytes_after)}"
    )
    word = "the same values:" if done.precision.exact else "measured only:" if done.target is None else "written:"
    parts = (
        Verdict(word=word, tone="good" if done.precision.exact else "plain", text=sizes, more=done.notes),
        Grid("What it costs", ("", "value>"), [] if done.precision.exact else cost_rows(done.precision)),
        Sentences(title="The run", lines=() if done.plan is None else run_of(done, done.plan)),
    )
    place = "" if done.target is None else f" to {done.target}"
    return Page(title=f"{done.source}{place}", parts=parts)


def _outcome(outcome: Outcome) -> Page:
    made = [(one.key, one.dtype, " x ".join(map(str, one.shape)), format_bytes(one.bytes)) for one in outcome.results]
    lines = closing(outcome.seconds, outcome.read, outcome.written, outcome.rate, outcome.distance)
    budget = outcome.plan.budgets[0].bytes if outcome.plan.budgets else None
    peaks = [("measured", outcome.measured), ("planned", outcome.projected)]
    bars = tuple(Bar(name=name, bytes=size) for name, size in peaks if size is not None)
    parts = (
        Verdict(word="done:", tone="good", text=lines[0].removeprefix("done ")),
        Grid("Written", ("file", "dtype", "shape", "bytes>"), made),
        Bars(title="Peak", rows=bars, limit=budget),
        Grid("Steps", *steps_of(outcome)),
    )
    return Page(title=outcome.plan.name, parts=parts)


def _program_run(run: ProgramRun) -> Page:
    course = run.timeline if len(run.timeline) > 1 else ()
    layer = Layer(name="in use", values=[moment.bytes for moment in course])
    parts = (
        Verdict(word="ended:", tone="good" if run.status == 0 else "bad", text=say(run)),
        Timeline(title="Memory over time", times=[moment.time for moment in course], unit="s", layers=(layer,)),
        Bars(title="Lines that took most", rows=bars_of(run.lines)),
    )
    return Page(title=" ".join(run.command), parts=parts)


def _measured_peak(peak: MeasuredPeak) -> Page:
    budget = "" if peak.budget is None else f" of {format_bytes(peak.budget)}"
    text = f"{format_bytes(peak.bytes)}{budget} at its peak{'' if peak.line is None else f', at {peak.line}'}"
    verdict = Verdict(word="held:", tone="good" if peak.fits else "bad", text=text, more=(peak.how,))
    return Page(
        title=peak.name, parts=(verdict, Bars(title="Held then by", rows=bars_of(peak.holders), limit=peak.budget))
    )
