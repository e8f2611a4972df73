"""Where an unfinished output lies, and what lies beside it.

Both are found by name after a kill, so an output that is begun anew first removes what an earlier one left: its journal
speaks of tiles that this one does not have. One save holds it at a time, by a lock of the kernel's, which ends with
its process: what a kill left is never held.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
from collections.abc import Iterator

from outsize.array.store.io.file import naming, sync_path
from outsize.core.errors import StoreError

JOURNAL = ".journal"
"""Beside the unfinished output: the folder of what is finished in it."""
EDGES = ".edges"
"""Beside the unfinished output: the file of pages that are half there."""
SCRATCH = ".scratch"
"""Beside the unfinished output: the folder of what the workers of a cluster leave to each other."""
LOCK = ".lock"
"""Beside the unfinished output: the file that the save which writes it has locked, and that says who it is."""
_locks: set[int] = set()
"""Descriptors of the locks of this process."""


def partial_path(path: str) -> str:
    """Where the unfinished output for a target lies: hidden, in the same folder, always the same name."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(folder, f".{name}.outsize-partial")


def forget_earlier(partial: str) -> None:
    """Remove what an earlier run left beside its unfinished output; called before this one's first byte."""
    for beside in (JOURNAL, SCRATCH):
        shutil.rmtree(partial + beside, ignore_errors=True)
    pathlib.Path(partial + EDGES).unlink(missing_ok=True)


def publish(partial: str, target: str) -> None:
    """Give a complete output its final name for good. A rename does not replace a folder: an older one is moved away first."""
    place, old = os.path.abspath(target), f"{partial}.replaced"
    with naming(target):
        if os.path.isdir(partial) and os.path.lexists(place):
            shutil.rmtree(old, ignore_errors=True)
            os.rename(place, old)
        os.replace(partial, place)
        sync_path(os.path.dirname(place))
    if os.path.isdir(old) and not os.path.islink(old):
        shutil.rmtree(old, ignore_errors=True)
    elif os.path.lexists(old):
        os.unlink(old)


@contextlib.contextmanager
def hold(path: str) -> Iterator[None]:
    """Keep every other save away from a target's unfinished output; a `StoreError` that says who has it."""
    lock = partial_path(path) + LOCK
    fd = _take(path, lock)
    try:
        yield
    finally:
        if fd in _locks:
            with contextlib.suppress(OSError):
                os.unlink(lock)  # before it is let go: who opened it meanwhile sees that it is gone
            _release(fd)


def _take(path: str, lock: str) -> int | None:
    """The locked file; None where nothing can be made there, which the output then says, or nothing be locked."""
    while True:
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            return None
        _locks.add(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino == os.stat(lock).st_ino:
                _sign(fd)
                return fd
        except BlockingIOError:
            who = os.pread(fd, 200, 0).decode(errors="replace") or "another process"
            _release(fd)
            raise StoreError(
                f"{path} is being written by {who}: wait until that is done, or save under another name", path=path
            ) from None
        except FileNotFoundError:
            pass
        except OSError:  # a file system without locks
            return fd
        _release(fd)  # its holder has just ended and removed it


def _sign(fd: int) -> None:
    with contextlib.suppress(OSError):  # a full disk
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)


def _release(fd: int) -> None:
    _locks.remove(fd)
    os.close(fd)


def _forget_locks() -> None:
    """In a forked child, which would hold its parent's locks beyond the parent's death."""
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_forget_locks)
