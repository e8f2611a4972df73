"""Files that a followed script writes: they go to a folder that is thrown away, and the script finds them there.

In: the script's calls to `open`, `os` and whatever stands on these (`pathlib`, `shutil`, `numpy.save`, logging). Out: the same
answers as on the real disk, where nothing changes. A file that the script has written is read from the folder, one that it has
removed is gone, and all others are the real ones.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from outsize.model.torch_port.patches import Row, replaced

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
"""Flags of `os.open` that change a file."""

COPIED = 256 * 2**20
"""Largest file of which a copy is made for a script that changes it in place."""

PLAIN = ("/dev/", "/proc/", "/sys/")
"""Where a path is no file on a disk."""


class Overlay:
    """A folder that lies over the disk for one process."""

    def __init__(self, folder: str) -> None:
        self.folder = os.path.realpath(folder)
        self.gone: set[str] = set()
        """Real files that the script has removed."""
        self.written: dict[str, None] = {}
        """What the script wanted to write, in order."""
        self.off = False
        """True once the script has ended: calls are then the plain ones."""

    def shown(self, path: Any, at: int | None = None) -> Any:
        """The path at which the script finds a file."""
        if isinstance(path, int):
            return path
        whole = self.whole(path, at)
        if not self.covers(whole):
            return path if at is None else whole
        over = self._over(whole)
        if os.path.lexists(over):
            return over
        if any(whole == gone or whole.startswith(f"{gone}/") for gone in self.gone):
            return f"{self.folder}/gone"  # there is never anything at this path
        return path if at is None else whole

    def owned(self, path: Any, at: int | None = None, copy: bool = True) -> Any:
        """The path at which the script may write a file; `copy`: what is in the real one comes along."""
        if isinstance(path, int):
            return path
        whole = self.whole(path, at)
        if not self.covers(whole):
            return path if at is None else whole
        over = self._over(whole)
        here = self.shown(whole)
        parent = os.path.dirname(whole)
        if not os.path.isdir(self.shown(parent)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), whole)
        os.makedirs(self._over(parent), exist_ok=True)
        if copy and here == whole and os.path.isfile(here):
            if os.path.getsize(here) > COPIED:
                raise PermissionError(errno.EPERM, "a file this large is not copied to be changed", whole)
            shutil.copyfile(here, over)
        self.written.setdefault(whole)
        self.gone.discard(whole)
        return over

    def covers(self, path: Any) -> bool:
        """True for a path on a disk, outside this folder."""
        if self.off or isinstance(path, int) or path is None:
            return False
        whole = self.whole(path)
        return not whole.startswith((f"{self.folder}/", *PLAIN)) and whole != self.folder

    def whole(self, path: Any, at: int | None = None) -> str:
        """The absolute path; `at` is an open folder."""
        found = os.fsdecode(path)
        return os.path.normpath(os.path.join(os.getcwd() if at is None else os.readlink(f"/proc/self/fd/{at}"), found))

    def _over(self, whole: str) -> str:
        return self.folder + "/disk" + whole

    def installed(self) -> contextlib.AbstractContextManager[None]:
        """The block's calls meet this folder."""
        calls = _Calls(self)
        rows: list[Row] = [(builtins, "open", calls.open_file), (io, "open", calls.open_file)]
        rows += [(os, name, getattr(calls, name)) for name in _Calls.NAMES]
        rows += [
            (os, name, calls.reading(getattr(os, name))) for name in ("stat", "lstat", "access", "readlink", "chdir")
        ]
        rows += [(os, name, calls.changing(getattr(os, name))) for name in ("chmod", "utime", "truncate", "mkdir")]
        return replaced(rows)


class _Calls:
    """The functions that stand in `os` and `builtins`."""

    NAMES = ("open", "listdir", "scandir", "remove", "unlink", "rmdir", "rename", "replace", "link", "symlink")

    def __init__(self, overlay: Overlay) -> None:
        self.over = overlay
        self._open, self._open_file, self._listdir, self._scandir = os.open, io.open, os.listdir, os.scandir
        self._remove, self._rmdir, self._replace = os.remove, os.rmdir, os.replace
        self._link, self._symlink, self._exists = os.link, os.symlink, os.path.lexists

    def open_file(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("opener") is None and self.over.covers(file):
            changes = set(mode) & set("wax+")
            file = self.over.owned(file, copy="w" not in mode) if changes else self.over.shown(file)
        return self._open_file(file, mode, *args, **kwargs)

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if not self.over.covers(path) and dir_fd is None:
            return self._open(path, flags, mode)
        place = self.over.owned if flags & WRITING and not flags & os.O_DIRECTORY else self.over.shown
        return self._open(place(path, dir_fd), flags, mode)

    def reading(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def read(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            return function(self.over.shown(path, dir_fd), *args, **kwargs)

        return read

    def changing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def change(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            if (
                function.__name__ == "mkdir"
                and self.over.covers(path)
                and os.path.lexists(self.over.whole(path, dir_fd))
            ):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            return function(self.over.owned(path, dir_fd), *args, **kwargs)

        return change

    def listdir(self, path: Any = ".") -> Any:
        return [entry.name for entry in self.scandir(path)] if self.over.covers(path) else self._listdir(path)

    def scandir(self, path: Any = ".") -> Any:
        """Entries of the real folder and of the one above it."""
        at = path if isinstance(path, int) else None
        if at is not None:
            path = os.readlink(f"/proc/self/fd/{at}")
        if not self.over.covers(path):
            return self._scandir(path)
        whole = self.over.whole(path)
        above = self.over.shown(whole)
        found: dict[str, Any] = {}
        for place in dict.fromkeys((whole, above)):
            try:
                with self._scandir(place) as entries:
                    found |= {entry.name: entry for entry in entries}
            except FileNotFoundError:
                if place == above:
                    raise
        return _Entries([entry for name, entry in found.items() if f"{whole}/{name}" not in self.over.gone])

    def remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._take_away(self._remove, path, dir_fd)

    unlink = remove

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._take_away(self._rmdir, path, dir_fd)

    def _take_away(self, function: Callable[..., Any], path: Any, at: int | None) -> None:
        whole = self.over.whole(path, at)
        if not self.over.covers(whole):
            function(path if at is None else whole)
            return
        here = self.over.shown(whole)
        if here != whole:
            function(here)
        if self._exists(whole):
            self.over.gone.add(whole)

    def rename(self, source: Any, target: Any, **_: Any) -> None:
        if not self.over.covers(source) and not self.over.covers(target):
            return self._replace(source, target)
        place = self.over.owned(source)
        if os.path.isdir(place) or not os.path.lexists(place):
            place = self.over.shown(source)
        self._replace(place, self.over.owned(target, copy=False))
        if self.over.covers(source) and self._exists(self.over.whole(source)):
            self.over.gone.add(self.over.whole(source))
        return None

    replace = rename

    def link(self, source: Any, target: Any, **_: Any) -> None:
        shutil.copyfile(source, target)

    def symlink(self, source: Any, target: Any, *args: Any, dir_fd: int | None = None, **_: Any) -> None:
        self._symlink(source, self.over.owned(target, dir_fd, copy=False))


class _Entries(list[Any]):
    """What `os.scandir` gives: also a context and an iterator."""

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def __next__(self) -> Any:
        if not self:
            raise StopIteration
        return self.pop(0)

    def __iter__(self) -> Iterator[Any]:
        while self:
            yield self.pop(0)

    def close(self) -> None:
        self.clear()
