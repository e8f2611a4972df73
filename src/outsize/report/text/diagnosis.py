"""Draws a `Diagnosis`: the cause first, then why, then what to do, most bytes first."""

from __future__ import annotations

import itertools
import re
import textwrap
from functools import partial

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column
from rich.text import Text

from outsize.core.failure import Cause, Diagnosis, Evidence, Remedy
from outsize.core.units import format_bytes
from outsize.report.text.layout import ByWidth, make_list

_KINDS = {"message": "the message says", "machine": "the machine says", "inferred": "so"}


def draw(diagnosis: Diagnosis) -> RenderableType:
    if diagnosis.cause is None:
        calm = Text("Not an out-of-memory failure, as far as this says.", style="green")
        return Group(calm, *_rest(diagnosis)) if diagnosis.evidence else calm
    parts: list[RenderableType] = [_headline(diagnosis.cause), Padding(Text(diagnosis.cause.text), (0, 0, 0, 2))]
    if diagnosis.cause.decide and not diagnosis.cause.certain:
        parts.append(Padding(Text(f"What would decide it: {diagnosis.cause.decide}", style="dim"), (0, 0, 0, 2)))
    for candidate in diagnosis.candidates:
        parts.append(Padding(_candidate(candidate), (0, 0, 0, 2)))
    return Group(*parts, *_rest(diagnosis))


def _rest(diagnosis: Diagnosis) -> list[RenderableType]:
    """Everything below the cause."""
    sections = {
        "why": _evidence(diagnosis.evidence),
        "memory over time": _timeline(diagnosis) if diagnosis.timeline else None,
        "who holds it": _holders(diagnosis) if diagnosis.holders else None,
        "what to do, most bytes first": _remedies(diagnosis.remedies) if diagnosis.remedies else None,
    }
    return [part for title, body in sections.items() if body for part in (Text(), Text(title, style="bold"), body)]


def _headline(cause: Cause) -> Text:
    sure = "" if cause.certain else " (likely)"
    return Text.assemble(("cause: ", "bold"), (f"{cause.name}{sure}", "bold red"))


def _candidate(cause: Cause) -> Text:
    decide = f" Decided by: {cause.decide}." if cause.decide else ""
    return Text.assemble(("or ", "dim"), (cause.name, "yellow"), f": {cause.text}", (decide, "dim"))


def _evidence(evidence: tuple[Evidence, ...]) -> RenderableType:
    rows = []
    for title, items in itertools.groupby(evidence_rows(evidence), key=lambda row: row[0]):
        rows += [("" if number else f"  {title}", Text(text)) for number, (_, text) in enumerate(items)]
    return make_list(rows, Column(style="dim", no_wrap=True))


def evidence_rows(evidence: tuple[Evidence, ...]) -> list[tuple[str, str]]:
    """(who says it, what), what the message says first."""
    ranked = sorted(evidence, key=lambda one: list(_KINDS).index(one.kind))
    return [(_KINDS[one.kind], one.text) for one in ranked]


def _remedies(remedies: tuple[Remedy, ...]) -> RenderableType:
    rows = []
    for remedy in remedies:
        head = Text.assemble(remedy.name, (f"  ({remedy.exactness}; cost: {remedy.costs})", "dim"))
        rows.append((format_bytes(remedy.saves), Group(head, ByWidth(partial(_code, remedy.how)))))
    return make_list(rows, Column(justify="right", style="bold green", no_wrap=True, min_width=12))


_COMMENTED = re.compile(r"(\s*)(\S.*?)\s{2,}# (.*)")


def _code(how: str, columns: int) -> Text:
    """Lines to copy. A comment that has no room behind its line stands above it: a terminal would break it into code."""
    lines = []
    for line in how.splitlines():
        found = _COMMENTED.fullmatch(line)
        if found is None or len(line) <= columns:
            lines.append(line)
            continue
        indent, code, comment = found.groups()
        lines += [f"{indent}# {part}" for part in textwrap.wrap(comment, max(20, columns - len(indent) - 2))]
        lines.append(indent + code)
    return Text("\n".join(lines), style="cyan")


def _timeline(diagnosis: Diagnosis, width: int = 60) -> RenderableType:
    """One bar per moment, at most twelve."""
    moments = diagnosis.timeline
    step = max(1, -(-len(moments) // 12))
    shown = [*moments[:-1][::step], moments[-1]]
    peak = max(moment.bytes for moment in moments) or 1
    lines = Text()
    for moment in shown:
        bar = "█" * max(1, round(moment.bytes / peak * width)) if moment.bytes else ""
        lines.append(f"  {moment.time:8.1f} s  {format_bytes(moment.bytes):>11}  {bar}\n")
    lines.rstrip()
    return lines


def _holders(diagnosis: Diagnosis) -> RenderableType:
    rows = [(f"  {format_bytes(part.bytes)}", Text(part.name)) for part in diagnosis.holders]
    return make_list(rows, Column(justify="right", style="green", no_wrap=True))
