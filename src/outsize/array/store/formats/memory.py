"""Arrays that are already in memory: a store without reads, and a sink into a NumPy array.

Other libraries' arrays are opened without a copy: anything that speaks DLPack (torch, JAX, CuPy), or NumPy's own protocols.
Arrays on a device are refused: moving them is a choice that the user makes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from outsize.array.store.base import Block, Buffer, Region, Sink, Store
from outsize.array.store.io.narrow_floats import NARROW, widened
from outsize.core.errors import InputError

_HOST_DEVICES = {1: "cpu", 3: "pinned host memory"}
"""DLPack's numbers of devices whose memory the processor can read."""


def _index(region: Region) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in region)


def _nothing(self: Any, region: Region) -> int:
    """Blocks are views of the array itself: they take no buffer, and nothing is moved."""
    return 0


class MemoryStore(Store):
    """A NumPy array. Regions are views of it: reading takes no memory and moves no bytes."""

    resident = True

    def __init__(self, array: Block, name: str = "memory", *, writable: bool = False) -> None:
        self.array = np.asarray(array)
        self.name = name
        self.shape, self.dtype = self.array.shape, self.array.dtype
        self.order = tuple(sorted(range(self.array.ndim), key=lambda axis: -abs(self.array.strides[axis])))
        self._writable = writable

    extent = traffic = _nothing

    def read(self, region: Region, buffer: Buffer) -> Block:
        """A view; the buffer is not used."""
        return self.array[_index(region)]

    def fingerprint(self) -> str:
        """Shape, dtype and a hash of the values."""
        import hashlib

        digest = hashlib.blake2b(np.ascontiguousarray(self.array).view(np.uint8).data, digest_size=16).hexdigest()
        return f"memory {self.shape} {self.dtype.str} {digest}"

    def update(self) -> Sink:
        return MemorySink(self.array) if self._writable else super().update()


class MemorySink(Sink):
    """Writes into a NumPy array that the caller made."""

    partial = ""

    def __init__(self, array: Block, name: str = "memory", *, counted: bool = True) -> None:
        self.array = array
        self.counted = counted
        """False where the array is a user's: its memory is not in our budget."""
        self.name = name
        self.shape, self.dtype = array.shape, array.dtype
        self.order = tuple(sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis])))

    extent = room = traffic = _nothing

    def sketch(self, region: Region) -> Block:
        """The place itself; a plan asks for one element at least, also of an array without any."""
        place = self.lay(region, np.empty(0, np.uint8))
        return place if place.size else super().sketch(region)

    def lay(self, region: Region, buffer: Buffer) -> Block:
        view: Any = self.array[_index(region)] if self.array.ndim else self.array
        return view  # type: ignore[no-any-return]

    def write(self, region: Region, block: Block, buffer: Buffer) -> None:
        """Nothing where the block was laid here, else a copy."""
        place = self.lay(region, buffer)
        if place.size and not np.may_share_memory(place, block):
            np.copyto(place, block, casting="unsafe")

    def commit(self) -> Store:
        return MemoryStore(self.array, self.name)


def open_memory(source: Any, mode: str = "r") -> Store:
    """A store over an array in memory."""
    if isinstance(source, np.ndarray):
        array = source
    elif hasattr(source, "__dlpack__") and hasattr(source, "__dlpack_device__"):
        return _open_dlpack(source, mode)
    elif hasattr(source, "__array_interface__") or hasattr(source, "__array__"):
        array = np.asarray(source)
    else:
        raise InputError(
            f"cannot open a {type(source).__name__}: give a path, a NumPy array, a tensor on the CPU, "
            f"or anything with __dlpack__"
        )
    return _wrap(array, mode)


def _open_dlpack(source: Any, mode: str) -> Store:
    try:
        device = source.__dlpack_device__()
    except ValueError:  # a tensor without contents has none
        device = (-1, 0)
    if int(device[0]) not in _HOST_DEVICES:
        where = getattr(source, "device", f"device {device}")
        raise InputError(f"the array lies on {where}: move it to host memory first, for instance with .cpu()")
    name = str(getattr(source, "dtype", "")).rpartition(".")[2]
    if getattr(source, "requires_grad", False):
        source = source.detach()
    if name in NARROW and type(source).__module__.split(".")[0] == "torch":
        import torch

        bits = source.view(torch.uint8 if NARROW[name].itemsize == 1 else torch.int16)
        return widened(MemoryStore(np.from_dlpack(bits).view(NARROW[name])), name)
    try:
        array = np.asarray(source) if name in NARROW else np.from_dlpack(source)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"cannot share a {type(source).__name__} of {name or 'unknown dtype'} with NumPy: {error}"
        ) from None
    return _wrap(array, mode)


def _wrap(array: np.ndarray[Any, Any], mode: str) -> Store:
    if array.dtype.name in NARROW:  # a NumPy array of ml_dtypes' types
        return widened(MemoryStore(array.view(NARROW[array.dtype.name])), array.dtype.name)
    if array.dtype.hasobject:
        raise InputError("an array of Python objects has no size in bytes: give one of numbers")
    return MemoryStore(array, writable=mode == "r+" and array.flags.writeable)
