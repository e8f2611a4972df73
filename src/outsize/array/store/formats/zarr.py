"""Zarr arrays, formats 2 and 3, read chunk by chunk into the engine's buffer and written beside their target.

Opening and writing is zarr-python's work. Reading is ours for the chunks that need no more than a compressor (blosc,
zstd, lz4 or none), in shards or not: file -> engine's buffer -> decoded into the block, so that not a byte is outside
the budget; zarr-python holds up to three more copies of a chunk and hops through an event loop for each. Chunks with
filters, transposition or other codecs go through zarr-python, one chunk at a time, and `extent` counts what
it takes (`_LIBRARY_COPIES`, measured in tests/array/test_store_zarr.py).

A missing chunk file: the format lets a writer leave out chunks that hold only the fill value, so a lost file and an
empty chunk look alike. Outsize does not guess: reading one is a `StoreError`, unless the array was opened with
`missing="fill"`. Our own sink writes every chunk.
"""

from __future__ import annotations

import math
import os
import shutil
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from outsize.array.store.base import (
    Block,
    Buffer,
    InPlace,
    Region,
    Sink,
    Store,
    count_chunks,
    give_back,
    region_shape,
    round_up,
)
from outsize.array.store.io.chunks import Piece, cut_regular, most_touched, on_grid, output_chunks
from outsize.array.store.io.decompress import DECODER, Coding, plain_coding
from outsize.array.store.io.file import naming, sync_path, telling
from outsize.array.store.io.objects import Folder, Objects
from outsize.array.store.io.partial import forget_earlier, partial_path, publish
from outsize.array.store.io.shards import Sharding, Span, find_sharding
from outsize.array.store.options import DEFAULT, Options, choose_key
from outsize.core.errors import InputError, StoreError
from outsize.core.extras import need
from outsize.core.units import MiB

_MARKERS = ("zarr.json", ".zarray", ".zgroup")
_LIBRARY_COPIES = 5
"""Decoded chunks that zarr-python holds at once while it reads or writes one chunk, at most (encoded bytes beside)."""
_ENCODER = 4 * MiB
"""Bytes of a compressor's tables: zstd takes about 2.4 MiB at its default level."""
_LIBRARY_CONSTANT = 256 * 1024
"""Bytes of its event loop, tasks and metadata per call."""
_BESIDE = 3
"""Memory of chunks that are read at once over a network may be so many times that of what is wanted: answers take their time."""
_EVERY_CHUNK = {"write_empty_chunks": True}
"""So that a missing chunk always means a lost one in what we write."""


def recognise(path: str, head: bytes = b"", size: int = 0) -> bool:
    """True for a folder that holds a zarr array or group."""
    return any(os.path.exists(os.path.join(path, marker)) for marker in _MARKERS)


def load_zarr() -> Any:
    """The zarr package, or an error that says how to get it."""
    package = need("zarr", "reading and writing zarr")
    if int(package.__version__.split(".")[0]) < 3:
        raise StoreError(f"zarr {package.__version__} is too old: pip install 'zarr>=3' (it reads formats 2 and 3)")
    return package


class ZarrStore(Store):
    """One array of a zarr folder."""

    def __init__(self, path: str, options: Options = DEFAULT) -> None:
        if options.missing not in ("error", "fill"):
            raise InputError(f"missing={options.missing!r}: use 'error' (a missing chunk stops the read) or 'fill'")
        array = _open_array(path, options.key, options.mode)
        self._path, self._options = path, options
        self.name = path if not array.path else f"{path}::{array.path}"
        self.shape = tuple(array.shape)
        self.dtype = np.dtype(array.dtype)
        if self.dtype.hasobject:
            raise StoreError(f"{self.name} holds Python objects or text of varying length, not numbers", path=path)
        self._chunk: tuple[int, ...] = tuple(max(1, length) for length in array.chunks)
        self.granule = tuple(min(c, max(1, n)) for c, n in zip(self._chunk, self.shape, strict=True))
        self._array = array
        self._objects = self._reach(array.path)
        self._sharding, codecs = find_sharding(array) if array.shards else (None, None)
        self._coding = plain_coding(array, codecs) if codecs or not array.shards else None
        self._shard = tuple(array.shards) if array.shards else self._chunk
        self._chunk_bytes = math.prod(self._chunk) * self.dtype.itemsize
        self._encoded = round_up(_most_encoded(self._chunk_bytes))

    def _reach(self, key: str) -> Objects:
        """Where the chunks stand."""
        self.paths = (self._path,)
        return Folder(os.path.join(self._path, key) if key else self._path)

    @property
    def folder(self) -> str:
        assert isinstance(self._objects, Folder)
        return self._objects.path

    def extent(self, region: Region) -> int:
        number = most_touched(region, self._chunk, self.shape, on_grid=True)
        return self._room(region, number, self._lies_straight(region))

    def most(self, region: Region) -> int:
        return self._room(region, most_touched(region, self._chunk, self.shape, on_grid=False), False)

    def _room(self, region: Region, number: int, straight: bool) -> int:
        index = number * round_up(self._sharding.index_bytes) if self._sharding else 0
        lane, beside = self._lane(straight)
        lanes = self._lanes(number, self.bytes_of(region), straight)
        return round_up(self.bytes_of(region)) + lanes * (lane + beside) + index

    def _lies_straight(self, region: Region) -> bool:
        """True where every chunk of the region is whole and lies in one piece in its block, as it does in all regions of a grid
        of such ones: then it is read, or decoded, to where it belongs."""
        coding, cut = self._coding, False
        if coding is None or coding.order != "C" or coding.dtype != self.dtype:
            return False
        for (start, stop), chunk in zip(reversed(region), reversed(self._chunk), strict=True):
            nested = start % max(1, stop - start) == 0 and (stop - start) % chunk == 0
            if not nested or (cut and chunk > 1):
                return False
            cut = cut or stop - start > chunk
        return True

    def _lane(self, straight: bool) -> tuple[int, int]:
        """What a chunk takes to be read and decoded beside its own place, and what its way takes beside that."""
        decoded, beside = round_up(self._chunk_bytes), round_up(self._objects.beside(self._encoded))
        if self._coding is None:
            return self._encoded + _LIBRARY_COPIES * decoded + _LIBRARY_CONSTANT + DECODER, beside
        if straight and self._coding.plain:
            return 0, beside
        return self._encoded + decoded * (self._coding.copies - straight) + self._coding.state, beside

    def _lanes(self, number: int, wanted: int, straight: bool) -> int:
        """How many chunks are read at once of so many, of which so many bytes are wanted."""
        return max(1, min(_BESIDE * wanted // max(1, sum(self._lane(straight))), number, self._objects.lanes))

    def traffic(self, region: Region) -> int:
        """A bound: chunks touched times the decoded size of one; what was saved is known only after reading."""
        return count_chunks(region, self._chunk) * self._chunk_bytes

    def read(self, region: Region, buffer: Buffer) -> Block:
        used = self.bytes_of(region)
        block = buffer[:used].view(self.dtype).reshape(region_shape(region))
        straight = self._lies_straight(region)
        scratch, (lane_bytes, beside) = buffer[round_up(used) :], self._lane(straight)
        lanes = self._lanes(count_chunks(region, self._chunk), used, straight)
        lanes = max(1, min(lanes, scratch.nbytes // max(1, lane_bytes + beside)))
        give_back(scratch if self._coding is None else scratch[lanes * lane_bytes :])  # for the library's own memory
        pieces = cut_regular(region, self._chunk)
        if self._coding is None:
            self._objects.each(lambda piece, _: self._ask_library(piece, block), pieces, lanes)
            return block
        coding = self._coding

        def work(span: Span, lane: int) -> None:
            place = scratch[lane * lane_bytes : (lane + 1) * lane_bytes]
            self._take(coding, span, block, place[: self._encoded], place[self._encoded :])

        self._objects.each(work, self._spans(pieces, lanes, block), lanes)
        return block

    def __reduce__(self) -> tuple[Any, ...]:
        return ZarrStore, (os.path.abspath(self._path), self._options)

    def fingerprint(self) -> str:
        """Metadata and the folder's own times: a chunk that is replaced changes the folder it stands in."""
        paths = [os.path.join(self.folder, name) for name in ("", *_MARKERS, "c")]
        times = [os.stat(path).st_mtime_ns for path in paths if os.path.exists(path)]
        return f"{os.path.abspath(self.name)} {self.shape} {self.dtype.str} {times}"

    def update(self) -> Sink:
        return _InPlaceZarr(self) if self._options.mode == "r+" else super().update()

    def _key(self, chunk: tuple[int, ...]) -> str:
        return str(self._array.metadata.encode_chunk_key(chunk))

    def _spans(self, pieces: Iterable[Piece], lanes: int, block: Block) -> Iterator[Span]:
        """What is to be read for these pieces; those that are known to hold the fill value are done with. Indices of shards are
        read at once, before the first span: lanes that wait for spans could not read them."""
        sharding = self._sharding
        if sharding is None:
            return (Span(self._key(piece.chunk), None, 0, [(0, piece)]) for piece in pieces)
        shards: dict[tuple[int, ...], list[Piece]] = {}
        for piece in pieces:
            shards.setdefault(sharding.shard_of(piece.chunk), []).append(piece)
        indices: dict[tuple[int, ...], Any] = {}

        def look(shard: tuple[int, ...], _: int) -> None:
            indices[shard] = self._index(sharding, shard)

        self._objects.each(look, shards, min(lanes, len(shards)))
        return self._spans_in(sharding, shards, indices, block)

    def _spans_in(
        self, sharding: Sharding, shards: dict[tuple[int, ...], list[Piece]], indices: dict[tuple[int, ...], Any], block: Block
    ) -> Iterator[Span]:  # fmt: skip
        def fill(piece: Piece) -> None:
            block[piece.target] = self._array.fill_value

        for shard, inside in shards.items():
            key, index = self._key(shard), indices.pop(shard)
            if index is None:
                for piece in inside:
                    fill(piece)
                continue
            with self._damaged(key):
                yield from sharding.spans(key, index, inside, self._encoded, fill)

    def _index(self, sharding: Sharding, shard: tuple[int, ...]) -> Any:
        """The index of a shard; None where the shard is missing and that means the fill value."""
        key, data = self._key(shard), np.empty(sharding.index_bytes, np.uint8)
        try:
            self._objects.read_range(key, sharding.index_at, data)
        except FileNotFoundError:
            self._refuse_missing(key)
            return None
        with self._damaged(key):
            return sharding.open_index(data)

    def _take(self, coding: Coding, span: Span, block: Block, fetched: Buffer, scratch: Buffer) -> None:
        """Read a span and put its chunks into the block."""
        try:
            if span.start is None:
                piece = span.parts[0][1]
                place = self._place(coding, piece, block)
                into = place if place is not None and coding.plain else fetched
                self._decode(coding, self._objects.read_whole(span.key, into), piece, block, scratch, place)
                return
            with self._objects.stream(span.key, span.start, span.size) as take:
                for length, piece in span.parts:
                    place = self._place(coding, piece, block)
                    straight = place is not None and coding.plain and length == place.nbytes
                    encoded = place if straight and place is not None else fetched[:length]
                    take(encoded)
                    self._decode(coding, encoded, piece, block, scratch, place)
        except FileNotFoundError:
            self._refuse_missing(span.key)
            for _, piece in span.parts:
                block[piece.target] = self._array.fill_value

    def _decode(
        self, coding: Coding, encoded: Buffer, piece: Piece, block: Block, scratch: Buffer, place: Buffer | None
    ) -> None:
        """Decode a chunk to where it belongs, which is `place` where it lies there as it is coded."""
        with self._damaged(self._key(piece.chunk)):
            plain = coding.decode(encoded, scratch[: self._chunk_bytes] if place is None else place)
            if plain.nbytes != self._chunk_bytes:
                raise ValueError(
                    f"it holds {plain.nbytes} bytes, the chunk shape {self._chunk} of {self.dtype} takes {self._chunk_bytes}"
                )
        if place is None:
            block[piece.target] = plain.view(coding.dtype).reshape(self._chunk, order=coding.order)[piece.inside]
        elif plain.ctypes.data != place.ctypes.data:
            place[:] = plain

    def _place(self, coding: Coding, piece: Piece, block: Block) -> Buffer | None:
        """The bytes of a block that are a chunk as it is coded, if the chunk is whole and lies in one piece there."""
        target = block[piece.target] if block.ndim else block
        whole = target.nbytes == self._chunk_bytes and target.flags.c_contiguous
        straight = whole and coding.order == "C" and coding.dtype == self.dtype
        return target.reshape(-1).view(np.uint8) if straight else None

    @contextmanager
    def _damaged(self, key: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError, struct.error) as error:
            path = f"{self._path}/{key}"
            raise StoreError(f"chunk {key} of {self.name} is damaged: {error}", path=path) from None

    def _ask_library(self, piece: Piece, block: Block) -> None:
        with _told(self.name, f"region {piece.region}"):
            key = self._key(tuple(start // n for (start, _), n in zip(piece.region, self._shard, strict=True)))
            if self._options.missing == "error" and not self._objects.exists(key):
                self._refuse_missing(key)
            selection = tuple(slice(*axis) for axis in piece.region)
            block[piece.target] = self._array.get_basic_selection(selection)

    def _refuse_missing(self, key: str) -> None:
        if self._options.missing == "error":
            raise StoreError(
                f"chunk file {key} of {self.name} is missing: it was lost, or its writer left it out because it held "
                f"only the fill value {self._array.fill_value}; to read it as that, open with missing='fill'",
                path=f"{self._path}/{key}",
            )


def wrap(array: Any, options: Options = DEFAULT) -> Store:
    """An array that the user has opened with zarr-python, read from its folder."""
    if not hasattr(array, "store_path") or not hasattr(array, "chunks"):
        raise InputError(f"cannot open a {type(array).__name__} of zarr: give one of its arrays, such as group['x']")
    root = getattr(array.store, "root", None)
    if root is None or not os.path.isdir(root):
        raise InputError(
            f"this zarr array lies in a {type(array.store).__name__}, which Outsize does not read piece by piece: copy it into "
            "a folder (zarr.save_array, or zarr.copy), and open that"
        )
    return ZarrStore(os.fspath(root), options._replace(key=array.path or None))


def _open_array(path: str, key: str | None, mode: str) -> Any:
    zarr = load_zarr()
    with _told(path, "its metadata"):
        node = zarr.open(path, mode=mode)
        if hasattr(node, "shape"):
            if key not in (None, "", "/"):
                raise InputError(f"{path} is one array, it has no key {key!r}: leave the key out")
            return node if mode == "r" else _open_to_write(path)
        keys = [name for name, member in node.members(max_depth=None) if hasattr(member, "shape")]
        chosen = choose_key(path, keys, key)
        return _open_to_write(path, chosen) if mode != "r" else zarr.open_array(path, path=chosen, mode=mode)


def _told(name: str, what: str) -> AbstractContextManager[None]:
    return telling(f"zarr cannot read {what} of {name}", name)


def _open_to_write(path: str, key: str = "") -> Any:
    """An array whose chunks are all kept; `open_array` takes a `config` and forgets it, so the library's own is set meanwhile."""
    zarr = load_zarr()
    with zarr.config.set({f"array.{name}": value for name, value in _EVERY_CHUNK.items()}):
        return zarr.open_array(path, path=key, mode="r+")


def _most_encoded(size: int) -> int:
    """Most bytes any of the compressors makes of `size` bytes (zstd: size/256 + 64 and more, lz4: size/255 + 16)."""
    return size + size // 128 + 1024


class _ZarrWriter(Sink):
    """Writes into an open zarr array, chunk by chunk, by zarr-python."""

    def __init__(self, folder: str) -> None:
        self._array: Any = None
        self._folder = folder
        self._edge, self._lock = threading.Lock(), threading.Lock()
        self._written: set[str] = set()
        self._chunk_bytes = math.prod(self.granule) * self.dtype.itemsize

    def extent(self, region: Region) -> int:
        copies = 1 if on_grid(region, self.granule, self.shape) else _LIBRARY_COPIES
        return copies * self._chunk_bytes + _most_encoded(self._chunk_bytes) + _LIBRARY_CONSTANT + _ENCODER

    def write(self, region: Region, block: Block, buffer: Buffer) -> None:
        give_back(buffer)
        for piece in cut_regular(region, self.granule):
            complete = on_grid(piece.region, self.granule, self.shape)
            alone = nullcontext() if complete else self._edge  # one cut chunk at a time
            with alone, naming(self.name):
                self._array[tuple(slice(*axis) for axis in piece.region)] = block[piece.target]
            with self._lock:
                self._written.add(self._array.metadata.encode_chunk_key(piece.chunk))

    def sync(self) -> None:
        with self._lock:
            written, self._written = self._written, set()
        with naming(self.name):
            for key in written:
                sync_path(os.path.join(self._folder, key))
            for folder in {os.path.dirname(os.path.join(self._folder, key)) for key in written} | {self._folder}:
                sync_path(folder)


class ZarrSink(_ZarrWriter):
    """A new zarr array, every chunk of which is written."""

    shared = True

    def __init__(self, path: str, shape: tuple[int, ...], dtype: np.dtype[Any], options: Options = DEFAULT) -> None:
        if os.path.lexists(path) and not recognise(path) and not (os.path.isdir(path) and not os.listdir(path)):
            raise InputError(
                f"{path} exists and is not a zarr array: it is not overwritten; remove it or choose another name"
            )
        self.name, self.shape, self.dtype = path, shape, np.dtype(dtype)
        self.granule = output_chunks(options.chunks, shape, self.dtype.itemsize)
        self.partial, self._compress = partial_path(path), options.compress
        super().__init__(self.partial)

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value for name, value in self.__dict__.items() if name not in ("_array", "_edge", "_lock", "_written")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In another process: the same unfinished array, opened again."""
        self.__dict__.update(state)
        super().__init__(self.partial)
        self._array = _open_to_write(self.partial)

    def create(self, *, resume: bool = False) -> None:
        self._array = (self._reopen() if resume else None) or self._create()

    def _reopen(self) -> Any:
        """The array an interrupted run left, None where there is none or it is another one."""
        if not recognise(self.partial):
            return None
        with _told(self.partial, "its metadata"):
            array = _open_to_write(self.partial)
        same = (tuple(array.shape), np.dtype(array.dtype), tuple(array.chunks))
        return array if same == (self.shape, self.dtype, self.granule) else None

    def _create(self) -> Any:
        zarr = load_zarr()
        forget_earlier(self.partial)
        shutil.rmtree(self.partial, ignore_errors=True)
        try:
            with naming(self.name):
                return zarr.create_array(
                    self.partial, shape=self.shape, dtype=self.dtype, chunks=self.granule,
                    compressors="auto" if self._compress else None, config=_EVERY_CHUNK,
                )  # fmt: skip
        except (TypeError, ValueError) as error:
            self.abort()
            raise StoreError(f"zarr cannot hold {self.dtype}: {error}", path=self.name) from None
        except StoreError:
            self.abort()
            raise

    def commit(self) -> Store:
        self.sync()
        publish(self.partial, self.name)
        return ZarrStore(self.name)

    def abort(self) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)


class _InPlaceZarr(InPlace, _ZarrWriter):
    """Writes into a zarr array that exists."""

    def __init__(self, store: ZarrStore) -> None:
        self.store = store
        self.name = self.partial = store.name
        self.shape, self.dtype = store.shape, store.dtype
        self.granule = store._shard
        super().__init__(store.folder)
        self._array = store._array


open_file, describe = ZarrStore, ZarrSink
"""One array of a folder; a folder of one array that is to be written."""
