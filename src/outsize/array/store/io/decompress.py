"""Chunks that need no more than a decompressor (blosc, zstd, lz4 or none): decoded inside a buffer of ours.

In: a zarr array, then the bytes of its chunk files. Out: the bytes of a chunk. The size that the encoded bytes state
is checked before anything is decoded, so that a damaged chunk can neither take more memory than was planned nor leave
part of a buffer as it was (a zstd frame that states no size is the exception: it is decoded beside the buffer).
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from outsize.array.store.base import Buffer
from outsize.core.units import MiB

DECODER = MiB
"""Bytes of a decompressor's own state and blocks."""


class Coding:
    """How chunks that need no more than a compressor are decoded."""

    def __init__(self, name: str | None, dtype: np.dtype[Any], order: Literal["C", "F"]) -> None:
        self.dtype = dtype
        self.order: Literal["C", "F"] = order
        self.copies = 2 if name == "zstd" else 1
        """Decoded chunks held at once: a zstd frame that does not state its size is decoded beside the buffer."""
        self.state = 0 if name is None else DECODER
        """Bytes the decompressor takes by itself."""
        self.plain = name is None
        """True where bytes are stored as they are."""
        self._name = name
        if name is not None:
            self._codec = importlib.import_module("numcodecs").get_codec({"id": name})

    def decode(self, encoded: Buffer, out: Buffer) -> Buffer:
        """The bytes of a chunk, in `out` where the encoding says that they fit there."""
        if self._name is None:
            return encoded
        stated = _STATED_SIZE[self._name](encoded)
        if stated is None:
            return np.frombuffer(self._codec.decode(encoded), np.uint8)
        if stated != out.nbytes:
            raise ValueError(f"it states {stated} bytes, not {out.nbytes}")
        self._codec.decode(encoded, out)
        return out


def _blosc_size(encoded: Buffer) -> int:
    decoded, _, whole = struct.unpack_from("<III", encoded.data, 4)
    if whole != encoded.nbytes:  # blosc itself decodes a short file into whatever was in memory
        raise ValueError(f"{encoded.nbytes} bytes of the {whole} that its header states")
    return int(decoded)


def _zstd_size(encoded: Buffer) -> int | None:
    """Content size in the frame's header (RFC 8878, 3.1.1), None where the writer did not know it yet."""
    magic, descriptor = struct.unpack_from("<IB", encoded.data, 0)
    if magic != 0xFD2FB528:
        raise ValueError("it does not begin like a zstd frame")
    single = bool(descriptor & 0x20)
    at = 5 + (0 if single else 1) + (0, 1, 2, 4)[descriptor & 3]
    flag = descriptor >> 6
    if flag == 0 and not single:
        return None
    form, base = (("<B", 0), ("<H", 256), ("<I", 0), ("<Q", 0))[flag]
    return int(struct.unpack_from(form, encoded.data, at)[0]) + base


_STATED_SIZE: dict[str, Callable[[Buffer], int | None]] = {
    "blosc": _blosc_size, "zstd": _zstd_size, "lz4": lambda encoded: int(struct.unpack_from("<I", encoded.data, 0)[0]),
}  # fmt: skip
"""Compressors that decode into a buffer of ours -> the reader of the size that the encoded bytes state."""


def plain_coding(array: Any, of_chunks: list[dict[str, Any]] | None = None) -> Coding | None:
    """The coding of an array whose chunks need no more than a compressor, else None. `of_chunks`: codecs of chunks in shards."""
    fields = array.metadata.to_dict()
    dtype = np.dtype(array.dtype)
    if fields["zarr_format"] == 2:
        compressor = fields.get("compressor")
        name = None if compressor is None else compressor["id"]
        if fields.get("filters") or name not in (None, *_STATED_SIZE):
            return None
        return Coding(name, dtype, fields["order"])
    told = of_chunks or fields["codecs"]
    codecs: list[dict[str, Any]] = [codec if isinstance(codec, dict) else {"name": codec} for codec in told]
    names = [codec["name"] for codec in codecs]
    if names[:1] != ["bytes"] or len(names) > 2 or not set(names[1:]) <= set(_STATED_SIZE):
        return None
    endian = codecs[0].get("configuration", {}).get("endian")
    stored = dtype if endian is None else dtype.newbyteorder("<" if endian == "little" else ">")
    return Coding(names[1] if len(names) == 2 else None, stored, "C")
