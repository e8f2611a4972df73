"""A store that is the same memory, in fewer bits.

In: the bytes of a tensor. Out: a slot that holds its numbers in 8 or 4 bits (`codes.py`) beside the model, and gives them back
rounded. What moves elsewhere in other plans is packed here, so everything that knows of tensors which are away (updates a few
parameters at a time, undo, saving, another plan) works as it is. In a dry run the slots hold memory without contents.
"""

from __future__ import annotations

from typing import Any

import torch

from outsize.model.fitting.move.codes import SMALL, beside_of, decode, encode, sizes_of
from outsize.model.fitting.move.mover import Landed, NoMover
from outsize.model.fitting.move.stores import Slot, Store


class NarrowStore(Store):
    """For the bytes of one tensor."""

    name = "memory, in fewer bits"
    beside = False

    def __init__(self, tensor: Any, bits: int, steps: bool, device: Any, real: bool) -> None:
        super().__init__(NoMover(None))
        self.steps = steps
        self._dtype = tensor.dtype
        self._device = tensor.device if real else device
        self._real = real
        self.bits = bits if tensor.is_floating_point() and tensor.numel() >= SMALL else 0
        """0: kept as they are."""

    def put(self, data: Any, land: Landed | None = None) -> Slot:
        slot = Slot(self._pack(data), int(data.numel()))
        if land is not None:
            land()
        return slot

    def have(self, size: int) -> Slot:
        return Slot(self._empty(size), size)

    def begin(self, slot: Slot, into: Any) -> int:
        self._unpack(slot, into)
        return 0

    def finish(self, number: int | None = None) -> None:
        """Nothing is on its way."""

    def land(self) -> None:
        """Nothing is on its way."""

    def read(self, slot: Slot, into: Any) -> None:
        self._unpack(slot, into)

    def write(self, slot: Slot, data: Any) -> None:
        slot.place = self._pack(data.to(self._device))

    def drop(self, slot: Slot) -> None:
        slot.place = None

    def close(self) -> None:
        """Slots go with those who hold them."""

    def tensors_of(self, slot: Slot | None) -> list[Any]:
        place = None if slot is None else slot.place
        return [] if place is None else [place] if not self.bits else [place.codes, place.scales]

    def _pack(self, data: Any) -> Any:
        if not self._real:
            return self._empty(data.numel())
        with torch.no_grad():
            return encode(data.view(self._dtype), self.bits, self.steps) if self.bits else data.clone()

    def _unpack(self, slot: Slot, into: Any) -> None:
        if not self._real:
            self._work(into.numel())
            return
        with torch.no_grad():
            if not self.bits:
                into.copy_(slot.place)
            elif into.device == self._device:
                decode(slot.place, into.view(self._dtype))
            else:
                here = torch.empty(into.numel() // self._dtype.itemsize, dtype=self._dtype, device=self._device)
                decode(slot.place, here)
                into.copy_(here.view(torch.uint8))

    def _empty(self, size: int) -> Any:
        """Memory without contents, as much as the slot takes; what the work needs beside is there meanwhile."""
        if not self.bits:
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        codes, scales = sizes_of(size // self._dtype.itemsize, self.bits)
        self._work(size)
        return (
            torch.empty(codes, dtype=torch.uint8, device=self._device),
            torch.empty(scales, dtype=torch.float32, device=self._device),
        )

    def _work(self, size: int) -> None:
        """Memory that packing and unpacking need for a moment."""
        if self.bits:
            torch.empty(beside_of(size // self._dtype.itemsize), dtype=torch.uint8, device=self._device)
