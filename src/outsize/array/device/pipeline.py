"""Chunks through a device: host block -> slot on the device -> kernels -> host block, three lanes, nothing waited for in
between.

Workers of the engine read (or copy) their chunk into page-locked memory of their own and send it; while one worker's
chunk is on the link, another's is computed and a third one's is read. Each takes one of a few slots of device memory
for as long as its chunk is under way. Host memory that the device can reach by itself is sent from where it lies.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.array.device.base import Device, Event, array_bytes, straight
from outsize.array.elementwise import broadcast_region
from outsize.array.frame import Frame
from outsize.array.graph import Node, Source
from outsize.array.store.base import Block, Region, Store, region_shape
from outsize.array.store.flat import FlatStore
from outsize.array.store.memory import MemoryStore


@dataclass(slots=True)
class Level:
    """A device as a plan sees it."""

    device: Device
    """The device."""
    budget: int
    """Bytes that may be held on it in all."""
    reason: str
    """Why this number."""
    strict: bool
    """True where the user named the device: what cannot run on it is an error, not a note."""
    tf32: bool = False
    """True where products of float32 may be rounded to TF32's ten bits."""

    @property
    def room(self) -> int:
        """Bytes that passes may reserve: what the device's libraries take is set aside."""
        return max(0, self.budget - self.device.outside)


@dataclass(frozen=True, slots=True)
class Parcel:
    """A host block on its way: as it is sent, and how its axes are turned back on the device."""

    block: Block
    """In C order of its own axes; contiguous, or rows at a pitch."""
    back: tuple[int, ...]
    """Order that gives the original axes."""

    def view(self, device: Device, offset: int) -> tuple[Any, Any]:
        """(the array that is sent to, the same with the original axes)."""
        target = device.view(offset, self.block.shape, self.block.dtype)
        return target, device.kernels.turn(target, self.back)


def pack(block: Block, frame: Frame, device: Device, *, direct: bool | None = None) -> Parcel:
    """A block as it can be sent: as it lies where the device reaches it, else copied into the worker's memory."""
    order = tuple(sorted(range(block.ndim), key=lambda axis: (-abs(block.strides[axis]), axis)))
    turned = block.transpose(order)
    back = tuple(int(axis) for axis in np.argsort(order))
    if direct is None:
        direct = sendable(turned) and (_inside(turned, frame) or device.reaches(turned))
    if direct:
        return Parcel(turned, back)
    packed = frame.array(turned.shape, block.dtype.newbyteorder("="))
    frame.copy(packed, turned)
    return Parcel(packed, back)


def sendable(block: Block) -> bool:
    """True where a block needs no repacking: native bytes, nothing repeated or reversed, rows at a pitch."""
    plain = all(stride > 0 for stride, n in zip(block.strides, block.shape, strict=True) if n > 1)
    return block.dtype.isnative and plain and straight(block)


def _inside(block: Block, frame: Frame) -> bool:
    if frame.buffer is None or frame.buffer.nbytes == 0:
        return False
    start = frame.buffer.ctypes.data
    return bool(start <= block.ctypes.data < start + frame.buffer.nbytes)


def load(leaf: Node, region: Region, frame: Frame, device: Device) -> Parcel:
    """The block of a leaf, with all axes of the result, ready to be sent; a dry frame only counts."""
    part = broadcast_region(region, leaf.shape)
    block = frame.evaluate(leaf, part)
    lead = (None,) * (len(region) - block.ndim)
    direct = _direct(leaf, part, frame.bindings, device) if frame.dry else None
    return pack(block[(*lead, ...)], frame, device, direct=direct)


def _direct(leaf: Node, region: Region, bindings: Mapping[Node, Store], device: Device) -> bool:
    """What `pack` will find, told before anything is read: True only where it is certain."""
    store = bindings.get(leaf) or (leaf.store if isinstance(leaf, Source) else None)
    if isinstance(store, FlatStore):
        return store.dtype.isnative
    if not isinstance(store, MemoryStore) or not device.reaches(store.array):
        return False
    block = store.array[tuple(slice(a, b) for a, b in region)]
    return sendable(block.transpose(sorted(range(block.ndim), key=lambda axis: (-abs(block.strides[axis]), axis))))


def parcel_bytes(leaf: Node, region: Region) -> int:
    """Bytes of a leaf's block on the device."""
    return array_bytes(region_shape(broadcast_region(region, leaf.shape)), leaf.dtype)


class Pipeline:
    """Slots of a device, and the way of a chunk through them."""

    def __init__(self, device: Device, base: int, slot_bytes: int, slots: int) -> None:
        self.device = device
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(slots):
            self._free.put(base + number * slot_bytes)
        self._order = threading.Lock()

    def run(
        self, parcels: Sequence[Parcel | None], work: Callable[[list[Any], int], Iterable[tuple[Block, Any]]]
    ) -> None:
        """Send the parcels, work on them (`work(arrays, first free offset)` -> what to bring back), and wait.

        `work` runs in the device's own order; what it returns as (host block, array) is copied out after it.
        """
        place = self._free.get()
        try:
            self._send(parcels, work, place).wait()
        finally:
            self._free.put(place)

    def _send(self, parcels: Sequence[Parcel | None], work: Any, place: int) -> Event:
        device = self.device
        arrays: list[Any] = []
        sends: list[tuple[Any, Block]] = []
        for parcel in parcels:
            if parcel is None:
                arrays.append(None)
                continue
            target, turned = parcel.view(device, place)
            sends.append((target, parcel.block))
            arrays.append(turned)
            place += array_bytes(parcel.block.shape, parcel.block.dtype)
        returns: list[tuple[Block, Any]] = []

        def upload() -> None:
            for target, block in sends:
                device.kernels.upload(target, block)

        def compute() -> None:
            returns.extend(work(arrays, place))

        def download() -> None:
            for block, array in returns:
                device.kernels.download(block, array)

        with self._order:
            device.submit("in", upload)
            device.follow("work", device.record("in"))
            device.submit("work", compute)
            device.follow("out", device.record("work"))
            device.submit("out", download)
            return device.record("out")
