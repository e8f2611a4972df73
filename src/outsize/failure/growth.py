"""Memory that a log shows rising: the first and the last of a series of sizes.

In: a text. Out: bytes at the start and at the end of the series, or None. Lines that differ only in their numbers are lines of
one log; a size in them that hardly ever falls and ends well above where it began is memory that grows, where the line or what
stands before it speaks of memory and not of a download.
"""

from __future__ import annotations

import itertools
import re

from outsize.failure.message.grammar import read_size

LEAST_LINES = 3
"""Readings that make a series."""
LEAST_RISE = 1.1
"""How far above its first reading the last one of a series must be: a first step alone makes less."""
_BEFORE = 400
"""Characters before the series in which its heading stands."""
_LONGEST = 60_000
_SIZE = re.compile(r"(?<![\w.])([0-9]{1,7}(?:\.[0-9]{1,6})?) ?([KMGT])(?:i?B)?(?![\w/])")
_NUMBER = re.compile(r"[0-9]+(?:[.,:][0-9]+)*")
_BLANKS = re.compile(r"\s+")
_MEMORY = re.compile(r"mem\b|memory|\bRSS\b|\bV?RAM\b|\bGPU|显存|内存", re.IGNORECASE)
_TRANSFER = re.compile(r"downloa|upload|copied|received|[KMG]i?B/s|\bread\b|writ(?:e|ten|ing)\b|fetch", re.IGNORECASE)


def rise(text: str) -> tuple[int, int] | None:
    """Bytes at the start and at the end of the series that rises most."""
    series: dict[tuple[str, int], list[int]] = {}
    starts: dict[tuple[str, int], int] = {}
    place = 0
    for line in text[:_LONGEST].splitlines(keepends=True):
        if _TRANSFER.search(line) is None:
            like = _BLANKS.sub(" ", _NUMBER.sub("0", line)).strip()
            for column, size in enumerate(_SIZE.finditer(line)):
                series.setdefault((like, column), []).append(read_size(size.group()) or 0)
                starts.setdefault((like, column), place + size.start())
        place += len(line)
    found = [
        (sizes[0], sizes[-1])
        for key, sizes in series.items()
        if _rises(sizes) and _MEMORY.search(text[max(0, starts[key] - _BEFORE) : starts[key]]) is not None
    ]
    return max(found, key=lambda ends: ends[1] - ends[0], default=None)


def _rises(sizes: list[int]) -> bool:
    pairs = itertools.pairwise(sizes)
    return (
        len(sizes) >= LEAST_LINES
        and sizes[-1] >= LEAST_RISE * sizes[0] > 0
        and all(after >= 0.98 * before for before, after in pairs)
    )
