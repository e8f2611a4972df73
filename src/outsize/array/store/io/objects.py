"""Objects that are read into memory of ours: the files of a folder here, in `addresses` what stands behind an address.

A store says which bytes of which objects it wants, and works on each as soon as it is there. A folder gives one after another;
an address gives several at once, each on a lane: a thread with memory of its own.
"""

from __future__ import annotations

import abc
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from outsize.array.store.base import Buffer
from outsize.core.errors import StoreError
from outsize.core.units import format_bytes

Item = TypeVar("Item")
Take = Callable[[Buffer], None]
"""Fills memory with what comes next."""


class Objects(abc.ABC):
    """Objects by their names."""

    lanes = 1
    """How many are read at once, at most."""

    def beside(self, size: int) -> int:
        """What a lane takes beside the memory that it reads pieces of this size into."""
        return 0

    @abc.abstractmethod
    def open(self, key: str, start: int | None = None, size: int = 0) -> AbstractContextManager[tuple[str, int, Take]]:
        """(what messages call it, how many bytes there are, what fills memory with them in order): all of an object, or so many
        from `start` on, the last ones where it is negative. `FileNotFoundError` where there is none."""

    def read_whole(self, key: str, out: Buffer) -> Buffer:
        """A whole object at the start of `out`; one that is longer is refused."""
        with self.open(key) as (name, size, take):
            if size > out.nbytes:
                raise StoreError(
                    f"chunk file {name} has {format_bytes(size)}, more than any encoding of its chunk "
                    f"({format_bytes(out.nbytes)}): it is damaged", path=name,
                )  # fmt: skip
            take(out[:size])
        return out[:size]

    @contextlib.contextmanager
    def stream(self, key: str, start: int, size: int) -> Iterator[Take]:
        """So many bytes from `start` on; less is an error."""
        with self.open(key, start, size) as (name, there, take):
            if there != size:
                raise cut_short(name, there)
            yield take

    def read_range(self, key: str, start: int, out: Buffer) -> None:
        """So many bytes as `out` has, from `start` on."""
        with self.stream(key, start, out.nbytes) as take:
            take(out)

    @abc.abstractmethod
    def exists(self, key: str) -> bool:
        """True where there is such an object."""

    def each(self, work: Callable[[Item, int], None], items: Iterable[Item], lanes: int) -> None:
        """`work(item, lane)` for every item, on up to so many lanes at once."""
        for item in items:
            work(item, 0)


class Folder(Objects):
    """The files of a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def locate(self, key: str) -> str:
        return os.path.join(self.path, key)

    def exists(self, key: str) -> bool:
        return os.path.exists(self.locate(key))

    @contextlib.contextmanager
    def open(self, key: str, start: int | None = None, size: int = 0) -> Iterator[tuple[str, int, Take]]:
        path = self.locate(key)
        with open(path, "rb", buffering=0) as file:
            end = os.fstat(file.fileno()).st_size
            first = max(0, end + start) if start is not None and start < 0 else start or 0
            file.seek(first)
            there = end - first if start is None else min(size, max(0, end - first))
            yield path, there, lambda out: _fill(file, path, out)


def cut_short(path: str, size: int) -> StoreError:
    """What an object is that ends before the bytes that were promised."""
    return StoreError(f"{path} has {format_bytes(size)} and its header promises more: it is cut short", path=path)


def _fill(file: Any, path: str, out: Buffer) -> None:
    done = 0
    while done < out.nbytes:
        count = file.readinto(out[done:].data)
        if not count:
            raise StoreError(f"chunk file {path} ended at byte {done} of {out.nbytes} while it was read", path=path)
        done += count
