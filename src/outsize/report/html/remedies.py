"""Remedies as bars: what each saves, what it costs, and the line to copy."""

from __future__ import annotations

from outsize.core.failure import Remedy
from outsize.report.html.parts import Bar, Bars


def remedy_bars(title: str, remedies: tuple[Remedy, ...]) -> Bars:
    """One bar a remedy, in the order in which they are given."""
    rows = tuple(
        Bar(name=one.name, bytes=one.saves, text=f"{one.exactness}; costs: {one.costs}; {one.known}", code=one.how)
        for one in remedies
    )
    return Bars(title=title, rows=rows, look=4)
