"""Failures that are none of memory's, and are often taken for it: what it is instead, and what to do.

In: a text in which no lack of memory was found. Out: a `Diagnosis` without a failure that says which other resource ran out, or
what broke, or None. `otherwise.toml` has the rows.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from outsize.core.failure import Cause, CauseName, Diagnosis, Evidence, Remedy
from outsize.core.noun import Known
from outsize.failure.advice import BITWISE, read_table

_LONGEST = 200_000
"""Characters of a log in which its end is looked for."""
_SHOWN = 160
"""Characters of the text that are shown as evidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kind of failure."""

    what: str
    """What ran out, or broke."""
    signs: re.Pattern[str]
    """What a text shows."""
    unless: re.Pattern[str] | None
    """What shows that it is something else."""
    cause: str
    """The sentence for the user."""
    decide: str
    """What tells whether it was memory after all; empty where it was not."""
    do: str
    """What to do."""
    how: str
    """The line or command."""
    costs: str
    """What that costs."""


@functools.cache
def read_rows() -> tuple[Row, ...]:
    """Every row, the most telling first."""
    return tuple(map(_read_row, read_table("otherwise.toml")["rows"]))


def _read_row(row: Mapping[str, str]) -> Row:
    unless = row.get("unless")
    return Row(
        what=row["what"],
        signs=re.compile(row["signs"]),
        unless=None if unless is None else re.compile(unless),
        cause=row["cause"],
        decide=row.get("decide", ""),
        do=row["do"],
        how=row["how"],
        costs=row.get("costs", "nothing"),
    )


def find_otherwise(text: str) -> Diagnosis | None:
    """What the text shows instead of a lack of memory. Of a long log only the end is looked at: there it failed."""
    text = text[-_LONGEST:]
    for row in read_rows():
        place = row.signs.search(text)
        if place is not None and (row.unless is None or row.unless.search(text) is None):
            return _diagnose(row, _line(text, place))
    return None


def _line(text: str, place: re.Match[str]) -> str:
    """The line in which a match begins, no longer than is read at a glance."""
    start = max(text.rfind("\n", 0, place.start()) + 1, place.start() - _SHOWN // 2)
    line = text[start : start + _SHOWN].partition("\n")[0]
    return line.strip()


def _diagnose(row: Row, line: str) -> Diagnosis:
    cause = Cause(name=CauseName.NOT_MEMORY, text=row.cause, certain=not row.decide, decide=row.decide)
    way = Remedy(name=row.do, saves=None, known=Known.ESTIMATE, costs=row.costs, exactness=BITWISE, how=row.how)
    evidence = (Evidence(kind="message", text=f"{line!r}: {row.what}, not memory" if cause.certain else repr(line)),)
    return Diagnosis(failure=None, cause=cause, evidence=evidence, remedies=(way,))
