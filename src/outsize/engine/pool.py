"""The pool of memory of a run: buffers that begin on a page, in all never more bytes than the budget.

Buffers are anonymous maps, in huge pages where the kernel has them: fewer faults, and cheaper to pin for direct I/O. A
request that does not fit is an error. The plan has counted every buffer before the run, so no request ever has to
wait.
"""

from __future__ import annotations

import contextlib
import contextvars
import mmap
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from outsize.core.errors import BudgetError
from outsize.core.units import format_bytes

_HUGE = 2 << 20
_PAGE = 4096


class MemoryPool:
    """Hands out buffers up to a budget."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        """Bytes that may be out at once."""
        self.peak = 0
        """Most bytes that were out at once."""
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, size: int, *, huge: bool = True) -> npt.NDArray[np.uint8]:
        """A buffer of `size` bytes; a `BudgetError` where the budget has no room for it."""
        self.count(size)
        return make_buffer(size, huge=huge)

    def count(self, size: int) -> None:
        """Count bytes that someone else allocates."""
        with self._lock:
            needed = self._taken + size
            if needed > self.budget:
                raise BudgetError(
                    f"{format_bytes(size)} were asked of a pool of {format_bytes(self.budget)}, of which "
                    f"{format_bytes(self._taken)} are taken: the plan counted less than the work takes",
                    needed=needed, budget=self.budget,
                )  # fmt: skip
            self._taken = needed
            self.peak = max(self.peak, self._taken)

    def give(self, size: int) -> None:
        """Give back bytes; the buffer itself is freed with its last view."""
        with self._lock:
            self._taken -= size


_elsewhere: contextvars.ContextVar[int | None] = contextvars.ContextVar("cores", default=None)


def cores() -> int:
    """Processors that the work may use: those of this process, or of the workers that a plan is made for."""
    return _elsewhere.get() or len(os.sched_getaffinity(0))


@contextlib.contextmanager
def cores_of_workers(number: int) -> Iterator[None]:
    """Inside the block plans are made for workers with so many processors."""
    token = _elsewhere.set(number)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def round_to_pages(size: int) -> int:
    """Bytes that a buffer of this size really takes: whole pages, from 2 MiB on whole huge pages."""
    page = _HUGE if size >= _HUGE else _PAGE
    return -(-size // page) * page


def within_pages(size: int) -> int:
    """Bytes of the largest buffer that takes no more than this."""
    page = _HUGE if size >= _HUGE else _PAGE
    return size // page * page


def make_buffer(size: int, *, huge: bool = True) -> npt.NDArray[np.uint8]:
    """A buffer that begins on a page, or on a huge page if it is large enough. What is written once and is most of the memory
    is better off without huge pages: the kernel clears the page cache to find them (a GiB took 7 s beside a full one, 1.6 in
    small pages)."""
    if size == 0:
        return np.empty(0, np.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory would be counted as files, and has no huge pages
    memory: Any = mmap.mmap(-1, round_to_pages(size), flags=flags)
    if size >= _HUGE and huge:
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)[:size]
