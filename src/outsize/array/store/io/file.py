"""A file read and written in large, aligned, direct transfers that release the GIL and stay out of the page cache.

In: byte offsets and buffers that begin on a page. Out: exact bytes. A range of bytes seldom begins and ends on a
page. Reads take the pages around it; writes send the pages inside it directly and the two ragged ends through the
page cache, or leave them with `Edges`; since no page is ever written both ways the kernel keeps the two coherent.
Where a file system refuses direct I/O the same calls run buffered and tell the kernel to drop what they touched.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from outsize.array.store.base import ALIGNMENT, Buffer, round_up
from outsize.array.store.io.edges import Edges, Page
from outsize.core.errors import InputError, MissingPath, StoreError
from outsize.core.units import format_bytes

_CALL = 1 << 26
"""Bytes of one system call: large enough to be free of overhead, small enough to be interrupted."""


class AlignedFile:
    """An open file. All transfers are positional, so that many threads can share it."""

    def __init__(self, path: str, *, writable: bool = False, create: bool = False) -> None:
        self.path = path
        self.writable = writable
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        with naming(path):
            self._buffered = os.open(path, flags, 0o666)
        try:
            self._descriptor: int | None = os.open(path, (flags & ~os.O_CREAT) | os.O_DIRECT)
        except OSError:  # the file system has no direct I/O
            self._descriptor = None
        self._direct = self._descriptor
        """None from the first refusal of a direct transfer on; other threads may be using the descriptor even then."""

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its path: another process opens it again."""
        return functools.partial(AlignedFile, writable=self.writable), (os.path.abspath(self.path),)

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        for fd in (getattr(self, "_buffered", None), getattr(self, "_descriptor", None)):
            if fd is not None:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._buffered, self._direct, self._descriptor = -1, None, None

    @property
    def size(self) -> int:
        """Length of the file in bytes."""
        return os.fstat(self._buffered).st_size

    def read(self, offset: int, length: int, buffer: Buffer) -> Buffer:
        """`length` bytes at `offset`, as a view inside `buffer`, which holds at least `window(length)` bytes."""
        start = offset // ALIGNMENT * ALIGNMENT
        lead = offset - start
        wanted = round_up(lead + length)
        got = 0
        with naming(self.path):
            while got < lead + length:
                piece = buffer[got : min(wanted, got + _CALL)]
                count = self._pread(piece, start + got)
                if count <= 0:
                    break
                got += count
                if got % ALIGNMENT:  # the end of the file
                    break
        if got < lead + length:
            missing = lead + length - got
            raise StoreError(
                f"{self.path} ends {format_bytes(missing)} too early: {length} bytes at offset {offset} were wanted, "
                f"the file has {self.size} bytes",
                path=self.path,
            )
        return buffer[lead : lead + length]

    def _pread(self, piece: Buffer, offset: int) -> int:
        direct = self._direct
        if direct is not None:
            try:
                return os.preadv(direct, [piece.data], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = None
        count = os.preadv(self._buffered, [piece.data], offset)
        os.posix_fadvise(self._buffered, offset, count, os.POSIX_FADV_DONTNEED)
        return count

    def write(self, offset: int, data: Buffer, bounce: Buffer, edges: Edges | None = None) -> None:
        """Write `data` at `offset`. Data whose address does not match its offset goes through `bounce` (or, if that is
        empty, through the page cache); ragged ends wait in `edges` for the rest of their page."""
        stop = offset + data.nbytes
        first, last = round_up(offset), stop // ALIGNMENT * ALIGNMENT
        with naming(self.path):
            if self._direct is None or first >= last:
                self._write_buffered(offset, data)
                return
            head = self._put(offset, data[: first - offset], edges)
            tail = self._put(last, data[last - offset :], edges)
            self._write_direct(first, data[first - offset : last - offset], bounce, head, tail)
            for page in (head, tail):
                if page is not None and edges is not None:
                    edges.written(page)

    def _put(self, offset: int, data: Buffer, edges: Edges | None) -> Page | None:
        """Leave a ragged end with `edges`, or write it; the page that it has completed, if it has."""
        if not data.nbytes:
            return None
        kept, page = (False, None) if edges is None else edges.put(offset, data)
        if not kept:
            self._write_buffered(offset, data)
        return page

    def _write_direct(
        self, offset: int, data: Buffer, bounce: Buffer, head: Page | None = None, tail: Page | None = None
    ) -> None:
        """Write whole pages, and the page before and after them in the same call where there is one."""
        before, after = [page.data for page in (head,) if page], [page.data for page in (tail,) if page]
        if data.ctypes.data % ALIGNMENT == 0:
            self._pwrite(offset - ALIGNMENT * len(before), [*before, data, *after])
            return
        for place, page in ((offset - ALIGNMENT, before), (offset + data.nbytes, after)):
            self._pwrite(place, page)
        step = bounce.nbytes // ALIGNMENT * ALIGNMENT
        if step == 0:
            self._write_buffered(offset, data)
            return
        for start in range(0, data.nbytes, step):
            piece = data[start : start + step]
            copy = bounce[: piece.nbytes]
            copy[:] = piece
            self._pwrite(offset + start, [copy])

    def _pwrite(self, offset: int, parts: list[Buffer]) -> None:
        """Write parts that lie one after another in the file."""
        while parts:
            direct = self._direct
            if direct is None:
                self._write_buffered(offset, parts[0])
                done = parts[0].nbytes
            else:
                try:
                    done = os.pwritev(direct, [part.data for part in parts], offset)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self._direct = None
                    continue
            offset += done
            while parts and done >= parts[0].nbytes:
                done -= parts.pop(0).nbytes
            if done:
                parts[0] = parts[0][done:]

    def _write_buffered(self, offset: int, data: Buffer) -> None:
        done = 0
        while done < data.nbytes:
            done += os.pwrite(self._buffered, data[done : done + _CALL].data, offset + done)

    def allocate(self, size: int) -> None:
        """Give the file its full length and its blocks, so that a full disk is met now and not half-way."""
        with naming(self.path):
            if size:
                try:
                    os.posix_fallocate(self._buffered, 0, size)
                except OSError as error:
                    if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                        raise
            os.ftruncate(self._buffered, size)

    def sync(self) -> None:
        """Make what was written survive a crash, and drop it from the page cache."""
        with naming(self.path):
            os.fsync(self._buffered)
        if self._direct is None:
            os.posix_fadvise(self._buffered, 0, 0, os.POSIX_FADV_DONTNEED)


def window(length: int) -> int:
    """Bytes of buffer that reading `length` bytes at any offset may need."""
    return round_up(length) + ALIGNMENT if length else 0


class naming(contextlib.AbstractContextManager[None]):
    """Turns the system's errors into a `StoreError` that names the file and, for a full disk, says so."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError) and not isinstance(error, StoreError):
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreError(f"no space is left on the disk of {self.path}: free some or choose another disk",
                                 path=self.path) from error  # fmt: skip
            folder = os.path.dirname(self.path)
            if error.errno == errno.ENOENT and not os.path.isdir(folder or "."):
                raise MissingPath(f"there is no folder {folder}: make it first", path=self.path) from error
            kind = MissingPath if error.errno == errno.ENOENT else StoreError
            raise kind(f"{self.path}: {error.strerror or error}", path=self.path) from error


@contextlib.contextmanager
def telling(what: str, path: str, but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turns whatever a library raises, but for some, into a `StoreError` of one sentence that begins with `what`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (StoreError, InputError, MemoryError, *but)):
            raise
        detail = " ".join(str(error).split())[:200]
        raise StoreError(f"{what}: {type(error).__name__}: {detail}", path=path) from None


@contextlib.contextmanager
def written_whole(
    path: str, part: str | None = None, publish: Callable[[str, str], None] = os.replace
) -> Iterator[BinaryIO]:
    """A file to write to. After the block it is there, whole and on its disk, or it is as it was."""
    part = part or path + ".part"
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        publish(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def sync_path(path: str) -> None:
    """Make a file, or a folder's list of names, survive a crash."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
