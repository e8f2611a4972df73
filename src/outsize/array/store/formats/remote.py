"""Arrays in object stores and on the web: `s3://`, `gs://`, `https://`, `memory://` and all else that fsspec opens.

A .npy file is read by ranges of bytes, many at once. A zarr array is read by zarr-python, which fetches its chunks at once too.
Nothing is written there: save to a local path, and copy it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from outsize.array.store.base import Block, Buffer, Region, Store, give_back, region_shape, round_up
from outsize.array.store.formats.flat import FlatLayout
from outsize.array.store.formats.pieces import ObjectStore
from outsize.array.store.options import Options
from outsize.core.errors import InputError, MissingExtra, StoreError
from outsize.core.extras import missing, need

_HEAD = 1 << 16
"""Bytes that hold the header of any .npy file of numbers."""
_RANGE = 4 << 20
"""Bytes of a request: long enough that a few at once fill a link."""
_AT_ONCE = 4 * _RANGE
"""Bytes that are asked for at once."""
_REQUESTS = 256
"""Requests at once, however short."""
_REQUEST = 2048
"""Bytes of a request's own."""
_ZARR = 5.0
"""What zarr-python takes of the chunks that it reads at once: as they come, joined, unpacked, and the result."""

_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp", "az": "adlfs",
             "abfs": "adlfs", "hf": "huggingface_hub"}  # fmt: skip
"""Scheme of an address -> the package that reads it."""


def is_remote(path: str) -> bool:
    """True for an address such as `s3://bucket/x.npy`."""
    scheme, mark, _ = path.partition("://")
    return bool(mark) and scheme.replace("+", "").replace("-", "").isalnum() and scheme != "file"


def open_files(path: str) -> tuple[Any, str]:
    """The file system of an address, and the path inside it."""
    fsspec = need("fsspec", path)
    try:
        files, inside = fsspec.core.url_to_fs(path)
    except ImportError as error:
        package = _PACKAGES.get(path.partition("://")[0])
        raise MissingExtra(missing(package, path) if package else f"{path} cannot be reached: {error}") from error
    except ValueError as error:
        raise InputError(f"{path} cannot be reached: {error}") from None
    return files, inside


def open_remote(path: str, options: Options) -> Store:
    """The array at an address."""
    files, inside = open_files(path)
    if options.mode != "r":
        raise InputError(f"{path} cannot be written in place: save to a local path and copy it")
    if path.rstrip("/").endswith(".zarr") or ".zarr/" in path or options.key is not None:
        return _open_zarr(path, options)
    if not path.endswith(".npy"):
        raise InputError(f"{path}: .npy files and zarr arrays are read where they are; download others first")
    try:
        return RemoteNpy(path, files, inside)
    except FileNotFoundError:
        raise StoreError(f"{path}: there is no such file", path=path) from None


def _open_zarr(path: str, options: Options) -> Store:
    zarr = need("zarr", path)
    try:
        array = zarr.open_array(
            path if options.key is None else f"{path.rstrip('/')}/{options.key.strip('/')}", mode="r"
        )
    except Exception as error:
        raise StoreError(
            f"{path} cannot be opened as a zarr array: {type(error).__name__}: {error}", path=path
        ) from None
    return RemoteZarr(array, path, options)


class RemoteZarr(ObjectStore):
    """A zarr array behind an address; another process opens it again."""

    def __init__(self, array: Any, path: str, options: Options) -> None:
        super().__init__(array, tuple(array.shards or array.chunks), _ZARR, path)
        self._options = options

    def __reduce__(self) -> tuple[Any, ...]:
        return open_remote, (self.name, self._options)

    def read(self, region: Region, buffer: Buffer) -> Block:
        try:
            return super().read(region, buffer)
        except (StoreError, InputError, MemoryError):
            raise
        except Exception as error:
            raise StoreError(f"{self.name} cannot be read: {type(error).__name__}: {error}", path=self.name) from error

    def fingerprint(self) -> str:
        """What the store says of the object that makes it an array."""
        files, inside = open_files(self.name)
        folder = f"{inside}/{self._options.key.strip('/')}" if self._options.key else inside
        found = next(
            (f"{folder}/{name}" for name in ("zarr.json", ".zarray") if files.exists(f"{folder}/{name}")), inside
        )
        return f"{self.name} {self.shape} {self.dtype.str} {files.ukey(found)}"


def _groups(ranges: Iterator[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Ranges that are asked for at once."""
    group: list[tuple[int, int]] = []
    for low, high in ranges:
        if len(group) == _REQUESTS or sum(b - a for a, b in group) + high - low > _AT_ONCE:
            yield group
            group = []
        group.append((low, high))
    if group:
        yield group


class RemoteNpy(Store):
    """A .npy file of which ranges of bytes are fetched."""

    def __init__(self, path: str, files: Any, inside: str) -> None:
        self.name, self._files, self._inside = path, files, inside
        self._size = int(files.info(inside)["size"])
        head = io.BytesIO(files.cat_file(inside, 0, min(self._size, _HEAD)))
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
        return round_up(size) + round_up(2 * min(size, _AT_ONCE) + _REQUESTS * _REQUEST)

    def traffic(self, region: Region) -> int:
        return self.bytes_of(region)

    def read(self, region: Region, buffer: Buffer) -> Block:
        lying, size = self._lying(region), self.bytes_of(region)
        block = np.ndarray(region_shape(lying), self.dtype, buffer[:size].data)
        if size:
            give_back(buffer[round_up(size) :])
            flat, position = buffer[:size], 0
            for ranges in _groups(self._ranges(lying)):
                for data in self._fetch(ranges):
                    flat[position : position + len(data)] = np.frombuffer(data, np.uint8)
                    position += len(data)
            if position != size:
                raise StoreError(f"{self.name}: {position} bytes came of {size}", path=self.name)
        return block.transpose() if self.order else block

    def _ranges(self, region: Region) -> Iterator[tuple[int, int]]:
        """(first byte, end) of what is wanted, in order, none longer than a request."""
        strides = [self.dtype.itemsize * math.prod(self._layout.shape[axis + 1 :]) for axis in range(len(region))]
        inner = len(region)
        while inner and region[inner - 1] == (0, self._layout.shape[inner - 1]):
            inner -= 1
        lead, axis = region[: max(0, inner - 1)], max(0, inner - 1)
        length = strides[axis] * (region[axis][1] - region[axis][0]) if region else self.dtype.itemsize
        first = strides[axis] * region[axis][0] if region else 0
        for index in np.ndindex(*region_shape(lead)):
            at = self._start + first + sum((a + i) * s for (a, _), i, s in zip(lead, index, strides, strict=False))
            for low in range(at, at + length, _RANGE):
                yield low, min(at + length, low + _RANGE)

    def _fetch(self, ranges: list[tuple[int, int]]) -> Any:
        starts, ends = zip(*ranges, strict=True)
        try:
            return self._files.cat_ranges([self._inside] * len(ranges), list(starts), list(ends), on_error="raise")
        except Exception as error:
            raise StoreError(f"{self.name} cannot be read: {type(error).__name__}: {error}", path=self.name) from None

    def fingerprint(self) -> str:
        return f"{self.name} {self._size} {self._files.ukey(self._inside)}"
