"""A tensor whose elements stand in a file at given strides: torch's views, transposed weights, expanded ones.

In: a file, an offset, shape and strides. Out: a flat store where the elements are contiguous, in whatever order of the axes;
else a store that reads the stretch of the file from the region's first element to its last.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from outsize.array.store.base import Block, Buffer, Region, Store, region_shape, whole
from outsize.array.store.formats.flat import FlatStore, is_packed
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
    lying = [(shape[axis], strides[axis]) for axis in order]
    if 0 in shape or is_packed(tuple(n for n, _ in lying), tuple(step for _, step in lying), 1):
        store: Store = FlatStore(AlignedFile(path), shape, bits, start, tuple(order), name)
    else:
        store = SpanStore(path, shape, strides, bits, start)
    store.name = name
    return widened(store, dtype)


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
