"""A run whose time, steps and peak are measured: around it, and from the events that it sends."""

from __future__ import annotations

import time
from collections.abc import Iterable

from outsize.core.contents import StoredArray
from outsize.core.events import Event, Finished, Listener, Started
from outsize.core.outcomes.outcome import Outcome
from outsize.core.plan import Plan
from outsize.monitor.peak import PeakMeter
from outsize.report.progress import terminal_listener


class MeasuredRun:
    """`with MeasuredRun(plan, steps=True) as run: save(..., progress=run.listener)`, then `run.outcome(...)`."""

    def __init__(self, plan: Plan, steps: bool) -> None:
        self.plan, self._steps = plan, steps
        self._bar: Listener | None = terminal_listener()
        self._seconds: list[float] = [0.0] * len(plan.steps)
        self._step, self._resumed = 0, 0
        self._meter = PeakMeter("run")

    def listener(self, event: Event) -> None:
        """Take one event, and hand it to the progress bar."""
        if isinstance(event, Started):
            self._step = event.index
            self._resumed += event.done
        elif isinstance(event, Finished) and self._step < len(self._seconds):
            self._seconds[self._step] = event.seconds
        if self._bar is not None:
            self._bar(event)

    def __enter__(self) -> MeasuredRun:
        self._meter.__enter__()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self._took = time.perf_counter() - self._began
        self._meter.__exit__(*error)

    def outcome(self, results: Iterable[tuple[str, tuple[int, ...], str, int]]) -> Outcome:
        """The run as a noun; each result is (path, shape, dtype, bytes)."""
        stored = [StoredArray(key=path, shape=shape, dtype=dtype, bytes=size) for path, shape, dtype, size in results]
        return Outcome(
            plan=self.plan, seconds=self._took, measured=self._meter.peaks()[0].bytes, results=tuple(stored),
            step_seconds=tuple(self._seconds) if self._steps else (), resumed=self._resumed,
        )  # fmt: skip
