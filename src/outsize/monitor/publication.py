"""What a process that watches itself tells those who watch it: a small file in a folder of its user.

`outsize.watch()` inside a program writes it about once a second; `outsize watch PID` and the parent of `outsize run
--watch` read it. The folder is the run's own where a parent made one, else one per user that nobody else may write to.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from dataclasses import dataclass

from outsize.core.noun import Noun, from_plain, to_plain
from outsize.core.outcomes.recording import AllocatorSample, Finding, Note

LARGEST = 2**20
"""Bytes of the largest file that is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication(Noun):
    """What a process says of itself."""

    pid: int
    time: float
    """Seconds since the epoch."""
    allocators: tuple[AllocatorSample, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[Note, ...] = ()
    step: int | None = None
    phase: str = ""


def user_folder() -> str:
    """The folder of this user for programs that nobody started for us."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return os.path.join(runtime, "outsize") if runtime else f"/tmp/outsize-watch-{os.getuid()}"


def make_folder(folder: str) -> bool:
    """Make sure that the folder is there and only ours; False where somebody else has it."""
    with contextlib.suppress(OSError):
        os.mkdir(folder, 0o700)
    return is_ours(folder)


def is_ours(folder: str) -> bool:
    """True if a folder is there, belongs to this user, and nobody else may write to it."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def publish(folder: str, publication: Publication) -> None:
    """Say it instead of what this process said before; where that is not possible, nothing is said. The file is written
    over: to put a new one in its place would make the file system write to its disk, which takes milliseconds. A reader
    that comes in between finds no whole text and takes what it read before."""
    data = json.dumps(to_plain(publication)).encode("utf-8", "replace")
    try:
        file = os.open(_path(folder, publication.pid), os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(file, data, 0)
            os.ftruncate(file, len(data))
        finally:
            os.close(file)
    except OSError:
        return


def withdraw(folder: str, pid: int) -> None:
    """Take back what a process said: it watches itself no longer."""
    with contextlib.suppress(OSError):
        os.unlink(_path(folder, pid))


def read_publication(folder: str, pid: int) -> Publication | None:
    """What a process last said, None where it says nothing."""
    try:
        with open(_path(folder, pid), encoding="utf-8") as file:
            return from_plain(Publication, json.loads(file.read(LARGEST)))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def _path(folder: str, pid: int) -> str:
    return os.path.join(folder, f"watch.{pid}")
