"""Pages of a file that two runs share, kept in memory until both halves are there.

In: the ragged ends of runs that are written directly. Out: whole pages, which go out in the same call as the run that
completed them. A transposition ends tens of thousands of runs inside pages; each such end written by itself through
the page cache took longer than its run. What is still incomplete survives a kill in a small file beside the output,
and is written through the page cache at the end.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.array.store.base import ALIGNMENT, Buffer
from outsize.engine.pool import make_buffer

_MOST = 2048
"""Pages that may wait at once."""
_RECORD = struct.Struct("<qqq")
"""Before each page in the file: its number, first and last byte that it has."""


def edge_pages(runs: int) -> int:
    """Pages that may wait while tiles of this many runs are written."""
    return min(2 * runs, _MOST)


@dataclass(slots=True, eq=False)
class Page:
    """A page of which the bytes from `low` to `high` are there."""

    number: int
    data: Buffer
    low: int
    high: int

    @property
    def whole(self) -> bool:
        """True where it can be written."""
        return self.low == 0 and self.high == ALIGNMENT


class Edges:
    """The waiting pages of one file, those first that an interrupted run left at `path`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._pages: dict[int, Page] = {}
        self._free: list[Buffer] = []
        self._room = 0
        if os.path.exists(path):
            self._load()

    def allow(self, pages: int) -> None:
        """Make room for this many pages; said before the first of a tile comes."""
        with self._lock:
            if pages > self._room:
                slab = make_buffer((pages - self._room) * ALIGNMENT)
                self._free += [slab[at : at + ALIGNMENT] for at in range(0, slab.nbytes, ALIGNMENT)]
                self._room = pages

    def put(self, offset: int, data: Buffer) -> tuple[bool, Page | None]:
        """Keep bytes that lie inside one page. False where there is no room for them, or they do not touch what is
        there: the caller writes them. A page that these bytes have made whole is the caller's to write, and to say
        `written`; no other caller is given it, since its memory is used again from then on."""
        number, low = divmod(offset, ALIGNMENT)
        high = low + data.nbytes
        with self._lock:
            page = self._pages.get(number)
            if page is None:
                if not self._free:
                    return False, None
                page = self._pages[number] = Page(number, self._free.pop(), low, high)
            elif low > page.high or high < page.low:
                return False, None
            before = page.whole
            page.data[low:high] = data
            page.low, page.high = min(low, page.low), max(high, page.high)
            return True, page if page.whole and not before else None

    def written(self, page: Page) -> None:
        """A whole page is on its way to the disk: forget it."""
        with self._lock:
            if self._pages.pop(page.number, None) is page:
                self._free.append(page.data)

    def rest(self) -> Iterator[tuple[int, Buffer]]:
        """(offset, bytes) of what never became whole; forgotten as it is given."""
        while self._pages:
            number, page = self._pages.popitem()
            yield number * ALIGNMENT + page.low, page.data[page.low : page.high]
            self._free.append(page.data)

    @contextlib.contextmanager
    def surviving(self) -> Iterator[None]:
        """What waits before the block is on disk after it; the block makes durable what had stopped waiting."""
        with self._lock, open(self.path + ".part", "wb") as file:
            for page in self._pages.values():
                file.write(_RECORD.pack(page.number, page.low, page.high))
                file.write(page.data.data)
        yield
        with open(self.path + ".part", "rb+") as file:
            os.fsync(file.fileno())
        os.replace(self.path + ".part", self.path)

    def _load(self) -> None:
        size = _RECORD.size + ALIGNMENT
        with open(self.path, "rb") as file:
            content = file.read()
        self.allow(len(content) // size)
        for at in range(0, len(content) // size * size, size):
            number, low, high = _RECORD.unpack_from(content, at)
            data: Any = np.frombuffer(content, np.uint8, ALIGNMENT, at + _RECORD.size)
            self.put(number * ALIGNMENT + low, data[low:high])

    def remove(self) -> None:
        for path in (self.path, self.path + ".part"):
            pathlib.Path(path).unlink(missing_ok=True)
