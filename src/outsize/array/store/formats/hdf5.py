"""HDF5 datasets. Those that lie in the file in one piece are read and written directly; chunked ones through h5py.

A contiguous dataset is a flat array at an offset, which HDF5 tells; so it is read like any other flat file, in
parallel and without the library's one lock. A chunked one is read by a single call for a region, with the library's
chunk cache switched off, so that what it holds is known: with filters, `_FILTER_COPIES` decoded chunks at most
(measured in tests/array/test_store_hdf5.py). Outputs are contiguous, or chunked where the user asks; neither is
compressed, because a compressed HDF5 file that was interrupted cannot be taken up again.
"""

from __future__ import annotations

import math
import pathlib
from contextlib import AbstractContextManager
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
from outsize.array.store.formats.flat import FlatLayout, FlatSink, FlatStore
from outsize.array.store.formats.pieces import Decoded
from outsize.array.store.io.chunks import cut_regular
from outsize.array.store.io.file import AlignedFile, naming, sync_path, telling
from outsize.array.store.io.partial import forget_earlier, partial_path, publish
from outsize.array.store.options import DEFAULT, Options, choose_key
from outsize.core.errors import InputError, StoreError
from outsize.core.extras import need
from outsize.core.units import KiB

_FILTER_COPIES = 5
"""Decoded chunks that HDF5 holds at once while it undoes filters: encoded, inflating (by doubling), unshuffled."""
_CONSTANT = 512 * KiB
"""Bytes of its own tables per read."""
_DEFAULT_KEY = "data"
_ALIGNED = {"alignment_threshold": 4096, "alignment_interval": 4096}


def load_h5py() -> Any:
    """The h5py package, or an error that says how to get it."""
    return need("h5py", "reading and writing HDF5")


def open_file(path: str, options: Options = DEFAULT) -> Store:
    """One dataset of the file."""
    with _told(path):
        file = load_h5py().File(path, options.mode, rdcc_nbytes=0)
    try:
        with _told(path):
            store = _store_of(file[_find(path, file, options.key)], path, options)
    except BaseException:
        file.close()
        raise
    if isinstance(store, FlatStore):
        file.close()
    return store


def wrap(dataset: Any, options: Options = DEFAULT) -> Store:
    """A dataset that the user has opened with h5py; their file stays open, and theirs to close."""
    if not isinstance(dataset, load_h5py().Dataset):
        raise InputError(f"cannot open a {type(dataset).__name__} of h5py: give one of its datasets, such as file['x']")
    if not dataset:
        raise InputError("the file of this h5py dataset is closed: open it again, or give its path")
    file, path = dataset.file, str(dataset.file.filename)
    if options.mode == "r+" and file.mode == "r":
        raise InputError(f"{path}::{dataset.name} is open for reading only: open the file with h5py.File(path, 'r+')")
    with _told(path):
        if file.mode != "r":
            file.flush()
        return _store_of(dataset, path, options, borrowed=True)


def _store_of(dataset: Any, path: str, options: Options, *, borrowed: bool = False) -> Store:
    """The flat store of a dataset that lies in the file in one piece, else one that reads through h5py."""
    name = f"{path}::{dataset.name}"
    if dataset.shape is None:
        raise StoreError(f"{name} is an empty dataset without a shape", path=path)
    if dataset.dtype.hasobject:
        raise StoreError(f"{name} holds text or references of varying length, not numbers", path=path)
    offset = _flat_offset(dataset) if dataset.file.driver in ("sec2", "stdio") else None
    if offset is None:
        return Hdf5Store(path, name, dataset, borrowed=borrowed)
    file = AlignedFile(path, writable=options.mode == "r+")
    return FlatStore(file, tuple(dataset.shape), dataset.dtype, offset, name=name)


def _find(path: str, file: Any, key: str | None) -> str:
    if key is not None and hasattr(file.get(key), "shape"):
        return key
    keys: list[str] = []

    def visit(name: str, item: Any) -> None:
        if hasattr(item, "shape"):
            keys.append(name)

    file.visititems(visit)
    return choose_key(path, keys, key)


def _flat_offset(dataset: Any) -> int | None:
    """Where the elements begin, if they lie in this file in one piece and just as NumPy lays them out."""
    if dataset.chunks is not None or dataset.is_virtual or dataset.external:
        return None
    plain = load_h5py().h5t.py_create(dataset.dtype, logical=True) == dataset.id.get_type()
    offset = dataset.id.get_offset()
    return int(offset) if plain and offset is not None else None


def _told(path: str) -> AbstractContextManager[None]:
    return telling(f"HDF5 cannot read or write {path}", path)


class Hdf5Store(Decoded):
    """A chunked, virtual, external or compact dataset, through h5py."""

    def __init__(self, path: str, name: str, dataset: Any, *, borrowed: bool = False) -> None:
        self.name, self.paths = name, (path,)
        self._borrowed = borrowed
        self.shape, self.dtype = tuple(dataset.shape), dataset.dtype
        self._path, self._file, self._dataset = path, dataset.file, dataset
        self._chunk = tuple(dataset.chunks or (max(1, n) for n in self.shape))
        self.granule = tuple(min(c, max(1, n)) for c, n in zip(self._chunk, self.shape, strict=True))
        filters = dataset.id.get_create_plist().get_nfilters() if dataset.chunks else 0
        chunk = math.prod(self._chunk) * self.dtype.itemsize
        self._held = _CONSTANT + (_FILTER_COPIES * chunk if filters else 0)
        if borrowed and dataset.chunks:  # the cache that the user's file keeps
            self._held += dataset.id.get_access_plist().get_chunk_cache()[1]
        self._chunk_bytes = chunk if dataset.chunks else 0

    def extent(self, region: Region) -> int:
        return round_up(self.bytes_of(region)) + self._held

    def traffic(self, region: Region) -> int:
        """A bound: whole chunks, decoded."""
        if not self._chunk_bytes:
            return self.bytes_of(region)
        return count_chunks(region, self._chunk) * self._chunk_bytes

    def decode(self, region: Region, block: Block) -> None:
        with _told(self._path):
            self._dataset.read_direct(block, tuple(slice(*axis) for axis in region))

    def __reduce__(self) -> tuple[Any, ...]:
        return open_file, (self._path, Options(key=self._dataset.name, mode=self._file.mode))

    def update(self) -> Sink:
        return super().update() if self._file.mode == "r" else _InPlaceHdf5(self)

    def close(self) -> None:
        if not self._borrowed:
            self._file.close()


def describe(path: str, shape: tuple[int, ...], dtype: np.dtype[Any], options: Options = DEFAULT) -> Sink:
    """A file of one dataset, called by the key, that is to be written."""
    chunks = None if not shape or 0 in shape else options.chunks  # HDF5 cuts neither into chunks
    draft = _Draft(path, shape, np.dtype(dtype), options.key or _DEFAULT_KEY, chunks)
    offset = draft.expected_offset()
    return H5pySink(draft) if offset is None else FlatHdf5Sink(draft, offset)


class _Draft:
    """The unfinished file: one dataset that has all its space and no values yet; made by `take_up`."""

    def __init__(
        self, path: str, shape: tuple[int, ...], dtype: np.dtype[Any], key: str, chunks: tuple[int, ...] | None
    ) -> None:
        self.path, self.shape, self.dtype, self.key = path, shape, dtype, key
        self.chunks = None if chunks is None else tuple(min(c, n) for c, n in zip(chunks, shape, strict=True))
        self.partial = partial_path(path)

    def open(self, mode: str) -> Any:
        """The file in h5py, without a chunk cache."""
        with _told(self.path):
            return load_h5py().File(self.partial, mode, rdcc_nbytes=0)

    def matches(self) -> bool:
        """True where an interrupted run left the same file."""
        try:
            with self.open("r") as file:
                found = file.get(self.key)
                wanted = (self.shape, self.dtype, self.chunks)
                return hasattr(found, "shape") and (found.shape, found.dtype, found.chunks) == wanted
        except StoreError:
            return False

    def take_up(self, resume: bool) -> None:
        """Make the file, unless an earlier run's is wanted and is the same."""
        if not (resume and self.matches()):
            forget_earlier(self.partial)
            self.make()

    def add_dataset(self, file: Any, shape: tuple[int, ...]) -> Any:
        """The dataset with its blocks reserved, so that writing values later changes nothing but values."""
        h5py = load_h5py()
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        properties.set_obj_track_times(False)
        return file.create_dataset(self.key, shape, self.dtype, chunks=self.chunks, dcpl=properties)

    def expected_offset(self) -> int | None:
        """What `flat_offset` will say, before there is a file: that of a smaller dataset in memory, which HDF5 places alike."""
        if self.chunks is not None:
            return None
        size, least = math.prod(self.shape) * self.dtype.itemsize, _ALIGNED["alignment_threshold"]
        short = (*(1 for _ in self.shape[1:]), -(-least // self.dtype.itemsize))
        options = {"driver": "core", "backing_store": False, "libver": "earliest", **_ALIGNED}
        with _told(self.path), load_h5py().File("sketch", "w", **options) as file:
            return _flat_offset(self.add_dataset(file, short if size >= least else self.shape))

    def make(self) -> None:
        self.remove()
        try:
            with naming(self.path):
                handle = AlignedFile(self.partial, writable=True, create=True)
            with _told(self.path), load_h5py().File(self.partial, "w", libver="earliest", **_ALIGNED) as file:
                self.add_dataset(file, self.shape)
            handle.allocate(handle.size)
            handle.sync()
            handle.close()
        except BaseException:
            self.remove()
            raise

    def flat_offset(self) -> int | None:
        """Where the values begin, None where they are in chunks or HDF5 gave them no place of their own."""
        with self.open("r") as file:
            return _flat_offset(file[self.key])

    def reopen(self, path: str) -> Store:
        """The dataset of the finished file."""
        return open_file(path, Options(key=self.key))

    def remove(self) -> None:
        pathlib.Path(self.partial).unlink(missing_ok=True)


class FlatHdf5Sink(FlatSink):
    """A contiguous dataset that is to be written, directly at its offset."""

    def __init__(self, draft: _Draft, offset: int) -> None:
        super().__init__(draft.path, draft.shape, draft.dtype, b"", draft.reopen)
        self._draft = draft
        self.layout = FlatLayout(draft.shape, draft.dtype, offset)

    def create(self, *, resume: bool = False) -> None:
        self._draft.take_up(resume)
        assert self._draft.flat_offset() == self.layout.offset
        self.file = AlignedFile(self.partial, writable=True)


class _H5pyWriter(Sink):
    """Writes into an open dataset through h5py, chunk by chunk."""

    held = _CONSTANT
    """Bytes that h5py holds meanwhile."""
    _file: Any
    _dataset: Any

    def extent(self, region: Region) -> int:
        return round_up(math.prod(self.granule) * self.dtype.itemsize) + self.held

    def write(self, region: Region, block: Block, buffer: Buffer) -> None:
        """Each chunk is packed in the buffer first: h5py would copy a block that is not contiguous as a whole."""
        for piece in cut_regular(region, self.granule):
            shape = region_shape(piece.region)
            packed = buffer[: math.prod(shape) * self.dtype.itemsize].view(self.dtype).reshape(shape)
            np.copyto(packed, block[piece.target], casting="unsafe")
            give_back(buffer[round_up(packed.nbytes) :])
            with _told(self.name):
                self._dataset.write_direct(packed, dest_sel=tuple(slice(*axis) for axis in piece.region))

    def sync(self) -> None:
        with _told(self.name):
            self._file.flush()
        with naming(self.name):
            sync_path(self.partial)


class H5pySink(_H5pyWriter):
    """A chunked, uncompressed dataset (or one without a place of its own)."""

    def __init__(self, draft: _Draft) -> None:
        self.name, self.shape, self.dtype, self.partial = draft.path, draft.shape, draft.dtype, draft.partial
        self.granule = draft.chunks or tuple(max(1, length) for length in draft.shape)
        self._draft = draft

    def create(self, *, resume: bool = False) -> None:
        self._draft.take_up(resume)
        self._file = self._draft.open("r+")
        self._dataset = self._file[self._draft.key]

    def commit(self) -> Store:
        self.sync()
        self._file.close()
        publish(self.partial, self.name)
        return self._draft.reopen(self.name)

    def abort(self) -> None:
        self._file.close()
        self._draft.remove()


class _InPlaceHdf5(InPlace, _H5pyWriter):
    """Writes into a chunked dataset that exists."""

    def __init__(self, store: Hdf5Store) -> None:
        self.store = store
        self.name = self.partial = store._path
        self.shape, self.dtype, self.granule, self.held = store.shape, store.dtype, store.granule, store._held
        self._file, self._dataset = store._file, store._dataset
