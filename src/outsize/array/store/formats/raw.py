"""Raw binary: elements and nothing else; shape, dtype and offset come from the user."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from outsize.array.store.formats.flat import FlatSink, FlatStore
from outsize.array.store.io.file import AlignedFile, naming
from outsize.array.store.options import Options, as_numpy
from outsize.core.errors import InputError, StoreError
from outsize.core.spec import parse_shape


def recognise(path: str, head: bytes, size: int) -> bool:
    """True for a file with one of the usual suffixes: nothing else tells them."""
    return os.path.isfile(path) and path.lower().endswith((".bin", ".raw", ".dat"))


def open_file(path: str, options: Options) -> FlatStore:
    """An `InputError`: the file says nothing of itself."""
    raise InputError(
        f"{path} looks like raw binary: say its shape= and dtype=, and offset= if a header stands before them"
    )


def open_raw(path: str, shape: Any, dtype: Any, *, offset: int = 0, order: str = "C", mode: str = "r") -> FlatStore:
    """Open a raw file; one axis of the shape may be -1 and is then read off the file's length."""
    if shape is None or dtype is None:
        raise InputError(f"{path} as raw binary needs both shape= and dtype=")
    if offset < 0:
        raise InputError(f"offset is a number of bytes from the file's start, not {offset}")
    if os.path.isdir(path):
        raise StoreError(f"{path} is a folder, not a file of raw binary", path=path)
    element = as_numpy(dtype)
    axes = [shape] if isinstance(shape, int) else list(shape)
    if -1 in axes:
        rest = element.itemsize * math.prod(length for length in axes if length != -1)
        with naming(path):
            size = os.stat(path).st_size - offset
        if axes.count(-1) > 1 or rest <= 0 or size % rest:
            raise InputError(f"{path}: {size} bytes are not a whole number of rows of {tuple(axes)} {element}")
        axes[axes.index(-1)] = size // rest
    if order not in ("C", "F"):
        raise InputError(f"order is 'C' or 'F', not {order!r}")
    file, lengths = AlignedFile(path, writable=mode == "r+"), parse_shape(axes)
    return FlatStore(file, lengths, element, offset, tuple(reversed(range(len(lengths)))) if order == "F" else None)


def describe(path: str, shape: tuple[int, ...], dtype: np.dtype[Any], options: Options) -> FlatSink:
    """A raw file that is to be written."""
    return FlatSink(path, shape, dtype, b"")
