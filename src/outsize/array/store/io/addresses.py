"""Objects behind an address: `s3://`, `gs://`, `https://`, `memory://` and all else that fsspec opens.

fsspec's file system knows the credentials. Where it can sign an address, its bytes are fetched over connections of ours
(`connections`), several at once. All else, and whatever fails there, is asked of the file system itself, which tries again and
knows what its errors mean.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from outsize.array.store.base import Buffer
from outsize.array.store.io.file import telling
from outsize.array.store.io.objects import Item, Objects, Take, cut_short
from outsize.core.errors import InputError, MissingExtra
from outsize.core.extras import missing, need

if TYPE_CHECKING:  # the standard library's connections take three mebibytes, which most programs do without
    from outsize.array.store.io import connections

_LANES = 16
"""Requests at once: enough to fill a link whose answers take their time."""
_LANE = 96 << 10
"""What a thread and its connection take."""
_PIECE = 1 << 20
"""Bytes that the library is asked for at once."""
_SIGNED = 3600
"""Seconds that a signed address is good for; half of that it is used."""
_FAILURES = 3
"""Times in a row that a connection of ours fails and the library does not, before only the library is asked."""

_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp", "az": "adlfs",
             "abfs": "adlfs", "hf": "huggingface_hub"}  # fmt: skip
"""Scheme of an address -> the package that reads it."""
_SETTINGS: dict[str, dict[str, Any]] = {
    scheme: {"config_kwargs": {"signature_version": "s3v4"}} for scheme in ("s3", "s3a")
}
"""Scheme -> what its file system is told: the form of signed addresses that every S3 takes."""


def is_remote(path: str) -> bool:
    """True for an address such as `s3://bucket/x.npy`."""
    scheme, mark, _ = path.partition("://")
    return bool(mark) and scheme.replace("+", "").replace("-", "").isalnum() and scheme != "file"


def open_files(path: str) -> tuple[Any, str]:
    """The file system of an address, and the path inside it."""
    fsspec = need("fsspec", path)
    scheme = path.partition("://")[0]
    try:
        files, inside = fsspec.core.url_to_fs(path, **_SETTINGS.get(scheme, {}))
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        raise MissingExtra(missing(package, path) if package else f"{path} cannot be reached: {error}") from error
    except ValueError as error:
        raise InputError(f"{path} cannot be reached: {error}") from None
    return files, inside


class Address(Objects):
    """What stands below an address."""

    lanes = _LANES

    def __init__(self, name: str, files: Any, inside: str) -> None:
        self.name, self._files, self._inside = name, files, inside
        self._failed = 0
        self._signed = _Signed()

    def __reduce__(self) -> tuple[Any, ...]:
        return Address, (self.name, self._files, self._inside)

    def beside(self, size: int) -> int:
        """Twice what the library brings at once: as it comes, and joined; and what a thread and its connection take."""
        return _LANE + 2 * min(size, _PIECE)

    @contextlib.contextmanager
    def open(self, key: str, start: int | None = None, size: int = 0) -> Iterator[tuple[str, int, Take]]:
        with contextlib.closing(self._open(key, start, size)) as stream:
            yield self._named(key), stream.size, stream.take

    def exists(self, key: str) -> bool:
        return bool(self._files.exists(self._path(key)))

    def each(self, work: Callable[[Item, int], None], items: Iterable[Item], lanes: int) -> None:
        if lanes == 1:
            return super().each(work, items, lanes)
        source, turn, stopped = iter(items), threading.Lock(), threading.Event()

        def live(lane: int) -> None:
            try:
                while not stopped.is_set():
                    with turn:
                        item = next(source, source)
                    if item is source:
                        return
                    work(item, lane)  # type: ignore[arg-type]
            except BaseException:
                stopped.set()
                raise

        lives = [_threads().submit(live, lane) for lane in range(lanes)]
        try:
            wait(lives)
        finally:
            stopped.set()  # also where Ctrl-C ends the waiting: nothing is written into memory that is given back
            wait(lives)
        for life in lives:
            life.result()

    def _path(self, key: str) -> str:
        return f"{self._inside.rstrip('/')}/{key}" if key else self._inside

    def _named(self, key: str) -> str:
        return f"{self.name}/{key}" if key else self.name

    def _open(self, key: str, start: int | None = None, size: int = 0) -> _Stream:
        if self._failed < _FAILURES:
            try:
                answer = self._ask(key, start, size)
                return _Stream(self, key, answer.size, start or 0, answer)
            except Exception:  # whatever it was, the library tries again and says what it is
                stream = self._open_by_library(key, start, size)
                self.failed()
                return stream
        return self._open_by_library(key, start, size)

    def failed(self) -> None:
        """A connection of ours failed, and the library did not."""
        self._failed += 1

    def _ask(self, key: str, start: int | None, size: int) -> connections.Answer:
        from outsize.array.store.io import connections

        for again in (False, True):
            try:
                answer = connections.Answer(self._sign(self._path(key), again), start, size)
                self._failed = 0
                return answer
            except connections.Refused as refused:
                if again or refused.status != 403:  # a signed address may have come to its end before its time
                    raise
        raise AssertionError(key)

    def _open_by_library(self, key: str, start: int | None, size: int) -> _Stream:
        with self._telling(key):
            end = int(self._files.size(self._path(key)))
        first = max(0, end + start) if start is not None and start < 0 else start or 0
        return _Stream(self, key, end - first if start is None else min(size, max(0, end - first)), first, None)

    def ask_library(self, key: str, start: int, out: Buffer) -> None:
        """Bytes from `start` on, as fsspec's file system gives them."""
        for low in range(0, out.nbytes, _PIECE):
            high = min(out.nbytes, low + _PIECE)
            with self._telling(key):
                data = self._files.cat_file(self._path(key), start=start + low, end=start + high)
            if len(data) != high - low:
                raise cut_short(self._named(key), start + low + len(data))
            out[low:high] = np.frombuffer(data, np.uint8)

    def _telling(self, key: str) -> contextlib.AbstractContextManager[None]:
        name = self._named(key)
        return telling(f"{name} cannot be read", name, (FileNotFoundError,))

    def _sign(self, path: str, again: bool) -> str:
        signed = self._signed
        bucket, _, key = path.partition("/")
        if again or signed.bucket != bucket or time.monotonic() - signed.when > _SIGNED / 2:
            url = _web_address(self._files, path)
            signed = self._signed = _Signed(bucket, time.monotonic(), path, url, _find_signer(self._files, url, key))
        if signed.path == path:
            return signed.url
        return signed.sign(key) if signed.sign is not None else self._sign(path, True)


class _Signed(NamedTuple):
    """The last address that was asked for, and what makes others of it."""

    bucket: str = ""
    when: float = 0.0
    path: str = ""
    url: str = ""
    sign: Callable[[str], str] | None = None


class _Stream:
    """Bytes of an object in order: over a connection of ours as long as it lasts, then from the library."""

    def __init__(self, source: Address, key: str, size: int, first: int, answer: connections.Answer | None) -> None:
        self.size = size
        self._source, self._key, self._next, self._answer = source, key, first, answer

    def take(self, out: Buffer) -> None:
        """The next ones."""
        if self._answer is not None:
            import http.client

            try:
                self._answer.take(out)
                self._next += out.nbytes
                return
            except (OSError, http.client.HTTPException):
                self.close()
        self._source.ask_library(self._key, self._next, out)
        self._next += out.nbytes

    def close(self) -> None:
        """Let go of the connection."""
        if self._answer is not None:
            self._answer.close()
            self._answer = None


def _web_address(files: Any, path: str) -> str:
    """Where the bytes of an object are had from the web without another word; an error where that is not known."""
    protocol = files.protocol if isinstance(files.protocol, tuple) else (files.protocol,)
    if "http" in protocol:
        if files.kwargs or files.client_kwargs:
            raise NotImplementedError("a file system with settings of its own")
        url = path
    else:
        url = files.sign(path, expiration=_SIGNED)
    from outsize.array.store.io import connections

    if not connections.reachable(url):
        raise NotImplementedError(url)
    return str(url)


def _find_signer(files: Any, url: str, key: str) -> Callable[[str], str] | None:
    """What signs other addresses as s3fs has signed this one; None where only the library does."""
    if "X-Amz-Signature" not in url:
        return None
    from fsspec.asyn import sync

    from outsize.array.store.io.signing import make_signer

    async def ask() -> Any:
        found = await files.session.get_credentials()
        return await found.get_frozen_credentials()

    try:
        return make_signer(url, key, sync(files.loop, ask).secret_key)
    except Exception:  # another library, or another version of it
        return None


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Threads of all addresses."""
    return ThreadPoolExecutor(_LANES, "outsize-address")


os.register_at_fork(after_in_child=_threads.cache_clear)
