"""A page: a title and parts from top to bottom, written as one HTML document that loads nothing, or as a piece of one.

The document's own policy forbids every request, so a page cannot reach the network even if a name in it tried to.
"""

from __future__ import annotations

import functools
import importlib.resources
from dataclasses import dataclass
from html import escape
from typing import Protocol

from outsize.report.html.patterns import definitions

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


class Part(Protocol):
    """One thing on a page."""

    def html(self, small: bool) -> str:
        """The part as HTML; `small` for a notebook: less of it, and no data for the script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What stands on a page."""

    title: str
    parts: tuple[Part, ...] = ()

    def body(self, small: bool) -> str:
        return "\n".join(part.html(small) for part in self.parts)


def write_page(page: Page) -> str:
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(page.title)} - Outsize</title>\n<style>{_asset('page.css')}</style>\n</head>\n"
        f'<body class="outsize">\n{definitions()}\n<main>\n<h1>{escape(page.title)}</h1>\n{page.body(small=False)}\n</main>\n'
        f'<div id="tip" role="status" hidden></div>\n<script>{_asset("page.js")}</script>\n</body>\n</html>\n'
    )


def write_fragment(page: Page) -> str:
    """A piece for a notebook: the same parts, small, without a script."""
    return (
        f'<div class="outsize small"><style>{_asset("page.css")}</style>{definitions()}'
        f"<h2>{escape(page.title)}</h2>{page.body(small=True)}</div>"
    )


@functools.cache
def _asset(name: str) -> str:
    return (importlib.resources.files("outsize.report.html") / name).read_text(encoding="utf-8")
