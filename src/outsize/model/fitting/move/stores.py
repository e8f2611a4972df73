"""Where bytes wait while the device has no room for them.

In: a tensor. Out: a slot that gives the same bytes back. A card's neighbour is page-locked host memory; a CPU's neighbour is a
file in the scratch folder, read and written with plain system calls, since a memory map's pages could not be counted. A dry
run, where tensors have no contents, gets `NoStore`: the same calls, no bytes. A `Mover` makes the copies; a store finds places
for them and says their order.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from outsize.model.fitting.move.locked_memory import Block
from outsize.model.fitting.move.mover import CardMover, Landed, Leaving, Mark, Mover, NoMover
from outsize.model.fitting.move.scratch_file import FileMover, ScratchFile
from outsize.model.torch_port.dispatch import unseen

IN_FLIGHT = 256 * 2**20
"""Most bytes whose copy to the host has begun and not ended: a forward pass that is faster than the link waits."""


@dataclass(slots=True, eq=False)
class Slot:
    """A place for so many bytes, and the ends of the last copies that wrote and read it."""

    place: Any
    size: int
    written: Mark = None
    read: Mark = None


class Store:
    """Slots of any size, used again by others of their size.

    The order is said by three rules. A copy begins after all that the kernels' stream was given before it: so what it reads
    is written, and the memory that it fills is nobody's. A copy in follows the copy that wrote its slot, a copy out the one
    that read it before. Memory at either end of a copy is held until the kernels' stream has been told to wait for that copy,
    and so used again in the order of that stream.
    """

    name = ""
    """The place, as a user would say it."""

    def __init__(self, mover: Mover) -> None:
        self.mover = mover
        self.held = 0
        """Bytes it holds now."""
        self.peak = 0
        """The most it has held."""
        self._spare: dict[int, list[Slot]] = defaultdict(list)
        self._begun = 0
        """Copies in so far."""
        self._arrived = 0
        """Those of them that what is computed next waits for."""
        self._coming: list[tuple[Any, Mark]] = []
        """What the others fill, and their ends; held, also where nothing is copied, so that a trace holds what a card does."""

    @property
    def beside(self) -> bool:
        """Copies out run beside what follows, so that what is copied must not be written meanwhile."""
        return self.mover.leaving.size > 0

    def _make(self, size: int) -> Any:
        """A place for so many bytes."""

    def put(self, data: Any, land: Landed | None = None) -> Slot:
        """Keep a flat byte tensor; returns its slot. Nobody may write it or use its memory again before it has landed: then,
        in this call or a later one, it is let go and `land()` is called."""
        size = int(data.numel())
        spare = self._spare[size]
        slot = spare.pop() if spare else Slot(self._make(size), size)
        try:
            slot.written = self.mover.send(slot.place, data, after=[slot.read])
        except BaseException:
            spare.append(slot)
            raise
        self.held += size
        self.peak = max(self.peak, self.held)
        self.mover.leaving.hold(self.mover, data, slot.written, land)
        return slot

    def have(self, size: int) -> Slot:
        """A slot of bytes that were there all the time, also when it held most."""
        self.held += size
        self.peak += size
        return Slot(None, size)

    def begin(self, slot: Slot, into: Any) -> int:
        """Start to fill a flat byte tensor from a slot; it is full after `finish`. Returns the number of the copy."""
        slot.read = self.mover.bring(into, slot.place, [self.mover.mark(), slot.written])
        self._coming.append((into, slot.read))
        self._begun += 1
        return self._begun

    def finish(self, number: int | None = None) -> None:
        """What was begun may be used from now on; nothing is done where that is known of the copy of this number."""
        if self._arrived < (self._begun if number is None else number):
            self.mover.wait(self.mover.join([mark for _, mark in self._coming]))
            self._arrived = self._begun
            self._coming.clear()

    def read(self, slot: Slot, into: Any) -> None:
        """Fill a flat byte tensor in host memory from a slot, at once."""
        self.mover.sync(slot.written)
        self.mover.copy(into, slot.place)

    def write(self, slot: Slot, data: Any) -> None:
        """Put a flat byte tensor in host memory in the place of what a slot has, at once."""
        self.mover.sync(slot.written)
        self.mover.sync(slot.read)
        self.mover.copy(slot.place, data)

    def land(self) -> None:
        self.mover.leaving.land(self.mover)

    def drop(self, slot: Slot) -> None:
        """The slot may be used again, by bytes of the same size: few are made, and a pinned allocator rounds up."""
        self._spare[slot.size].append(slot)
        self.held -= slot.size

    def close(self) -> None:
        self.finish()
        self.land()
        for slot in (slot for slots in self._spare.values() for slot in slots):
            self.mover.sync(slot.written)
            self.mover.sync(slot.read)
        self._spare.clear()


class NoStore(Store):
    """Counts and keeps nothing, except for what a card's copies would still be reading: so many bytes, then the card waits."""

    name = "nowhere"

    def __init__(self, in_flight: int = 0) -> None:
        super().__init__(NoMover(None, Leaving(size=in_flight)))


class DiskStore(Store):
    """A file in a scratch folder; it vanishes with the process, since it has no name any more."""

    name = "disk"

    def __init__(self, folder: str) -> None:
        self._file = ScratchFile(folder)
        super().__init__(FileMover(Mover(torch.device("cpu")), self._file))

    def _make(self, size: int) -> Any:
        return self._file.take(size)

    def close(self) -> None:
        super().close()
        self._file.close()


class HostStore(Store):
    """Page-locked host memory of a CUDA device."""

    name = "host"

    def __init__(self, device: Any) -> None:
        super().__init__(CardMover(device, Leaving(size=IN_FLIGHT)))

    def _make(self, size: int) -> Any:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class StoredTensor:
    """A tensor that waits in a store, with the way back."""

    __slots__ = ("__weakref__", "_layout", "_slot", "_store", "fetched")

    def __init__(self, tensor: Any, store: Store, device: Any = None, slot: Any = None, owned: bool = True) -> None:
        """`slot`: where the store has these bytes already; not `owned`: it is somebody else's."""
        dense = without_gaps(tensor)
        data = dense if dense.is_contiguous() else dense.as_strided((dense.numel(),), (1,))
        self._layout = (tensor.shape, tensor.stride(), tensor.dtype, device or tensor.device, dense.stride())
        self._store = store
        self.fetched: Any = None
        self._slot = unseen(lambda: store.put(_bytes(data.detach()))) if slot is None else slot
        if owned:
            weakref.finalize(self, store.drop, self._slot)

    def fetch(self) -> Any:
        """Begin to bring the tensor back; the same one for all who ask while it lives."""
        tensor = self.fetched() if self.fetched is not None else None
        if tensor is None:
            shape, _, dtype, device, strides = self._layout
            tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            flat = tensor.as_strided((tensor.numel(),), (1,))
            unseen(lambda: self._store.begin(self._slot, _bytes(flat)))
            self.fetched = weakref.ref(tensor)
        return tensor


def without_gaps(tensor: Any) -> Any:
    """The tensor itself where its elements fill one run of memory in some order of the axes, else a packed copy."""
    expected = 1
    for stride, length in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return tensor.contiguous()
        expected *= length
    return tensor


def _bytes(flat: Any) -> Any:
    if type(flat) is not torch.Tensor:
        return torch.empty(flat.numel() * flat.element_size(), dtype=torch.uint8, device="meta")
    return flat.view(-1).view(torch.uint8)


class BlockStore(Store):
    """Page-locked blocks of exact size, beside a device that a model visits."""

    name = "host"

    def __init__(self, mover: Mover) -> None:
        super().__init__(mover)
        self._blocks: list[Block] = []

    def _make(self, size: int) -> Any:
        if not self.mover.real:
            return None
        self._blocks.append(Block(size))
        return self._blocks[-1].bytes

    def close(self) -> None:
        super().close()
        for block in self._blocks:
            block.unlock()


class KeptInputs:
    """Keeps the inputs of units on the host for the backward pass, which goes from the last to the first: the one before starts
    to come when one is asked for."""

    def __init__(self, mover: Mover) -> None:
        self.store = BlockStore(mover)
        self._kept: list[StoredTensor] = []
        self._soon: Any = None
        """The tensor that is asked for next, on its way."""

    def keep(self, tensor: Any) -> Callable[[], Any]:
        kept, number = StoredTensor(tensor, self.store, self.store.mover.device), len(self._kept)
        self._kept.append(kept)

        def bring() -> Any:
            mine = kept.fetch()
            self.store.finish()
            self._soon = self._kept[number - 1].fetch() if number else None
            return mine

        return bring

    def end_pass(self) -> None:
        self._kept.clear()
        self._soon = None


def open_store(device: Any, scratch: str) -> Store:
    return HostStore(device) if device.type == "cuda" else DiskStore(scratch)
