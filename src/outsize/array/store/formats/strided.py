"""A tensor whose elements stand in a file at given strides: torch's views, transposed weights, expanded ones.

In: a file, an offset, shape and strides. Out: the raw store where the elements are contiguous; the raw store with its
axes exchanged where they are contiguous in another order; else a store that reads the stretch of the file from the
region's first element to its last.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from outsize.array.store.base import Block, Buffer, Region, Store, region_shape, whole
from outsize.array.store.formats.flat import FlatStore
from outsize.array.store.io.file import AlignedFile
from outsize.array.store.io.narrow_floats import numpy_dtype, widened
from outsize.array.store.io.view import SeenStore
from outsize.core.errors import StoreError


def open_strided(
    path: str, *, name: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, first: int, offset: int,
    size: int, swapped: bool = False,
) -> Store:  # fmt: skip
    """The elements at `first + sum(index * strides)`, counted in elements, of the `size` bytes at `offset`."""
    bits = numpy_dtype(dtype, name)
    if swapped:
        bits = bits.newbyteorder(">")
    end = 0 if 0 in shape else first + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1
    if end * bits.itemsize > size:
        raise StoreError(
            f"{name}: shape {shape} of {dtype} with strides {strides} reaches to byte {end * bits.itemsize} "
            f"of a storage of {size}: the file is damaged", path=path,
        )  # fmt: skip
    start = offset + first * bits.itemsize
    order = sorted(range(len(shape)), key=lambda axis: (-strides[axis], axis))
    ordered = tuple(shape[axis] for axis in order)
    store: Store
    if not _is_contiguous(ordered, tuple(strides[axis] for axis in order)):
        store = SpanStore(path, shape, strides, bits, start)
    else:
        store = FlatStore(AlignedFile(path), ordered, bits, start, name=name)
        if order != sorted(order):
            store = TransposedStore(store, order)
    store.name = name
    return widened(store, dtype)


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """True where the strides are those of a C-ordered array; strides of axes of length 1 do not matter."""
    if 0 in shape:
        return True
    expected = 1
    for length, step in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True


class TransposedStore(SeenStore):
    """A store with its axes exchanged; no bytes move for that."""

    def __init__(self, inner: Store, order: list[int]) -> None:
        """`order[i]` is the axis of this store that is axis i of `inner`."""
        self.inner = inner
        self._order = order
        self._back = [order.index(axis) for axis in range(len(order))]
        self.name, self.paths, self.dtype = inner.name, inner.paths, inner.dtype
        self.shape = tuple(inner.shape[axis] for axis in self._back)
        self.granule = tuple(inner.granule[axis] for axis in self._back)
        self.order = tuple(order)

    def _under(self, region: Region) -> Region:
        return tuple(region[axis] for axis in self._order)

    def read(self, region: Region, buffer: Buffer) -> Block:
        return self.inner.read(self._under(region), buffer).transpose(self._back)

    def fingerprint(self) -> str:
        return f"{self.inner.fingerprint()} {self._order}"


class SpanStore(SeenStore):
    """Elements at strides that leave gaps or repeat: read as one stretch of bytes and viewed."""

    def __init__(
        self, path: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any], offset: int
    ) -> None:
        self.name, self.shape, self.dtype, self.paths = path, shape, dtype, (path,)
        self._strides = strides
        self.inner = FlatStore(AlignedFile(path), (self._last(whole(shape)),), dtype, offset)
        far = max(strides, default=1)
        self.granule = tuple(1 if step == far else n for n, step in zip(shape, strides, strict=True))

    def _last(self, region: Region) -> int:
        """One past the last element of a region, counted from the first of the array."""
        if 0 in region_shape(region):
            return 0
        return sum((stop - 1) * step for (_, stop), step in zip(region, self._strides, strict=True)) + 1

    def _under(self, region: Region) -> Region:
        last = self._last(region)
        return ((min(last, sum(start * step for (start, _), step in zip(region, self._strides, strict=True))), last),)

    def read(self, region: Region, buffer: Buffer) -> Block:
        flat = self.inner.read(self._under(region), buffer)
        steps = tuple(step * self.dtype.itemsize for step in self._strides)
        shape = region_shape(region)
        if math.prod(shape) == 0:
            return flat[:0].reshape(shape)
        return np.lib.stride_tricks.as_strided(flat, shape, steps, writeable=False)

    def fingerprint(self) -> str:
        return f"{self.inner.fingerprint()} {self.shape} {self._strides}"
