"""Chunks through a device: host block -> slot on the device -> kernels -> host block, three lanes, nothing waited for in
between.

Workers of the engine read (or copy) their chunk into page-locked memory of their own and send it; while one worker's
chunk is on the link, another's is computed and a third one's is read. Each takes one of a few slots of device memory
for as long as its chunk is under way. Host memory that the device can reach by itself is sent from where it lies; other
memory is copied piece by piece through page-locked rings, by so many hands at once as memory bears: while a worker waits
for the end of its chunk, another one's hand copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.array.copy import copy_block
from outsize.array.device.base import Device, Event, Shuttle, array_bytes, straight
from outsize.array.elementwise import broadcast_region
from outsize.array.frame import Frame
from outsize.array.graph import Node, Source
from outsize.array.store.base import Block, Buffer, Region, Store, region_shape
from outsize.array.store.flat import FlatStore
from outsize.array.store.memory import MemoryStore

PIECE = 8 << 20
"""Bytes of a piece: long enough for the link, and all workers' pieces together stay in a processor's last cache, so that
staging costs its memory one read and no write."""
_PIECES = 2
"""Pieces of a ring: one is filled while the other is sent."""


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
    pinned: int | None = None
    """Bytes of host memory that may be page-locked, None where the host's budget is the only limit."""

    def lockable(self, room: int) -> int:
        """What of the host's room may be page-locked."""
        return room if self.pinned is None else min(room, self.pinned)

    @property
    def room(self) -> int:
        """Bytes that passes may reserve: what the device's libraries take is set aside."""
        return max(0, self.budget - self.device.outside)


@dataclass(frozen=True, slots=True)
class Parcel:
    """A host block on its way: as it is sent, and how its axes are turned back on the device."""

    block: Block
    """With its axes from slow to fast as they lie in memory."""
    back: tuple[int, ...]
    """Order that gives the original axes."""
    ring: Buffer | None
    """Page-locked memory through which it goes piece by piece; None where it is sent as it lies."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """dtype on the device."""
        return self.block.dtype.newbyteorder("=")

    def view(self, device: Device, offset: int) -> tuple[Any, Any]:
        """(the array that is sent to, the same with the original axes)."""
        target = device.view(offset, self.block.shape, self.dtype)
        return target, device.kernels.turn(target, self.back)


def pack(block: Block, frame: Frame, device: Device, *, direct: bool | None = None) -> Parcel:
    """A block as it can be sent: as it lies where the device reaches it, else through a ring in the worker's memory."""
    order = tuple(sorted(range(block.ndim), key=lambda axis: (-abs(block.strides[axis]), axis)))
    turned = block.transpose(order)
    back = tuple(int(axis) for axis in np.argsort(order))
    if direct is None:
        direct = sendable(turned) and (lies_in(turned, frame) or device.reaches(turned))
    if direct:
        return Parcel(turned, back, None)
    size = min(_PIECES * PIECE, _PIECES * array_bytes(turned.shape, block.dtype))
    if frame.ring is None or size > frame.ring.nbytes:
        frame.ring = frame.bytes(size)
    return Parcel(turned, back, frame.ring)


def cut(block: Block, limit: int) -> Iterator[tuple[int, Block]]:
    """(elements before it, part) of a block in C order, in parts of at most `limit` bytes that are whole in it."""
    if block.nbytes <= limit or block.size == 1:
        yield 0, block
        return
    if block.flags.c_contiguous:
        flat, step = block.reshape(-1), max(1, limit // block.itemsize)
        yield from ((low, flat[low : low + step]) for low in range(0, flat.size, step))
        return
    inner = block.size // block.shape[0]
    step = max(1, limit // max(1, inner * block.itemsize))
    for low in range(0, block.shape[0], step):
        for before, part in cut(block[low : low + step] if step > 1 else block[low], limit):
            yield low * inner + before, part


def sendable(block: Block) -> bool:
    """True where a block needs no repacking: native bytes, nothing repeated or reversed, rows at a pitch."""
    plain = all(stride > 0 for stride, n in zip(block.strides, block.shape, strict=True) if n > 1)
    return block.dtype.isnative and plain and straight(block)


def lies_in(block: Block, frame: Frame) -> bool:
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


def fills(parcel: Parcel, limit: int) -> Iterator[tuple[int, int, Callable[[int], Any]]]:
    """(bytes before it, its bytes, what copies it to a place in the parcel's ring) of pieces of at most `limit` bytes.

    A block that lies in one stretch is copied by addresses, without an array for every piece: many threads do this at
    once, and share one interpreter."""
    block, dtype, ring = parcel.block, parcel.dtype, parcel.ring
    assert ring is not None
    if block.flags.c_contiguous and block.dtype.isnative:
        source, target, total = block.ctypes.data, ring.ctypes.data, block.nbytes
        for low in range(0, total, limit):
            size = min(limit, total - low)
            yield low, size, functools.partial(_move, target, source + low, size)
        return
    for before, part in cut(block, limit):
        yield before * dtype.itemsize, part.size * dtype.itemsize, functools.partial(_repack, ring, dtype, part)


def _move(target: int, source: int, size: int, place: int) -> None:
    ctypes.memmove(target + place, source, size)


def _repack(ring: Buffer, dtype: np.dtype[Any], part: Block, place: int) -> None:
    copy_block(np.ndarray(part.shape, dtype, ring.data, place), part)


@dataclass(frozen=True, slots=True)
class Slot:
    """Device memory of a chunk."""

    offset: int
    """Where it begins."""
    shuttles: tuple[Shuttle, ...]
    """One for each piece of the ring of the worker who has the slot."""


class Pipeline:
    """Slots of a device, and the way of a chunk through them."""

    def __init__(self, device: Device, base: int, slot_bytes: int, slots: int, hands: int) -> None:
        self.device = device
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for number in range(slots):
            self._free.put(Slot(base + number * slot_bytes, tuple(device.shuttle() for _ in range(_PIECES))))
        self._hands = threading.Semaphore(hands)
        """Held by a worker while it copies."""
        self._order = threading.Lock()

    def run(
        self, parcels: Sequence[Parcel | None], work: Callable[[list[Any], int], Iterable[tuple[Block, Any]]]
    ) -> None:
        """Send the parcels, work on them (`work(arrays, first free offset)` -> what to bring back), and wait.

        `work` runs in the device's own order; what it returns as (host block, array) is copied out after it.
        """
        slot = self._free.get()
        try:
            self._send(parcels, work, slot).wait()
        finally:
            self._free.put(slot)

    def _stage(self, parcel: Parcel, offset: int, shuttles: tuple[Shuttle, ...]) -> None:
        """Send a parcel through its ring: a piece is filled again when its copy has been made."""
        assert parcel.ring is not None
        size, address = parcel.ring.nbytes // _PIECES, parcel.ring.ctypes.data
        for number, (before, length, fill) in enumerate(fills(parcel, size)):
            turn = number % _PIECES
            shuttles[turn].wait()
            fill(turn * size)
            shuttles[turn].send(address + turn * size, length, offset + before)

    def _send(self, parcels: Sequence[Parcel | None], work: Any, slot: Slot) -> Event:
        device, place = self.device, slot.offset
        arrays: list[Any] = []
        sends: list[tuple[Any, Block]] = []
        with self._hands if any(p is not None and p.ring is not None for p in parcels) else contextlib.nullcontext():
            for parcel in parcels:
                if parcel is None:
                    arrays.append(None)
                    continue
                target, turned = parcel.view(device, place)
                if parcel.ring is None:
                    sends.append((target, parcel.block))
                else:
                    self._stage(parcel, place, slot.shuttles)
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
