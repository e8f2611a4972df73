"""Text -> `Failure`, or None where it is no message of a program that ran out of memory.

The formats are rows of `formats.toml`, asked in its order: the telling ones first, bare words last. A format is read
in the text with its line breaks turned to spaces and, where lines were cut mid-word, with the breaks taken out; the reading
that fills more fields wins. Numbers no memory can have (an unsigned counter that went below zero, a corrupt length) are
kept as they were printed and named in `extra`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from outsize.core.failure import Failure
from outsize.failure.framework import framework
from outsize.failure.message.clean import Cleaned, clean
from outsize.failure.message.formats import read_formats
from outsize.failure.message.grammar import SIZED, Format, Pattern, is_dtype, read_size
from outsize.failure.message.story import read_story

FORMATS = read_formats()
"""Every format, most telling first."""

SAYING = SIZED | {"shape", "pid"}
"""Holes that make an occurrence more than a title."""
_TITLES = 6
_DEVICE = frozenset({"device", "index"})
"""Two ways to say where: the first that is found holds."""

_FIELDS = ("shape", "dtype", "pid", "process", "device")
_HIDDEN = {"index", "base"}
_ADDRESSABLE = 2**57
"""Bytes that the largest address space of today's processors has."""


def read(text: str) -> Failure | None:
    """What the message says, or None where it is not an out-of-memory failure."""
    views = clean(text)
    found = [format_ for format_ in FORMATS if format_.anchor.may_be_in(views.key)]
    remark: Failure | None = None
    for format_ in found:
        fields = _best(format_, views)
        if fields is None:
            continue
        if remark is not None and format_.framework == "unknown":  # words of a user about that remark
            continue
        if "not_a_failure" in {**format_.extra, **fields}:  # what comes with it may have ended the program
            remark = remark or _failure(format_, fields)
            continue
        for other in found:
            if other is not format_ and other.framework in format_.fills:
                more = _best(other, views) or {}
                fields = ({} if "not_a_failure" in more else more) | fields
        return _failure(format_, fields)
    return remark or read_story(views)


def _best(format_: Format, text: Cleaned) -> dict[str, Any] | None:
    """The fields of the view in which the format says most, of the likelier view where two say as much;
    None where its anchor is missing or it is a lookalike."""
    views = (text.lines, *text.views) if format_.lines else text.views
    if format_.unless is not None and any(format_.unless.find(view) is not None for view in text.views):
        return None
    clauses = [clause for clause in format_.clauses if clause.may_be_in(text.key)]
    readings = [fields for view in views if (fields := _fields(format_, clauses, view)) is not None]
    return max(readings, key=_worth, default=None)


def _worth(fields: dict[str, Any]) -> int:
    """How much a reading says, less what no program prints: a cut in the middle of a word leaves half a type or a name
    with a gap."""
    said = sum(len(value) if isinstance(value, tuple) and name != "shape" else 1 for name, value in fields.items())
    return said - ("dtype" in fields and not is_dtype(fields["dtype"])) - (" " in fields.get("process", ""))


def _fields(format_: Format, clauses: Sequence[Pattern], text: str) -> dict[str, Any] | None:
    """Everything the format's parts fill; None where its anchor is missing."""
    place = format_.anchor.find(text)
    if place is None:
        return None
    fields, end = _first(format_, clauses, text, place)
    for name, part in format_.each.items():
        repeated = tuple(part.find_all(text[place.start() : len(text) if name == "victims" else end]))
        fields |= {name: repeated} if repeated else {}
    victims = fields.pop("victims", ())
    return fields | max(victims, key=lambda victim: victim["anon_rss_bytes"], default={})


def _first(format_: Format, clauses: Sequence[Pattern], text: str, place: re.Match[str]) -> tuple[dict[str, Any], int]:
    """The fields of the first failure and where it ends: at the next one of the same format. One that says no number is a
    title, and the next one is what it announces."""
    fields, end = format_.anchor.read(place), len(text)
    for _ in range(_TITLES):
        again = format_.anchor.find(text, place.end())
        end = len(text) if again is None else again.start()
        for clause in clauses:
            match = clause.find(text, place.start(), end) or (clause.find(text) if format_.whole else None)
            told = _DEVICE if _DEVICE & fields.keys() else frozenset()
            more = {} if match is None else clause.read(match)
            fields = {name: value for name, value in more.items() if name not in told} | fields
        if (
            again is None
            or format_.whole
            or (fields.keys() & SAYING and not _is_repeated(format_, fields, again, text))
        ):
            break
        place, fields = again, fields | format_.anchor.read(again)
    return fields, end


def _is_repeated(format_: Format, fields: dict[str, Any], again: re.Match[str], text: str) -> bool:
    """True where the next occurrence tells the same request again: a title and then the message itself."""
    asked = {"requested", "index", "device"} >= fields.keys() and fields.get("requested")
    more = (clause.find(text, again.start()) for clause in format_.clauses if "requested" in clause.holes)
    return bool(asked) and any(match is not None and read_size(match.group("requested")) == asked for match in more)


def _failure(format_: Format, fields: dict[str, Any]) -> Failure:
    known: dict[str, Any] = {f"{name}_bytes": fields[name] for name in SIZED if name in fields}
    known |= {name: fields[name] for name in _FIELDS if name in fields}
    known["device"] = fields.get("device") or _device(format_, fields)
    extra = dict(format_.extra) | {
        name: value for name, value in fields.items() if name not in SIZED | _HIDDEN and name not in _FIELDS
    }
    extra |= _absurd(known | extra)
    return Failure(framework=format_.framework, extra={"format": format_.name} | extra, **known)


def _device(format_: Format, fields: dict[str, Any]) -> str | None:
    index = fields.get("index")
    base = fields.get("base") or format_.device or framework(format_.framework).device
    if base is None and index is not None:
        base = "cuda"
    return base if index is None or base in (None, "cpu", "mps", "vulkan", "metal", "tpu") else f"{base}:{index}"


def _absurd(fields: dict[str, Any]) -> dict[str, Any]:
    """Byte counts no machine has: named, so that nobody takes them for a reading."""
    sizes = {name: value for name, value in fields.items() if name.endswith("_bytes") and isinstance(value, int)}
    wrapped = tuple(sorted(name for name, value in sizes.items() if value >= 2**63))
    impossible = tuple(sorted(name for name, value in sizes.items() if _ADDRESSABLE < value < 2**63))
    return ({"wrapped": wrapped} if wrapped else {}) | ({"impossible": impossible} if impossible else {})
