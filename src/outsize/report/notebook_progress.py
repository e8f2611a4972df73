"""A progress bar in a cell of a notebook, which listens to a run's events: one HTML bar that is renewed in its place.

It is drawn only for work that takes longer than a moment, at most five times a second, and goes when the last step has ended.
"""

from __future__ import annotations

import html
import sys
import time
from typing import Any

from outsize.core.events import Advanced, Event, Finished, Listener, Started
from outsize.core.units import format_bytes

_QUIET = 0.5
"""Seconds before anything is drawn."""
_PAUSE = 0.2
"""Seconds between two drawings."""


class NotebookBar:
    """One bar for the step that runs."""

    def __init__(self, display: Any) -> None:
        self._display, self._handle = display, None
        self._began = self._drawn = time.monotonic()
        self._started: Started | None = None
        self._done = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started):
            self._started, self._done = event, event.done
        elif isinstance(event, Advanced):
            self._done += event.bytes
        elif (
            isinstance(event, Finished) and self._started is not None and self._started.index == self._started.steps - 1
        ):
            self._show("")
            return
        now = time.monotonic()
        if now - self._began > _QUIET and now - self._drawn > _PAUSE and self._started is not None:
            self._drawn = now
            self._show(draw(self._started, self._done, now - self._began))

    def _show(self, text: str) -> None:
        content = {"text/html": text, "text/plain": ""}
        if self._handle is not None:
            self._handle.update(content, raw=True)
        elif text:
            self._handle = self._display(content, raw=True, display_id=True)


def draw(started: Started, done: int, seconds: float) -> str:
    """The bar as HTML: what runs, how much of it, bytes a second."""
    count = f"{started.index + 1}/{started.steps} " if started.steps > 1 else ""
    words = f"{count}{started.step}"
    if started.unit != "bytes" or not started.bytes:
        return f"<progress></progress> {html.escape(words)}: {done} {html.escape(started.unit)}"
    rate = format_bytes(int(done / seconds)) if seconds > 0 else "-"
    told = f"{format_bytes(done)} of {format_bytes(started.bytes)}, {rate}/s"
    return (
        f'<progress max="{started.bytes}" value="{min(done, started.bytes)}"></progress> {html.escape(words)}: {told}'
    )


def notebook_listener() -> Listener | None:
    """A bar if this is a notebook's kernel, else None. Nothing is imported for the question."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if type(shell).__name__ != "ZMQInteractiveShell":
        return None
    from IPython.display import display

    return NotebookBar(display)
