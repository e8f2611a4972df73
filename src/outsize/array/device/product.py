"""A matrix product on a device that holds only blocks of it: C blocks stay there, panels of A and B stream past.

In: matrices on the host (any size, row by row or column by column), a number of bytes on the device. Out: C = A @ B, or
C + A @ B, on the host. The block of C is chosen so that the link's time hides under the arithmetic's: a square block of
c x c needs 2/c words an operation, and panels are deep enough that C is seldom read and written. Copies in, products and
copies out run on three lanes. A finished block leaves in strips; the first panels of the next block are multiplied strip
by strip behind it, so that neither arithmetic nor link waits for the whole block to have left.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.array.device.base import Device, Event, Rates, padded
from outsize.array.device.porter import Porter
from outsize.array.store.base import Block

_STRIPS = 8
"""Strips in which a block of C leaves."""
_STRIP_BYTES = 8 << 20
"""Strips shorter than this are not worth their copies."""
_DEPTHS = (3, 2)
"""Panels on the device at once; one where no more fit."""
_PANELS = (64, 256, 1024, 2048, 4096, 8192)
"""Depths of panels that are tried."""
_NEAR = 1.001
"""Times within this of the best are as good."""
_CALL = 3e-5
"""Seconds that a panel costs whatever its size."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a product is cut."""

    rows: int
    """Rows of a block of C."""
    columns: int
    """Columns of a block of C."""
    panel: int
    """Columns of A and rows of B in a panel."""
    depth: int
    """Panels on the device at once."""
    item: int
    """Bytes of an element of A and B."""
    wide: int
    """Bytes of an element of C."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of C."""
        return padded(self.rows * self.columns * self.wide)

    @property
    def panel_bytes(self) -> tuple[int, int]:
        """Bytes of a panel of A and of B."""
        return padded(self.rows * self.panel * self.item), padded(self.panel * self.columns * self.item)

    @property
    def cast_bytes(self) -> tuple[int, int]:
        """Bytes of the panels in C's dtype, where that is another."""
        if self.item == self.wide:
            return 0, 0
        return padded(self.rows * self.panel * self.wide), padded(self.panel * self.columns * self.wide)

    @property
    def held(self) -> int:
        """Bytes on the device."""
        return self.block_bytes + self.depth * sum(self.panel_bytes) + sum(self.cast_bytes)

    def sent(self, m: int, n: int, k: int, add: bool) -> int:
        """Bytes over the link to the device."""
        words = k * (m * -(-n // self.columns) + n * -(-m // self.rows))
        return words * self.item + (m * n * self.wide if add else 0)

    def seconds(self, m: int, n: int, k: int, add: bool, rates: Rates, flops: float) -> float:
        """Time of the whole: the slowest level, what cannot overlap at the ends and between blocks, and a little for
        traffic that is hidden only as long as the link keeps its rate."""
        tiles = -(-m // self.rows) * -(-n // self.columns)
        panels = -(-k // self.panel)
        touched = 2.0 * m * n * panels * self.wide / rates.memory
        work = 2.0 * m * n * k / flops + 0.5 * touched + tiles * panels * _CALL
        leaves = self.block_bytes / rates.link_out
        head = self.depth * work / (tiles * panels)  # products behind a leaving block; the link rests meanwhile
        sending = self.sent(m, n, k, add) / rates.link_in
        slowest = 0.05 * sending + max(
            sending + (tiles - 1) * 0.7 * leaves,
            work + (tiles - 1) * (max(0.0, leaves - head) + leaves / _STRIPS),
            m * n * self.wide / rates.link_out,
        )
        return slowest + sum(self.panel_bytes) / rates.link_in + max(leaves / _STRIPS, leaves - work / (tiles * panels))


@functools.lru_cache(maxsize=256)
def choose_blocks(
    m: int, n: int, k: int, item: int, wide: int, room: int, line: int, rates_key: tuple[float, float, float, float]
) -> Blocks | None:
    """The cut that takes the least time inside `room` bytes; of equally good ones the smallest. None where none fits.

    `line` is the most bytes that a row of a panel may have (a piece of page-locked memory has to hold it)."""
    rates = Rates(*rates_key[:3], flops={"d": rates_key[3]}, source="")
    found: list[tuple[float, int, Blocks]] = []
    panels = [step for step in _PANELS if step < min(k, line // item + 1)] + [k] * (k * item <= line)
    for depths in (_DEPTHS, (1,)):
        for rows, columns in itertools.product(_cuts(m), _cuts(n)):
            if rows * columns * wide > room or columns * max(item, wide) > line or rows * item > line:
                continue
            for panel, depth in itertools.product(panels, depths):
                steps = -(-k // panel) * -(-m // rows) * -(-n // columns)
                blocks = Blocks(rows, columns, panel, min(depth, steps), item, wide)
                if blocks.held <= room:
                    found.append((blocks.seconds(m, n, k, False, rates, rates_key[3]), blocks.held, blocks))
        if found:
            break
    else:
        return None
    best = min(found, key=lambda row: row[:2])[0]
    return min((row for row in found if row[0] <= best * _NEAR), key=lambda row: row[1])[2]


def _cuts(length: int) -> list[int]:
    """Lengths of even cuts, in steps that kernels like."""
    pieces = [count for count in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64, 128, 512, 2048) if count <= length]
    cuts = {-(-length // count) for count in pieces} | {min(length, 32)}
    return sorted({min(length, -(-cut // 128) * 128) if cut > 512 else cut for cut in cuts}, reverse=True)


@dataclass(slots=True)
class _Run:
    """One product under way."""

    device: Device
    porter: Porter
    blocks: Blocks
    a: Block
    b: Block
    c: Block
    dtype: np.dtype[Any]
    add: bool
    tf32: bool
    free: list[Event | None]
    """Per place for a panel: when its last product is done."""
    drained: list[Event]
    """Per strip: when the last block's strip has left."""
    shape: tuple[int, ...] = ()
    """Shape of that block."""


@dataclass(frozen=True, slots=True)
class _Panel:
    """A panel of A and of B on the device."""

    place: int
    a: Any
    b: Any
    arrived: Event


def stream_product(
    device: Device, porter: Porter, blocks: Blocks, a: Block, b: Block, c: Block, *, add: bool, tf32: bool
) -> None:
    """c = a @ b (or c + a @ b), c's memory on the host included, by the time this returns."""
    run = _Run(device, porter, blocks, a, b, c, c.dtype, add, tf32, [None] * blocks.depth, [])
    step = 0
    for low, left in itertools.product(range(0, c.shape[0], blocks.rows), range(0, c.shape[1], blocks.columns)):
        rows, columns = slice(low, low + blocks.rows), slice(left, left + blocks.columns)
        step = _block(run, a[rows], b[:, columns], c[rows, columns], step)
    porter.finish()


def _block(run: _Run, a: Block, b: Block, c: Block, step: int) -> int:
    """One block of C; returns the number of panels sent so far."""
    device, blocks = run.device, run.blocks
    kept = device.view(0, c.shape, run.dtype)
    strips = _strips(c.shape[0], c.nbytes)
    starts = list(range(0, a.shape[1], blocks.panel))
    head = min(blocks.depth, len(starts)) if run.drained else 1
    tail = max(head, len(starts) - 1)
    panels: list[_Panel] = []
    for number, start in enumerate(starts):
        stretch = slice(start, start + blocks.panel)
        panels.append(_send_panel(run, a[:, stretch], b[stretch], step % blocks.depth))
        step += 1
        if number == head - 1:
            _multiply_in_strips(run, kept, c, strips, panels, first=True, last=head == len(starts))
            panels = []
        elif number >= head and number < tail:
            (panel,) = panels
            device.follow("work", panel.arrived)
            device.submit("work", functools.partial(_multiply, run, kept, panel.a, panel.b, True))
            run.free[panel.place] = device.record("work")
            panels = []
        elif number >= tail:
            _multiply_in_strips(run, kept, c, strips, panels, first=False, last=True)
            panels = []
    return step


def _send_panel(run: _Run, a: Block, b: Block, place: int) -> _Panel:
    device, blocks = run.device, run.blocks
    sizes = blocks.panel_bytes
    offset = blocks.block_bytes + place * sum(sizes)
    before = run.free[place]
    if before is not None:
        device.follow("in", before)
    first = run.porter.send(a, offset)
    second = run.porter.send(b, offset + sizes[0])
    return _Panel(place, first, second, device.record("in"))


def _multiply_in_strips(
    run: _Run, kept: Any, c: Block, strips: list[slice], panels: list[_Panel], *, first: bool, last: bool
) -> None:
    """Some panels, strip by strip: behind the block that leaves, or ahead of this one's leaving."""
    device = run.device
    drained = []
    for number, strip in enumerate(strips):
        if first:
            for event in run.drained[number : number + 1] if run.shape == c.shape else run.drained:
                device.follow("in" if run.add else "work", event)
            if run.add:
                run.porter.send(c[strip], strip.start * c.shape[1] * run.dtype.itemsize)
                device.follow("work", device.record("in"))
        for order, panel in enumerate(panels):
            if number == 0:
                device.follow("work", panel.arrived)
            add = run.add or not first or order > 0
            device.submit("work", functools.partial(_multiply, run, kept[strip], panel.a[strip], panel.b, add))
        if last:
            device.follow("out", device.record("work"))
            run.porter.fetch(c[strip], kept[strip])
            drained.append(device.record("out"))
    for panel in panels:
        run.free[panel.place] = device.record("work")
    if last:
        run.drained, run.shape = drained, c.shape


def _multiply(run: _Run, c: Any, a: Any, b: Any, add: bool) -> None:
    kernels, blocks = run.device.kernels, run.blocks
    if blocks.item != blocks.wide:
        first = blocks.block_bytes + blocks.depth * sum(blocks.panel_bytes)
        a, b = (_widen(run, value, place) for value, place in ((a, first), (b, first + blocks.cast_bytes[0])))
    kernels.multiply(c, a, b, add, run.tf32)


def _widen(run: _Run, value: Any, place: int) -> Any:
    wide = run.device.view(place, tuple(value.shape), run.dtype)
    run.device.kernels.cast(wide, value)
    return wide


def _strips(rows: int, size: int) -> list[slice]:
    count = max(1, min(_STRIPS, rows, size // _STRIP_BYTES))
    step = -(-rows // count)
    return [slice(low, min(rows, low + step)) for low in range(0, rows, step)]


def link_floor(m: int, n: int, k: int, item: int, wide: int, room: int, add: bool) -> int:
    """Fewest bytes to the device: 2mnk/sqrt(S) words, never less than A and B once (Smith et al. 2017)."""
    words = max(1, room // wide)
    return int(max(2.0 * m * n * k / words**0.5, k * (m + n))) * item + (m * n * wide if add else 0)
