"""Who keeps the memory that grows: an inspection that lasts a few steps and begins only when there is a trend.

    begin      garbage is collected, everything is counted
    second     some steps later: counted again; what is longer is followed line by line, and Python notes where objects are made
    conclude   some steps later: counted a third time -> findings and notes

Growth that the collection gave back was garbage in cycles. Growth that did not go on during the inspection is no leak:
nothing is said. All of it runs in the thread of the program: at the end of its steps, or between two of its instructions.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from outsize.core.outcomes.recording import Finding
from outsize.core.units import format_bytes
from outsize.monitor.leaks.assignments import find_assignment
from outsize.monitor.leaks.census import Census, length_of, take_census
from outsize.monitor.leaks.describe import Lines, describe, on
from outsize.monitor.leaks.device_history import DeviceHistory
from outsize.monitor.leaks.names import NOTHING, Holding, find_holding
from outsize.monitor.leaks.suspects import (
    Suspect,
    confirm,
    find_buffers,
    find_filling,
    find_graph,
    find_kinds,
    find_suspects,
    has_graph,
)
from outsize.monitor.leaks.tracer import LineTracer, most_added
from outsize.monitor.leaks.user_code import is_user_file, spell, user_modules
from outsize.monitor.trend import Trend

Meter = Callable[[], int | None]
_FRAMES = 12
"""Frames that Python notes of each allocation."""
_WAIT, _LONGEST = 0.4, 8.0
"""Seconds between two counts: at least, where no steps are known; at most."""
ADVICE = {
    "memory": "look for objects that hold on to each other, a handle of a C library that is never closed, a result to free",
    "shared memory": "call `close()` and `unlink()` on each block of shared memory when it is done",
}
"""What to do about growth that no container explains."""
_MOST = 3
"""Findings of one inspection."""
_PATIENCE = 6
"""How many times as long is waited where nothing grows: memory may be lost once in an epoch."""
_SHARE = 0.1
"""Part of the growth that a culprit must explain."""
_BOUND = 10.0
"""Seconds of the program's time that the counts and the search for names may take together, one of them more or less."""


@dataclass(kw_only=True)
class Inspection:
    """One look at a growing program."""

    trend: Trend
    """Why it was begun."""
    device: str
    """`host`, `cuda:0`, ..."""
    what: str
    """`memory` or `shared memory`."""
    meter: Meter
    """Bytes that grow."""
    line_meter: Meter
    """What is counted from line to line: the same bytes, or what makes them grow."""
    stepwise: bool
    """True where steps are known."""
    ours: set[int]
    """ids of the watch's own containers."""
    findings: list[Finding] = field(default_factory=list)
    """What was found, once it is done."""
    notes: list[str] = field(default_factory=list)
    """Growth that is no leak."""
    done: bool = False
    """True when it has ended."""
    gave_back: bool = False
    """True where collecting garbage gave back most of what had grown."""
    stage: int = 0
    """How many counts there were."""
    _censuses: list[Census] = field(default_factory=list)
    _suspects: list[Suspect] = field(default_factory=list)
    _tracer: LineTracer | None = None
    _history: DeviceHistory | None = None
    _since: tuple[float, int] = (0.0, 0)
    _first: int = 0
    _level: int = 0
    _own_notes: bool = False
    _spent: float = 0.0
    _began: float = 0.0
    _filling: list[str] = field(default_factory=list)

    def begin(self, step: int) -> None:
        """The first count."""
        with self._counted():
            self._begin(step)

    def _begin(self, step: int) -> None:
        before = self.meter() or 0
        gc.collect()
        freed = before - (self.meter() or 0)
        self.gave_back = freed >= 0.5 * self.trend.grown
        if self.gave_back and gc.isenabled():
            self.notes.append(
                f"growth that ends: {format_bytes(freed)} were cycles that waited for the garbage collector"
            )
            self.done = True
            return
        self._count(step)
        self._first = step
        self._history = DeviceHistory.start(self.device)

    def advance(self, step: int) -> None:
        """Go on if it is time to."""
        if self.done or not self._is_time(step):
            return
        if self._spent * (3 / self.stage) > _BOUND:  # three counts of such a heap would take longer
            self.notes.append(
                f"{self.what} of {self.device} grows, {self.trend.rate(self.stepwise)}; who keeps it is not looked for: one "
                f"count of this program's objects takes {self._spent / self.stage:.1f} s"
            )
            self.close()
            return
        with self._counted():
            self._second(step) if self.stage == 1 else self._conclude(step)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Adds up what the inspection takes."""
        began = time.thread_time()
        self._began = began - self._spent
        try:
            yield
        finally:
            self._spent = time.thread_time() - self._began

    def close(self) -> None:
        """End at once, whatever was found so far."""
        if self._tracer is not None:
            self._tracer.stop()
        if self._own_notes:
            tracemalloc.stop()
            self._own_notes = False
        if self._history is not None:
            self._history.stop()
        self._censuses, self._suspects, self._tracer, self.done = [], [], None, True

    def _is_time(self, step: int) -> bool:
        """After some steps or moments, if the bytes have grown on; after many more in any case."""
        began, at = self._since
        waited = time.monotonic() - began
        wanted = min(40, max(4, self.trend.steps // 10))
        passed = (step - at) / wanted if self.stepwise else waited / _WAIT
        if passed < 1:
            return waited > _LONGEST and step > at + 1
        return passed >= _PATIENCE or waited > _LONGEST or self._goes_on(step)

    def _count(self, step: int) -> None:
        before = self._censuses[-1] if self._censuses else None
        self.ours |= {id(self._censuses), id(self._suspects), id(self.ours)}
        self._censuses.append(take_census(self.ours, before, self.device))
        if self.stage < 2:
            self._censuses[-1].tail = None  # it would keep a graph alive
        self.stage += 1
        self._level = self.meter() or 0
        self._since = (time.monotonic(), step)

    def _second(self, step: int) -> None:
        self._count(step)
        self._suspects = find_suspects(self._censuses[0], self._censuses[1], self.device)
        self._censuses[-1].grown.clear()
        if not tracemalloc.is_tracing():
            tracemalloc.start(_FRAMES)
            self._own_notes = True
        lengths = {id(suspect.item): _reader(suspect.item) for suspect in self._suspects}
        self._tracer = LineTracer(lengths, lambda: self.line_meter() or 0)
        self._tracer.start()
        self._level = self.meter() or 0

    def _conclude(self, step: int) -> None:
        tracer = self._tracer
        assert tracer is not None
        tracer.stop()
        went_on = self._goes_on(step)
        self._count(step)
        self._filling = find_filling(self._censuses[2])
        try:
            if went_on and self.gave_back:
                self.findings.append(describe_cycles(self.trend, self.device, tracer, self.stepwise))
            elif went_on:
                self._judge(tracer, step)
            self.notes += [f"growth that ends: {text}" for text in self._filling[:2]]
        finally:
            self._tracer = None
            self.close()

    def _goes_on(self, step: int) -> bool:
        """True where the bytes grew on since the second count, as fast as the trend says."""
        began, at = self._since
        passed = (step - at) if self.stepwise else time.monotonic() - began
        rate = self.trend.per_step if self.stepwise else self.trend.per_second
        return (self.meter() or 0) - self._level >= 0.4 * rate * passed

    def _judge(self, tracer: LineTracer, step: int) -> None:
        censuses = (self._censuses[0], self._censuses[1], self._censuses[2])
        steps = max(1, step - self._first)
        expected = self.trend.per_step * steps
        suspects = confirm(self._suspects, censuses[1], censuses[2])
        suspects += [*find_buffers(censuses)[:3]]
        graph = find_graph(censuses, steps)
        suspects += [] if graph is None or any(has_graph(one.sample) for one in suspects) else [graph]
        self._judge_suspects(suspects, tracer, expected, steps)
        if not self.findings and not self._filling:
            self._judge_suspects(find_kinds(censuses, self.device)[:3], tracer, expected, steps)
        if not self.findings and not self._filling:
            self._judge_lines(tracer)

    def _judge_suspects(self, suspects: list[Suspect], tracer: LineTracer, expected: float, steps: int) -> None:
        for suspect in suspects:
            unmeasured = has_graph(suspect.sample) or suspect.kind in (
                "graph",
                "traces",
            )  # what they keep is not Python's
            explains = unmeasured or suspect.bytes >= _SHARE * expected
            if not explains or len(self.findings) == _MOST:
                continue
            if self.findings and time.thread_time() - self._began > _BOUND:
                break
            holding = NOTHING if suspect.item is None else find_holding(suspect.item, self.ours)
            if (holding.name or "").startswith(("outsize.", "tracemalloc", "linecache")):
                continue
            lines = self._lines(suspect, holding, tracer)
            found = describe(suspect, holding, lines, self.trend, self.device, steps if self.stepwise else 0)
            if self.findings and self.findings[0].kind == "tracing":
                continue  # its lists and dicts are the framework's own
            if not any(one.name == found.name or one.where == found.where for one in self.findings):
                self.findings.append(found)

    def _lines(self, suspect: Suspect, holding: Holding, tracer: LineTracer) -> Lines:
        added = tracer.added.get(id(suspect.item))
        kept = most_added(added) if added else None
        if suspect.kind in ("buffer", "graph"):
            name = suspect.name[1] if suspect.name else holding.name
            kept = find_assignment(name) if name else None
        allocated = _noted_line(suspect.sample) or most_added(tracer.taken)
        if self._history is not None:
            allocated = self._history.largest_line() or allocated
        return Lines(kept=kept or (allocated if suspect.kind != "cache" else None), allocated=allocated)

    def _judge_lines(self, tracer: LineTracer) -> None:
        """No container grew: the line that takes memory and does not give it back is all that is known."""
        line = tracer.losing_line()
        if line is None:
            return
        kind = "unknown" if self.what == "memory" else self.what
        text = f"{line} takes {self.what}{on(self.device)} that no container keeps: {self.trend.rate(self.stepwise)}"
        said = {"kind": kind, "device": self.device, "text": text, "advice": ADVICE[self.what]}
        self.findings.append(self.trend.finding(self.stepwise, **said, where=line, allocated_at=line))


def _reader(item: Any) -> Callable[[], int]:
    return lambda: length_of(item)


def describe_cycles(trend: Trend, device: str, tracer: LineTracer, stepwise: bool) -> Finding:
    """Objects that refer to each other while the collector is off: what they are, and where they are made."""
    flags = gc.get_debug()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        count = gc.collect()
        kinds = Counter(type(item) for item in gc.garbage if sys.modules.get(type(item).__module__) in user_modules())
        kind = kinds.most_common(1)[0][0] if kinds else None
        lines = (_noted_line(item) for item in reversed(gc.garbage) if kind is None or type(item) is kind)
        line = next((line for line in lines if line is not None), None) or most_added(tracer.taken)
    finally:
        gc.set_debug(flags)
        gc.garbage.clear()
    gc.collect()
    what = f"`{kind.__qualname__}` objects" if kind is not None else "objects"
    return trend.finding(
        stepwise,
        kind="cycles",
        device=device,
        text=f"{what} made in {line} refer to each other and the garbage collector is off: {trend.rate(stepwise)}",
        advice="call `gc.collect()` every few steps or `gc.enable()`, or break the cycle with a weak reference",
        name=None if kind is None else kind.__qualname__,
        where=line,
        allocated_at=line,
        count=count,
    )


def _noted_line(sample: Any) -> str | None:
    """The user's line at which Python noted that an object was made."""
    trace = tracemalloc.get_object_traceback(sample) if sample is not None and tracemalloc.is_tracing() else None
    for frame in reversed(trace or ()):
        if is_user_file(frame.filename):
            return spell(frame.filename, frame.lineno)
    return None
