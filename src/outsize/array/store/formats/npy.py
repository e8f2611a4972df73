"""The .npy format: any version, C and Fortran order, any byte order. Headers are read as data, never as code.

`np.lib.format` turns dtypes into text and back. Its readers and writers of whole headers do not serve: the public ones stop
at version 2, and data they write begins at a multiple of 64 bytes, not of a page.

Output headers are padded to a page, which the format allows, so that data begins where direct I/O likes it.
"""

from __future__ import annotations

import ast
import struct
from typing import Any

import numpy as np

from outsize.array.store.base import ALIGNMENT
from outsize.array.store.formats.flat import FlatSink, FlatStore
from outsize.array.store.io.file import AlignedFile, naming
from outsize.array.store.options import DEFAULT, Options
from outsize.core.errors import StoreError

_MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 1 << 20
"""Bytes: no honest header of a numeric array comes near this."""


def open_file(path: str, options: Options = DEFAULT) -> FlatStore:
    """Open a .npy file by its header alone."""
    with naming(path), open(path, "rb") as file:
        shape, dtype, order, offset = read_header(file, path)
    return FlatStore(AlignedFile(path, writable=options.mode == "r+"), shape, dtype, offset, order)


Order = tuple[int, ...] | None
"""Axes from the slowest to the fastest; None is C order."""


def read_header(file: Any, path: str) -> tuple[tuple[int, ...], np.dtype[Any], Order, int]:
    """(shape, dtype, order of the axes, offset of the data from here) from a stream that stands at the magic bytes."""
    head = file.read(8)
    if len(head) < 8 or head[:6] != _MAGIC:
        raise StoreError(f"{path} is not a .npy file: it does not begin with the format's magic bytes", path=path)
    wide = head[6] >= 2
    raw = file.read(4 if wide else 2)
    if len(raw) < (4 if wide else 2) or head[6] not in (1, 2, 3):
        raise StoreError(f"{path} has a .npy header of unknown version {head[6]}.{head[7]} or is cut off", path=path)
    length = struct.unpack("<I" if wide else "<H", raw)[0]
    if length > _LONGEST_HEADER:
        raise StoreError(f"{path} claims a .npy header of {length} bytes: the file is damaged", path=path)
    text = file.read(length)
    if len(text) < length:
        raise StoreError(f"{path} ends inside its .npy header", path=path)
    shape, dtype, order = _parse_header(text.decode("utf-8" if head[6] == 3 else "latin-1"), path)
    return shape, dtype, order, 8 + len(raw) + length


def _parse_header(text: str, path: str) -> tuple[tuple[int, ...], np.dtype[Any], Order]:
    try:
        header = ast.literal_eval(text.strip())
        shape, fortran, descr = header["shape"], header["fortran_order"], header["descr"]
        dtype = np.lib.format.descr_to_dtype(descr)
        sound = isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape) and isinstance(fortran, bool)
    except (ValueError, SyntaxError, KeyError, TypeError, MemoryError, RecursionError) as error:
        raise StoreError(f"{path} has a damaged .npy header: {text[:80]!r}", path=path) from error
    if not sound:
        raise StoreError(f"{path} has a .npy header with shape {shape!r} and fortran_order {fortran!r}", path=path)
    if dtype.hasobject:
        raise StoreError(f"{path} holds pickled Python objects, which Outsize does not load: save numbers", path=path)
    return shape, dtype, tuple(reversed(range(len(shape)))) if fortran else None


def make_header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    """A header of a whole number of pages."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    text = repr(header).encode("latin-1")
    wide = len(text) + 11 > 65535
    prefix = _MAGIC + (b"\x02\x00" if wide else b"\x01\x00")
    lead = len(prefix) + (4 if wide else 2)
    total = -(-(lead + len(text) + 1) // ALIGNMENT) * ALIGNMENT
    length = struct.pack("<I" if wide else "<H", total - lead)
    return prefix + length + text + b" " * (total - lead - len(text) - 1) + b"\n"


def describe(path: str, shape: tuple[int, ...], dtype: np.dtype[Any], options: Options = DEFAULT) -> FlatSink:
    """A .npy file that is to be written."""
    return FlatSink(path, shape, dtype, make_header(shape, dtype), open_file)
