"""Arrays in object stores and on the web: `s3://`, `gs://`, `https://`, `memory://` and all else that fsspec opens.

A .npy file is read by ranges of bytes, many at once; a zarr array by its chunks. Zarr arrays are written there too.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from outsize.array.store.base import Block, Buffer, Region, Store, give_back, region_shape, round_up
from outsize.array.store.formats.flat import FlatLayout, offsets
from outsize.array.store.formats.npy import read_header
from outsize.array.store.io.addresses import Address, open_files
from outsize.array.store.io.objects import cut_short
from outsize.array.store.options import Options
from outsize.core.errors import InputError, StoreError

_HEAD = 1 << 16
"""Bytes that hold the header of any .npy file of numbers."""
_RANGE = 4 << 20
"""Bytes of a request: long enough that a few at once fill a link."""


def open_remote(path: str, options: Options) -> Store:
    """The array at an address."""
    files, inside = open_files(path)
    if options.mode != "r":
        raise InputError(f"{path} cannot be written in place: save to a local path and copy it")
    if path.rstrip("/").endswith(".zarr") or ".zarr/" in path or options.key is not None:
        from outsize.array.store.formats.remote_zarr import RemoteZarr  # it needs zarr-python

        return RemoteZarr(path, options)
    if not path.endswith(".npy"):
        raise InputError(f"{path}: .npy files and zarr arrays are read where they are; download others first")
    try:
        return RemoteNpy(path, files, inside)
    except FileNotFoundError:
        raise StoreError(f"{path}: there is no such file", path=path) from None


class RemoteNpy(Store):
    """A .npy file of which ranges of bytes are fetched."""

    def __init__(self, path: str, files: Any, inside: str) -> None:
        self.name, self._files, self._inside = path, files, inside
        self._objects = Address(path, files, inside)
        self._size = int(files.info(inside)["size"])
        head = io.BytesIO(files.cat_file(inside, start=0, end=min(self._size, _HEAD)))
        self.shape, self.dtype, self.order, start = read_header(head, path)
        self._layout = FlatLayout(self.shape, self.dtype, start, self.order)
        if self._size < start + self._layout.nbytes:
            raise cut_short(path, self._size)

    def extent(self, region: Region) -> int:
        size = self.bytes_of(region)
        return round_up(size) + round_up(self._objects.lanes * self._objects.beside(min(size, _RANGE)))

    def traffic(self, region: Region) -> int:
        return self.bytes_of(region)

    def read(self, region: Region, buffer: Buffer) -> Block:
        lying, size = self._layout.turn(region), self.bytes_of(region)
        block = np.ndarray(region_shape(lying), self.dtype, buffer[:size].data)
        if size:
            give_back(buffer[round_up(size) :])
            flat, pieces = buffer[:size], list(self._ranges(lying))

            def fetch(piece: tuple[int, int, int], _: int) -> None:
                place, start, length = piece
                self._objects.read_range("", start, flat[place : place + length])

            self._objects.each(fetch, pieces, min(self._objects.lanes, len(pieces)))
        return self._layout.turn_back(block)

    def _ranges(self, lying: Region) -> Iterator[tuple[int, int, int]]:
        """(place in the block, first byte, bytes) of what is wanted, in order, none longer than a request."""
        runs = self._layout.runs(lying)
        for number, (_, offset) in enumerate(offsets(runs)):
            for low in range(0, runs.length, _RANGE):
                yield number * runs.length + low, offset + low, min(_RANGE, runs.length - low)

    def fingerprint(self) -> str:
        return f"{self.name} {self._size} {self._files.ukey(self._inside)}"
