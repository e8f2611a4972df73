"""Nouns as text, JSON and HTML.

A drawing takes a noun and returns a rich renderable. `DRAWINGS` says which file draws which noun, and a file is imported
when its noun is first shown. HTML is made by `report.html`, or from the drawing where a noun has no page of its own. Knows only
`core`.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TextIO

from rich.console import Console, RenderableType
from rich.rule import Rule
from rich.text import Text

from outsize.core.answers import KINDS
from outsize.core.noun import Noun, Skin, to_plain
from outsize.report.text.layout import make_list

_ELSEWHERE = {"FitPlan": "fitting", "Receipt": "footprint"}
DRAWINGS = {
    kind: f"outsize.report.text.{_ELSEWHERE.get(kind) or re.sub('(?<=[a-z])(?=[A-Z])', '_', kind).lower()}" for kind in KINDS
}  # fmt: skip
"""Name of the noun's class -> the module whose `draw` draws it: of its own name, as a rule."""

_HTML = '<pre style="font-family:monospace;line-height:1.25">{code}</pre>'


def renderable(noun: Any) -> RenderableType | None:
    """The noun's drawing, or None where it has none."""
    module = DRAWINGS.get(type(noun).__name__)
    return None if module is None else importlib.import_module(module).draw(noun)


def draw(noun: Any, skin: Skin) -> str | None:
    """The noun as plain text, as HTML for a notebook, or as a whole page."""
    if skin == "text":
        return _draw_rich(noun, "text")
    from outsize.report.html import to_fragment, to_page

    if skin == "html":
        return to_fragment(noun) or _draw_rich(noun, "html")
    return to_page(noun, _draw_rich(noun, "html"))


def _draw_rich(noun: Any, skin: Literal["text", "html"]) -> str | None:
    drawn = renderable(noun)
    if drawn is None:
        return None
    console = _console(
        file=io.StringIO(), record=skin == "html", color_system="truecolor" if skin == "html" else None,
        legacy_windows=False,
    )  # fmt: skip
    console.print(drawn)
    if skin == "html":
        return console.export_html(inline_styles=True, code_format=_HTML)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def to_json(noun: Any) -> str:
    plain = noun.to_dict() if isinstance(noun, Noun) else to_plain(noun)
    return json.dumps(plain, indent=2, allow_nan=False, ensure_ascii=False)


def show(noun: Any, as_json: bool = False, *, stderr: bool = False) -> None:
    """Print a noun (or anything rich can print) to standard output or standard error, in colour where that is a terminal."""
    if as_json:
        sys.stdout.write(to_json(noun) + "\n")
        return
    drawn = renderable(noun)
    _console(stderr=stderr).print(noun if drawn is None else drawn)


def show_verbs(verbs: Mapping[str, str]) -> None:
    show(make_list((Text(f"outsize {name}", style="bold"), line) for name, line in verbs.items()))


def show_stop(number: int, stops: int, command: str, why: str, answers: Sequence[Any]) -> None:
    """Print one stop of the tour: the command to type, why, and the answer."""
    show(Rule(Text(f"{number} of {stops}"), style="dim"))
    show(Text(why))
    show(Text(f"$ {command}", style="bold cyan"))
    show(Text())
    for answer in answers:
        show(answer)
    show(Text())


def columns_of(stream: TextIO, piped: int = 100) -> int:
    """Columns of the terminal behind a stream; of one that is no terminal what COLUMNS says, or `piped`."""
    if stream.isatty():
        return min(200, shutil.get_terminal_size((100, 24)).columns)
    given = os.environ.get("COLUMNS", "")
    return min(200, int(given) if given.isdigit() and int(given) else piped)


def _console(stderr: bool = False, **rest: Any) -> Console:
    """A console that prints where it is told to. In a notebook rich would show the text as the cell's output and
    return nothing. Here it must not: a notebook shows a noun through `_repr_html_`."""
    width = columns_of(sys.stderr if stderr else sys.stdout)
    return Console(stderr=stderr, width=width, force_jupyter=False, markup=False, highlight=False, **rest)
