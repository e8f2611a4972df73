"""Makes the heap of the C library give freed memory back to the system.

By default glibc keeps freed blocks of up to 32 MiB, and up to 64 MiB at the end of every thread's heap. That is more
than a budget allows: what one pass has freed would still be there while the next pass runs. glibc only; elsewhere
nothing is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator

_MMAP, _TRIM = -3, -1
"""mallopt's M_MMAP_THRESHOLD and M_TRIM_THRESHOLD."""
_LEAN = {_MMAP: 1 << 20, _TRIM: 1 << 20}
"""Freed blocks of 1 MiB and more go back to the system at once, and so does a longer end of a heap."""
_USUAL = {_MMAP: 32 << 20, _TRIM: 64 << 20}
"""The values that glibc reaches after the first large blocks. They are restored, because glibc cannot be asked for its
values."""


def _set(limits: dict[int, int]) -> None:
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("libc.so.6")
        for name, value in limits.items():
            library.mallopt(name, value)


_lock = threading.Lock()
_users = 0
"""How many want freed memory to be given back now."""


def _count(change: int) -> None:
    """One user more, or one less: limits are lean as long as there is any."""
    global _users
    with _lock:
        before, _users = _users, _users + change
        if not before or not _users:
            _set(_LEAN if _users else _USUAL)


@contextlib.contextmanager
def lean_heap() -> Iterator[None]:
    """Inside the `with` block freed memory is given back."""
    _count(1)
    try:
        yield
    finally:
        _count(-1)


@contextlib.contextmanager
def keeping_blocks(size: int) -> Iterator[None]:
    """Inside the `with` block freed blocks up to this size stay for the next call that wants as much: fresh pages for every call
    cost more than a transform. For blocks that a plan counts, inside `lean_heap`."""
    if size <= _LEAN[_MMAP]:
        yield
        return
    _set(dict.fromkeys(_LEAN, min(size, _USUAL[_MMAP])))
    try:
        yield
    finally:
        with _lock:
            _set(_LEAN if _users else _USUAL)
        trim_heap()


def keep_heap_lean() -> None:
    """Give freed memory back from now on. torch's aligned blocks leave holes that are a little too small for the next
    block of their size. Without this a step would hold as many bytes in holes as the model has."""
    _count(1)


def trim_heap() -> None:
    """Give what is free on the heap back to the system."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
