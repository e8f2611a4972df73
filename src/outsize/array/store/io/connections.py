"""Ranges of bytes of a web address, straight into memory of ours.

The libraries of object stores hand out bytes of their own, after an event loop has joined them: on a fast link that costs
several times what the bytes cost. Here a thread asks for a range over a connection that stays open, and the system writes the
answer where it is wanted. Nothing is retried and nothing explained: who calls asks the library where this fails.
"""

from __future__ import annotations

import collections
import http.client
import os
import threading
import urllib.parse
import urllib.request
from typing import Any

from outsize.array.store.base import Buffer

_TIMEOUT = 60.0
"""Seconds without a byte."""
_IDLE = 32
"""Connections to a host that stay open."""
_NO_ENCODING = {"Accept-Encoding": "identity"}


class Refused(Exception):
    """The answer is not the bytes that were asked for; `status` says why."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


_idle: dict[tuple[str, str], collections.deque[http.client.HTTPConnection]] = {}
_lock = threading.Lock()
os.register_at_fork(after_in_child=_idle.clear)  # a connection belongs to one process


def reachable(url: str) -> bool:
    """True for an address that is reached without a proxy."""
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    proxied = parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host)
    return parts.scheme in ("http", "https") and bool(host) and not proxied


class Answer:
    """The bytes of an object, whole or from `start` on (the last ones, where it is negative), as they come."""

    def __init__(self, url: str, start: int | None, size: int = 0) -> None:
        parts = urllib.parse.urlsplit(url)
        self._place = (parts.scheme, parts.netloc)
        headers = dict(_NO_ENCODING)
        if start is not None:
            headers["Range"] = f"bytes={start}-{start + size - 1}" if start >= 0 else f"bytes={start}"
        target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        self._connection, self._answer = _ask(self._place, target, headers)
        encoded = self._answer.getheader("Content-Encoding", "identity") != "identity"
        if self._answer.status != (200 if start is None else 206) or self._answer.length is None or encoded:
            self._connection.close()
            raise Refused(self._answer.status)
        self.size: int = self._answer.length

    def take(self, out: Buffer) -> None:
        """The next ones."""
        done = 0
        while done < out.nbytes:
            count = self._answer.readinto(out[done:].data)
            if not count:
                raise http.client.IncompleteRead(b"", out.nbytes - done)
            done += count

    def close(self) -> None:
        """Give the connection back, if all of it was read."""
        if not self._answer.isclosed() or self._answer.will_close:
            self._connection.close()
            return
        with _lock:
            _idle.setdefault(self._place, collections.deque(maxlen=_IDLE)).append(self._connection)


def _ask(place: tuple[str, str], target: str, headers: dict[str, str]) -> tuple[Any, http.client.HTTPResponse]:
    """A connection and its answer; one that stood idle may have been closed meanwhile, so that another is opened."""
    while True:
        with _lock:
            waiting = _idle.get(place)
            old = waiting.pop() if waiting else None
        connection = old or _open(place)
        try:
            connection.request("GET", target, headers=headers)
            return connection, connection.getresponse()
        except (OSError, http.client.HTTPException):
            connection.close()
            if old is None:
                raise


def _open(place: tuple[str, str]) -> http.client.HTTPConnection:
    scheme, host = place
    kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
    return kind(host.rpartition("@")[2], timeout=_TIMEOUT)
