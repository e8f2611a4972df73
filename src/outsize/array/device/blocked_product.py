"""A matrix product on a device that holds only blocks of it: C blocks stay there, panels of A and B stream past.

In: matrices on the host (any size, row by row or column by column), a number of bytes on the device. Out: C = A @ B, or
C + A @ B, on the host. The block of C is chosen so that the link's time hides under the arithmetic's: a square block of
c x c needs 2/c words an operation, and panels are deep enough that C is seldom read and written and that rows of A are
sent in long runs. Copies in, products and copies out run on three streams. A block is worked on in strips of rows: panels
of B stay for all strips, strips of A come and go. The last panels of a block are multiplied strip by strip, so that
strips leave one after another while others are still worked on, and the next block begins where the first has left.
While one matrix is multiplied, the next one is being sent already: staging threads never wait for the interpreter.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outsize.array.device.base import Device, Event, Rates, Stream, padded
from outsize.array.device.lower import DeviceRegisters
from outsize.array.device.operand import OperandWork, RawOperand
from outsize.array.device.transfer.matrices import MatrixCopies
from outsize.array.store.base import Block
from outsize.array.tuning import Tuning

_STRIPS = 8
"""Strips in which a block of C is worked on."""
_KEPT = ((3, 6), (3, 4), (2, 4), (2, 2), (1, 1))
"""Panels of B and strips of A on the device at once, from generous to bare."""
_PANELS = (64, 256, 1024, 2048, 4096, 8192)
"""Depths of panels that are tried: deeper ones are no faster, and a kernel's sums of float32 grow longer with them."""
_SMALL = 64
"""Blocks of less than this part of the room are not looked at where larger ones fit."""
_NEAR = 1.003
"""Times within this of the best are as good."""
_CALL = 3e-5
"""Seconds that a product of a strip costs whatever its size."""
_EVEN = 256
"""Long blocks are cut at multiples of this: kernels have tiles that large."""
_UNEVEN = 1.01
"""What it costs where blocks are no multiples of that, or the last one is smaller: 51.6 TFLOP/s of float32 against 52.6 on
an H200, where 65536 columns are cut into three or into four."""
_ROW = 1e-8
"""Seconds that a row costs on the link whatever its length."""


Matrix = Block | RawOperand
"""A matrix on the host, or what the device makes it of."""


@dataclass(frozen=True, slots=True)
class Operands:
    """What is known of the operands of a product besides their sizes."""

    same: bool = False
    """True where A is the transpose of B: B alone is sent, and C is one block."""
    left: OperandWork | None = None
    """How A is computed on the device; None: it is sent as it is."""
    right: OperandWork | None = None
    """How B is."""
    whole: tuple[bool, bool, bool] = (False, False, False)
    """Whether C's rows, C's columns and what is summed over must not be cut."""
    scratch: int = 0
    """Bytes of registers."""
    elements: int = 0
    """Elements of a register."""


PLAIN = Operands()


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a product is cut."""

    rows: int
    """Rows of a block of C."""
    columns: int
    """Columns of a block of C."""
    panel: int
    """Columns of A and rows of B in a panel."""
    strip: int
    """Rows of a strip of a block."""
    panels: int
    """Panels of B on the device at once."""
    strips: int
    """Strips of A on the device at once."""
    item: int
    """Bytes of an element of A and B."""
    wide: int
    """Bytes of an element of C."""
    tuning: Tuning
    operands: Operands = PLAIN

    @property
    def block_bytes(self) -> int:
        return padded(self.rows * self.columns * self.wide)

    @property
    def strip_bytes(self) -> int:
        left = self.operands.left
        return left.nbytes(self.strip, self.panel) if left else padded(self.strip * self.panel * self.item)

    @property
    def panel_bytes(self) -> int:
        right = self.operands.right
        return right.nbytes(self.panel, self.columns) if right else padded(self.panel * self.columns * self.item)

    @property
    def cast_bytes(self) -> tuple[int, int]:
        """Bytes of a strip of A and a panel of B in C's dtype, where that is another."""
        if self.item == self.wide:
            return 0, 0
        left = 0 if self.operands.same else padded(self.strip * self.panel * self.wide)
        return left, padded(self.panel * self.columns * self.wide)

    @property
    def split(self) -> int:
        """In how many parts a panel's product is added up: a small block of C does not keep a card busy by itself."""
        part = self.tuning.panel_part
        small = self.rows * self.columns <= self.tuning.small_block and self.panel >= part * 4
        return min(32, self.panel // part) if small else 1

    @property
    def split_bytes(self) -> int:
        """Bytes of those parts, and of their sum."""
        return padded((self.split + 1) * self.strip * self.columns * self.wide) if self.split > 1 else 0

    @property
    def held(self) -> int:
        """Bytes on the device."""
        strips = 0 if self.operands.same else self.strips * self.strip_bytes
        return (
            self.block_bytes + self.panels * self.panel_bytes + strips + sum(self.cast_bytes) + self.operands.scratch
            + self.split_bytes
        )  # fmt: skip

    def sent(self, m: int, n: int, k: int, add: bool) -> int:
        """Bytes over the link to the device."""
        left, right, same = self.operands.left, self.operands.right, self.operands.same
        a = left.sent(m, k) if left else m * k * self.item
        b = right.sent(k, n) if right else k * n * self.item
        back = m * n * self.wide if add else 0
        return back + (b if same else a * -(-n // self.columns) + b * -(-m // self.rows))

    def seconds(self, m: int, n: int, k: int, rates: Rates, flops: float) -> float:
        """Time of the whole: the slowest level, what cannot overlap at the ends and between blocks, and a little for
        traffic that is hidden only as long as the link keeps its rate."""
        down, across, deep = -(-m // self.rows), -(-n // self.columns), -(-k // self.panel)
        tiles, cuts = down * across, -(-self.rows // self.strip)
        touched = 2.0 * m * n * deep * self.wide / rates.memory
        uneven = m % self.rows or n % self.columns or self.rows % _EVEN or self.columns % _EVEN
        work = (_UNEVEN if uneven else 1.0) * 2.0 * m * n * k / flops + 0.5 * touched + tiles * deep * cuts * _CALL
        sending = self.sent(m, n, k, False) / rates.link_in + (m * across * deep + k * down * across) * _ROW
        leaves = self.block_bytes / rates.link_out
        tail = min(self.panels - 1, deep) * work / (tiles * deep)
        if self.rows * self.columns <= self.tuning.small_block:  # nothing hides what the interpreter takes for a panel
            plain = self.operands.left is self.operands.right is None
            sending += tiles * deep * self.tuning.send_seconds * (1 if plain else 3)
        stall = max(0.0, leaves * (1 - 1 / cuts) - tail) + (leaves / cuts if self.panels < 3 else 0.0)
        fill = (self.panel_bytes + self.strip_bytes) / rates.link_in
        slowest = max(sending, work, m * n * self.wide / rates.link_out)
        return slowest + 0.05 * sending + fill + tiles * stall + leaves / cuts


@functools.lru_cache(maxsize=256)
def choose_blocks(
    m: int, n: int, k: int, item: int, wide: int, room: int, line: int, rates_key: tuple[float, float, float, float],
    tuning: Tuning = Tuning(), operands: Operands = PLAIN,  # noqa: B008  (it is frozen)
) -> Blocks | None:  # fmt: skip
    """The cut that takes the least time inside `room` bytes; of equally good ones the smallest. None where none fits. Where both
    operands are the same, C is one block.

    `line` is the most bytes that a row may have: a piece of page-locked memory has to hold it."""
    part = tuning.panel_part
    rates = Rates(*rates_key[:3], flops={}, source="")
    found: list[tuple[float, int, Blocks]] = []
    longest = max(_PANELS[-1], tuning.deepest_panel // max(m, n) // part * part if m * n <= tuning.small_block else 0)
    steps = {*_PANELS, *(step for step in (longest, longest // 4 // part * part) if step > _PANELS[-1])}
    deep = sorted(step for step in steps if step < min(k, line // item + 1)) + [k] * (k <= min(longest, line // item))
    deep = [step for step in deep if step == k or not operands.whole[2]]
    downs, acrosses = ([m] if operands.whole[0] else _cuts(m)), ([n] if operands.whole[1] else _cuts(n))
    shapes = sorted(itertools.product(downs, acrosses), key=lambda shape: -shape[0] * shape[1])
    for panels, strips in _KEPT:
        for rows, columns in shapes:
            if rows * columns * wide > room or columns * max(item, wide) > line or rows * item > line:
                continue
            if found and rows * columns * wide * _SMALL < room:
                break
            strip = (
                rows if operands.whole[0] and not operands.same else _strip(rows, columns * wide, tuning.device_strip)
            )
            for panel in deep:
                blocks = Blocks(rows, columns, panel, strip, panels, strips, item, wide, tuning, operands)
                if blocks.held <= room:
                    found.append((blocks.seconds(m, n, k, rates, rates_key[3]), blocks.held, blocks))
        if found and panels == 2:
            break
    if not found:
        return None
    best = min(found, key=lambda row: row[:2])[0]
    return min((row for row in found if row[0] <= best * _NEAR), key=lambda row: row[1])[2]


def _strip(rows: int, row_bytes: int, shortest: int) -> int:
    """Rows of a strip: few strips where the block is small, whole multiples of what kernels like where it is large."""
    count = max(1, min(_STRIPS, rows * row_bytes // shortest))
    step = -(-rows // count)
    return min(rows, -(-step // 128) * 128) if step > 512 else step


def _cuts(length: int) -> list[int]:
    """Lengths of even cuts, in steps that kernels like."""
    pieces = [count for count in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64, 128, 512, 2048) if count <= length]
    cuts = {-(-length // count) for count in pieces} | {min(length, 32)}
    return sorted({min(length, _even(cut)) for cut in cuts}, reverse=True)


def _even(cut: int) -> int:
    """A length that is good for kernels, at least as long."""
    step = _EVEN if cut >= 16 * _EVEN else 128 if cut > 512 else 1
    return -(-cut // step) * step


def bare_blocks(m: int, n: int, k: int, item: int, wide: int, tuning: Tuning, operands: Operands) -> Blocks:
    """The smallest blocks that work."""
    whole, edge = operands.whole, tuning.edge
    rows, columns = (m if whole[0] else min(m, edge)), (n if whole[1] else min(n, edge))
    return Blocks(rows, columns, k if whole[2] else min(k, edge), rows, 1, 1, item, wide, tuning, operands)


@dataclass(slots=True)
class _Place:
    """Memory on the device that is used again and again."""

    offset: int
    free: list[Event] = field(default_factory=list)
    """When its last products are done."""
    taken: bool = False
    """True until those products have been submitted."""


@dataclass(slots=True)
class _Sent:
    """A matrix on its way to the device."""

    array: Any
    arrive: Callable[[], Event]
    """Waits until it is on the stream; when it is there."""
    place: _Place
    arrived: Event = field(init=False)
    followed: set[Stream] = field(default_factory=set)
    """Lanes that wait for it already."""


class _Product:
    """One product under way."""

    def __init__(
        self, device: Device, copies: MatrixCopies, blocks: Blocks, dtype: np.dtype[Any], add: bool, tf32: bool
    ) -> None:
        self.device, self.copies, self.blocks = device, copies, blocks
        self.dtype, self.add, self.tf32 = dtype, add, tf32
        start = blocks.block_bytes
        self._panels = [_Place(start + i * blocks.panel_bytes) for i in range(blocks.panels)]
        start += blocks.panels * blocks.panel_bytes
        self._strips = [
            _Place(start + i * blocks.strip_bytes) for i in range(0 if blocks.operands.same else blocks.strips)
        ]
        self._casts = start + len(self._strips) * blocks.strip_bytes
        # they share a place for what is made
        alone = blocks.item != blocks.wide or blocks.operands.same or blocks.split > 1
        self._order: tuple[Stream, ...] = ("work",) if alone else ("work", "side")
        """Strips in turn: the last wave of one product leaves room for the first of the next."""
        self._later: collections.deque[Callable[[], None]] = collections.deque()
        """What is to be submitted, in order."""
        self._sending: collections.deque[_Sent] = collections.deque()
        """What is on its way, in order."""
        self._drained: list[Event] = []
        self._shape: tuple[int, ...] = ()
        self._parts = self._casts + sum(blocks.cast_bytes) + blocks.operands.scratch
        scratch = self._casts + sum(blocks.cast_bytes)
        self._registers = {
            id(work): {key: DeviceRegisters(chain, device, scratch, blocks.operands.elements)
                       for key, chain in work.local.chains.items()}
            for work in (blocks.operands.left, blocks.operands.right) if work is not None
        }  # fmt: skip

    def block(self, a: Matrix, b: Matrix, c: Block) -> None:
        kept = self.device.view(0, c.shape, self.dtype)
        step, rows = self.blocks.strip, c.shape[0]
        strips = [slice(low, min(rows, low + step)) for low in range(0, rows, step)]
        depths = [slice(low, low + self.blocks.panel) for low in range(0, a.shape[1], self.blocks.panel)]
        tail = max(1, min(self.blocks.panels - 1, len(depths)))
        drained: list[Event] = []
        for depth in range(len(depths) - tail):
            panel = self._send(b[depths[depth]], self._panels)
            for number, strip in enumerate(strips):
                self._strip(kept, c, a, panel, strip, depths[depth], number, begins=depth == 0)
            self._then(self._done, panel, *self._order)
        first = len(depths) == tail
        panels = [self._send(b[span], self._panels) for span in depths[-tail:]]
        for number, strip in enumerate(strips):
            for panel, span in zip(panels, depths[-tail:], strict=True):
                self._strip(kept, c, a, panel, strip, span, number, begins=first and span.start == 0)
            self._then(self._leave, c[strip], kept[strip], number, drained)
        for panel in panels:
            self._then(self._done, panel, *self._order)
        self._then(self._end, drained, c.shape)

    def finish(self) -> None:
        """Submit what is left."""
        while self._later:
            self._later.popleft()()

    def give_up(self) -> None:
        """Wait for what is on its way, after an error: the memory that it comes from is somebody else's soon."""
        while self._sending:
            with contextlib.suppress(Exception):
                self._sending.popleft().arrive()

    def _then(self, work: Callable[..., None], *arguments: Any) -> None:
        """Done when the next matrix is on its way: staging threads have something to do meanwhile."""
        self._later.append(functools.partial(work, *arguments))

    def _send(self, block: Matrix, places: list[_Place]) -> _Sent:
        place = places.pop(0)
        places.append(place)
        if place.taken:
            self.finish()
        for event in place.free:
            self.device.follow("in", event)
        place.taken = True
        if isinstance(block, RawOperand):
            sent = _Sent(*block.start(self.copies, self._registers[id(block.work)], place.offset), place)
        else:
            array, wait = self.copies.start(block, place.offset)
            sent = _Sent(array, self.copies.arrival([wait]), place)
        self._sending.append(sent)
        self.finish()
        self._then(self._arrive, sent)
        return sent

    def _arrive(self, sent: _Sent) -> None:
        sent.arrived = sent.arrive()
        self._sending.popleft()

    def _follow(self, stream: Stream, sent: _Sent) -> None:
        if stream not in sent.followed:
            self.device.follow(stream, sent.arrived)
            sent.followed.add(stream)

    def _done(self, sent: _Sent, *streams: Stream) -> None:
        sent.place.free, sent.place.taken = [self.device.record(stream) for stream in streams], False

    def _leave(self, target: Block, source: Any, number: int, drained: list[Event]) -> None:
        """A strip of C goes to the host."""
        self.device.follow("out", self.device.record(self._order[number % len(self._order)]))
        self.copies.fetch(target, source)
        drained.append(self.device.record("out"))

    def _end(self, drained: list[Event], shape: tuple[int, ...]) -> None:
        """The block's memory is free strip by strip."""
        self._drained, self._shape = drained, shape

    def _strip(
        self, kept: Any, c: Block, a: Matrix, panel: _Sent, strip: slice, span: slice, number: int, *, begins: bool
    ) -> None:
        """A strip of A times a panel of B, into its strip of C; `begins` where it is the strip's first."""
        left = None if self.blocks.operands.same else self._send(a[strip, span], self._strips)
        self._then(self._multiply, kept, c, left, panel, strip, number, begins)

    def _multiply(
        self, kept: Any, c: Block, left: _Sent | None, panel: _Sent, strip: slice, number: int, begins: bool
    ) -> None:
        device, stream = self.device, self._order[number % len(self._order)]
        if begins:
            for event in self._drained[number : number + 1] if self._shape == c.shape else self._drained:
                device.follow("in" if self.add else stream, event)
            if self.add:
                place = strip.start * c.shape[1] * self.dtype.itemsize
                device.follow(stream, self.copies.send(c[strip], place))
        self._follow(stream, panel)
        add = self.add or not begins
        if left is None:
            device.submit(stream, functools.partial(self._square, kept[strip], panel.array, strip, add))
            return
        self._follow(stream, left)
        device.submit(stream, functools.partial(self._call, kept[strip], left.array, panel.array, add))
        self._done(left, stream)

    def _square(self, c: Any, b: Any, strip: slice, add: bool) -> None:
        """Rows of a matrix's transpose times the matrix."""
        b = b if self.blocks.item == self.blocks.wide else self._widen(b, self._casts)
        self._multiply_add(c, self.device.kernels.turn(b, (1, 0))[strip], b, add)

    def _call(self, c: Any, a: Any, b: Any, add: bool) -> None:
        if self.blocks.item != self.blocks.wide:
            a, b = self._widen(a, self._casts), self._widen(b, self._casts + self.blocks.cast_bytes[0])
        self._multiply_add(c, a, b, add)

    def _multiply_add(self, c: Any, a: Any, b: Any, add: bool) -> None:
        kernels, (rows, columns), depth = self.device.kernels, tuple(c.shape), b.shape[0]
        count = next((n for n in range(self.blocks.split, 0, -1) if depth % n == 0), 1)
        if count < 4:
            kernels.multiply(c, a, b, add, self.tf32)
            return
        parts = self.device.view(self._parts, (count, rows, columns), self.dtype)
        left = kernels.turn(a.reshape((rows, count, depth // count)), (1, 0, 2))
        kernels.multiply_each(parts, left, b.reshape((count, depth // count, columns)), self.tf32)
        if not add:
            kernels.reduce("add", c[None], parts, (0,))
            return
        total = self.device.view(
            self._parts + count * rows * columns * self.dtype.itemsize, (1, rows, columns), self.dtype
        )
        kernels.reduce("add", total, parts, (0,))
        kernels.apply("add", self.dtype, c, c, total[0])

    def _widen(self, value: Any, place: int) -> Any:
        wide = self.device.view(place, tuple(value.shape), self.dtype)
        self.device.kernels.cast(wide, value)
        return wide


def stream_product(
    device: Device, copies: MatrixCopies, blocks: Blocks, a: Matrix, b: Matrix, c: Block, *, add: bool, tf32: bool
) -> None:
    """c = a @ b (or c + a @ b), c's memory on the host included, by the time this returns."""
    product = _Product(device, copies, blocks, c.dtype, add, tf32)
    try:
        for low, left in itertools.product(range(0, c.shape[0], blocks.rows), range(0, c.shape[1], blocks.columns)):
            rows, columns = slice(low, low + blocks.rows), slice(left, left + blocks.columns)
            product.block(a[rows], b[:, columns], c[rows, columns])
        product.finish()
    finally:
        product.give_up()
    copies.finish()


def link_floor(m: int, n: int, k: int, item: int, wide: int, room: int, add: bool) -> int:
    """Fewest bytes to the device: 2mnk/sqrt(S) words, never less than A and B once (Smith et al. 2017)."""
    words = max(1, room // wide)
    return int(max(2.0 * m * n * k / words**0.5, k * (m + n))) * item + (m * n * wide if add else 0)
