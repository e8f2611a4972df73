"""Chunks through a device: host block -> slot on the device -> kernels -> host block, three streams, nothing waited for in
between.

Workers of the engine read (or copy) their chunk into page-locked memory of their own and send it; while one worker's
chunk is on the link, another's is computed and a third one's is read. Each takes one of a few slots of device memory
for as long as its chunk is under way. Host memory that the device can reach by itself is sent from where it lies; other
memory is taken there by a stager, chunk after chunk.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.array.device.base import STREAMS, Device, Event, array_bytes, rows_of
from outsize.array.device.transfer.staging import Stager
from outsize.array.graph.elementwise import broadcast_region
from outsize.array.graph.frame import Frame
from outsize.array.graph.node import Node, Source
from outsize.array.store.base import Block, Region, Store
from outsize.array.store.formats.flat import FlatStore
from outsize.array.store.formats.memory import MemoryStore
from outsize.array.tuning import Tuning


@dataclass(frozen=True, slots=True)
class Parcel:
    """A host block on its way: as it is sent, and how its axes are turned back on the device."""

    block: Block
    """With its axes from slow to fast as they lie in memory."""
    back: tuple[int, ...]
    """Order that gives the original axes."""
    staged: bool
    """True where the device does not reach it, so that staging threads must take it there."""

    def view(self, device: Device, offset: int) -> tuple[Any, Any]:
        """(the array that is sent to, the same with the original axes)."""
        target = device.view(offset, self.block.shape, self.block.dtype.newbyteorder("="))
        straight_on = self.back == tuple(range(len(self.back)))
        return target, target if straight_on else device.kernels.turn(target, self.back)


def pack(block: Block, frame: Frame, device: Device, *, direct: bool | None = None) -> Parcel:
    """A block as it can be sent; `direct` says whether from where it lies, where that is settled."""
    order = _by_pitch(block)
    turned, back = block.transpose(order), tuple(int(axis) for axis in np.argsort(order))
    if direct is None:
        direct = _plain(turned) and _long(turned, frame.tuning) and (lies_in(turned, frame) or device.reaches(turned))
    return Parcel(turned, back, not direct)


def _by_pitch(block: Block) -> tuple[int, ...]:
    """Axes from slow to fast."""
    return tuple(sorted(range(block.ndim), key=lambda axis: (-abs(block.strides[axis]), axis)))


def sendable(block: Block) -> bool:
    """True where a block can be sent at once, as it is: native bytes, nothing repeated or reversed, rows at a pitch."""
    return _plain(block) and rows_of(block) is not None


def _plain(block: Block) -> bool:
    positive = all(stride > 0 for stride, n in zip(block.strides, block.shape, strict=True) if n > 1)
    return bool(block.dtype.isnative) and positive


def _long(block: Block, tuning: Tuning) -> bool:
    """True where the rows of a block, and its parts that can be sent at once, are few or long: each costs its time."""
    parts, part = 1, block
    while (found := rows_of(part)) is None:
        parts, part = parts * part.shape[0], part[0]
    width, rows, _ = found
    return (rows == 1 or width >= tuning.direct_row) and (parts == 1 or block.nbytes >= parts * tuning.direct_part)


def straight_parts(target: Any, block: Block) -> Iterator[tuple[Any, Block]]:
    """(where it goes, part) of a block whose rows lie at several pitches: what was read with more around it."""
    if rows_of(block) is not None:
        yield target, block
        return
    for index in range(block.shape[0]):
        yield from straight_parts(target[index], block[index])


def lies_in(block: Block, frame: Frame) -> bool:
    if frame.buffer is None or frame.buffer.nbytes == 0:
        return False
    start = frame.buffer.ctypes.data
    return bool(start <= block.ctypes.data < start + frame.buffer.nbytes)


def load(leaf: Node, region: Region, frame: Frame, device: Device, direct: bool | None = None) -> Parcel:
    """The block of a leaf, with all axes of the result, ready to be sent; a dry frame only counts. `direct` says whether it is
    sent from where it lies, where that is settled."""
    block = frame.evaluate(leaf, broadcast_region(region, leaf.shape))
    lead = (None,) * (len(region) - block.ndim)
    return pack(block[(*lead, ...)], frame, device, direct=False if frame.dry else direct)


def settled(leaf: Node, bindings: Mapping[Node, Store], device: Device, tuning: Tuning) -> bool | None:
    """Before anything is read: True where every block of a leaf can be sent from where it lies, False where none can, None
    where that shows when it is made."""
    store = bindings.get(leaf) or (leaf.store if isinstance(leaf, Source) else None)
    if isinstance(store, FlatStore):
        return True if store.dtype.isnative else None
    if not isinstance(store, MemoryStore):
        return None
    if not device.reaches(store.array):
        return False
    whole = store.array.transpose(_by_pitch(store.array))
    return True if sendable(whole) and _long(whole, tuning) else None


class Pipeline:
    """Slots of a device, and the way of a chunk through them."""

    def __init__(self, device: Device, base: int, slot_bytes: int, slots: int, stager: Stager | None) -> None:
        self.device, self.stager = device, stager
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Where free slots begin."""
        for number in range(slots):
            self._free.put(base + number * slot_bytes)
        self._turns = {stream: threading.Lock() for stream in STREAMS}
        """What a chunk puts on a stream is not mixed with another's: none waits for more than was there before it."""

    def run(self, parcels: list[Parcel], work: Callable[[list[Any], int], Iterable[tuple[Block, Any]]]) -> None:
        """Send the parcels, work on them (`work(arrays, first free offset)` -> what to bring back), and wait.

        `work` runs in the device's own order; what it returns as (host block, array) is copied out after it.
        """
        slot = self._free.get()
        try:
            self._send(parcels, work, slot).wait()
        finally:
            self._free.put(slot)

    def _send(self, parcels: list[Parcel], work: Any, place: int) -> Event:
        device = self.device
        arrays: list[Any] = []
        sends: list[tuple[Any, Block]] = []
        carried: list[tuple[Block, int]] = []
        for parcel in parcels:
            target, turned = parcel.view(device, place)
            if parcel.staged:
                carried.append((parcel.block, place))
            else:
                sends.append((target, parcel.block))
            arrays.append(turned)
            place += array_bytes(parcel.block.shape, parcel.block.dtype)
        if carried:
            assert self.stager is not None, "memory that the device does not reach, in a plan without staging threads"
            self.stager.carry(carried)
        returns: list[tuple[Block, Any]] = []

        def upload() -> None:
            for target, block in sends:
                for there, part in straight_parts(target, block):
                    device.kernels.upload(there, part)

        def compute() -> None:
            returns.extend(work(arrays, place))

        def download() -> None:
            for block, array in returns:
                device.kernels.download(block, array)

        turn = self._turns["in"] if sends else contextlib.nullcontext()  # staging threads send pieces in between anyway
        with turn:
            if sends:
                device.submit("in", upload)
            arrived = device.record("in")
        with self._turns["work"]:  # chunks share registers
            device.follow("work", arrived)
            device.submit("work", compute)
            done = device.record("work")
        with self._turns["out"]:
            device.follow("out", done)
            device.submit("out", download)
            return device.record("out")
