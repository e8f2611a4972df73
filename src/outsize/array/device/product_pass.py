"""The device twin of the product pass: two levels of tiles.

The host pass keeps a large tile of C in RAM against the disk's traffic and reads panels of A and B; each panel's product
is streamed through the device in blocks chosen against the link's traffic. Operands that lie in RAM are one panel, so
that a block of C goes to the host once and never comes back; panels from disk are deep, since C crosses the link twice
for each.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from outsize.array.device.blocked_product import Blocks, choose_blocks, link_floor, stream_product
from outsize.array.device.lower import Refused, Trivial
from outsize.array.device.transfer.matrices import Porter
from outsize.array.device.transfer.pipeline import Level, lies_in, settled
from outsize.array.device.transfer.staging import Crew, Muster
from outsize.array.graph.barrier import Contract
from outsize.array.graph.frame import Frame
from outsize.array.graph.node import Node
from outsize.array.kernels.blas import NOTHING, Packing
from outsize.array.passes.base import Manner
from outsize.array.passes.product import ContractPass, grouped
from outsize.array.passes.tiling import Box
from outsize.array.store.base import Block, Buffer, Region, Sink, Store, region_shape
from outsize.array.store.formats.memory import MemorySink
from outsize.array.tuning import Tuning
from outsize.core.plan import Level as PlanLevel
from outsize.core.units import format_bytes
from outsize.engine.pinned import lock_memory
from outsize.engine.pool import cores, round_to_pages

Payload = tuple[Block, Block, bool, bool]


class DeviceContractPass(ContractPass):
    """Makes one contraction."""

    locks = (True, True)

    def __init__(
        self, node: Contract, sink: Sink, bindings: Mapping[Node, Store], tuning: Tuning, level: Level
    ) -> None:
        if node.dtype.newbyteorder("=").char not in "efdFD":
            raise Refused(f"products of {node.dtype.name} are the processor's")
        super().__init__(node, sink, bindings, tuning)
        if math.prod(self.lengths) == 0:
            raise Trivial("nothing is summed")
        self.level, self.leaves = level, list(node.inputs)
        self.muster, self.piece, self._pieces = Muster(), 0, 0
        self.blocks: dict[tuple[int, int, int], Blocks] = {}
        self._alone = threading.Lock()
        self._open = contextlib.ExitStack()
        self._ring: list[Buffer] = []
        self._crew: Crew | None = None
        self._lands = self._plain() and isinstance(sink, MemorySink) and self.working == sink.dtype
        """True where C is accumulated in the result's own memory."""

    @property
    def flops(self) -> int:
        """Operations of the whole product."""
        each = 8 if self.node.dtype.kind == "c" else 2
        return each * math.prod(self.node.shape) * math.prod(self.lengths)

    def _staged(self) -> bool:
        """True where a part of an operand may lie so that the device cannot take it by itself."""
        return not all(settled(child, self.bindings, self.level.device, self.tuning) for child in self.node.inputs)

    def _comes_back(self) -> bool:
        """True where C goes to a place that the device does not reach."""
        return self._lands and not self.level.device.reaches(self.sink.array)  # type: ignore[attr-defined]

    def _operand(self, child: Node, region: Region, axes: tuple[int, int, int], frame: Frame) -> Block:
        block = super()._operand(child, region, axes, frame)
        if self.muster.hands:  # they take matrices of any layout
            return block
        if any(
            stride == block.itemsize or n == 1 for stride, n in zip(block.strides[-2:], block.shape[-2:], strict=True)
        ):
            return block
        packed = frame.array(block.shape, block.dtype)
        frame.copy(packed, block)
        return packed

    def _packing(self, box: Box) -> Packing:
        """Nothing: the device multiplies."""
        return NOTHING

    def shape_up(self, manner: Manner, room: int) -> bool:
        some, back = 0 if manner.bare else room, self._comes_back()
        needed = self._staged() or back  # C is sent too, where it is added to
        self.muster = Muster.of(some, self.tuning, alone=manner.workers == 1) if needed else Muster()
        self._pieces = 0 if not back else 2 if manner.bare else self.tuning.return_pieces
        self.piece = (
            0 if not back else max(4096, min(self.tuning.return_ring, some // 8) // self._pieces // 4096 * 4096)
        )
        self.shared_bytes = self.muster.nbytes + round_to_pages(self._pieces * self.piece)
        done = super().shape_up(manner, room - self.shared_bytes)
        if done and self.workers > 1 and len(self.grid) > 1 and self.peak + self.slot_bytes <= room:
            self.slots = 2  # a tile is written while the next one is made
        return done and self._cut(manner)

    def _cut(self, manner: Manner) -> bool:
        """Choose blocks for every kind of tile and panel."""
        self.blocks = {}
        split_at = len(self.node.shape)
        for region, _ in self.kinds():
            m, n = grouped(region_shape(region[:split_at]), (self.batch, self.m, self.n))[-2:]
            k = math.prod(region_shape(region[split_at:]))
            self.blocks[m, n, k] = self._blocks(m, n, k, manner)
        return manner.bare or self.device_peak <= self.level.room

    def _blocks(self, m: int, n: int, k: int, manner: Manner) -> Blocks:
        item, wide = self._item, self.working.itemsize
        rates = self.level.device.rates()
        flops = rates.product(self.working.char, self.level.tf32)[1]
        line = self.piece or 1 << 40
        key = (rates.link_in, rates.link_out, rates.memory, flops)
        found = (
            None
            if manner.bare
            else choose_blocks(m, n, k, item, wide, self.level.room, line, key, self.tuning.device_strip)
        )
        edge = self.tuning.edge
        least = Blocks(min(m, edge), min(n, edge), min(k, edge), min(m, edge), 1, 1, item, wide)
        return found or least

    @property
    def _item(self) -> int:
        return 4 if self.node.dtype.char == "e" else self.node.dtype.itemsize

    @property
    def device_peak(self) -> int:  # type: ignore[override]
        """Bytes that this pass reserves on the device."""
        return max((blocks.held for blocks in self.blocks.values()), default=0)

    def size(self, room: int) -> bool:
        return super().size(self.level.lockable(room)) and self.device_peak <= self.level.room

    def _seconds(self, box: Box) -> float:
        """The slowest level's time for one panel."""
        split_at = len(self.node.shape)
        m, n = grouped(box[:split_at], (self.batch, self.m, self.n))[-2:]
        k, batch = math.prod(box[split_at:]), math.prod(box[: self.batch])
        rates = self.level.device.rates()
        edge = math.sqrt(self.level.room / 2 / self.working.itemsize) or 1
        sent = k * (m * math.ceil(n / edge) + n * math.ceil(m / edge)) * self._item
        whole = all(step >= length for step, length in zip(box[split_at:], self.lengths, strict=True))
        crossed = m * n * self.working.itemsize
        link = max((sent + (0 if whole else crossed)) / rates.link_in, crossed / rates.link_out)
        flops = rates.product(self.working.char, self.level.tf32)[1]
        return max(super()._seconds(box), batch * link, batch * 2.0 * m * n * k / flops)

    def begin(self) -> None:
        """What was entered last goes first: the conductor's product needs all the others."""
        ring = self._open.enter_context(lock_memory(self._pieces * self.piece)).array
        self._ring = [ring[n * self.piece : (n + 1) * self.piece] for n in range(self._pieces)]
        if self.muster.hands:
            self._crew = Crew(self.level.device, self.muster, self.tuning.stage_pause)
            self._open.callback(self._crew.close)
            self._crew.start()
        threads = max(1, min(self.tuning.return_threads, cores()))
        self._threads = self._open.enter_context(ThreadPoolExecutor(threads, "outsize-porter"))
        # one thread for all products: libraries keep a workspace for every thread
        self._conductor = self._open.enter_context(ThreadPoolExecutor(1, "outsize-product"))

    def end(self) -> None:
        self._open.close()
        self._ring, self._crew = [], None

    def open(self, tile: Region, slot: Buffer) -> Any:
        return self.lay_out(tile, slot)

    def load(self, tile: Region, chunk: Region, state: Any, frame: Frame) -> Payload:  # type: ignore[override]
        frame.reset()
        a, b = self._load(tile, chunk, frame, state.left)
        near = [lies_in(block, frame) or self.level.device.reaches(block) for block in (a, b)]
        return a, b, state.left is not None or near[0], near[1]

    def fold(self, tile: Region, chunk: Region, state: Any, payload: Any) -> None:
        a, b, near_a, near_b = payload
        total = state.total if self._plain() else state.total.reshape(
            grouped(state.total.shape, (self.batch, self.m, self.n)))  # fmt: skip
        total, a, b = (block[None] if block.ndim == 2 else block for block in (total, a, b))
        blocks = self.blocks[(*total.shape[1:], a.shape[2])]
        device = self.level.device
        lands = not self._lands or device.reaches(state.total)

        def reaches(block: Block) -> bool:
            if np.may_share_memory(block, state.total):
                return lands
            return bool(near_a if np.may_share_memory(block, a) else near_b)

        with self._alone:
            for i in range(total.shape[0]):
                add = any(start > 0 for start, _ in chunk)
                porter = Porter(device, self._crew, self._ring, self._threads, reaches)
                self._conductor.submit(
                    stream_product, device, porter, blocks, a[i], b[i], total[i], add=add, tf32=self.level.tf32
                ).result()
        self.progress(total.size * a.shape[2])

    def link_out(self) -> int:
        """Bytes of C brought back: once for every panel."""
        return sum(n * self._matrix(region)[0] for region, n in self.kinds()) * self.working.itemsize

    def link_in(self) -> int:
        """Bytes sent: panels as often as blocks need them, and C from the second panel on."""
        total = 0
        for region, number in self.kinds():
            _, m, n, k, batch = self._matrix(region)
            add = any(start > 0 for start, _ in region[len(self.node.shape) :])
            total += number * batch * self.blocks[m, n, k].sent(m, n, k, add)
        return total

    def _matrix(self, region: Region) -> tuple[int, int, int, int, int]:
        shape, split_at = region_shape(region), len(self.node.shape)
        m, n = grouped(shape[:split_at], (self.batch, self.m, self.n))[-2:]
        return math.prod(shape[:split_at]), m, n, math.prod(shape[split_at:]), math.prod(shape[: self.batch])

    def levels(self) -> tuple[PlanLevel, ...]:
        rates = self.level.device.rates()
        m, n = grouped(self.node.shape, (self.batch, self.m, self.n))[-2:]
        k, batch = math.prod(self.lengths), math.prod(self.node.shape[: self.batch])
        item, wide = self._item, self.working.itemsize
        least = batch * link_floor(m, n, k, item, wide, self.level.room, add=False)
        result = batch * m * n * wide
        panels = sum(number * -(-self._matrix(r)[3] // self.blocks[self._matrix(r)[1:4]].panel)
                     * self._matrix(r)[0] for r, number in self.kinds())  # fmt: skip
        flops = rates.product(self.working.char, self.level.tf32)[1]
        rows = (
            ("disk", self.reads() + self.writes(), self.floor(), self.tuning.disk_rate),
            ("link in", self.link_in(), least, rates.link_in),
            ("link out", self.link_out(), result, rates.link_out),
            ("device memory", 2 * panels * wide + self.link_in(), result, rates.memory),
            ("arithmetic", self.flops, self.flops, flops * (4 if self.node.dtype.kind == "c" else 1)),
        )  # fmt: skip
        return tuple(PlanLevel(name=name, amount=n, floor=floor, rate=rate) for name, n, floor, rate in rows)

    def notes(self) -> tuple[str, ...]:
        stays = "C tile and its rows of A stay" if self.left_stays else "C tile stays"
        rates = self.level.device.rates()
        name, rate = rates.product(self.working.char, self.level.tf32)
        kind = {"f": "float32", "d": "float64", "tf32": "TF32", "F": "complex64", "D": "complex128"}.get(name, name)
        blocks = max(self.blocks.values(), key=lambda found: found.held)
        return (
            f"in RAM: {stays}, panels of {self.panel} stream",
            f"on {self.level.device.name}: {blocks.rows}x{blocks.columns} of C stay, panels of {blocks.panel} "
            f"stream, {format_bytes(blocks.held)}; {kind} at {rate / 1e12:.0f} TFLOP/s ({rates.source})",
        )
