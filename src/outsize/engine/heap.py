"""The C library's heap, made to give back what is freed.

By itself it keeps freed blocks of up to 32 MiB, and up to 64 MiB at the end of every thread's heap: more than a budget allows,
since what one pass has freed is still there while the next one takes all of its own. glibc only; elsewhere nothing is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator

_MMAP, _TRIM = -3, -1
"""mallopt's M_MMAP_THRESHOLD and M_TRIM_THRESHOLD."""
_LEAN = {_MMAP: 1 << 20, _TRIM: 1 << 20}
"""Blocks of 1 MiB and more are the system's as soon as they are freed, and so is a longer end of a heap."""
_USUAL = {_MMAP: 32 << 20, _TRIM: 64 << 20}
"""Where glibc itself arrives after the first large blocks; how it was cannot be asked."""


def _set(limits: dict[int, int]) -> None:
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("libc.so.6")
        for name, value in limits.items():
            library.mallopt(name, value)


class _Users:
    """Who wants a lean heap now."""

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0

    def come(self) -> None:
        """One more."""
        with self._lock:
            self._count += 1
            if self._count == 1:
                _set(_LEAN)

    def go(self) -> None:
        """One less."""
        with self._lock:
            self._count -= 1
            if self._count == 0:
                _set(_USUAL)


_users = _Users()


@contextlib.contextmanager
def lean_heap() -> Iterator[None]:
    """Inside, what is freed is given back."""
    _users.come()
    try:
        yield
    finally:
        _users.go()


def keep_heap_lean() -> None:
    """From now on, for good: torch's aligned blocks leave holes that are a little too small for the next of their size, and a
    step would hold a model's worth of them."""
    _users.come()


def trim_heap() -> None:
    """Hand what is free on the heap to the system."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
