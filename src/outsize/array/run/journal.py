"""What a save has finished, on disk, so that the same call can go on after a kill.

A folder beside the unfinished output: a log with one line a finished tile, and small results of finished passes. A
line is written only after the data it speaks of was synced. The first line is a digest of the work (graph, sources
with size and time, budget, tiles); a journal with another digest belongs to other work and is thrown away.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from outsize.array.store.base import Block
from outsize.array.store.io.file import written_whole
from outsize.array.tuning import Tuning


class Journal:
    """The journal of one save."""

    def __init__(self, folder: str, tuning: Tuning = Tuning()) -> None:  # noqa: B008  (it is frozen)
        self.folder, self._tuning = folder, tuning
        self._log = os.path.join(folder, "log")
        self._lock = threading.Lock()
        self._pending: list[str] = []
        self._next = time.monotonic() + tuning.sync_every
        self.done: dict[int, set[int]] = {}
        """Pass -> its tiles that are finished."""
        self.resumed = False
        """True where it goes on with what an earlier run finished."""
        self.kept: set[str] = set()
        """Names of results that were put aside."""

    @staticmethod
    def header(folder: str) -> dict[str, Any] | None:
        """The first line of a journal that an earlier run left, None where there is none."""
        with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, "log")) as log:
            found = json.loads(log.readline())
            return found if isinstance(found, dict) else None
        return None

    def is_of(self, digest: str) -> bool:
        """True where an earlier run left the journal of this work."""
        found = self.header(self.folder)
        return found is not None and found.get("digest") == digest

    def begin(self, digest: str, budget: int) -> None:
        """Take up the earlier journal if it is of the same work, else start a new one."""
        if self.is_of(digest):
            self.resumed = True
            self._replay()
            return
        self.remove()
        os.makedirs(self.folder)
        with open(self._log, "w") as log:
            shares = {"workers": self._tuning.spread, "cores": self._tuning.worker_cores}
            log.write(json.dumps({"digest": digest, "budget": budget, **shares}) + "\n")

    def _replay(self) -> None:
        with open(self._log) as log:
            log.readline()
            for line in log:
                words = line.split()
                if len(words) == 3 and words[0] == "tile" and line.endswith("\n"):
                    self.done.setdefault(int(words[1]), set()).add(int(words[2]))
                elif len(words) == 2 and words[0] == "kept" and line.endswith("\n"):
                    self.kept.add(words[1])

    def tile(self, number: int, tile: int, sync: Callable[[], None]) -> None:
        """A tile is written; it enters the log with the next sync."""
        with self._lock:
            self._pending.append(f"tile {number} {tile}\n")
            begin = time.monotonic()
            if begin < self._next:
                return
            pending, self._pending = self._pending, []
            self._next = math.inf  # nobody else meanwhile
        sync()
        self._append(pending)
        with self._lock:
            end = time.monotonic()
            self._next = end + max(self._tuning.sync_every, self._tuning.sync_share * (end - begin))

    def keep(self, name: str, block: Block) -> None:
        """Put a result aside."""
        with written_whole(os.path.join(self.folder, name + ".npy")) as file:
            np.save(file, block)
        self._append([f"kept {name}\n"])
        self.kept.add(name)

    def load(self, name: str) -> Block:
        """A result that was put aside."""
        found: Block = np.load(os.path.join(self.folder, name + ".npy"))
        return found

    def flush(self, sync: Callable[[], None]) -> None:
        """Bring everything that is written into the log."""
        with self._lock:
            pending, self._pending = self._pending, []
        if pending:
            sync()
            self._append(pending)

    def _append(self, lines: list[str]) -> None:
        with open(self._log, "ab", buffering=0) as log:
            log.write("".join(lines).encode())
            os.fsync(log.fileno())

    def remove(self) -> None:
        """The work is done, or is no longer wanted."""
        shutil.rmtree(self.folder, ignore_errors=True)
