"""The product pass on a device: tiles in memory, and blocks of them on the device.

The host pass keeps a large tile of C in RAM against the disk's traffic and reads panels of A and B; each panel's product
is streamed through the device in blocks chosen against the link's traffic. Operands that lie in RAM are one panel, so
that a block of C goes to the host once and never comes back; panels from disk are deep, since C crosses the link twice
for each.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outsize.array.device.base import DeviceBudget
from outsize.array.device.blocked_product import (
    PLAIN,
    Blocks,
    Operands,
    bare_blocks,
    choose_blocks,
    link_floor,
    stream_product,
)
from outsize.array.device.lower import Refused, Trivial, slice_elements
from outsize.array.device.operand import RawOperand, find_operand
from outsize.array.device.transfer.matrices import MatrixCopies
from outsize.array.device.transfer.pipeline import lies_in, settled
from outsize.array.device.transfer.staging import Stager, Staging, staging_threads
from outsize.array.graph.barrier import Contract, Reduce
from outsize.array.graph.frame import Frame
from outsize.array.graph.node import Node, nodes_below
from outsize.array.graph.rearrange import base_of_turn
from outsize.array.kernels.blas import NOTHING, Packing
from outsize.array.passes.base import ANY, Effort, Job, Room
from outsize.array.passes.product import ContractPass, SizedProduct, grouped
from outsize.array.passes.tiling import Box
from outsize.array.store.base import Block, Buffer, Region, Sink, Store, region_shape
from outsize.array.store.formats.memory import MemorySink
from outsize.array.tuning import Tuning
from outsize.core.plan import Level
from outsize.core.units import format_bytes
from outsize.engine.pinned import lock_memory
from outsize.engine.pool import cores, round_to_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedDeviceProduct(SizedProduct):
    """A product with its sizes on host and device."""

    staging: Staging
    """The staging threads that carry what the device does not reach."""
    piece: int
    """Bytes of a piece of page-locked memory through which C comes back."""
    pieces: int
    blocks: Mapping[tuple[int, int, int], Blocks]
    """Rows, columns and depth of a panel -> how its product is cut on the device."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A product on an open device."""

    ring: list[Buffer]
    """Page-locked pieces through which C comes back."""
    stager: Stager | None
    """Takes operands to the device."""
    threads: ThreadPoolExecutor
    """Empty the pieces."""
    conductor: ThreadPoolExecutor
    """One thread for all products: libraries keep a workspace for every thread."""
    alone: threading.Lock
    """One product at a time."""


class DeviceContractPass(ContractPass):
    """Makes one contraction."""

    locks = (True, True)

    def __init__(
        self, node: Contract, sink: Sink, bindings: Mapping[Node, Store], tuning: Tuning, device_budget: DeviceBudget
    ) -> None:
        if node.dtype.newbyteorder("=").char not in "efdFD":
            raise Refused(f"products of {node.dtype.name} are the processor's")
        super().__init__(node, sink, bindings, tuning)
        if math.prod(self.lengths) == 0:
            raise Trivial("nothing is summed")
        self.device_budget, self.leaves = device_budget, list(node.inputs)
        self._operands = self._find_operands()
        self._lands = self.plain() and isinstance(sink, MemorySink) and self.working == sink.dtype
        """True where C is accumulated in the result's own memory."""
        reached = [settled(child, bindings, device_budget.device, tuning) for child in node.inputs]
        self._comes_back = self._lands and not device_budget.device.reaches(sink.array)  # type: ignore[attr-defined]
        """True where C goes to a place that the device does not reach."""
        self._staged = self._comes_back or not all(reached)
        """True where a part of an operand may lie so that the device cannot take it by itself; C is sent too, where it is
        added to."""

    def _find_operands(self) -> Operands:
        """What the device computes of the operands, and whether one is the other's transpose."""
        if not (self.batch == 0 and self.m == 1 and self.n == 1 and self.node.summed == 1):
            return PLAIN
        a, b = self.node.inputs
        device, element = self.device_budget.device, self._element
        left, right = (
            find_operand(child, device, self.bindings, self.tuning)
            if child.dtype.newbyteorder("=") == element
            else None
            for child in (a, b)
        )
        for child, work in ((a, left), (b, right)):
            below = nodes_below([child], lambda node: node in self.bindings or node.barrier)
            if work is None and any(isinstance(node, Reduce) and node.local for node in below):
                raise Refused("its operand and what its lanes come to are made by the processor")
        same, works = base_of_turn(a) is b or base_of_turn(b) is a, [work for work in (left, right) if work is not None]
        if not works:
            return replace(PLAIN, same=same)
        each = sum(work.registers_bytes(1 << 12) for work in works) >> 12
        elements = slice_elements(self.device_budget.room // 2, self.tuning.device_slice, max(1, each))
        rows, depth = left.lanes if left else (False, False)
        deep, columns = right.lanes if right else (False, False)
        return Operands(
            same=same, left=left, right=right, whole=(rows, columns, depth or deep), elements=elements,
            scratch=max(work.scratch(elements) for work in works),
        )  # fmt: skip

    @property
    def flops(self) -> int:
        """Operations of the whole product."""
        each = 8 if self.node.dtype.kind == "c" else 2
        return each * math.prod(self.node.shape) * math.prod(self.lengths)

    def _operand(self, child: Node, region: Region, axes: tuple[int, int, int], frame: Frame) -> Any:
        work = self._operands.left if child is self.node.inputs[0] else self._operands.right
        if work is not None:
            return work.load(region[::-1] if work.turned else region, frame)
        block = super()._operand(child, region, axes, frame)
        if self._staged:  # staging threads take matrices of any layout
            return block
        matrix = zip(block.strides[-2:], block.shape[-2:], strict=True)
        if any(stride == block.itemsize or n == 1 for stride, n in matrix):
            return block
        packed = frame.array(block.shape, block.dtype)
        frame.copy(packed, block)
        return packed

    def _packing(self, box: Box, strip: int) -> Packing:
        """Nothing: the device multiplies."""
        return NOTHING

    def limit(self, room: Room) -> tuple[Room, int]:
        return self.device_budget.limit(room)

    def fit(self, effort: Effort, room: Room, there: int = ANY) -> SizedDeviceProduct | None:
        some, back = 0 if effort.bare else room.host, self._comes_back
        staging = Staging.choose(some, self.tuning, alone=effort.workers == 1) if self._staged else Staging()
        ring = min(self._ring(), some // 8)
        pieces = (
            0
            if not back
            else 2
            if effort.bare
            else min(self.tuning.return_pieces, max(4, ring // self.tuning.return_piece))
        )
        piece = 0 if not back else max(4096, ring // pieces // 4096 * 4096)
        shared = staging.nbytes + round_to_pages(pieces * piece)
        found = super().fit(effort, replace(room, host=room.host - shared))
        if found is None:
            return None
        blocks = self._cut(found, piece, effort.bare)
        sized = found.extended(
            SizedDeviceProduct, shared_bytes=shared, device_bytes=max((cut.held for cut in blocks.values()), default=0),
            staging=staging, piece=piece, pieces=pieces, blocks=blocks,
        )  # fmt: skip
        if sized.workers > 1 and len(sized.grid) > 1 and sized.peak + sized.slot_bytes <= room.host:
            sized = replace(sized, slots=2)  # a tile is written while the next one is made
        return sized if effort.bare or sized.device_bytes <= self.device_budget.room else None

    def _ring(self) -> int:
        """Page-locked bytes through which C comes back, where there is room."""
        tuning, result = self.tuning, math.prod(self.node.shape) * self.working.itemsize
        return min(tuning.return_ring, max(tuning.return_least, result // tuning.return_share))

    def _cut(self, sized: SizedProduct, piece: int, bare: bool) -> dict[tuple[int, int, int], Blocks]:
        """Blocks for every kind of tile and panel."""
        blocks = {}
        item, wide = self._item, self.working.itemsize
        rates, room = self.device_budget.device.rates(), self.device_budget.room
        flops = rates.product(self.working.char, self.device_budget.tf32)[1]
        key = (rates.link_in, rates.link_out, rates.memory, flops)
        line = piece or 1 << 40
        for region, _ in self.kinds(sized.grid, sized.chunk):
            _, m, n, k, _ = self._matrix(region)
            blocks[m, n, k] = self._blocks(m, n, k, (item, wide, room, line, key, self.tuning), bare)
        return blocks

    def _blocks(self, m: int, n: int, k: int, how: tuple[Any, ...], bare: bool) -> Blocks:
        """The best blocks; where both operands are the same, with C in one, if that fits."""
        known = self._operands
        choose = choose_blocks if known.left is known.right is None else choose_blocks.__wrapped__
        apart = replace(known, same=False)
        if known.same and m == n == self.node.shape[0] and not bare:
            deep = known.right is not None and known.right.lanes[0]
            if found := choose(m, n, k, *how, replace(known, whole=(True, True, deep))):
                return found
        if not bare and (found := choose(m, n, k, *how, apart)):
            return found
        return bare_blocks(m, n, k, how[0], how[1], self.tuning, apart)

    @property
    def _item(self) -> int:
        return 4 if self.node.dtype.char == "e" else self.node.dtype.itemsize

    def _seconds(self, box: Box, stays: bool = False) -> float:
        """The slowest level's time for one panel."""
        split_at = len(self.node.shape)
        m, n = grouped(box[:split_at], (self.batch, self.m, self.n))[-2:]
        k, batch = math.prod(box[split_at:]), math.prod(box[: self.batch])
        rates = self.device_budget.device.rates()
        edge = math.sqrt(self.device_budget.room / 2 / self.working.itemsize) or 1
        sent = k * (m * math.ceil(n / edge) + n * math.ceil(m / edge)) * self._item
        whole = all(step >= length for step, length in zip(box[split_at:], self.lengths, strict=True))
        crossed = m * n * self.working.itemsize
        link = max((sent + (0 if whole else crossed)) / rates.link_in, crossed / rates.link_out)
        flops = rates.product(self.working.char, self.device_budget.tf32)[1]
        slowest = max(super()._seconds(box, stays), batch * link, batch * 2.0 * m * n * k / flops)
        return slowest + 10 * self.tuning.send_seconds  # streams run empty at the end of a panel

    @contextlib.contextmanager
    def opened(self, sized: SizedDeviceProduct) -> Iterator[Opened]:
        """What was entered last goes first: the conductor's product needs all the others."""
        with contextlib.ExitStack() as stack:
            memory = stack.enter_context(lock_memory(sized.pieces * sized.piece)).array
            ring = [memory[n * sized.piece : (n + 1) * sized.piece] for n in range(sized.pieces)]
            staging = staging_threads(self.device_budget.device, sized.staging, self.tuning.stage_pause)
            stager = stack.enter_context(staging)
            count = max(1, min(self.tuning.return_threads, cores()))
            threads = stack.enter_context(ThreadPoolExecutor(count, "outsize-return"))
            conductor = stack.enter_context(ThreadPoolExecutor(1, "outsize-product"))
            yield Opened(ring, stager, threads, conductor, threading.Lock())

    def open(self, job: Job, tile: Region, slot: Buffer) -> Any:
        return self.lay_out(job, tile, slot)

    def load(self, job: Job, tile: Region, chunk: Region, state: Any, frame: Frame) -> Any:
        frame.reset()
        a, b = self._load(tile, chunk, frame, state.left, False)
        near = [
            all(lies_in(block, frame) or self.device_budget.device.reaches(block) for block in _blocks_of(operand))
            for operand in (a, b)
        ]
        stays = state.left is not None and not isinstance(a, RawOperand)
        return a, b, stays or near[0], near[1]

    def fold(self, job: Job, tile: Region, chunk: Region, state: Any, payload: Any) -> None:
        *panels, near_a, near_b = payload
        if self._operands.left is self._operands.right is None:
            total, a, b = self.matrices(state, *panels)
        else:
            c = state.total
            total, a, b = c[None], panels[:1], panels[1:]
        blocks, opened = job.sized.blocks[(*total.shape[1:], a[0].shape[1])], job.opened
        device = self.device_budget.device
        lands = not self._lands or device.reaches(state.total)

        def reaches(block: Block) -> bool:
            if np.may_share_memory(block, state.total):
                return lands
            return bool(near_a if any(np.may_share_memory(block, one) for one in _blocks_of(panels[0])) else near_b)

        with opened.alone:
            for i in range(total.shape[0]):
                add = any(start > 0 for start, _ in chunk)
                copies = MatrixCopies(device, opened.stager, opened.ring, opened.threads, reaches)
                opened.conductor.submit(
                    stream_product, device, copies, blocks, a[i], b[i], total[i], add=add, tf32=self.device_budget.tf32
                ).result()
        job.progress(total.size * a[0].shape[1])

    def _link_in(self, sized: SizedDeviceProduct) -> int:
        """Bytes sent: panels as often as blocks need them, and C from the second panel on."""
        total = 0
        for region, number in self.kinds(sized.grid, sized.chunk):
            _, m, n, k, batch = self._matrix(region)
            add = any(start > 0 for start, _ in region[len(self.node.shape) :])
            total += number * batch * sized.blocks[m, n, k].sent(m, n, k, add)
        return total

    def _matrix(self, region: Region) -> tuple[int, int, int, int, int]:
        shape, split_at = region_shape(region), len(self.node.shape)
        m, n = grouped(shape[:split_at], (self.batch, self.m, self.n))[-2:]
        return math.prod(shape[:split_at]), m, n, math.prod(shape[split_at:]), math.prod(shape[: self.batch])

    def levels(self, sized: Any) -> tuple[Level, ...]:
        rates = self.device_budget.device.rates()
        m, n = grouped(self.node.shape, (self.batch, self.m, self.n))[-2:]
        k, batch = math.prod(self.lengths), math.prod(self.node.shape[: self.batch])
        item, wide = self._item, self.working.itemsize
        least = batch * link_floor(m, n, k, item, wide, self.device_budget.room, add=False)
        result, into = batch * m * n * wide, self._link_in(sized)
        kinds = self.kinds(sized.grid, sized.chunk)
        back = sum(number * self._matrix(region)[0] for region, number in kinds) * wide  # C, once for every panel
        least = min(least, batch * k * n * item if self._operands.same else into, into)
        panels = sum(number * -(-self._matrix(r)[3] // sized.blocks[self._matrix(r)[1:4]].panel)
                     * self._matrix(r)[0] for r, number in self.kinds(sized.grid, sized.chunk))  # fmt: skip
        flops = rates.product(self.working.char, self.device_budget.tf32)[1]
        rows = (
            ("disk", self.reads(sized) + self.writes(), self.floor(sized), self.tuning.disk_rate),
            ("link in", into, least, rates.link_in),
            ("link out", back, result, rates.link_out),
            ("device memory", 2 * panels * wide + into, result, rates.memory),
            ("arithmetic", self.flops, self.flops, flops * (4 if self.node.dtype.kind == "c" else 1)),
        )  # fmt: skip
        return tuple(Level(name=name, amount=n, floor=floor, rate=rate) for name, n, floor, rate in rows)

    def notes(self, sized: Any) -> tuple[str, ...]:
        stays = "C tile and its rows of A stay" if sized.left_stays else "C tile stays"
        rates = self.device_budget.device.rates()
        name, rate = rates.product(self.working.char, self.device_budget.tf32)
        kind = {"f": "float32", "d": "float64", "tf32": "TF32", "F": "complex64", "D": "complex128"}.get(name, name)
        blocks = max(sized.blocks.values(), key=lambda found: found.held)
        return (
            f"in RAM: {stays}, panels of {sized.chunk} stream",
            f"on {self.device_budget.device.name}: {blocks.rows}x{blocks.columns} of C stay, panels of {blocks.panel} "
            f"stream, {format_bytes(blocks.held)}; {kind} at {rate / 1e12:.0f} TFLOP/s ({rates.source})",
        )


def _blocks_of(operand: Any) -> tuple[Block, ...]:
    return operand.blocks if isinstance(operand, RawOperand) else (operand,)
