"""`outsize.show`: what is in a file, from its headers alone.

In: a path, or `path::key`. Out: `Contents`. Every format is opened as any other work would open it, so nothing is shown that
could not be read; a file of several arrays names them when it is opened without a key.
"""

from __future__ import annotations

import math
import os
import pathlib

from outsize.array.store.base import Store
from outsize.array.store.io.addresses import is_remote
from outsize.array.store.io.narrow_floats import stored_as
from outsize.array.store.options import split_key
from outsize.array.store.registry import find_format, open_store
from outsize.core.contents import Contents, StoredArray
from outsize.core.errors import SeveralArrays
from outsize.machine import memory

_LISTED = 100
"""Arrays that are opened; a checkpoint may hold thousands."""


def show(path: str | os.PathLike[str]) -> Contents:
    """What a file holds: its format, and the shape, dtype and bytes of each array. Nothing but headers is read.

    >>> outsize.show("x.npy")
    """
    source = os.fspath(path)
    try:
        stores, count = [open_store(source)], 1
    except SeveralArrays as several:
        keys = several.keys
        stores, count = [open_store(source, key=key) for key in keys[:_LISTED]], len(keys)
    file = source if os.path.lexists(source) else split_key(source, None)[0]
    remote = is_remote(file)
    found = None if remote else find_format(file)
    arrays = tuple(_describe(store, found is not None and found.chunked) for store in stores)
    notes = tuple(dict.fromkeys(store.note for store in stores if store.note))
    for store in stores:
        store.close()
    return Contents(
        path=source, format="remote" if found is None else found.name, on_disk=None if remote else _on_disk(file),
        arrays=arrays, count=count, available=memory().host.available, notes=notes,
    )  # fmt: skip


def _describe(store: Store, chunked: bool) -> StoredArray:
    key, (dtype, size) = store.name.partition("::")[2], stored_as(store)
    return StoredArray(
        key=key, shape=store.shape, dtype=dtype, bytes=math.prod(store.shape) * size,
        chunks=tuple(store.granule) if chunked and store.granule != store.shape else None,
    )  # fmt: skip


def _on_disk(path: str) -> int:
    """Bytes of a file, or of all files of a folder."""
    if not os.path.isdir(path):
        return os.stat(path).st_size
    return sum(file.lstat().st_size for file in pathlib.Path(path).rglob("*") if not file.is_dir())
