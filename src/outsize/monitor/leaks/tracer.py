"""Runs beside a few steps of the program, line by line in its own files: which line adds to which container, and which
takes memory.

In: the containers that may be growing, and a meter (a function that gives bytes). Out: counts by line. Only lines of the
user's own files are stopped at, so what a library does counts for the line that called it. Installed only where no
debugger is at work.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from outsize.monitor.leaks.user_code import is_user_file, spell


class LineTracer:
    """Notes what grows between two lines of the thread that starts it."""

    def __init__(self, lengths: Mapping[int, Callable[[], int]], meter: Callable[[], int]) -> None:
        self.added: dict[int, Counter[str]] = {key: Counter() for key in lengths}
        """Container -> line -> elements added there."""
        self.taken: Counter[str] = Counter()
        """Line -> bytes taken there and not given back there."""
        self._lengths, self._meter = lengths, meter
        self._last: tuple[str, int] | None = None
        self._had: dict[int, int] = {}
        self._held = 0
        self._times: Counter[str] = Counter()
        self._moved: Counter[str] = Counter()
        self._thread: int | None = None

    def start(self) -> bool:
        """Begin in the calling thread; False where something else traces it."""
        if sys.gettrace() is not None:
            return False
        self._thread = threading.get_ident()
        self._read()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if is_user_file(frame.f_code.co_filename):
                frame.f_trace = self._local
                self._last = self._last or (frame.f_code.co_filename, frame.f_lineno)
            frame = frame.f_back
        sys.settrace(self._global)
        return True

    def stop(self) -> None:
        """End; called in the same thread."""
        if self._thread != threading.get_ident():
            return
        sys.settrace(None)
        self._note(self._last)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_trace == self._local:
                frame.f_trace = None
            frame = frame.f_back

    def losing_line(self) -> str | None:
        """The line that took memory again and again, never gave any back, and took about as much as all lines together
        have lost."""
        lost = sum(self.taken.values())
        lines = [
            line
            for line, taken in self.taken.items()
            if self._times[line] >= 3 and taken >= 0.6 * self._moved[line] and 0.3 * lost <= taken
        ]
        return min(lines, key=lambda line: abs(self.taken[line] - lost), default=None) if lost > 0 else None

    def _global(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._local if is_user_file(frame.f_code.co_filename) else None

    def _local(self, frame: FrameType, event: str, _: Any) -> Any:
        """A line is about to run, or a function has returned: what has grown grew in the line before."""
        self._note(self._last)
        self._last = (frame.f_code.co_filename, frame.f_lineno)
        if event == "return" and frame.f_back is not None and is_user_file(frame.f_back.f_code.co_filename):
            self._last = (frame.f_back.f_code.co_filename, frame.f_back.f_lineno)
        return self._local

    def _note(self, line: tuple[str, int] | None) -> None:
        had, held = self._had, self._held
        self._read()
        if line is None:
            return
        for key, before in had.items():
            if self._had[key] > before:
                self.added[key][spell(*line)] += self._had[key] - before
        if self._held != held:
            self.taken[spell(*line)] += self._held - held
            self._times[spell(*line)] += 1
            self._moved[spell(*line)] += abs(self._held - held)

    def _read(self) -> None:
        self._had = {key: read() for key, read in self._lengths.items()}
        self._held = self._meter()


def most_added(counter: Counter[str]) -> str | None:
    """The line with the most, None where none has any."""
    ranked = [(line, count) for line, count in counter.most_common(1) if count > 0]
    return ranked[0][0] if ranked else None
