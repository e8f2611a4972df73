"""A `Recording` as a stream of lines, `run.watch`: each line is one JSON object with one key, the kind of what it holds.

    {"watch": 1, "head": {...}}     the first line: the version of the format, and what was watched
    {"sample": {...}}               fields that are empty or None are left out
    {"mark": {...}} {"finding": {...}} {"note": {...}}

Lines are only ever added, so what was written before a kill or a full disk can be read. A last line that was cut off is
dropped and the recording says that it is not complete. A line that is damaged in the middle is skipped and noted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from outsize.core.errors import StoreError
from outsize.core.noun import Noun, from_plain, to_plain
from outsize.core.outcomes.recording import Finding, Head, Mark, Note, Recording, Sample

VERSION = 1
KINDS: dict[str, type[Noun]] = {"sample": Sample, "mark": Mark, "finding": Finding, "note": Note}
"""Key of a line -> the noun it holds."""
LONGEST = 16 * 2**20
"""Characters of the longest line that is read."""


def encode_head(head: Head) -> str:
    """The first line."""
    return _dump({"watch": VERSION, "head": _thin(to_plain(head))})


def encode(item: Sample | Mark | Finding | Note) -> str:
    """Any further line."""
    return _dump({type(item).__name__.lower(): _thin(to_plain(item))})


def is_stream(first_line: str) -> bool:
    """True if a file with this first line is a recording."""
    return first_line.startswith('{"watch":')


def decode(lines: Iterable[str], path: str = "the recording") -> Recording:
    """The recording that these lines hold, as far as they go."""
    iterator = iter(lines)
    head = _decode_head(next(iterator, ""), path)
    found: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    damaged, cut = 0, False
    for line in iterator:
        damaged += cut  # a bad line that was not the last
        cut = not _decode_line(line, found)
    notes = list(found["note"])
    if damaged:
        notes.append(Note(time=0.0, text=f"{damaged} damaged line(s) of {path} were skipped"))
    return Recording(
        head=head,
        samples=tuple(sorted(found["sample"], key=lambda sample: sample.time)),
        marks=tuple(found["mark"]),
        findings=newest(found["finding"]),
        notes=tuple(notes),
        complete=not cut and any(mark.kind == "end" for mark in found["mark"]),
    )


def decode_item(line: str) -> Noun | None:
    """What one line holds; None for a line that is cut off, damaged or of an unknown kind."""
    try:
        table = json.loads(line)
        kind = next(iter(table))
        return from_plain(KINDS[kind], table[kind])
    except (ValueError, TypeError, KeyError, StopIteration, RecursionError):
        return None


def newest(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The last finding of each culprit; without those that have ended. What has a line comes first, and of it what grows most.

    Tensors on a card take a little of the host too: a culprit with a name is one finding, on the device where it grows most."""
    last: dict[tuple[str, str, str | None, str | None], Finding] = {}
    for finding in findings:
        last[finding.kind, finding.device, finding.name, finding.where] = finding
    growing = sorted((one for one in last.values() if not one.ended), key=lambda one: -(one.per_second or 0.0))
    growing.sort(key=lambda one: one.where is None)
    kept: list[Finding] = []
    for finding in growing:
        if not any(is_part_of(finding, one) for one in kept):
            kept.append(finding)
    return tuple(kept)


def is_part_of(finding: Finding, other: Finding) -> bool:
    """True where another finding says more of the same culprit: it grows there too, on another device, and faster."""
    named = finding.name is not None and finding.where is not None
    same = (finding.name, finding.where) == (other.name, other.where) and finding.device != other.device
    return named and same and (finding.per_second or 0.0) <= (other.per_second or 0.0)


def _decode_head(line: str, path: str) -> Head:
    try:
        table = json.loads(line) if len(line) <= LONGEST else {}
        version = table["watch"]
        if version == VERSION:
            return from_plain(Head, table["head"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise StoreError(f"{path} is no recording of outsize watch: its first line is no head", path=path) from None
    raise StoreError(f"{path} has version {version} of the format, and this Outsize reads {VERSION}", path=path)


def _decode_line(line: str, found: dict[str, list[Any]]) -> bool:
    item = decode_item(line) if len(line) <= LONGEST else None
    if item is not None:
        found[type(item).__name__.lower()].append(item)
    return item is not None


def _dump(table: dict[str, Any]) -> str:
    return json.dumps(table, separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n"


_EMPTY: tuple[Any, ...] = (None, [], {}, "")


def _thin(value: Any) -> Any:
    """Plain data without the fields that are empty: reading back gives them their defaults."""
    if isinstance(value, dict):
        return {key: _thin(item) for key, item in value.items() if item not in _EMPTY}
    if isinstance(value, list):
        return [_thin(item) for item in value]
    return value
