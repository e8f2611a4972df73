"""Nouns as HTML: a whole page in one file, or a small piece for a notebook's cell.

`PAGES` says which file lays out which noun: `lay_out(noun) -> Page`, parts from top to bottom. A part writes itself as HTML and
SVG, so that it can be read without a script and printed. `page.js` adds zoom and hover. A noun that has no layout of its own is
shown as its text. Knows only `core`.
"""

from __future__ import annotations

import importlib
from typing import Any

from outsize.report.html.page import Page, write_fragment, write_page
from outsize.report.html.parts import Drawing

PAGES = {
    "AllocatorHistory": "outsize.report.html.history",
    "Diagnosis": "outsize.report.html.diagnosis",
    "Factoring": "outsize.report.html.factoring",
    "FitPlan": "outsize.report.html.plan",
    "Footprint": "outsize.report.html.footprint",
    "Plan": "outsize.report.html.plan",
    "Recording": "outsize.report.html.recording",
    "Replay": "outsize.report.html.replay",
    **dict.fromkeys(
        ("Contents", "Conversion", "MeasuredPeak", "Outcome", "ProgramRun", "Reading", "Sizing"),
        "outsize.report.html.small_answers",
    ),
    "Shrinking": "outsize.report.html.shrinking",
}
"""Name of the noun's class -> the module whose `lay_out` makes its page."""


def lay_out(noun: Any) -> Page | None:
    """The noun's page, None where it has no layout of its own."""
    module = PAGES.get(type(noun).__name__)
    return None if module is None else importlib.import_module(module).lay_out(noun)


def to_fragment(noun: Any) -> str | None:
    """A piece of HTML for a cell of a notebook, None where the noun has no layout."""
    page = lay_out(noun)
    return None if page is None else write_fragment(page)


def to_page(noun: Any, drawn: str | None = None) -> str | None:
    """A whole HTML page; a noun without a layout is shown as `drawn`, its text as HTML. None where there is neither."""
    page = lay_out(noun)
    if page is None and drawn is not None:
        page = Page(title=type(noun).__name__, parts=(Drawing(drawn),))
    return None if page is None else write_page(page)
