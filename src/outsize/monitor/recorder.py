"""Recordings in files: a `Recorder` adds lines to `run.watch` as they come, `load` reads one back.

Each line goes to the file at once, so a kill loses at most the line that was being written. A full disk ends no program:
the line that did not fit is taken back, the watch goes on, and writing is tried again later.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from outsize.core.errors import InputError, MissingPath, StoreError
from outsize.core.outcomes.recording import Finding, Head, Mark, Note, Recording, Sample
from outsize.core.outcomes.watch_stream import LONGEST, decode, encode, encode_head, is_stream

Item = Sample | Mark | Finding | Note
_RETRY = 5.0
"""Seconds after which a full disk is tried again."""


class Recorder:
    """Writes a recording, line by line."""

    def __init__(self, path: str | os.PathLike[str], head: Head) -> None:
        self.path = os.fspath(path)
        self.trouble: str | None = None
        """Why lines are missing, one sentence; None while all goes well."""
        self._retry_at, self._ended = 0.0, False
        self._file: int | None = _create(self.path)
        self._end = 0
        self._write(encode_head(head))

    def __call__(self, item: Item) -> None:
        """Add one line."""
        self._ended = isinstance(item, Mark) and item.kind == "end"
        self._write(encode(item))

    def close(self, time_: float, name: str = "ended") -> None:
        """Say that this is the end; a recording without it was cut off."""
        if self._file is not None and self.trouble is None and not self._ended:
            self._write(encode(Mark(time=time_, kind="end", name=name)))
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, line: str) -> None:
        if self._file is None or time.monotonic() < self._retry_at:
            return
        data = line.encode("utf-8", "replace")
        try:
            written = os.write(self._file, data)
            if written < len(data):
                written += os.write(self._file, data[written:])
            self._end += written
            self.trouble = None
        except OSError as error:
            self.trouble = f"{self.path} is not written for now: {error.strerror}: the watch goes on"
            self._retry_at = time.monotonic() + _RETRY
            try:
                os.ftruncate(self._file, self._end)
                os.lseek(self._file, self._end, os.SEEK_SET)
            except OSError:  # a pipe or a device has no end to go back to
                return


def check_writable(path: str | os.PathLike[str]) -> None:
    """Refuse now what `Recorder` would refuse: a place that cannot be written, a file that is no recording."""
    os.close(_create(os.fspath(path)))


def _create(path: str) -> int:
    """A new file; one that is there must be an old recording."""
    if os.path.isfile(path) and os.path.getsize(path) and not is_recording(path):
        raise InputError(f"{path} is there and is no recording: give --record another name")
    try:
        return os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}", path=path) from None


def is_recording(path: str) -> bool:
    """True where a file can be read and begins as a recording does."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return is_stream(file.read(64))
    except OSError:
        return False


def load(path: str | os.PathLike[str]) -> Recording:
    """The recording in a file, as far as it goes."""
    name = os.fspath(path)
    try:
        with open(name, encoding="utf-8", errors="replace") as file:
            return decode(_lines(file), name)
    except FileNotFoundError:
        raise MissingPath(f"there is no file {name}", path=name) from None


def _lines(file: Iterator[str]) -> Iterator[str]:
    """Lines of a file; one longer than any of ours (a file that is no recording) is cut, so that it is refused."""
    read = file.readline  # type: ignore[attr-defined]
    while line := read(LONGEST + 1):
        yield line
