"""A progress bar on standard error that listens to a run's events. It shows bytes, bytes per second and time left, or
other counts."""

from __future__ import annotations

import sys

from rich import progress as rich
from rich.console import Console
from rich.progress import Progress

from outsize.core.events import Advanced, Event, Finished, Listener, Started


class Bar:
    """One bar per pass. The bars disappear when the last pass has ended."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(*_columns("bytes"), console=console, transient=True)
        self._task: rich.TaskID | None = None
        self._last = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started):
            self._last = event.index == event.steps - 1
            if event.index == 0 and event.unit != "bytes":
                self._progress = Progress(*_columns(event.unit), console=self._console, transient=True)
            self._progress.start()
            title = f"{event.index + 1}/{event.steps} {event.step}" if event.steps > 1 else event.step
            total = max(1, event.bytes) if event.bytes or event.unit == "bytes" else None
            self._task = self._progress.add_task(title, total=total, completed=event.done)
        elif isinstance(event, Advanced) and self._task is not None:
            self._progress.advance(self._task, event.bytes)
        elif isinstance(event, Finished) and self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
            if self._last:
                self._progress.stop()


def _columns(unit: str) -> list[rich.ProgressColumn]:
    """What is drawn beside the bar."""
    shared = [rich.TextColumn("{task.description}"), rich.BarColumn()]
    if unit == "bytes":
        return [*shared, rich.DownloadColumn(binary_units=True), rich.TransferSpeedColumn(), rich.TimeRemainingColumn()]
    return [*shared, rich.TextColumn(f"{{task.completed:.0f}} {unit}"), rich.TimeElapsedColumn()]


def terminal_listener() -> Listener | None:
    """A progress bar if standard error is a terminal, else None."""
    return Bar(Console(stderr=True, force_jupyter=False)) if sys.stderr is not None and sys.stderr.isatty() else None
