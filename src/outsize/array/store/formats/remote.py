"""Arrays in object stores and on the web: `s3://`, `gs://`, `https://`, `memory://` and all else that fsspec opens.

A .npy file is read by ranges of bytes, many at once; a zarr array by its chunks. Zarr arrays are written there too.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from outsize.array.store.base import Block, Buffer, Region, Store, give_back, region_shape, round_up
from outsize.array.store.formats.flat import FlatLayout
from outsize.array.store.io.addresses import Address, open_files
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
        try:
            version = np.lib.format.read_magic(head)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            self.shape, turned, self.dtype = read(head)
        except ValueError as error:
            raise StoreError(f"{path} is no .npy file: {error}", path=path) from None
        if self.dtype.hasobject:
            raise StoreError(f"{path} holds Python objects, which are never read", path=path)
        self._start = head.tell()
        if self._size < self._start + math.prod(self.shape) * self.dtype.itemsize:
            raise StoreError(f"{path} has {self._size} bytes and its header promises more: it is cut short", path=path)
        self.order = tuple(reversed(range(len(self.shape)))) if turned else None
        lying = tuple(reversed(self.shape)) if turned else self.shape
        self._layout = FlatLayout(lying, self.dtype, self._start)
        self.granule = tuple(min(1, n) for n in self.shape)

    def _lying(self, region: Region) -> Region:
        return tuple(reversed(region)) if self.order else region

    def extent(self, region: Region) -> int:
        size = self.bytes_of(region)
        return round_up(size) + round_up(self._objects.lanes * self._objects.beside(min(size, _RANGE)))

    def traffic(self, region: Region) -> int:
        return self.bytes_of(region)

    def read(self, region: Region, buffer: Buffer) -> Block:
        lying, size = self._lying(region), self.bytes_of(region)
        block = np.ndarray(region_shape(lying), self.dtype, buffer[:size].data)
        if size:
            give_back(buffer[round_up(size) :])
            flat = buffer[:size]
            pieces = list(self._ranges(lying))

            def fetch(piece: tuple[int, int, int], _: int) -> None:
                at, low, high = piece
                self._objects.read_range("", low, flat[at : at + high - low])

            self._objects.each(fetch, pieces, min(self._objects.lanes, len(pieces)))
        return block.transpose() if self.order else block

    def _ranges(self, region: Region) -> Iterator[tuple[int, int, int]]:
        """(place in the block, first byte, end) of what is wanted, in order, none longer than a request."""
        strides = [self.dtype.itemsize * math.prod(self._layout.shape[axis + 1 :]) for axis in range(len(region))]
        inner = len(region)
        while inner and region[inner - 1] == (0, self._layout.shape[inner - 1]):
            inner -= 1
        lead, axis = region[: max(0, inner - 1)], max(0, inner - 1)
        length = strides[axis] * (region[axis][1] - region[axis][0]) if region else self.dtype.itemsize
        first = strides[axis] * region[axis][0] if region else 0
        place = 0
        for index in np.ndindex(*region_shape(lead)):
            at = self._start + first + sum((a + i) * s for (a, _), i, s in zip(lead, index, strides, strict=False))
            for low in range(at, at + length, _RANGE):
                high = min(at + length, low + _RANGE)
                yield place, low, high
                place += high - low

    def fingerprint(self) -> str:
        return f"{self.name} {self._size} {self._files.ukey(self._inside)}"
