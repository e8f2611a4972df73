"""`guard` and `install`: an out-of-memory exception leaves as itself, with its diagnosis as a note (PEP 678).

Nothing is caught, changed or kept: the note is text. What the note costs (a reading of the machine, a search of the heap
for live arrays) is paid only when memory has run out.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

from outsize.core.errors import InputError
from outsize.core.failure import Diagnosis
from outsize.core.units import format_bytes
from outsize.failure.evidence import add_readings
from outsize.failure.explain import explain_exception
from outsize.failure.live import live_arrays
from outsize.machine import memory

HEADING = "outsize: why memory ran out"
_MARK = "__outsize_explained__"


class guard(contextlib.ContextDecorator):
    """`with outsize.guard(): ...` or `@outsize.guard()` (also plain `@outsize.guard`): explains an out-of-memory error inside.

    The exception leaves unchanged but for a note with cause, evidence, the largest live arrays and remedies.
    """

    def __init__(self) -> None:
        self._available: int | None = None
        self._rss: int | None = None

    def __new__(cls, function: Callable[..., Any] | None = None) -> Any:
        """`@outsize.guard` without brackets decorates at once."""
        return super().__new__(cls) if function is None else cls()(function)

    def __call__(self, function: Callable[..., Any]) -> Any:
        """The function with the guard around all of its run: one that waits or yields has only begun when it returns."""
        if inspect.isasyncgenfunction(function):
            raise InputError(
                f"{function.__name__} is an asynchronous generator: write `with outsize.guard():` inside of it"
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wait(*args: Any, **kwargs: Any) -> Any:
                with guard():
                    return await function(*args, **kwargs)

            return wait
        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def give(*args: Any, **kwargs: Any) -> Any:
                with guard():
                    return (yield from function(*args, **kwargs))

            return give
        return super().__call__(function)

    def __enter__(self) -> guard:
        reading = memory()
        self._available, self._rss = reading.host.available, reading.rss
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            _annotate_quietly(error, trace, self._before())

    def _before(self) -> str | None:
        if self._rss is None:
            return None
        available, held = format_bytes(self._available), format_bytes(self._rss)
        return f"when the block began: {available} of RAM available, this process held {held}"


def annotate(error: BaseException, trace: TracebackType | None, before: str | None = None) -> Diagnosis | None:
    """Add the diagnosis to an out-of-memory exception, once; None where it is another kind."""
    if getattr(error, _MARK, False):
        return None
    diagnosis = explain_exception(error)
    if diagnosis.failure is None:
        return None
    evidence = add_readings(diagnosis.evidence, [] if before is None else [before])
    diagnosis = replace(diagnosis, evidence=evidence, holders=live_arrays(trace))
    error.add_note(f"\n{HEADING}\n{diagnosis}")
    with contextlib.suppress(AttributeError):  # an exception with slots: the note may then come twice
        setattr(error, _MARK, True)
    return diagnosis


def explain_uncaught() -> None:
    """Explain every uncaught out-of-memory exception of this program, threads included; calling it again changes nothing."""
    if getattr(sys.excepthook, _MARK, False):
        return
    before, before_thread = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _annotate_quietly(error, trace)
        before(kind, error, trace)

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            _annotate_quietly(args.exc_value, args.exc_traceback)
        before_thread(args)

    setattr(hook, _MARK, True)
    sys.excepthook, threading.excepthook = hook, thread_hook


def _annotate_quietly(error: BaseException, trace: TracebackType | None, before: str | None = None) -> None:
    """Nothing of ours may take the place of the error that is on its way, and memory is short here."""
    try:
        annotate(error, trace, before)
    except Exception as own:
        sys.stderr.write(f"outsize: could not explain this: {own!r}\n")
