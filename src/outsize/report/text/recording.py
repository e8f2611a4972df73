"""Draws a `Recording`: what was watched, memory over time under its limit, GPUs, allocators, processes, what grows and
who keeps it.

The live screen of `outsize watch` is the same drawing with keys below it. All of it is plain `Text`, which is quick to
draw: a table of rich takes several times as long, and a screen that is renewed each second must stay under a hundredth
of a processor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from outsize.core.outcomes.outlook import Outlook, gpu_outlook, host_outlook
from outsize.core.outcomes.rates import counted_twice, held_bytes
from outsize.core.outcomes.recording import (
    AllocatorSample,
    Finding,
    GpuSample,
    HostSample,
    Note,
    ProcessSample,
    Recording,
    Sample,
)
from outsize.core.units import format_bytes, format_seconds, format_span
from outsize.report.text.layout import ByWidth, draw_share, fold

_LEVELS = " ▁▂▃▄▅▆▇█"
_ROWS = 4


def draw(recording: Recording) -> RenderableType:
    """A recording that has ended: where it was highest, and what was found."""
    peak = recording.peak
    if peak is None:
        return Text(f"{_title(recording)}: it ended before its memory could be read")
    ended = Text("the end was cut off: a kill, or a full disk\n", style="yellow") if not recording.complete else Text()
    return ByWidth(
        lambda columns: Group(*_head(recording, peak, columns, live=False), *_parts(recording, peak, columns), ended)
    )


def draw_live(recording: Recording, columns: int, sort: str = "RAM", frozen: bool = False) -> Group:
    """The screen while it runs."""
    last = recording.samples[-1]
    keys = Text("q quit   f freeze   s sort   p snapshot", style="dim")
    if frozen:
        keys.append("   frozen: f goes on", style="bold")
    return Group(*_head(recording, last, columns, live=True), *_parts(recording, last, columns, sort), Text(), keys)


def draw_line(recording: Recording, columns: int) -> str:
    """The last sample as one plain line, or as several where the columns are few."""
    sample = recording.samples[-1]
    host = sample.host
    left = _full_words(host_outlook(recording.samples))
    most = "at most " if counted_twice(sample) else ""
    words = [f"{sample.time:8.1f} s", f"held {most}{format_bytes(held_bytes(sample)):>11}"]
    words += [_limit_words(host, share=not left), *left]
    words += [f"GPU {gpu.index} {format_bytes(gpu.used)} of {format_bytes(gpu.total)}" for gpu in sample.gpus]
    words += [f"step {sample.step}"] if sample.step is not None else []
    return fold(words, columns, "  ").plain


def draw_news(item: object, columns: int) -> str | None:
    """A finding or a note as plain lines; None of anything else."""
    if not isinstance(item, Finding | Note):
        return None
    text = _finding_words(item) if isinstance(item, Finding) else item.text
    return fold(f"outsize: {text}".split(" "), columns).plain


def _finding_words(finding: Finding) -> str:
    left = f"; full in {format_seconds(finding.full_in)} at this rate" if finding.full_in is not None else ""
    if finding.ended:
        return f"grows no longer: {finding.text}"
    return f"grows: {finding.text}{left}: {finding.advice}"


def _title(recording: Recording) -> str:
    head = recording.head
    if head.pid is None:
        return "this machine"
    words = " ".join(head.command) or "process"
    return f"{words if len(words) <= 48 else words[:45] + '...'} (pid {head.pid})"


def _head(recording: Recording, sample: Sample, columns: int, live: bool) -> Iterator[Text]:
    when = f"{sample.time:.0f} s" if live else f"{recording.seconds:.1f} s, peak at {sample.time:.1f} s"
    step = f"   step {sample.step}" if sample.step is not None else ""
    phase = f"   {sample.phase}" if sample.phase else ""
    yield Text.assemble((_title(recording), "bold"), f"   {when}{step}{phase}", no_wrap=True, overflow="ellipsis")


def _parts(recording: Recording, sample: Sample, columns: int, sort: str = "RAM") -> Iterator[Text]:
    host = sample.host
    uss = next((one.host.uss for one in reversed(recording.samples) if one.host.uss is not None), None)
    most = "at most " if counted_twice(sample) else ""
    held = [
        f"RAM  {most}{format_bytes(held_bytes(sample))} held",
        f"RSS {format_bytes(host.rss)}",
        f"USS {format_bytes(uss)}",
    ]
    yield fold([*held, f"shared {format_bytes(host.shared)}"], columns, "   ")
    yield _limit(recording, host, columns)
    yield Text(f"swap {format_bytes(host.swap)}   page cache {format_bytes(host.page_cache)} (freed before a kill)")
    yield Text()
    yield from draw_chart([(one.time, held_bytes(one)) for one in recording.samples], host.limit, columns)
    for gpu in sample.gpus:
        yield from _gpu(recording, gpu, columns)
    for allocator in sample.allocators:
        yield _allocator(allocator, columns)
        yield from (Text(f"    {line}", style="dim") for line in allocator.tensors)
    yield from _processes(sample, sort, columns)
    for finding in recording.findings:
        left = f" Full in {format_seconds(finding.full_in)} at this rate." if finding.full_in is not None else ""
        yield Text(f"! {finding.text}.{left}", style="bold red")
        yield Text(f"  {finding.advice}")
    for note in recording.notes[-6:]:
        yield Text(f"- after {note.time:.0f} s: {note.text}", style="yellow")


def _limit(recording: Recording, host: HostSample, columns: int) -> Text:
    used = Text.assemble(_bar(host.used, host.limit), " ", _limit_words(host))
    return fold([used, *_rate_words(host_outlook(recording.samples))], columns, "   ")


def _full_words(outlook: Outlook | None) -> list[str]:
    """When it is full, where that is known and within a day."""
    if outlook is None or not outlook.is_known or outlook.latest >= 86400:
        return []
    return [f"full in {format_span(outlook.earliest, outlook.latest)}"]


def _rate_words(outlook: Outlook | None) -> list[Text]:
    return [Text(f"{words} at this rate", style="bold red") for words in _full_words(outlook)]


def _limit_words(host: HostSample, share: bool = True) -> str:
    part = f" ({host.used / host.limit:.0%})" if share and host.used is not None and host.limit else ""
    name = "RAM in use" if host.limit_name == "RAM" else host.limit_name  # beside what the watched processes hold
    return f"{name} {format_bytes(host.used)} of {format_bytes(host.limit)}{part}"


def _bar(used: int | None, total: int | None) -> Text:
    return Text("-") if used is None or not total else draw_share(used / total)


def draw_chart(held: Sequence[tuple[float, int]], limit: int | None, columns: int, rows: int = _ROWS) -> Iterator[Text]:
    """Bytes over time in a few rows, the highest of each column. The top is the limit where memory comes near it, else
    the peak."""
    width = max(10, min(columns, 100) - 14)
    bins = _bins(held, width)
    highest = max(bins, default=0)
    near = limit is not None and highest > 0.4 * limit
    top = max(limit if near and limit is not None else highest, 1)
    named = "limit" if near else "peak"
    for row in range(rows, 0, -1):
        low, high = top * (row - 1) / rows, top * row / rows
        cells = "".join(_LEVELS[round(8 * min(1.0, max(0.0, (value - low) / (high - low))))] for value in bins)
        label = f"  {format_bytes(top)}" if row == rows else f"  {named}" if row == rows - 1 else ""
        yield Text.assemble((cells, "cyan"), (label, "dim"), no_wrap=True)


def _bins(held: Sequence[tuple[float, int]], width: int) -> list[int]:
    """The highest value in each of `width` equal spans of time; a span without a sample repeats the one before."""
    if not held:
        return []
    start, end = held[0][0], held[-1][0]
    span = max(end - start, 1e-9)
    bins: list[int | None] = [None] * width
    for time, value in held:
        index = min(width - 1, int((time - start) / span * width))
        bins[index] = max(bins[index] or 0, value)
    filled, last = [], held[0][1]
    for found in bins:
        last = last if found is None else found
        filled.append(last)
    return filled


def _gpu(recording: Recording, gpu: GpuSample, columns: int) -> Iterator[Text]:
    used = f" {format_bytes(gpu.used)} of {format_bytes(gpu.total)}"
    words = [Text.assemble((f"GPU {gpu.index} {gpu.name} ", "bold"), _bar(gpu.used, gpu.total), used)]
    words += [Text(f"{gpu.utilisation:.0%} busy")] if gpu.utilisation is not None else []
    yield fold([*words, *_rate_words(gpu_outlook(recording.samples, gpu.index))], columns, "   ")
    for holder in gpu.holders[:4]:
        yield Text(f"    pid {holder.pid} {holder.name or '-'}   {format_bytes(holder.bytes)}")


def _allocator(allocator: AllocatorSample, columns: int) -> Text:
    numbers = ((name, getattr(allocator, name)) for name in ("requested", "allocated", "reserved", "fragments"))
    words = [f"{name} {format_bytes(value)}" for name, value in numbers if value is not None]
    return fold([f"{allocator.framework} {allocator.device} (pid {allocator.pid})", *words], columns, "   ")


def _processes(sample: Sample, sort: str, columns: int) -> Iterator[Text]:
    if len(sample.processes) < 2 and sample.process_count < 2:
        return
    names = _COLUMNS if columns >= 64 else _COLUMNS[:1]
    yield Text(f"{sample.process_count:,} processes by {sort}", style="bold")
    yield Text(f"{'pid':>8}  {'process':<18}" + "".join(f"{name:>12}" for name in names), style="dim")
    for one in sorted(sample.processes, key=_KEYS[sort]):
        numbers = "".join(f"{format_bytes(-_KEYS[name](one)):>12}" for name in names)
        yield Text(f"{one.pid:>8}  {one.name[:16]:<18}{numbers}")


_COLUMNS = ("RAM", "shared", "swap")
"""Numbers of a process; a narrow terminal has room for the first."""
_KEYS: dict[str, Callable[[ProcessSample], int]] = {
    "RAM": lambda one: -one.anonymous,
    "shared": lambda one: -one.shared,
    "swap": lambda one: -one.swap,
    "pid": lambda one: one.pid,
}
"""How processes are sorted -> by which number."""
SORTS = tuple(_KEYS)
