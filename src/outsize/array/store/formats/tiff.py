"""TIFF files and stacks of them (GeoTIFF, OME-TIFF, BigTIFF): the first series as an array, one page decoded at a time.

A series without compression that lies in one piece is read like a raw file, in any region.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from outsize.array.store.base import Block, Store
from outsize.array.store.formats.flat import FlatStore
from outsize.array.store.formats.pieces import PieceStore
from outsize.array.store.io.file import AlignedFile
from outsize.array.store.options import Options
from outsize.core.errors import InputError, StoreError
from outsize.core.extras import need

_READ = 1 << 16
"""Bytes of strips or tiles that are read at once, or one where that is longer."""
_SEGMENTS = 3
"""Strips or tiles unpacked that are held at once: by the decompressor, its copy, and what undoes a prediction."""
_CONSTANT = 1 << 16
"""Bytes of the library's own for each file that it opens."""


def open_file(path: str, options: Options) -> Store:
    """The first series of a file, or the one whose number is the key."""
    tifffile = need("tifffile", "reading TIFF files")
    number = int(options.key or 0) if (options.key or "0").isdigit() else -1
    try:
        with tifffile.TiffFile(path) as file:
            if not 0 <= number < len(file.series):
                raise InputError(
                    f"{path} has {len(file.series)} series of pictures, numbered from 0, not {options.key!r}"
                )
            series = file.series[number]
            shape, dtype = tuple(int(n) for n in series.shape), np.dtype(series.dtype)
            offset, pages = series.dataoffset, len(series.pages)
            byteorder, decoding = file.byteorder, _decoding(series.keyframe)
    except (tifffile.TiffFileError, ValueError, IndexError, OSError) as error:
        if isinstance(error, InputError):
            raise
        raise StoreError(f"{path} cannot be read as TIFF: {error}", path=path) from None
    name = path if options.key is None else f"{path}::{options.key}"
    if offset is not None:
        store: Store = FlatStore(AlignedFile(path), shape, dtype.newbyteorder(byteorder), offset)
        store.name = name
        return store
    if pages == 0 or math.prod(shape) % pages:
        raise StoreError(f"{path}: {pages} pages do not make the shape {shape}", path=path)
    row, page = max(1, math.prod(shape[1:])), math.prod(shape) // pages
    rows, per = (page // row, 1) if page % row == 0 else (1, pages // shape[0])  # or several pages make one row
    load = functools.partial(_load, path=path, series=number, per=per, shape=(rows, *shape[1:]))
    return PieceStore(name, shape, dtype, list(range(0, shape[0] + 1, rows)), load, decoding, (path,))


def _decoding(page: Any) -> int:
    """Bytes that decoding takes beside the page: strips or tiles as they lie, and unpacked; tags of 16 bytes for each."""
    segment = math.prod(page.chunks) * np.dtype(page.dtype).itemsize
    encoded = max(segment + segment // 128 + 1024, *page.databytecounts)
    return int(
        2 * max(encoded, min(_READ, sum(page.databytecounts)))
        + _SEGMENTS * segment
        + 128 * len(page.databytecounts)
        + _CONSTANT
    )


def _load(number: int, path: str, series: int, per: int, shape: tuple[int, ...]) -> Block:
    import tifffile

    try:
        with tifffile.TiffFile(path) as file:
            pages = file.series[series].pages[number * per : (number + 1) * per]
            found = np.empty((len(pages), *pages[0].keyframe.shaped), pages[0].keyframe.dtype)
            for page, out in zip(pages, found, strict=True):
                page.asarray(out=out, maxworkers=1, buffersize=_READ)
    except (tifffile.TiffFileError, ValueError, OSError, IndexError) as error:
        raise StoreError(f"{path}: page {number * per} cannot be decoded: {error}", path=path) from None
    return found.reshape(shape)
