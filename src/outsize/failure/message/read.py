"""Text -> `Failure`, or None where it is no message of a program that ran out of memory.

The formats are rows of lists, asked in the order of `FORMATS`: the telling ones first, bare words last. A format is read
in the text with its line breaks turned to spaces and, where lines were cut mid-word, with the breaks taken out; the reading
that fills more fields wins. Numbers no memory can have (an unsigned counter that went below zero, a corrupt length) are
kept as they were printed and named in `extra`.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from outsize.core.failure import Failure
from outsize.failure.message import engine_formats, host_formats, system_formats, tensor_formats, torch_formats
from outsize.failure.message.clean import Cleaned, clean
from outsize.failure.message.grammar import SIZED, Format

FORMATS: tuple[Format, ...] = (
    *torch_formats.FORMATS,
    *tensor_formats.TENSORFLOW,
    *host_formats.HOST,
    *tensor_formats.XLA,
    *engine_formats.ENGINES,
    *system_formats.CLUSTER,
    *system_formats.KERNEL,
    *torch_formats.LAST,
    *system_formats.GENERIC[:2],
    *host_formats.BARE,
    *system_formats.GENERIC[2:],
    *system_formats.EXITS,
)
"""Every format, most telling first."""

_FIELDS = ("shape", "dtype", "pid", "process", "device")
_HIDDEN = {"index", "base", "said_bytes", "plain_bytes", "free_gib", "total_gib"}
_ADDRESSABLE = 2**57
"""Bytes that the largest address space of today's processors has."""


def read(text: str) -> Failure | None:
    """What the message says, or None where it is not an out-of-memory failure."""
    views = clean(text)
    found = [format_ for format_ in FORMATS if _has_key(format_, views.key)]
    for format_ in found:
        fields = _best(format_, views)
        if fields is None:
            continue
        for other in found:
            if other is not format_ and other.framework in format_.fills:
                fields = (_best(other, views) or {}) | fields
        return _failure(format_, fields)
    return None


def _has_key(format_: Format, text: str) -> bool:
    return format_.key in text if isinstance(format_.key, str) else any(key in text for key in format_.key)


def _best(format_: Format, views: Cleaned) -> dict[str, Any] | None:
    """The fields of the view that fills more of them."""
    if format_.lines:
        return _fields(format_, views.lines, views.key)[0]
    flat, parts = _fields(format_, views.flat, views.key)
    if views.joined == views.flat:
        return flat
    joined, joined_parts = _fields(format_, views.joined, views.key)
    if joined is None or flat is None:
        return flat or joined
    return joined if joined_parts + views.cut > parts else flat


def _fields(format_: Format, text: str, key: str) -> tuple[dict[str, Any] | None, int]:
    """Everything the format's parts fill and how many parts were found; None where its anchor is missing or it is a
    lookalike."""
    place = format_.anchor.find(text) if format_.anchor.literal in key else None
    if place is None or (format_.unless is not None and format_.unless.find(text) is not None):
        return None, 0
    fields, parts = format_.anchor.read(place), 1
    again = text.find(place.group(), place.end())
    end = len(text) if again < 0 else again
    for clause in format_.clauses:
        if clause.literal not in key:
            continue
        match = clause.find(text, place.start(), end) or (clause.find(text) if format_.whole else None)
        if match is not None:
            fields, parts = clause.read(match) | fields, parts + 1
    if not format_.anchor.holes.keys() <= fields.keys():  # a class name may have stood for the words of the message
        for later in islice(format_.anchor.find_all(text), 1, 5):
            fields = later | fields
    for name, part in format_.each.items():
        if part.literal not in key:
            continue
        repeated = list(part.find_all(text[place.start() : end]))
        if repeated:
            fields[name] = tuple(repeated)
            parts += len(repeated)
    return fields, parts


def _failure(format_: Format, fields: dict[str, Any]) -> Failure:
    known: dict[str, Any] = {f"{name}_bytes": fields[name] for name in SIZED if name in fields}
    known |= {name: fields[name] for name in _FIELDS if name in fields}
    known["device"] = fields.get("device") or _device(format_, fields)
    extra = dict(format_.extra) | {name: value for name, value in fields.items() if not _is_read(name)}
    for size in ("said_bytes", "plain_bytes"):
        if size in fields:
            known.setdefault("requested_bytes", fields[size])
    for name, gib in (("free_bytes", "free_gib"), ("total_bytes", "total_gib")):
        if gib in fields:
            known[name] = round(fields[gib] * 2**30)
    extra |= _absurd(known | extra)
    return Failure(framework=format_.framework, extra={"format": format_.name} | extra, **known)


def _is_read(name: str) -> bool:
    """True for a hole that a field or nobody takes; a name that ends in a digit only tells two places in a template apart."""
    return name in SIZED or name in _HIDDEN or name in _FIELDS or name[-1].isdigit()


def _device(format_: Format, fields: dict[str, Any]) -> str | None:
    index, base = fields.get("index"), fields.get("base", format_.device)
    if base is None and index is not None:
        base = "cuda"
    return base if index is None or base in (None, "cpu", "mps", "vulkan", "metal", "tpu") else f"{base}:{index}"


def _absurd(fields: dict[str, Any]) -> dict[str, Any]:
    """Byte counts no machine has: named, so that nobody takes them for a reading."""
    sizes = {name: value for name, value in fields.items() if name.endswith("_bytes") and isinstance(value, int)}
    wrapped = tuple(sorted(name for name, value in sizes.items() if value >= 2**63))
    impossible = tuple(sorted(name for name, value in sizes.items() if _ADDRESSABLE < value < 2**63))
    return ({"wrapped": wrapped} if wrapped else {}) | ({"impossible": impossible} if impossible else {})
