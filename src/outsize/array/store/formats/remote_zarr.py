"""Zarr arrays in object stores, read chunk by chunk as in a folder, and written so.

zarr-python packs each chunk in memory, and its bytes go out as one object. An object store renames nothing, so the array stands
under its own name from the first chunk on; what makes it an array, its metadata, is written last. Several processes may write
disjoint chunks at once.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from contextlib import nullcontext
from typing import Any

import numpy as np

from outsize.array.store.base import Block, Buffer, Region, Sink, Store, give_back
from outsize.array.store.formats.zarr import _EVERY_CHUNK, ZarrStore, load_zarr
from outsize.array.store.io.addresses import Address, open_files
from outsize.array.store.io.chunks import cut_regular, on_grid, output_chunks
from outsize.array.store.io.file import telling
from outsize.array.store.options import Options
from outsize.core.errors import InputError
from outsize.core.units import MiB

_COPIES = 5
"""Chunks in memory while one is packed and sent: as given, packed, as an object of zarr, of the network's library, on its way."""
_CONSTANT = 6 * MiB
"""Bytes of a compressor's tables, and of a connection."""
_METADATA = "zarr.json"
_MARKERS = (_METADATA, ".zarray")
"""Objects that make it an array."""


class RemoteZarr(ZarrStore):
    """One array behind an address."""

    def _reach(self, key: str) -> Address:
        files, inside = open_files(self._path)
        below = f"{inside.rstrip('/')}/{key}" if key else inside
        return Address(self.name, files, below)

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteZarr, (self._path, self._options)

    def fingerprint(self) -> str:
        """What the store says of the object that makes it an array."""
        files, inside = open_files(self._path)
        folder = f"{inside.rstrip('/')}/{self._array.path}" if self._array.path else inside
        found = next((f"{folder}/{name}" for name in _MARKERS if files.exists(f"{folder}/{name}")), inside)
        return f"{self.name} {self.shape} {self.dtype.str} {files.ukey(found)}"


class RemoteZarrSink(Sink):
    """A new array at an address."""

    shared = True

    def __init__(self, path: str, shape: tuple[int, ...], dtype: np.dtype[Any], options: Options) -> None:
        from outsize.machine import current_system
        from outsize.machine.disk import default_scratch

        self.name, self.shape, self.dtype = path.rstrip("/"), shape, np.dtype(dtype)
        self.granule = output_chunks(options.chunks, shape, self.dtype.itemsize)
        place = hashlib.blake2b(self.name.encode(), digest_size=8).hexdigest()
        self.partial = os.path.join(default_scratch(current_system()), f".outsize-remote-{place}")
        self._compress = options.compress
        self._chunk_bytes = math.prod(self.granule) * self.dtype.itemsize
        self._edge = threading.Lock()
        self._local = threading.local()

    @property
    def beside(self) -> str:
        """Where workers of a cluster leave what they have for each other."""
        return f"{self.name}.outsize-scratch"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_edge", "_local")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._edge, self._local = threading.Lock(), threading.local()

    def create(self, *, resume: bool = False) -> None:
        files, inside = open_files(self.name)
        os.makedirs(os.path.dirname(self.partial), exist_ok=True)
        with telling(f"{self.name} cannot be written", self.name):
            if files.exists(f"{inside}/{_METADATA}") or (not resume and files.exists(inside)):
                raise InputError(
                    f"{self.name} exists, and an object store replaces nothing in one step: remove it first, or choose "
                    "another name"
                )
        self._packer()

    def _packer(self) -> tuple[Any, Any]:
        """(an array of the same shape in memory, what its chunks appear in); one for each thread."""
        made = getattr(self._local, "packer", None)
        if made is None:
            zarr = load_zarr()
            memory: dict[str, Any] = {}
            with telling(f"zarr cannot hold {self.dtype}", self.name):
                array = zarr.create_array(
                    zarr.storage.MemoryStore(memory), shape=self.shape, dtype=self.dtype, chunks=self.granule,
                    compressors="auto" if self._compress else None, config=_EVERY_CHUNK,
                )  # fmt: skip
            made = self._local.packer = array, memory
        return made

    def extent(self, region: Region) -> int:
        return _COPIES * self._chunk_bytes + _CONSTANT

    def write(self, region: Region, block: Block, buffer: Buffer) -> None:
        give_back(buffer)
        files, inside = open_files(self.name)
        for piece in cut_regular(region, self.granule):
            complete = on_grid(piece.region, self.granule, self.shape)
            with nullcontext() if complete else self._edge:  # one cut chunk at a time, with what is there of it
                self._send(files, inside, piece, block, again=not complete)

    def _send(self, files: Any, inside: str, piece: Any, block: Block, *, again: bool) -> None:
        array, memory = self._packer()
        key = array.metadata.encode_chunk_key(piece.chunk)
        with telling(f"{self.name} cannot be written", self.name):
            if again and files.exists(f"{inside}/{key}"):
                buffer = load_zarr().core.buffer.default_buffer_prototype().buffer
                memory[key] = buffer.from_bytes(files.cat_file(f"{inside}/{key}"))
            array[tuple(slice(*axis) for axis in piece.region)] = block[piece.target]
            files.pipe_file(f"{inside}/{key}", memory.pop(key).to_bytes())

    def commit(self) -> Store:
        files, inside = open_files(self.name)
        _, memory = self._packer()
        with telling(f"{self.name} cannot be written", self.name):
            files.pipe_file(f"{inside}/{_METADATA}", memory[_METADATA].to_bytes())
            files.invalidate_cache()
        return RemoteZarr(self.name, Options())

    def abort(self) -> None:
        files, inside = open_files(self.name)
        with telling(f"{self.name} cannot be removed", self.name):
            if files.exists(inside):
                files.rm(inside, recursive=True)
