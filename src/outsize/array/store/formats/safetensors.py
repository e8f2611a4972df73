"""Safetensors: eight bytes of length, a JSON table of tensors, then their bytes. Read and written without a library.

Opening reads the table and believes none of it before it is checked: lengths against the file, offsets against the
length, shapes against offsets. A tensor is then a flat array at an offset and is read directly. bfloat16 and float8
tensors are opened as float32 (by `io/narrow_floats.py`). An output holds one tensor; its table is padded to a page, which the
format allows, so that the data is written directly too.
"""

from __future__ import annotations

import functools
import json
import math
import os
import struct
from typing import Any

import numpy as np

from outsize.array.store.base import ALIGNMENT, Block, Buffer, Region, Sink, Store, region_shape, round_up
from outsize.array.store.formats.flat import FlatSink, FlatStore
from outsize.array.store.io.file import AlignedFile, naming
from outsize.array.store.io.narrow_floats import NARROW, numpy_dtype, round_to_bfloat16, widened
from outsize.array.store.io.view import SeenSink
from outsize.array.store.options import DEFAULT, Options, choose_key
from outsize.core.dtypes import parse_dtype
from outsize.core.errors import InputError, StoreError
from outsize.core.units import format_bytes

_LONGEST_HEADER = 100_000_000
"""The format's own limit on the table, in bytes."""
_DEFAULT_KEY = "tensor"
_ROUNDED = 65536
"""Elements rounded at once: the temporaries stay in the cache."""

_CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "float32": "F32", "float64": "F64", "complex64": "C64",
}  # fmt: skip
"""Our name of a dtype -> the format's, of what can be written."""
_NAMES = {code: name for name, code in _CODES.items()} | {
    "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""The format's name of a dtype -> ours, of what can be read."""


def recognise(path: str, head: bytes, size: int) -> bool:
    """True where the first nine bytes can begin such a file: there are no magic bytes, only a length and a brace."""
    if len(head) < 9 or head[8:9] != b"{":
        return False
    return bool(8 + struct.unpack("<Q", head[:8])[0] <= size)


def open_file(path: str, options: Options = DEFAULT) -> Store:
    """One tensor of the file."""
    table, start, size = read_table(path)
    chosen = choose_key(path, list(table), options.key)
    name = f"{path}::{chosen}"
    try:
        row = table[chosen]
        code, shape, (first, last) = str(row["dtype"]), tuple(row["shape"]), row["data_offsets"]
        sound = all(type(n) is int and n >= 0 for n in (*shape, first, last)) and first <= last
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise StoreError(f"{name}: its row of the table is damaged: {str(table[chosen])[:100]}", path=path)
    if code not in _NAMES:
        raise StoreError(f"{name} has dtype {code[:20]}; Outsize reads {', '.join(_NAMES)}", path=path)
    dtype = _NAMES[code]
    bits = numpy_dtype(dtype, name)
    if math.prod(shape) * bits.itemsize != last - first or start + last > size:
        raise StoreError(
            f"{name}: {shape} of {code} take {math.prod(shape) * bits.itemsize} bytes, the table gives it bytes "
            f"{first} to {last} of {size - start}: the file is damaged or truncated", path=path,
        )  # fmt: skip
    if options.mode == "r+" and dtype in NARROW:
        raise InputError(f"{name} is {dtype}: Outsize reads that as float32 and cannot write into it")
    file = AlignedFile(path, writable=options.mode == "r+")
    return widened(FlatStore(file, shape, bits.newbyteorder("<"), start + first, name=name), dtype)


def read_table(path: str) -> tuple[dict[str, dict[str, Any]], int, int]:
    """(tensors by name, byte at which their data begins, length of the file)."""
    table, start, size = read_header(path)
    table.pop("__metadata__", None)
    return table, start, size


def read_header(path: str) -> tuple[dict[str, dict[str, Any]], int, int]:
    """As `read_table`, with the metadata under `__metadata__`."""
    with naming(path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        lead = file.read(8)
        length = struct.unpack("<Q", lead)[0] if len(lead) == 8 else None
        if length is None or length > size - 8:
            raise StoreError(
                f"{path} is not a whole safetensors file: it states a table of "
                f"{'-' if length is None else length} bytes, the file has {size}", path=path,
            )  # fmt: skip
        if length > _LONGEST_HEADER:
            raise StoreError(f"{path} states a table of {format_bytes(length)}, the format allows 100 MB", path=path)
        text = file.read(length)
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: its table of tensors is damaged: {error}", path=path) from None
    if not isinstance(table, dict):
        raise StoreError(f"{path}: its table of tensors is damaged: it is not a JSON object", path=path)
    return table, 8 + length, size


class Bfloat16Sink(SeenSink):
    """A file of one bfloat16 tensor: takes float32 blocks and writes the nearest bfloat16."""

    def __init__(self, bits: Sink) -> None:
        self.name, self.partial, self.shape, self.granule = bits.name, bits.partial, bits.shape, bits.granule
        self.dtype = np.dtype(np.float32)
        self.sink = bits

    def extent(self, region: Region) -> int:
        """The block again in float32, its bits in uint16, and what writing those takes."""
        size = math.prod(region_shape(region))
        return round_up(4 * size) + round_up(2 * size) + self.sink.extent(region)

    room, sketch, lay = Sink.room, Sink.sketch, Sink.lay

    def write(self, region: Region, block: Block, buffer: Buffer) -> None:
        shape, size = region_shape(region), math.prod(region_shape(region))
        values = np.ndarray(shape, np.float32, buffer.data)
        narrow = np.ndarray(shape, np.uint16, buffer[round_up(4 * size) :].data)
        np.copyto(values, block, casting="unsafe")
        flat, bits = values.reshape(-1), narrow.reshape(-1)
        for start in range(0, size, _ROUNDED):
            piece = flat[start : start + _ROUNDED]
            round_to_bfloat16(piece)
            np.right_shift(piece.view(np.uint32), np.uint32(16), out=bits[start : start + _ROUNDED], casting="unsafe")
        self.sink.write(region, narrow, buffer[round_up(4 * size) + round_up(2 * size) :])


def describe(path: str, shape: tuple[int, ...], dtype: Any, options: Options = DEFAULT) -> Sink:
    """A safetensors file of one tensor, called by the key, that is to be written; `dtype` may be "bfloat16"."""
    name = parse_dtype(dtype).name
    if name == "bfloat16":
        return Bfloat16Sink(_describe(path, shape, np.dtype(np.uint16), "BF16", options.key))
    if name not in _CODES:
        raise InputError(f"safetensors cannot hold {name}: it has bfloat16, {', '.join(_CODES)}")
    return _describe(path, shape, np.dtype(dtype), _CODES[name], options.key)


def _describe(path: str, shape: tuple[int, ...], dtype: np.dtype[Any], code: str, key: str | None) -> FlatSink:
    key = key or _DEFAULT_KEY
    little = dtype.newbyteorder("<")
    nbytes = math.prod(shape) * little.itemsize
    header = make_header({key: {"dtype": code, "shape": list(shape), "data_offsets": [0, nbytes]}})
    return FlatSink(path, shape, little, header, functools.partial(open_file, options=Options(key=key)))


def make_header(table: dict[str, dict[str, Any]]) -> bytes:
    """The first bytes of a file: the length of the table and the table, padded to a page."""
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    length = round_up(8 + len(text), ALIGNMENT) - 8
    return struct.pack("<Q", length) + text.ljust(length, b" ")


def describe_tensors(arrays: dict[str, Block]) -> dict[str, dict[str, Any]]:
    """The rows of the table for arrays that stand one after another."""
    rows, start = {}, 0
    for name, array in arrays.items():
        code = _CODES[array.dtype.name]
        rows[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [start, start + array.nbytes]}
        start += array.nbytes
    return rows
