"""An operand of a product that is computed on the device: what it is made of crosses the link, and not what it comes to.

In: an elementwise chain of two axes, perhaps turned, with the short lanes that it reads (the norms of unit rows, the mean of
centred columns). `OperandWork` is the recipe that a plan counts with. `RawOperand` is a part of it, as blocks on the host:
cutting it cuts the blocks, sending it sends them and computes the part where it is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.array.device.base import Device, Event, array_bytes, padded
from outsize.array.device.folding import dtype_there
from outsize.array.device.local_work import LocalWork
from outsize.array.device.lower import DeviceRegisters, Refused
from outsize.array.device.transfer.matrices import MatrixCopies
from outsize.array.graph.elementwise import Elementwise
from outsize.array.graph.frame import Frame
from outsize.array.graph.node import Node
from outsize.array.graph.rearrange import base_of_turn
from outsize.array.kernels.fused import cut_slices
from outsize.array.store.base import Block, Region, Store, region_shape
from outsize.array.tuning import Tuning


class OperandWork:
    """How an operand is computed on the device."""

    def __init__(
        self, base: Node, turned: bool, device: Device, bindings: Mapping[Node, Store], tuning: Tuning
    ) -> None:
        self.base, self.turned = base, turned
        self.local = LocalWork(device, bindings, tuning)
        self.local.add(base)

    @property
    def lanes(self) -> tuple[bool, bool]:
        """Whether a part must be whole along its rows' axis, and along its columns' axis."""
        whole = (0 in self.local.lanes, 1 in self.local.lanes)
        return (whole[1], whole[0]) if self.turned else whole

    def region(self, rows: tuple[int, int], columns: tuple[int, int]) -> Region:
        """The region of the chain that is this part of the operand."""
        return (columns, rows) if self.turned else (rows, columns)

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes on the device for a part."""
        region = self.region((0, rows), (0, columns))
        return array_bytes(region_shape(region), self.base.dtype) + self.local.nbytes(region)

    def sent(self, rows: int, columns: int) -> int:
        """Bytes over the link for a part."""
        parts = self.local.parts(self.region((0, rows), (0, columns))).sent
        return sum(int(np.prod(region_shape(part))) * leaf.dtype.itemsize for leaf, part in parts)

    def registers_bytes(self, elements: int) -> int:
        """Bytes of the registers of any of its chains."""
        return max(chain.registers(elements) for chain in self.local.chains.values())

    def scratch(self, elements: int) -> int:
        """Bytes that all parts share: registers, and what lanes are reduced in."""
        wide = max((dtype_there(one).itemsize for one in self.local.accumulators.values()), default=0)
        return self.registers_bytes(elements) + 2 * padded(elements * wide)

    def load(self, region: Region, frame: Frame) -> RawOperand:
        """A part of the chain as blocks on the host; a dry frame only counts."""
        blocks = [
            (leaf, part, _native(frame.evaluate(leaf, part), frame)) for leaf, part in self.local.parts(region).sent
        ]
        rows, columns = (region[1], region[0]) if self.turned else region
        return RawOperand(self, rows, columns, tuple(blocks))


def find_operand(child: Node, device: Device, bindings: Mapping[Node, Store], tuning: Tuning) -> OperandWork | None:
    """How the device computes an operand; None where it is sent as it is, or the processor makes it."""
    base = base_of_turn(child)
    chain = child if base is None or child in bindings else base
    if not isinstance(chain, Elementwise) or chain in bindings or chain.ndim != 2:
        return None
    try:
        return OperandWork(chain, chain is not child, device, bindings, tuning)
    except Refused:
        return None


def _native(block: Block, frame: Frame) -> Block:
    if block.dtype.isnative:
        return block
    turned = frame.array(block.shape, block.dtype.newbyteorder("="))
    frame.copy(turned, block)
    return turned


@dataclass(frozen=True, slots=True)
class RawOperand:
    """A part of an operand as blocks on the host."""

    work: OperandWork
    """How it is computed."""
    rows: tuple[int, int]
    columns: tuple[int, int]
    loaded: tuple[tuple[Node, Region, Block], ...]
    """(leaf, the region of it that is there, the block)."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The memory that it lies in."""
        return tuple(block for _, _, block in self.loaded)

    def __getitem__(self, key: Any) -> RawOperand:
        first, second = key if isinstance(key, tuple) else (key, slice(None))
        spans = [
            (start + part.indices(stop - start)[0], start + part.indices(stop - start)[1])
            for part, (start, stop) in ((first, self.rows), (second, self.columns))
        ]
        return RawOperand(self.work, spans[0], spans[1], self.loaded)

    def _block(self, leaf: Node, part: Region) -> Block:
        """The block of a leaf, cut out of what is there."""
        for node, there, block in self.loaded:
            pairs = list(zip(part, there, strict=True)) if node is leaf else [((0, 1), (1, 1))]
            if all(a <= low and high <= b for (low, high), (a, b) in pairs):
                return block[tuple(slice(low - a, high - a) for (low, high), (a, _) in pairs)]
        raise AssertionError(f"{leaf.label()} was not read for {part}")

    def start(
        self, copies: MatrixCopies, registers: Mapping[int, DeviceRegisters], place: int
    ) -> tuple[Any, Callable[[], Event]]:  # fmt: skip
        """(the part on the device, what waits for it): it is computed at `place`, of what is sent behind it."""
        device, local, base = copies.device, self.work.local, self.work.base
        region = self.work.region(self.rows, self.columns)
        shape = region_shape(region)
        out = device.view(place, shape, base.dtype.newbyteorder("="))
        place += array_bytes(shape, base.dtype)
        arrays, waits = [], []
        for leaf, part in local.parts(region).sent:
            block = self._block(leaf, part)
            flat = block.reshape((1,) * (2 - block.ndim) + block.shape)
            array, wait = copies.start(flat, place)
            arrays.append(array if block.ndim == 2 else array.reshape(block.shape))
            waits.append(wait)
            place += array_bytes(block.shape, block.dtype)
        arrival = copies.arrival(waits)
        own = registers[id(base)]
        behind = own.base + self.work.registers_bytes(own.elements)

        def compute() -> None:
            found, _ = local.make(registers, behind, arrays, place, region)
            ins = local.leaves_of(base, region, found)
            for index, piece in cut_slices(shape, own.elements):
                own.value(ins, index, piece, out[index])

        def arrive() -> Event:
            device.follow("work", arrival())
            device.submit("work", compute)
            return device.record("work")

        return device.kernels.turn(out, (1, 0)) if self.work.turned else out, arrive
