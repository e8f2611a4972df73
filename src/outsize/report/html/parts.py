"""The plain parts of a page: a verdict, tables, bars and sentences; one that has no rows is not there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal, TypeVar

from outsize.core.failure import Remedy
from outsize.core.memory import Part
from outsize.core.units import format_bytes
from outsize.report.html.patterns import fill

T = TypeVar("T")
Tone = Literal["good", "bad", "unsure", "plain"]
MARKS = {"good": "✓", "bad": "✗", "unsure": "?", "plain": ""}
"""A sign beside the colour."""
FEW = 12
"""Rows of a small table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer, in a word and a sentence."""

    word: str
    """`fits`, `cause: fragmentation`."""
    tone: Tone
    text: str
    more: tuple[str, ...] = ()

    def html(self, small: bool) -> str:
        """A line and paragraphs."""
        mark = f'<span aria-hidden="true">{MARKS[self.tone]}</span> ' if MARKS[self.tone] else ""
        rest = "".join(f"<p>{escape(line)}</p>" for line in self.more[: 2 if small else None])
        return f'<section class="verdict {self.tone}"><p><b>{mark}{escape(self.word)}</b> {escape(self.text)}</p>{rest}</section>'


def verdict_of(fits: bool | None, text: str, more: tuple[str, ...] = (), unsure: str = "may fit") -> Verdict:
    """Whether something fits; `unsure` says it where that is not known."""
    word = unsure if fits is None else "fits" if fits else "does not fit"
    tone: Tone = "unsure" if fits is None else "good" if fits else "bad"
    return Verdict(word=f"{word}:", tone=tone, text=text, more=more)


def _first(rows: Sequence[T], small: bool) -> tuple[Sequence[T], str]:
    """The rows that are shown, in a notebook the first, and how many there are beside them."""
    shown = rows[:FEW] if small else rows
    return shown, f"<p class=quiet>and {len(rows) - len(shown)} more</p>" if len(shown) < len(rows) else ""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table."""

    title: str
    columns: tuple[str, ...]
    """Titles of the columns; one that ends in `>` holds numbers and is set to the right, one that ends in `#` holds code."""
    rows: Sequence[Sequence[str]]

    def html(self, small: bool) -> str:
        """A table; in a notebook its first rows."""
        if not self.rows:
            return ""
        kinds = ["n" if name.endswith(">") else "c" if name.endswith("#") else "" for name in self.columns]
        head = "".join(
            f'<th class="{kind}">{escape(name.rstrip(">#"))}</th>'
            for name, kind in zip(self.columns, kinds, strict=True)
        )
        shown, more = _first(self.rows, small)
        body = "".join(
            "<tr>"
            + "".join(f'<td class="{kind}">{_cell(cell, kind)}</td>' for cell, kind in zip(row, kinds, strict=True))
            + "</tr>"
            for row in shown
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f"<section><h2>{escape(self.title)}</h2><div class=wide>{table}</div>{more}</section>"


def _cell(text: str, kind: str) -> str:
    return f"<code>{escape(text)}</code>" if kind == "c" and text else escape(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One row of bars."""

    name: str
    bytes: int | None
    """How long it is; None where that is not known."""
    text: str = ""
    code: str = ""
    """A line, setting or command to copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Bytes side by side."""

    title: str
    rows: tuple[Bar, ...]
    limit: int | None = None
    """A line that should not be passed, such as a budget."""
    look: int = 0

    def html(self, small: bool) -> str:
        """One line a bar: bytes, bar, name."""
        if not self.rows:
            return ""
        longest = max([*(row.bytes or 0 for row in self.rows), self.limit or 0, 1])
        shown, more = _first(self.rows, small)
        body = "".join(self._row(row, longest) for row in shown)
        told = (
            "" if self.limit is None else f"<p class=quiet>the dashed line is the limit: {format_bytes(self.limit)}</p>"
        )
        return f"<section><h2>{escape(self.title)}</h2><div class=bars>{body}</div>{told}{more}</section>"

    def _row(self, row: Bar, longest: int) -> str:
        width = 100 * (row.bytes or 0) / longest
        over = self.limit is not None and (row.bytes or 0) > self.limit
        line = "" if self.limit is None else (
            f'<line x1="{100 * self.limit / longest:.2f}" x2="{100 * self.limit / longest:.2f}" y1="0" y2="16" class="limit"/>'
        )  # fmt: skip
        picture = (
            '<svg viewBox="0 0 100 16" preserveAspectRatio="none" aria-hidden="true">'
            f'<rect width="{width:.2f}" height="16" fill="{fill(self.look)}"/>{line}</svg>'
        )
        size = f"{'over: ' if over else ''}{format_bytes(row.bytes)}"
        code = f"<code>{escape(row.code)}</code>" if row.code else ""
        text = f"<span class=quiet>{escape(row.text)}</span>" if row.text else ""
        return (
            f'<div class="bar" data-tip="{escape(_tip(row))}"><span class="n{" over" if over else ""}">{size}</span>{picture}'
            f"<span>{escape(row.name)} {text}{code}</span></div>"
        )


def bars_of(held: tuple[Part, ...]) -> tuple[Bar, ...]:
    """Parts as bars, the largest first."""
    total = sum(part.bytes for part in held) or 1
    return tuple(
        Bar(name=part.name, bytes=part.bytes, text=f"{part.bytes / total:.1%}, {part.known}")
        for part in sorted(held, key=lambda part: -part.bytes)
    )


def remedy_bars(title: str, remedies: tuple[Remedy, ...]) -> Bars:
    """One bar a remedy, in the order in which they are given."""
    rows = tuple(
        Bar(name=one.name, bytes=one.saves, text=f"{one.exactness}; costs: {one.costs}; {one.known}", code=one.how)
        for one in remedies
    )
    return Bars(title=title, rows=rows, look=4)


def _tip(row: Bar) -> str:
    exact = "" if row.bytes is None else f"\n{row.bytes:,} bytes"
    return f"{row.name}{exact}" + (f"\n{row.text}" if row.text else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentences:
    """A list of sentences."""

    title: str
    lines: tuple[str, ...]

    def html(self, small: bool) -> str:
        """A list; in a notebook its first lines."""
        if not self.lines:
            return ""
        shown, more = _first(self.lines, small)
        body = "".join(f"<li>{escape(line)}</li>" for line in shown)
        return f"<section><h2>{escape(self.title)}</h2><ul>{body}</ul>{more}</section>"


@dataclass(frozen=True, slots=True)
class Drawing:
    """HTML or SVG that was made elsewhere."""

    markup: str

    def html(self, small: bool) -> str:
        return self.markup
