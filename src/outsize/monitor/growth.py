"""Looks for growth in this process: bytes asked for at the same place of each step, a trend, then an inspection that
finds the culprit.

`mark` is called at the end of each step, in the program's thread; `tick` ten times a second by the sampler, and takes the
place of steps where a program has none. Readings are paced, so that a loop of fast steps pays less than half a percent.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from outsize.core.outcomes.recording import HOST_DEVICE, Finding
from outsize.core.outcomes.watch_stream import is_part_of
from outsize.monitor.allocators import device_meters, read_malloc, read_small, size_small
from outsize.monitor.leaks.inspection import Inspection
from outsize.monitor.main_thread import run_in_main_thread
from outsize.monitor.pace import Paced, Pause
from outsize.monitor.trend import FEWEST, Point, Trend, find_trend, still_grows

_POINTS = 2048
"""Points of a series that are kept; then every second one is dropped."""
_SHARE = 0.002
"""Part of the program's time that readings at its steps may take."""
_LEAST_PAUSE = 0.1
"""Seconds between two readings at steps, at least: where steps are short, not every one is read."""


InProgram = Callable[[Callable[[], None]], None]
"""Runs a function in the program's thread. Another thread must not look through the heap: it would hold, for a moment,
tuples that the program is still making, and Python ends that with an error."""


class Meter(NamedTuple):
    """Something that may grow."""

    device: str
    """Where the bytes are."""
    what: str
    """`memory` or `shared memory`."""
    read: Callable[[], int | None]
    """Bytes now."""
    read_lines: Callable[[], int | None]
    """What is counted from line to line: the bytes, or the files that hold them (a block of shared memory takes none when
    it is made)."""


class Growth:
    """Follows the meters of this process and inspects it when one grows for good."""

    def __init__(
        self,
        say: Callable[[Finding], None],
        note: Callable[[str], None],
        inspect: bool = True,
        own_objects: Callable[[], int] = lambda: 0,
    ) -> None:
        self.inspecting = False
        """True during an inspection."""
        self._say, self._note, self._inspect = say, note, inspect
        self._series: dict[tuple[str, str, str], list[Point]] = {}
        self._inspection: Inspection | None = None
        self._key: tuple[str, str, str] | None = None
        self._next_reading, self._next_check, self._ticks = 0.0, 0, 0
        self._settled: dict[tuple[str, str, str], int] = {}
        self._open: dict[tuple[str, str, str], list[Finding]] = {}
        self._lock = threading.Lock()
        self._modules, self._forgets = 0, False
        self._meters, self._pause = (
            Meters(_SHARE, lambda: own_objects() + self._own_objects()),
            Pause(_LEAST_PAUSE, _SHARE),
        )
        self.ours: set[int] = set()
        """ids of containers that belong to the watch."""

    def mark(self, step: int, phase: str) -> None:
        """The end of a step."""
        now = time.monotonic()
        if now < self._next_reading and self._inspection is None:
            return
        began = time.thread_time()
        self._read(step, phase, now, stepwise=True)
        self._pause.note(time.thread_time() - began)
        self._next_reading = now + self._pause.seconds

    def tick(self, phase: str) -> None:
        """A moment of a program without steps."""
        self._ticks += 1
        if len(sys.modules) != self._modules:  # a program that loads modules is still warming up
            self._modules = len(sys.modules)
            self.forget()
        self._read(self._ticks, phase, time.monotonic(), stepwise=False)

    def forget(self) -> None:
        """Steps are known from now on, or the program still loads itself: what was read before says nothing."""
        self._forgets = True

    def close(self) -> None:
        """The watch is over."""
        with self._lock:
            self._end_inspection()
            self._withdraw()

    def trends(self) -> dict[tuple[str, str, str], Trend]:
        """(device, what, phase) -> trend, of every series that has one now."""
        with self._lock:
            found = {key: find_trend(points) for key, points in self._series.items()}
        return {key: trend for key, trend in found.items() if trend is not None}

    def _read(self, step: int, phase: str, now: float, stepwise: bool) -> None:
        if not self._lock.acquire(blocking=False):  # the other thread is at it
            return
        try:
            in_program = _call if stepwise else run_in_main_thread
            if self._forgets:
                self._forgets = False
                self._series.clear()
                if self._inspection is not None:
                    in_program(self._end_inspection)
            if self._inspection is not None:
                in_program(lambda: self._go_on(step))
                return
            for meter in self._meters.list():
                held = meter.read()
                if held is not None:
                    self._add((meter.device, meter.what, phase), Point(now, step, held))
            if self._inspect:
                self._check(step, phase, stepwise, in_program)
        finally:
            self._lock.release()

    def _add(self, key: tuple[str, str, str], point: Point) -> None:
        points = self._series.setdefault(key, [])
        points.append(point)
        if len(points) > _POINTS:
            del points[::2]

    def _own_objects(self) -> int:
        """Objects of the points: a tuple and its three numbers each."""
        return 4 * sum(map(len, self._series.values()))

    def _check(self, step: int, phase: str, stepwise: bool, in_program: InProgram) -> None:
        """Look for a trend each time there are an eighth more points."""
        count = max(len(points) for points in self._series.values()) if self._series else 0
        if self._next_check <= count:
            self._next_check = 0
        if count < FEWEST or (self._next_check and count < self._next_check):
            return
        self._next_check = min(_POINTS, count + max(4, count // 8))
        self._withdraw()
        growing = []
        for meter in self._meters.list():
            key = (meter.device, meter.what, phase)
            trend = find_trend(self._series.get(key, []))
            if trend is not None and trend.grown > self._settled.get(key, 0):
                growing.append((trend.per_second, functools.partial(self._begin, meter, key, trend, step, stepwise)))
        if growing:  # what grows most is looked into first
            in_program(max(growing, key=lambda pair: pair[0])[1])

    def _begin(self, meter: Meter, key: tuple[str, str, str], trend: Trend, step: int, stepwise: bool) -> None:
        self._inspection = Inspection(
            trend=trend, device=meter.device, what=meter.what, meter=meter.read, line_meter=meter.read_lines, stepwise=stepwise,
            ours=set(self.ours),
        )  # fmt: skip
        self._key, self.inspecting = key, True
        self._safely(self._inspection.begin, step)
        self._finish_if_done()

    def _go_on(self, step: int) -> None:
        if self._inspection is not None:
            self._safely(self._inspection.advance, step)
            self._finish_if_done()

    def _safely(self, act: Callable[[int], None], step: int) -> None:
        """An inspection that fails ends itself and nothing else: objects of the program answer as they like."""
        try:
            act(step)
        except Exception as error:
            self._note(f"an inspection has failed: {error!r}")
            assert self._inspection is not None
            self._inspection.close()

    def _finish_if_done(self) -> None:
        inspection = self._inspection
        if inspection is None or not inspection.done or self._key is None:
            return
        said = [one for key, findings in self._open.items() if key != self._key for one in findings]
        fresh = [finding for finding in inspection.findings if not any(is_part_of(finding, one) for one in said)]
        for finding in fresh:
            self._say(finding)
        self._open[self._key] = fresh
        for text in inspection.notes:
            self._note(text)
        again = 16 if inspection.findings else 2  # a known culprit is looked for again only when much more has grown
        self._settled[self._key] = again * inspection.trend.grown
        if not inspection.findings or inspection.gave_back:
            self._series.pop(self._key, None)
        self._end_inspection()

    def _withdraw(self) -> None:
        """Take back findings about what has stopped growing."""
        for key, findings in list(self._open.items()):
            rate = max((finding.per_step or 0.0 for finding in findings), default=0.0)
            if rate and not still_grows(self._series.get(key, []), rate):
                del self._open[key]
                for finding in findings:
                    self._say(replace(finding, ended=True))
                    self._note(f"growth that ended: {finding.text}")

    def _end_inspection(self) -> None:
        if self._inspection is not None and not self._inspection.done:
            self._inspection.close()
        self._inspection, self._key, self.inspecting, self._next_check = None, None, False, 0


class Meters:
    """The meters of this process. What costs more is read less often and carried over between."""

    def __init__(self, share: float, own_objects: Callable[[], int]) -> None:
        self._own_objects = own_objects
        self._small = 0
        self._shared: int | None = None
        self._read_small = Paced(read_small, every=0.0, share=share / 4)
        self._read_shared = Paced(read_shared, every=0.0, share=share / 8)
        self._host = (
            Meter(HOST_DEVICE, "memory", self._requested, read_malloc),
            Meter(HOST_DEVICE, "shared memory", self._held_shared, count_shared),
        )
        self._find_devices = Paced(device_meters, every=1.0, share=share / 8)
        self._all: tuple[Meter, ...] = self._host

    def list(self) -> tuple[Meter, ...]:
        """What may grow now. A program may start a device at any time: they are looked for once a second."""
        devices = self._find_devices(time.monotonic())
        if devices is not None:
            self._all = (*self._host, *(Meter(name, "memory", read, read) for name, read in devices.items()))
        return self._all

    def _requested(self) -> int | None:
        found = self._read_small(time.monotonic())
        self._small = self._small if found is None else found
        asked = read_malloc()
        return None if asked is None else asked + self._small - size_small(self._own_objects())

    def _held_shared(self) -> int | None:
        found = self._read_shared(time.monotonic())
        self._shared = self._shared if found is None else found
        return self._shared


def read_shared() -> int | None:
    """Bytes in use in `/dev/shm`, None where there is none."""
    try:
        space = os.statvfs("/dev/shm")
    except OSError:
        return None
    return (space.f_blocks - space.f_bfree) * space.f_frsize


def count_shared() -> int | None:
    """Files in `/dev/shm`."""
    try:
        space = os.statvfs("/dev/shm")
    except OSError:
        return None
    return space.f_files - space.f_ffree


def _call(function: Callable[[], None]) -> None:
    function()
