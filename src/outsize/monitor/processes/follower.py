"""A process tree that is read ten times a second, at a small part of what `read_tree` costs.

Each time only `statm` is read, one short line for each process: it tells what is the process's own from what it shares.
How the shared part divides into files and shared memory, and what is in swap, is read once a second, and at once where the
shared part has changed. New processes are looked for twice a second, or less often where the tree is large.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import NamedTuple

from outsize.monitor.pace import Paced
from outsize.monitor.processes.tree import ProcessReading, TreeReading, children_of, read_proc, read_process

_PAGE = os.sysconf("SC_PAGE_SIZE")
_CHANGED = 2**20
"""Bytes by which the shared part may change before it is read how it divides."""
_SHARE = 0.0005
"""Part of one processor that each of the slower readings may take."""


class _Known(NamedTuple):
    """What was last read of a process."""

    process: ProcessReading
    pages: tuple[int, int]
    """What `statm` said then."""
    mapped: int
    """Bytes of files and shared memory when it was last read in full."""


class TreeFollower:
    """Reads the tree under a process, again and again."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._known: dict[int, _Known] = {}
        self._find = Paced(self._find_all, every=0.5, share=_SHARE)
        self._renew = Paced(self._known.clear, every=1.0, share=_SHARE)
        self._pids: list[int] = [root]

    def read(self) -> TreeReading:
        """The tree now; empty where it has gone."""
        now = time.monotonic()
        self._pids = self._find(now) or self._pids
        self._renew(now)
        found = [process for pid in self._pids if (process := self._read(pid)) is not None]
        return TreeReading(time=time.time(), processes=tuple(found))

    def _read(self, pid: int) -> ProcessReading | None:
        """The same object as last time where nothing has changed."""
        pages = _read_pages(pid)
        known = self._known.get(pid)
        if pages is None:
            return None
        resident, mapped = pages
        if known is None or not resident or abs(mapped - known.mapped) > _CHANGED:
            process = read_process(pid)  # it is new, has ended, or maps other files
            if process is not None:
                self._known[pid] = _Known(process, pages, mapped)
            return process
        before = known.process
        if pages != known.pages:
            before = replace(before, anonymous=resident - mapped, files=max(0, mapped - before.shared))
            self._known[pid] = _Known(before, pages, known.mapped)
        return before

    def _find_all(self) -> list[int]:
        """Every process of the tree, the root first."""
        found = [self._root]
        for pid in found:
            found += children_of(pid)
        return found


def _read_pages(pid: int) -> tuple[int, int] | None:
    """(bytes of RAM it has mapped, those of them that are files or shared memory); None where it has gone."""
    words = (read_proc(f"/proc/{pid}/statm") or "").split()
    return (int(words[1]) * _PAGE, int(words[2]) * _PAGE) if words else None
