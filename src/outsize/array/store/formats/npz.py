"""Members of `.npz` files: those stored as they are are read directly, deflated ones as a stream.

A deflated member has no way in but its beginning. So a few streams are kept open, each where its last read ended, and
a read takes the one that is nearest before it; reading in order then decompresses everything once. What is not wanted
is decompressed in small pieces and dropped, so memory stays bounded whatever the member's size.
"""

from __future__ import annotations

import io
import math
import threading
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from outsize.array.store.base import Block, Buffer, Region, Store, region_shape, round_up
from outsize.array.store.formats.flat import FlatLayout, FlatStore, offsets
from outsize.array.store.formats.npy import Order, read_header
from outsize.array.store.formats.zip_directory import DAMAGE, Member, holds_entry, read_directory
from outsize.array.store.io.file import AlignedFile
from outsize.array.store.options import DEFAULT, Options, choose_key
from outsize.core.errors import StoreError
from outsize.core.units import KiB, MiB

_STREAMS = 4
"""Streams kept open for one member."""
_PIECE = 256 * KiB
"""Bytes decompressed at once."""
_HELD = MiB
"""Bytes one read holds beside its block: a piece, its compressed bytes, zlib's window (0.6 MiB measured)."""


def recognise(path: str, head: bytes, size: int) -> bool:
    """True for a zip with `.npy` files in it."""
    return holds_entry(path, head, ".npy")


def open_file(path: str, options: Options = DEFAULT) -> Store:
    """One member of the file, called by its name without `.npy`."""
    members = {
        name.removesuffix(".npy"): member for name, member in read_directory(path).items() if name.endswith(".npy")
    }
    chosen = choose_key(path, list(members), options.key)
    member, name = members[chosen], f"{path}::{chosen}"
    if member.info.flag_bits & 1:
        raise StoreError(f"{name} is encrypted", path=path)
    start = member.offset()
    header = io.BytesIO(member.read(MiB + 64))
    shape, dtype, order, lead = read_header(header, name)
    nbytes = math.prod(shape) * dtype.itemsize
    if lead + nbytes > member.size:
        raise StoreError(
            f"{name} is cut off: {shape} of {dtype} need {lead + nbytes} bytes, the member has {member.size}", path=path
        )
    if member.compressed:
        return DeflatedStore(member, name, shape, dtype, lead, order)
    return FlatStore(AlignedFile(path), shape, dtype, start + lead, order, name)


class _Stream:
    """A member being decompressed, and how far."""

    def __init__(self, member: Member) -> None:
        self._archive = zipfile.ZipFile(member.path)
        self._stream = self._archive.open(member.info)
        self.position = 0

    def skip_to(self, position: int) -> None:
        while self.position < position:
            self._advance(min(_PIECE, position - self.position))

    def read_into(self, out: Buffer) -> None:
        done = 0
        while done < out.nbytes:
            data = self._advance(min(_PIECE, out.nbytes - done))
            out[done : done + len(data)] = np.frombuffer(data, np.uint8)
            done += len(data)

    def _advance(self, most: int) -> bytes:
        data = self._stream.read(most)
        if not data:
            raise EOFError(f"it ends after {self.position} bytes")
        self.position += len(data)
        return data

    def close(self) -> None:
        self._stream.close()
        self._archive.close()


class DeflatedStore(Store):
    """A compressed member, read as a stream."""

    def __init__(
        self, member: Member, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], lead: int, order: Order
    ) -> None:
        self.name, self.shape, self.dtype, self.paths = name, shape, dtype, (member.path,)
        self._member = member
        self._layout = FlatLayout(shape, dtype, lead, order)
        self.order = self._layout.order
        slowest = self.order[0] if self.order else 0
        self.granule = tuple(1 if axis == slowest else max(1, n) for axis, n in enumerate(shape))
        self._free: list[_Stream] = []
        self._lock = threading.Lock()

    def extent(self, region: Region) -> int:
        return round_up(self.bytes_of(region)) + _HELD

    def traffic(self, region: Region) -> int:
        """The region's share of the compressed bytes; a read out of order moves those before it too."""
        return math.ceil(self.bytes_of(region) / max(1, self._member.size) * self._member.info.compress_size)

    def read(self, region: Region, buffer: Buffer) -> Block:
        lying = self._layout.turn(region)
        runs, packed = self._layout.runs(lying), buffer[: self.bytes_of(region)]
        if packed.nbytes:
            with self._stream_before(runs.start) as stream:
                for number, (_, offset) in enumerate(offsets(runs)):
                    stream.skip_to(offset)
                    stream.read_into(packed[number * runs.length : (number + 1) * runs.length])
        return self._layout.turn_back(np.ndarray(region_shape(lying), self.dtype, packed.data))

    @contextmanager
    def _stream_before(self, position: int) -> Iterator[_Stream]:
        """The open stream nearest before a position, else a new one; it is kept for the next read."""
        with self._lock:
            before = [stream for stream in self._free if stream.position <= position]
            stream = max(before, key=lambda found: found.position) if before else None
            if stream is not None:
                self._free.remove(stream)
        try:
            stream = stream or _Stream(self._member)
            yield stream
        except (*DAMAGE, zlib.error) as error:
            if stream is not None:
                stream.close()
            raise StoreError(f"{self.name} is damaged: {error}", path=self._member.path) from None
        with self._lock:
            self._free.append(stream)
            dropped = self._free.pop(0) if len(self._free) > _STREAMS else None
        if dropped is not None:
            dropped.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return open_file, (self._member.path, Options(key=self._member.info.filename.removesuffix(".npy")))

    def close(self) -> None:
        with self._lock:
            free, self._free = self._free, []
        for stream in free:
            stream.close()
