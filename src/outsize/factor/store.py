"""A store that rebuilds what is read of it: the factors are in memory, the tensor is nowhere.

In: a region and a buffer. Out: the region's elements, made inside the buffer. What that takes is counted by the same lines
that do it (`Workspace`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from outsize.array.memo import remembered
from outsize.array.store.base import Block, Buffer, Region, Sink, Store, region_shape, whole
from outsize.core.errors import InputError
from outsize.factor.formats.form import Resident
from outsize.factor.workspace import Workspace


class FactorStore(Store):
    """A tensor as factors."""

    def __init__(
        self, form: Resident, name: str = "factors", path: str | None = None,
        held_as: Callable[[Any], Any] | None = None, note: str = "",
    ) -> None:  # fmt: skip
        """With a path, the factors were read for the work that is planned: they count."""
        self.form, self.name, self.paths = form, name, () if path is None else (path,)
        self.shape, self.dtype = form.shape, form.dtype
        self.granule = form.granule
        self.held_as, self.note = held_as, note

    @property
    def holds(self) -> int:
        return self.form.nbytes if self.paths else 0

    @remembered
    def _measure(self, shape: tuple[int, ...]) -> Workspace:
        """What rebuilding a region of this shape takes, wherever it lies."""
        found = Workspace(self.dtype)
        self.form.rebuild(whole(shape), found)
        return found

    def extent(self, region: Region) -> int:
        return self._measure(region_shape(region)).used

    def packing(self, region: Region) -> tuple[int, int]:
        return tuple(self._measure(region_shape(region)).packing)  # type: ignore[return-value]

    def traffic(self, region: Region) -> int:
        return 0

    def read(self, region: Region, buffer: Buffer) -> Block:
        return self.form.rebuild(region, Workspace(self.dtype, buffer))

    def update(self) -> Sink:
        raise InputError(
            f"{self.name} is kept as factors, which cannot be written into: save the rebuilt tensor and open that with mode='r+'"
        )

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for name, array in self.form.arrays().items():
            digest.update(f"{name} {array.shape} {array.dtype.str}".encode())
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return f"{self.form.method} {digest.hexdigest()}"

    def __reduce__(self) -> tuple[Any, ...]:
        return FactorStore, (self.form, self.name, self.paths[0] if self.paths else None)
