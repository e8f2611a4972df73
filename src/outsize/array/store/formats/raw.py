"""Raw binary: elements and nothing else; shape, dtype and offset come from the user."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from outsize.array.store.formats.flat import FlatSink, FlatStore
from outsize.array.store.io.file import AlignedFile, naming
from outsize.array.store.io.partial import partial_path
from outsize.array.store.options import Options
from outsize.core.errors import InputError
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
    element = np.dtype(dtype)
    axes = [shape] if isinstance(shape, int) else list(shape)
    if -1 in axes:
        rest = element.itemsize
        for length in axes:
            rest *= length if length != -1 else 1
        with naming(path):
            size = os.stat(path).st_size - offset
        if axes.count(-1) > 1 or rest <= 0 or size % rest:
            raise InputError(f"{path}: {size} bytes are not a whole number of rows of {tuple(axes)} {element}")
        axes[axes.index(-1)] = size // rest
    if order not in ("C", "F"):
        raise InputError(f"order is 'C' or 'F', not {order!r}")
    file = AlignedFile(path, writable=mode == "r+")
    return FlatStore(file, parse_shape(axes), element, offset, fortran=order == "F")


def describe(path: str, shape: tuple[int, ...], dtype: np.dtype[Any], options: Options) -> FlatSink:
    """A raw file that is to be written."""
    return FlatSink(path, partial_path(path), shape, dtype, b"")
