"""Element types that NumPy does not have (bfloat16, the float8 family), read as float32.

Every value of these types is a float32 exactly, so nothing is lost; the store's dtype is float32, the bytes it moves
from disk are the narrow ones, and both copies are inside the engine's buffer. Narrow tensors are opened as their bits
(uint16 or uint8) by the store of their file, and wrapped here.

`ml_dtypes` has these types and is not used. It widens 16 Mi bfloat16 in 3.3 ms where two calls of NumPy take 5.6 ms (and
reading them takes 15 ms at 2 GB/s), rounds to bfloat16 in 23 ms instead of 50, but widens 16 Mi float8 in 340 ms where a table
of 256 values takes 79 ms; it takes 34 ms to import. Both give the same values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from outsize.array.store.base import Block, Buffer, Region, Store, region_shape, round_up
from outsize.array.store.io.view import SeenStore
from outsize.core.errors import StoreError


class _Float8(NamedTuple):
    """Layout of a one-byte float."""

    exponent: int
    """Bits of the exponent."""
    mantissa: int
    """Bits of the mantissa."""
    bias: int
    """What is taken from the exponent."""
    nan: tuple[int, ...]
    """Codes that are not a number."""
    infinite: bool = False
    """True where the largest exponent means infinity and NaN, as in the IEEE formats."""


_FLOAT8 = {
    "float8_e4m3fn": _Float8(4, 3, 7, (0x7F, 0xFF)),
    "float8_e4m3fnuz": _Float8(4, 3, 8, (0x80,)),
    "float8_e5m2": _Float8(5, 2, 15, (), infinite=True),
    "float8_e5m2fnuz": _Float8(5, 2, 16, (0x80,)),
    "float8_e8m0fnu": _Float8(8, 0, 127, (0xFF,)),
}

NARROW: dict[str, np.dtype[Any]] = {"bfloat16": np.dtype(np.uint16), **dict.fromkeys(_FLOAT8, np.dtype(np.uint8))}
"""Name of the type -> the NumPy type of its bits."""


def numpy_dtype(name: str, where: str) -> np.dtype[Any]:
    """The NumPy type in which elements called `name` are opened: bits for the narrow ones."""
    if name in NARROW:
        return NARROW[name]
    try:
        return np.dtype(name)
    except TypeError:
        raise StoreError(
            f"{where} has dtype {name}, which NumPy does not have; Outsize reads {', '.join(NARROW)} as float32, "
            f"but not this one", path=where,
        ) from None  # fmt: skip


def widened(store: Store, name: str) -> Store:
    """`store` as it is, or, where it holds the bits of a narrow type, as float32."""
    return WideStore(store, name) if name in NARROW else store


class WideStore(SeenStore):
    """The float32 values of a store of bits."""

    def __init__(self, bits: Store, name: str) -> None:
        self.name, self.shape, self.paths, self.granule = bits.name, bits.shape, bits.paths, bits.granule
        self.dtype = np.dtype(np.float32)
        self.narrow = name
        self.inner = bits
        self._table = None if name == "bfloat16" else float8_values(name)

    def _beside(self, region: Region) -> int:
        return round_up(self.bytes_of(region))

    def read(self, region: Region, buffer: Buffer) -> Block:
        used = self.bytes_of(region)
        values = buffer[:used].view(np.float32).reshape(region_shape(region))
        bits = self.inner.read(region, buffer[round_up(used) :])
        if self._table is None:  # a bfloat16 is the upper half of a float32
            wide = values.view(np.uint32)
            np.copyto(wide, bits)  # a shift that casts as it goes takes 1.5 times as long as both
            np.left_shift(wide, np.uint32(16), out=wide)
        else:
            np.take(self._table, bits, out=values, mode="wrap")  # any mode but `raise` writes straight into `out`
        return values

    def fingerprint(self) -> str:
        return f"{self.inner.fingerprint()} {self.narrow}"


def stored_as(store: Store) -> tuple[str, int]:
    """(name of the dtype, bytes of an element) in which a store's file has its elements."""
    if isinstance(store, WideStore):
        return store.narrow, store.inner.dtype.itemsize
    return store.dtype.name, store.dtype.itemsize


def float8_values(name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The 256 values of a one-byte float, by code."""
    layout, codes = _FLOAT8[name], np.arange(256)
    top = (1 << layout.exponent) - 1
    exponent = (codes >> layout.mantissa) & top
    fraction = (codes & ((1 << layout.mantissa) - 1)) / (1 << layout.mantissa)
    values = np.ldexp(1 + fraction, exponent - layout.bias)
    if layout.mantissa:  # the lowest exponent has no leading one
        values = np.where(exponent == 0, np.ldexp(fraction, 1 - layout.bias), values)
    if layout.infinite:
        values = np.where(exponent == top, np.where(fraction == 0, np.inf, np.nan), values)
    if layout.exponent + layout.mantissa == 7:
        values[128:] *= -1
    values[list(layout.nan)] = np.nan
    return np.asarray(values, np.float32)


def round_to_bfloat16(values: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    """Round float32 values in place to the nearest that a bfloat16 can hold, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    quiet = np.isnan(values)
    odd = bits >> np.uint32(16)
    odd &= np.uint32(1)
    odd += np.uint32(0x7FFF)
    bits += odd
    bits &= np.uint32(0xFFFF0000)
    bits[quiet] = np.uint32(0x7FC00000)
