"""What a decomposition has done so far, in the scratch folder, so that the same call goes on after a kill.

A folder named by a digest of the work (the data as they are now, the arguments). It has the state of every pass: finished ones
with what they gave, and the one under way with how many chunks it has folded. A state is written beside its place and
renamed. Nothing is written before the first interval is over: short work is done again in a moment. From then on every
finished pass is noted before what it read is let go of.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from outsize.array.graph.node import Node, Source, structure, walk
from outsize.array.store.io.file import written_whole
from outsize.core.errors import ClusterError, InputError

_PREFIX = "outsize-decompose-"
_SHARE = 20
"""Writing states takes at most one part in so many of the time."""
_OLD = 14 * 86400
"""Seconds after which what an interrupted run left is removed by other runs."""

INTERVAL = 10.0
"""Seconds between two states, at the least."""


class Checkpoint:
    """The states of one decomposition; none are kept without a folder."""

    def __init__(self, folder: str | None, budget: int) -> None:
        self.folder, self.budget = folder, budget
        self._began = self._last = time.monotonic()
        self._cost = 0.0
        self._started = folder is not None and os.path.exists(os.path.join(folder, "header.json"))
        self.stage = -1
        """The number of the present pass."""

    def next(self) -> int:
        """The number of the next pass."""
        self.stage += 1
        return self.stage

    def load(self, stage: int) -> tuple[dict[str, Any], int] | None:
        """(state, chunks that were folded) of a pass that an earlier run has begun; -1 where it has finished it."""
        if self.folder is None:
            return None
        path = self._path(stage)
        if not os.path.exists(path):
            return None
        with np.load(path, allow_pickle=False) as found:
            state = {name: found[name] for name in found.files}
        return state, int(state.pop("done"))

    def due(self) -> bool:
        """True where a state is to be written now."""
        since = time.monotonic() - self._last
        return self.folder is not None and since >= max(INTERVAL, _SHARE * self._cost)

    def begin(self) -> None:
        """From now on the folder is there, and every finished pass is noted."""
        if self.folder is not None and not self._started:
            os.makedirs(self.folder, exist_ok=True)
            with written_whole(os.path.join(self.folder, "header.json")) as file:
                file.write(json.dumps({"budget": self.budget}).encode())
            self._started = True

    def save(self, stage: int, done: int, state: dict[str, Any]) -> None:
        """Write the state of a pass."""
        if self.folder is None:
            return
        began = time.monotonic()
        self.begin()
        with written_whole(self._path(stage)) as file:
            np.savez(file, **state, done=done)
        self._last = time.monotonic()
        self._cost = self._last - began

    def finish(self, stage: int, state: dict[str, Any]) -> None:
        """Note a finished pass, where anything was noted before or is due."""
        if self._started or self.due():
            self.save(stage, -1, state)

    def _path(self, stage: int) -> str:
        assert self.folder is not None
        return os.path.join(self.folder, f"{stage}.npz")

    def remove(self) -> None:
        """The work is done, or is no longer wanted."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def digest_of(node: Node, arguments: str) -> str | None:
    """What tells this work from other work; None where data are only in memory, which no kill survives."""
    known: dict[int, str] = {}
    for each in walk(node):
        if isinstance(each, Source):
            if not each.store.paths:
                return None
            known[id(each)] = each.store.fingerprint()
    return hashlib.blake2b(f"{structure(node, known)} {arguments}".encode(), digest_size=16).hexdigest()


@contextlib.contextmanager
def checkpoint(scratch: str, digest: str | None, budget: int, resume: bool) -> Iterator[Checkpoint]:
    """The states of a decomposition while it runs; they stay where it is killed or interrupted, and go where it ends."""
    if digest is None or not _writable(scratch):
        yield Checkpoint(None, budget)
        return
    folder = os.path.join(scratch, _PREFIX + digest)
    _forget_old(scratch)
    with open(folder + ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                "another process runs this very decomposition: wait for it, or give resume=False"
            ) from None
        earlier = _earlier_budget(folder)
        if earlier is None or not resume or earlier > budget:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            budget = earlier
        made = Checkpoint(folder, budget)
        try:
            yield made
        except (KeyboardInterrupt, ClusterError) as stop:
            stop.add_note(f"finished passes are kept in {folder}: the same call goes on from there")
            raise
        except BaseException:
            made.remove()
            raise
        else:
            made.remove()
        finally:
            with contextlib.suppress(OSError):
                os.unlink(folder + ".lock")


def _writable(scratch: str) -> bool:
    """True where states can be kept; work that needs no scratch runs without them."""
    with contextlib.suppress(OSError):
        os.makedirs(scratch, exist_ok=True)
        return os.access(scratch, os.W_OK)
    return False


def _earlier_budget(folder: str) -> int | None:
    with (
        contextlib.suppress(OSError, ValueError, KeyError, TypeError),
        open(os.path.join(folder, "header.json")) as file,
    ):
        return int(json.load(file)["budget"])
    return None


def _forget_old(scratch: str) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(scratch):
            path = os.path.join(scratch, name)
            if name.startswith(_PREFIX) and time.time() - os.path.getmtime(path) > _OLD:
                shutil.rmtree(path, ignore_errors=True) if os.path.isdir(path) else os.unlink(path)
