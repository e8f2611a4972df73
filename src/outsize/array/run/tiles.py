"""Tiles of an array, for a user's own kernels: NumPy arrays, or torch tensors where a device is named.
They are read ahead, sent ahead, and written back where asked.

`for tile in x.tiles(device="cuda", prefetch=2)` gives one tensor after another. While a tile is worked on, threads make
the next ones on the host and send them into other slots of the device; the user's stream waits for the copy, not the
user. A tile is good until the next one is asked for: then its slot is used again, after everything that was put on the
user's stream by then. Tiles are sized as passes are (`passes/base.py: size`), and `Tiles.plan` shows it.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.array.device.base import Device, DeviceBudget, Event, array_bytes
from outsize.array.device.find import find_device
from outsize.array.device.transfer.pipeline import lies_in, sendable
from outsize.array.device.transfer.staging import Stager, Staging, staging_threads
from outsize.array.graph.frame import Frame
from outsize.array.graph.node import Node, Source, held_by_stores
from outsize.array.passes.base import ANY, BARE, Effort, Room, Sizable, Sized, size, size_barely
from outsize.array.passes.tiling import Box, Grid, balance, grow, page_box
from outsize.array.plan.prepare import resolve_budget
from outsize.array.plan.schedule import ScheduledPass, show_plan
from outsize.array.store.base import Block, Region, Sink, region_shape
from outsize.array.store.formats.memory import MemoryStore
from outsize.array.tuning import Tuning, current
from outsize.core.errors import BudgetError, InputError
from outsize.core.extras import need
from outsize.core.memory import Part
from outsize.core.noun import Known
from outsize.engine.pinned import Pinned, lock_memory


@dataclass(slots=True)
class _Flight:
    """One tile's place on host and device."""

    frame: Frame
    offset: int
    tensor: Any = None
    block: Block | None = None
    region: Region = ()
    arrived: Event | None = None
    freed: Any = None
    """What the user's stream had to do with it before it may be used again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedTiles(Sized):
    """Tiles with their sizes on host and device."""

    staging: Staging
    """The staging threads that carry tiles which the device does not reach by itself."""
    tile_bytes: int
    """Bytes of the device for each tile."""


class TileWork(Sizable):
    """Tiles of a node as they are sized: so many at once, each made in a buffer of its own."""

    rereads = True
    locks = (True, False)

    def __init__(
        self, node: Node, sink: Sink | None, slots: int, box: Box | None, tuning: Tuning, allowed: DeviceBudget | None
    ) -> None:
        super().__init__(() if sink is None else ((node, sink),), {}, tuning)
        self.node, self.sink, self.slots, self.box, self.allowed = node, sink, slots, box, allowed
        self.dtype = node.dtype.newbyteorder("=")
        store = node.store if isinstance(node, Source) else None
        near = allowed is not None and sink is None and isinstance(store, MemoryStore)
        self.near: Block | None = store.array if near else None  # type: ignore[union-attr]
        """The array, where tiles are sent from where they lie: nothing of it is written back."""
        self.reached = self.near is None or allowed is None or allowed.device.reaches(self.near)
        """False where staging threads carry the tiles."""

    def label(self) -> str:
        return f"tiles of {self.node.label()}"

    def straight(self, region: Region) -> bool:
        """True where a tile is sent from where it lies, by the device itself or by staging threads."""
        if self.near is None or not self.reached:
            return self.near is not None
        return sendable(self.near[tuple(slice(*span) for span in region)])

    def measure(self, region: Region, frame: Frame) -> None:
        frame.evaluate(self.node, region)
        if not self.straight(region):
            frame.array(region_shape(region), self.dtype)
        if self.sink is not None:
            frame.bytes(self.sink.room(region) + self.sink.extent(region))
        frame.device = 0 if self.allowed is None else array_bytes(region_shape(region), self.dtype)

    def limit(self, room: Room) -> tuple[Room, int]:
        return (room, ANY) if self.allowed is None else self.allowed.limit(room)

    def efforts(self, room: int) -> list[Effort]:
        return [Effort(self.slots, room // self.slots), BARE]

    def fit(self, effort: Effort, room: Room, there: int = ANY) -> SizedTiles:
        shape, some = self.node.shape, 0 if effort.bare else room.host
        staging = Staging() if self.reached else Staging.choose(some, self.tuning)
        least = page_box(shape, tuple(1 for _ in shape), None, self.dtype.itemsize)
        box = self.box or (least if effort.bare else self._choose(least, (room.host - staging.nbytes) // self.slots))
        grid = Grid(shape, box)
        found = self.settle(grid, box, self.slots, self.slots, 0, room)
        each = max((self.probe(region).device for region, _ in grid.kinds()), default=0)
        return found.extended(
            SizedTiles, shared_bytes=staging.nbytes, device_bytes=self.slots * each, staging=staging, tile_bytes=each
        )  # fmt: skip

    def _choose(self, least: Box, buffer: int) -> Box:
        """The box that is read fastest, of those that fit a buffer and a slot of the device."""
        shape, slot = self.node.shape, self.tuning.device_slot
        most = slot if self.allowed is None else min(slot, self.allowed.room // self.slots)

        def fits(box: Box) -> bool:
            return array_bytes(box, self.dtype) <= most and self.holds(self.probe_box(shape, box), buffer, ANY)

        def seconds(box: Box) -> float:
            return self.wait(self.probe_box(shape, box)) + self.tuning.send_seconds

        box, _ = grow(shape, least, seconds, fits, lambda b: math.prod(b) * self.dtype.itemsize, self.tuning)
        return balance(shape, box, least)


class Tiles:
    """Iterates once over an array; `region` says which part the present tile is."""

    def __init__(
        self, node: Node, device: Any, prefetch: int, budget: Any, write: bool, shape: tuple[int, ...] | None
    ) -> None:
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
            raise InputError(f"prefetch is a number of tiles, not {prefetch!r}")
        self.node, self.write, self.tuning = node, write, current()
        self._stager: Stager | None = None
        self.sink = _target(node) if write else None
        allowed, notes = find_device(device)
        self.device: Device | None = None if allowed is None else allowed.device
        self.slots = prefetch + 1
        box = None if shape is None else _clip(shape, node.shape)
        self._work = TileWork(node, self.sink, self.slots, box, self.tuning, allowed)
        self._tensors = device is not None
        if self._tensors:
            _check_dtype(self._work.dtype)
        given = resolve_budget(budget)
        resident = tuple(
            Part(name=f"factors of {name}", bytes=size, known=Known.EXACT)
            for name, size in held_by_stores(node).items()
        )
        held = sum(part.bytes for part in resident)
        sized, bare = size(self._work, Room((given.host or 0) - held))[0], size_barely(self._work, 0)
        assert isinstance(sized, SizedTiles)
        self.grid, self._staging, self.host_bytes, self.device_bytes = (
            sized.grid, sized.staging, sized.worker_bytes, sized.tile_bytes,
        )  # fmt: skip
        one = ScheduledPass(sized, resident=resident)
        self.plan = show_plan((one,), given, self._work.label(), allowed, bare.peak + held, bare.device_bytes, notes)
        """What a loop over the tiles reads, writes and holds."""
        try:
            self.plan.check()
        except BudgetError as error:
            raise BudgetError(
                f"{error}: give at least {error.smallest} bytes, or ask for smaller tiles or less prefetch",
                needed=error.needed, budget=error.budget, smallest=error.smallest, culprit=error.culprit, plan=self.plan,
            ) from None  # fmt: skip
        self.region: Region = ()
        """The present tile's part of the array: (start, stop) along each axis."""

    def __len__(self) -> int:
        return len(self.grid)

    def __iter__(self) -> Iterator[Any]:
        with contextlib.ExitStack() as stack:  # what was entered last goes first
            if self.sink is not None:
                stack.callback(self.sink.sync)
            locked = [stack.enter_context(lock_memory(self.host_bytes)) for _ in range(min(self.slots, len(self.grid)))]
            if self.device is not None:
                stack.callback(self.device.close)
                self.device.open(max(1, self.device_bytes * self.slots))
                threads = staging_threads(self.device, self._staging, self.tuning.stage_pause)
                self._stager = stack.enter_context(threads)
            yield from self._hand_out_all(locked)

    def _hand_out_all(self, locked: list[Pinned]) -> Iterator[Any]:
        regions = iter(self.grid)
        slots: deque[Future[_Flight]] = deque()
        last: list[Future[None]] = []
        with ThreadPoolExecutor(max(1, self.slots), "outsize-tiles") as stager:
            for number, memory in enumerate(locked):
                slot = _Flight(Frame(memory.array, {}, self.tuning), number * self.device_bytes)
                slots.append(stager.submit(self._fill, slot, next(regions)))
            while slots:
                slot = slots.popleft().result()
                self.region = slot.region
                yield self._hand_out(slot)
                self._take_back(slot)
                following = next(regions, None)
                if following is not None:
                    slots.append(stager.submit(self._fill, slot, following))
                else:
                    last.append(stager.submit(self._write_back, slot))
            for job in last:
                job.result()

    def _fill(self, slot: _Flight, region: Region) -> _Flight:
        """Make a tile on the host and send it; what the slot had is first written back, where that is wanted."""
        self._write_back(slot)
        frame = slot.frame
        if slot.arrived is not None:  # the user's stream has waited for the copy, the host has not
            slot.arrived.wait()
        frame.reset()
        shape = region_shape(region)
        block = frame.evaluate(self.node, region)
        ready = block.flags.c_contiguous and block.dtype == self._work.dtype and lies_in(block, frame)
        if not ready and not self._work.straight(region):
            packed = frame.array(shape, self._work.dtype)
            frame.copy(packed, block)
            block = packed
        slot.block, slot.region = block, region
        if self.device is None:
            return slot
        slot.tensor = self.device.view(slot.offset, shape, self._work.dtype)
        with _SENDING_LOCK if self._stager is None else contextlib.nullcontext():  # stagers take several tiles at once
            if slot.freed is not None:
                self.device.follow("in", slot.freed)
            if self._stager is not None:
                self._stager.carry([(block, slot.offset)])
            else:
                self.device.submit("in", lambda: self.device.kernels.upload(slot.tensor, block))  # type: ignore[union-attr]
            slot.arrived = self.device.record("in")
        return slot

    def _hand_out(self, slot: _Flight) -> Any:
        assert slot.block is not None
        if self.device is None:
            return need("torch", "tiles(device='cpu')").from_numpy(slot.block) if self._tensors else slot.block
        assert slot.arrived is not None
        self.device.meet(slot.arrived)
        return slot.tensor

    def _take_back(self, slot: _Flight) -> None:
        """From here on the tile is ours again, after what the user's stream still does with it."""
        if self.device is None:
            return
        slot.freed = self.device.leave()
        if self.sink is not None:
            block = slot.block
            assert block is not None
            with _SENDING_LOCK:
                self.device.follow("out", slot.freed)
                self.device.submit("out", lambda: self.device.kernels.download(block, slot.tensor))  # type: ignore[union-attr]
                slot.freed = self.device.record("out")

    def _write_back(self, slot: _Flight) -> None:
        if self.sink is None or slot.block is None:
            return
        if self.device is not None:
            slot.freed.wait()
        room = self.sink.room(slot.region)
        scratch = slot.frame.bytes(room + self.sink.extent(slot.region))
        target = self.sink.lay(slot.region, scratch[:room])
        np.copyto(target, slot.block)
        self.sink.write(slot.region, target, scratch[room:])


_SENDING_LOCK = threading.Lock()


def _target(node: Node) -> Sink:
    """What tiles are written back to."""
    if not isinstance(node, Source):
        raise InputError("only an array from outsize.empty(...) or opened with mode='r+' takes tiles back")
    return node.store.update()


def _check_dtype(dtype: np.dtype[Any]) -> None:
    """An `InputError` where torch has no such elements."""
    need("torch", "tiles(device=...)", "leave device= out for NumPy tiles")
    from outsize.array.device.torch_kernels import torch_dtype

    if torch_dtype(dtype) is None:
        raise InputError(f"torch has no {dtype.name} to make tiles of: cast with .astype(...), or leave device= out")


def _clip(shape: tuple[int, ...], whole: tuple[int, ...]) -> Box:
    if len(shape) != len(whole) or any(not isinstance(n, int) or n < 1 for n in shape):
        raise InputError(f"a tile of shape {shape} does not cut an array of shape {whole}")
    return tuple(max(1, min(n, length)) for n, length in zip(shape, whole, strict=True))
