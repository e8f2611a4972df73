"""The page of a `Recording`: what grows and who keeps it, memory over time, peaks, phases and notes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from outsize.core.outcomes.rates import held_bytes
from outsize.core.outcomes.recording import Finding, Recording, Sample
from outsize.core.units import format_bytes
from outsize.report.html.page import Page, Part
from outsize.report.html.parts import Bar, Bars, Grid, Sentences, Verdict
from outsize.report.html.timeline import Layer, Timeline

FOREIGN = 3
"""The line of what is used of the limit is left out where others use so many times more than the program: it would be tiny."""


def lay_out(recording: Recording) -> Page:
    parts: list[Part] = [_verdict(recording)]
    parts += [_finding(finding) for finding in recording.findings]
    if recording.samples:
        parts.append(_host(recording))
        parts += [_allocator(recording, *which) for which in _allocators(recording)]
        parts += [_gpu(recording, index) for index in _gpus(recording)]
        parts.append(_peaks(recording))
    columns = ("phase", "from>", "seconds>", "host at most>", "allocators at most>")
    seen = () if recording.peak is None else recording.peak.processes
    rows = tuple(Bar(name=f"{one.name} ({one.pid})", bytes=one.anonymous + one.shared) for one in seen)
    notes = tuple(f"{note.time:,.1f} s: {note.text}" for note in recording.notes)
    parts += [
        Grid("Phases", columns, _phases(recording)), Bars(title="Processes at the peak", rows=rows, look=2),
        Sentences(title="Notes", lines=notes),
    ]  # fmt: skip
    name = " ".join(map(os.path.basename, recording.head.command[:3])) or "the machine"
    return Page(title=f"{name}, watched for {recording.seconds:,.1f} s", parts=tuple(parts))


def _verdict(recording: Recording) -> Verdict:
    cut = (
        ()
        if recording.complete
        else ("The recording has no end: the program was killed, still ran, or the disk was full.",)
    )
    peak = recording.peak
    if peak is None:
        return Verdict(word="nothing seen:", tone="unsure", text="the recording has no samples", more=cut)
    count = peak.process_count or 1
    text = (
        f"{format_bytes(held_bytes(peak))} of RAM after {peak.time:,.1f} s, in {count:,} process{'es' * (count != 1)}"
    )
    if recording.findings:
        return Verdict(
            word=f"{len(recording.findings)} growing:", tone="bad", text=f"the highest moment held {text}", more=cut
        )
    limit = peak.host.limit
    room = "" if limit is None else f"; the limit ({peak.host.limit_name}) is {format_bytes(limit)}"
    return Verdict(word="peak:", tone="plain", text=text + room, more=cut)


def _finding(finding: Finding) -> Verdict:
    pace = []
    if finding.per_step:
        pace.append(f"{format_bytes(round(finding.per_step))} a step")
    if finding.full_in is not None:
        pace.append(f"full in {finding.full_in / 60:,.1f} min at this rate")
    where = [
        f"kept at {finding.where}" if finding.where else "",
        f"allocated at {finding.allocated_at}" if finding.allocated_at else "",
    ]
    chain = " → ".join(finding.chain)
    more = (finding.advice, ", ".join([*pace, *filter(None, where)]), chain)
    return Verdict(
        word=f"{finding.kind} ({finding.device}):", tone="bad", text=finding.text, more=tuple(filter(None, more))
    )


def _marks(recording: Recording) -> tuple[tuple[float, str], ...]:
    return tuple((mark.time, mark.name or mark.kind) for mark in recording.marks)


def _labels(recording: Recording) -> list[str]:
    labels = []
    for sample in recording.samples:
        step = "" if sample.step is None else f"step {sample.step}"
        labels.append(" ".join(filter(None, (sample.phase, step))))
    return labels if any(labels) else []


def _host(recording: Recording) -> Timeline:
    samples = recording.samples
    layers = (
        Layer(name="the processes' own", values=[sample.host.anonymous for sample in samples]),
        Layer(name="shared memory", values=[sample.host.shared for sample in samples]),
        Layer(
            name="file pages (the kernel can take them back)",
            values=[max(0, sample.host.rss - sample.host.anonymous - sample.host.shared) for sample in samples],
        ),
        Layer(name="in swap", values=[sample.host.swap for sample in samples]),
    )
    limits = [sample.host for sample in samples if sample.host.limit is not None]
    used = [sample.host.used or 0 for sample in samples]
    alone = 0 < max(used) <= FOREIGN * max(map(held_bytes, samples))
    outline = Layer(name=f"used of the limit ({limits[-1].limit_name})", values=used) if limits and alone else None
    return Timeline(
        title="RAM", times=[sample.time for sample in samples], unit="s", layers=layers,
        outline=outline,
        labels=_labels(recording), limit=limits[-1].limit if limits else None,
        limit_name=limits[-1].limit_name if limits else "limit", marks=_marks(recording),
    )  # fmt: skip


def _allocators(recording: Recording) -> list[tuple[str, str]]:
    found = {(one.framework, one.device): None for sample in recording.samples for one in sample.allocators}
    return list(found)


def _allocator(recording: Recording, framework: str, device: str) -> Timeline:
    """Allocated and unused bytes of one allocator, summed over the processes; a sample without it keeps the value before."""
    rows: list[tuple[float, int, int, int, str]] = []
    labels = _labels(recording) or [""] * len(recording.samples)
    for sample, label in zip(recording.samples, labels, strict=True):
        ours = [one for one in sample.allocators if (one.framework, one.device) == (framework, device)]
        if ours:
            asked = sum(one.requested or 0 for one in ours)
            allocated = max(asked, sum(one.allocated or 0 for one in ours))
            reserved = max(allocated, sum(one.reserved or 0 for one in ours))
            rows.append((sample.time, asked or allocated, allocated, reserved, label))
    every = (one.tensors for sample in reversed(recording.samples) for one in sample.allocators if one.tensors)
    tensors = () if framework == "malloc" else next(every, ())
    detail = "\n".join(("largest tensors:", *tensors)) if tensors else ""
    layers = (
        Layer(name="asked for by the program", values=[row[1] for row in rows], detail=detail),
        Layer(name="lost to rounding", values=[row[2] - row[1] for row in rows]),
        Layer(name="held and not used", values=[row[3] - row[2] for row in rows]),
    )
    return Timeline(
        title=f"{framework} on {device}", times=[row[0] for row in rows], unit="s", layers=layers,
        labels=[row[4] for row in rows] if any(row[4] for row in rows) else (), marks=_marks(recording),
    )  # fmt: skip


def _gpus(recording: Recording) -> list[int]:
    return sorted({gpu.index for sample in recording.samples for gpu in sample.gpus if gpu.used is not None})


def _gpu(recording: Recording, index: int) -> Timeline:
    found = [(sample.time, gpu) for sample in recording.samples for gpu in sample.gpus if gpu.index == index]
    last = found[-1][1]
    return Timeline(
        title=f"GPU {index}: {last.name}", times=[time for time, _ in found], unit="s",
        layers=(Layer(name="in use, by whomever", values=[gpu.used or 0 for _, gpu in found]),),
        limit=last.total, limit_name="its memory", marks=_marks(recording),
    )  # fmt: skip


def _peaks(recording: Recording) -> Grid:
    samples = recording.samples
    named: list[tuple[str, Callable[[Sample], int | None]]] = [
        ("RAM of the processes (own and shared)", held_bytes),
        ("RAM mapped, file pages included", lambda sample: sample.host.rss),
        ("used of the limit", lambda sample: sample.host.used),
        ("in swap", lambda sample: sample.host.swap),
        ("page cache", lambda sample: sample.host.page_cache),
    ]
    for framework, device in _allocators(recording):
        for field in ("requested", "allocated", "reserved", "fragments"):
            named.append((f"{framework} on {device}: {field}", functools.partial(_sum, framework, device, field)))
    rows = []
    for name, read in named:
        best = max(((read(sample) or 0, -number) for number, sample in enumerate(samples)), default=(0, 0))
        if best[0]:
            rows.append((name, format_bytes(best[0]), f"{best[0]:,}", f"{samples[-best[1]].time:,.1f} s"))
    return Grid("Peaks (highest samples)", ("peak", "size>", "bytes>", "at>"), rows)


def _sum(framework: str, device: str, field: str, sample: Sample) -> int:
    ours = (one for one in sample.allocators if (one.framework, one.device) == (framework, device))
    return sum(getattr(one, field) or 0 for one in ours)


def _phases(recording: Recording) -> list[tuple[str, str, str, str, str]]:
    marks = [mark for mark in recording.marks if mark.kind in ("phase", "end")]
    ends = [*(mark.time for mark in marks[1:]), recording.seconds]
    rows = []
    for mark, end in zip(marks, ends, strict=False):
        inside = [sample for sample in recording.samples if mark.time <= sample.time <= end]
        if mark.kind == "phase" and inside:
            held = max(map(held_bytes, inside))
            allocated = max(sum(one.allocated or one.requested or 0 for one in sample.allocators) for sample in inside)
            row = (
                mark.name,
                f"{mark.time:,.1f} s",
                f"{end - mark.time:,.1f}",
                format_bytes(held),
                format_bytes(allocated or None),
            )
            rows.append(row)
    return rows
