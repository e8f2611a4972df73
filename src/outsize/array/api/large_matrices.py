"""Factors of a matrix that does not fit into the budget.

In: a square matrix of two axes, larger than memory. Out: factors as panels of columns, each in a scratch file that goes with
them. They are made at the call, inside the current budget, one panel at a time (left-looking): a panel is read, what the panels
before it do to it is taken off, and it is factored in memory. So each earlier panel is read once for every later one, and
nothing is written twice. Tall matrices need nothing of this: `linalg` makes their factors lazily, by blocks of rows.

Toledo, "Locality of reference in LU decomposition with partial pivoting", SIAM J. Matrix Anal. 18 (1997), for the panel.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.array.api.lazy import Array
from outsize.array.graph import build as make
from outsize.array.kernels.blas import factor_columns, multiply_add, solve_triangle
from outsize.array.kernels.copies import copy_block
from outsize.array.plan.prepare import resolve_budget
from outsize.array.run.now import remove, scratch_file
from outsize.array.run.results import compute_node
from outsize.array.store.base import Block, Store, block_in, whole
from outsize.array.store.formats.npy import describe
from outsize.core.errors import BudgetError, InputError
from outsize.core.memory import HOST, Allowance, Budget
from outsize.core.units import format_bytes
from outsize.engine.heap import lean_heap
from outsize.engine.pool import make_buffer

_NARROW = 16
"""Columns that are factored one by one."""
_CORNER = 128
"""Rows of a triangle that are inverted at once, where BLAS does not show how to solve it."""
_LEAST = 256 << 10
"""A budget that the passes can work with beside a panel."""
_SHARE = 0.6
"""Of the budget for what is held here; the rest is for the passes that read and multiply."""


@dataclass(frozen=True, slots=True)
class Room:
    """The budget, shared between what is held here and the passes that read and write meanwhile."""

    bytes: int
    rest: Budget
    """For a pass that reads or writes while a panel is held."""
    strip: int
    """Bytes of rows that are read at a time."""

    @classmethod
    def current(cls) -> Room:
        """That of the current budget."""
        budget = resolve_budget(None)
        whole = budget.host or 0
        rest = Allowance(pool=HOST, bytes=int(0.9 * (1 - _SHARE) * whole), reason="beside a panel of columns")
        others = tuple(allowance for allowance in budget.allowances if allowance.pool != HOST)
        return cls(whole, Budget(allowances=(rest, *others), scratch=budget.scratch), max(1 << 16, whole // 32))

    def width(self, n: int, held: float, itemsize: int) -> int:
        """Columns of a panel, where `held` times as much is in memory at once; a `BudgetError` where not even a few fit."""
        width = int(_SHARE * self.bytes / (held * n * itemsize))
        if width < min(n, _NARROW) or self.bytes < _LEAST:
            needed = max(_LEAST, math.ceil(held * n * itemsize * min(n, _NARROW) / _SHARE))
            raise BudgetError(
                f"a matrix of {n} rows is factored in panels of {_NARROW} columns or more, which need {format_bytes(needed)}; "
                f"the budget is {format_bytes(self.bytes)}", needed=needed, budget=self.bytes, smallest=needed,
                culprit="a panel of columns",
            )  # fmt: skip
        width = min(width, max(_NARROW, n // 4))  # a panel's corner is copied a few times: it is the smaller part
        return min(n, width // _NARROW * _NARROW)

    def read(self, x: Array, out: Block | None = None) -> Block:
        """A part of a matrix, in memory of the panel's share."""
        return compute_node(x.node, self.rest, out=np.empty(x.shape, x.dtype) if out is None else out)

    def strips(self, panel: Array, first: int = 0, last: int | None = None) -> Iterator[tuple[int, Block]]:
        """(row counted from the first, rows) of a panel that was kept, few at a time and without a plan for each."""
        store: Store = panel.node.store  # type: ignore[attr-defined]  # what `keep` made
        (end, width), rows = panel.shape, max(1, self.strip // (panel.shape[1] * panel.dtype.itemsize))
        end = end if last is None else last
        regions = [((low, min(low + rows, end)), (0, width)) for low in range(first, end, rows)]
        buffer = make_buffer(max((store.extent(region) for region in regions), default=1))
        for region in regions:
            yield region[0][0] - first, store.read(region, buffer)

    def keep(self, block: Block) -> Array:
        """An array in memory, written to a scratch file that goes with it."""
        name = scratch_file(self.rest.scratch)
        sink, region = describe(name, block.shape, block.dtype), whole(block.shape)
        sink.create()
        sink.write(region, block, make_buffer(sink.extent(region)))
        node = make.source(sink.commit())
        weakref.finalize(node, remove, name)
        return Array(node)


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Block:
    """Memory of its own mapping, which goes back to the system at once when it is let go."""
    return block_in(make_buffer(math.prod(shape) * dtype.itemsize), shape, dtype)


def solve_lower(triangle: Block, right: Block, unit: bool = False) -> None:
    """right becomes triangle^-1 right; without `trsm` corners are inverted and the rest is multiplied."""
    if solve_triangle(triangle, right, lower=True, unit=unit):
        return
    for low in range(0, triangle.shape[0], _CORNER):
        high = min(low + _CORNER, triangle.shape[0])
        if low:
            right[low:high] -= triangle[low:high, :low] @ right[:low]
        corner = np.tril(triangle[low:high, low:high], -1 if unit else 0)
        right[low:high] = (
            np.linalg.inv(corner + np.eye(high - low, dtype=corner.dtype) if unit else corner) @ right[low:high]
        )


def solve_upper(triangle: Block, right: Block) -> None:
    """right becomes triangle^-1 right."""
    if solve_triangle(triangle, right, lower=False):
        return
    for high in range(triangle.shape[0], 0, -_CORNER):
        low = max(0, high - _CORNER)
        if high < triangle.shape[0]:
            right[low:high] -= triangle[low:high, high:] @ right[high:]
        right[low:high] = np.linalg.inv(np.triu(triangle[low:high, low:high])) @ right[low:high]


def _solve_rows(corner: Block, rows: Block, step: int) -> None:
    """rows become rows (corner^H)^-1, a few at a time."""
    if corner.dtype.kind != "c" and solve_triangle(corner, rows, lower=True, turned=True):
        return
    for start in range(0, len(rows), step):
        turned = np.ascontiguousarray(rows[start : start + step].conj().T)
        solve_lower(corner, turned)
        rows[start : start + step] = turned.conj().T


@lean_heap()
def cholesky_panels(x: Array) -> list[Array]:
    """The lower factor of a positive definite matrix in panels; only its lower half is read. Each begins at its diagonal."""
    n, room = x.shape[0], Room.current()
    width = room.width(n, 2.2, x.dtype.itemsize)
    parts: list[Array] = []
    for low in range(0, n, width):
        high = min(n, low + width)
        panel = _empty((n - low, high - low), x.dtype)
        room.read(x[low:, low:high], panel)
        for number, before in enumerate(parts):
            first = low - number * width
            head = room.read(before[first : first + high - low]).conj().T
            for start, strip in room.strips(before, first):
                multiply_add(strip, head, panel[start : start + len(strip)], room.strip, -1.0)
        try:
            corner = np.linalg.cholesky(panel[: high - low])
        except np.linalg.LinAlgError:
            raise InputError(
                f"cholesky failed between rows {low} and {high}: the matrix is not positive definite"
            ) from None
        panel[: high - low] = corner
        _solve_rows(corner, panel[high - low :], max(1, room.strip // (width * x.dtype.itemsize)))
        parts.append(room.keep(panel))
        del panel
    return parts


@dataclass(frozen=True, slots=True)
class Factored:
    """P A = L U. A panel holds its columns of U and, from its own diagonal down, of L, whose diagonal is ones. Its rows are in
    the order that it and the panels before it chose."""

    width: int
    """Columns of a panel."""
    orders: tuple[Block, ...]
    """For each panel, from its own diagonal down, the order in which it took the rows that were there."""
    panels: tuple[Array, ...]

    @property
    def n(self) -> int:
        return self.panels[0].shape[0]


@lean_heap()
def factor(x: Array) -> Factored:
    """The LU factors of a square matrix, with partial pivoting."""
    n, room = x.shape[0], Room.current()
    width = room.width(n, 2.3, x.dtype.itemsize)
    found = Factored(width, (), ())
    for low in range(0, n, width):
        high = min(n, low + width)
        panel = _empty((n, high - low), x.dtype)
        room.read(x[:, low:high], panel)
        forward(room, found, panel)
        order = _factor_panel(panel[low:], room.strip)
        if not panel[low:high].diagonal().all():
            raise InputError(f"the matrix is singular: no pivot is left in columns {low} to {high}")
        found = Factored(width, (*found.orders, order), (*found.panels, room.keep(panel)))
        del panel
    return found


def _factor_panel(a: Block, strip: int) -> Block:
    """LU with partial pivoting in place (unit lower, upper); returns the order of the rows."""
    columns = _empty(a.shape[::-1], a.dtype).T
    copy_block(columns, a)
    swaps = factor_columns(columns)
    if swaps is None:
        del columns
        return _factor_halves(a, strip)
    copy_block(a, columns)
    order = np.arange(len(a))
    for place, other in enumerate(swaps.tolist()):
        order[[place, other]] = order[[other, place]]
    return order


def _factor_halves(a: Block, strip: int) -> Block:
    """The same by halves of the columns, without LAPACK."""
    rows, columns = a.shape
    order = np.arange(rows)
    if columns <= _NARROW:
        for k in range(min(rows, columns)):
            best = k + int(np.argmax(np.abs(a[k:, k])))
            if best != k:
                a[[k, best]] = a[[best, k]]
                order[[k, best]] = order[[best, k]]
            if a[k, k] != 0:
                a[k + 1 :, k] /= a[k, k]
                a[k + 1 :, k + 1 :] -= a[k + 1 :, k, None] * a[k, None, k + 1 :]
        return order
    half = columns // 2
    left, right = a[:, :half], a[:, half:]
    order = _factor_halves(left, strip)
    _reorder(right, order, strip)
    solve_lower(left[:half], right[:half], unit=True)
    right[half:] -= left[half:] @ right[:half]
    then = _factor_halves(right[half:], strip)
    _reorder(left[half:], then, strip)
    order[half:] = order[half:][then]
    return order


def _reorder(rows: Block, order: Block, strip: int) -> None:
    """rows become rows[order], so many bytes at a time."""
    moved = np.flatnonzero(order != np.arange(len(order)))
    step = max(1, strip // (rows.itemsize * max(1, len(moved))))
    for start in range(0, rows.shape[1], step):
        rows[moved, start : start + step] = rows[order[moved], start : start + step]


def forward(room: Room, factored: Factored, right: Block) -> None:
    """right becomes L^-1 P right, a panel at a time."""
    for number, (order, panel) in enumerate(zip(factored.orders, factored.panels, strict=True)):
        low = number * factored.width
        high = low + panel.shape[1]
        _reorder(right[low:], order, room.strip)
        solve_lower(room.read(panel[low:high]), right[low:high], unit=True)
        for start, strip in room.strips(panel, high):
            rows = right[high + start : high + start + len(strip)]
            multiply_add(strip, right[low:high], rows, room.strip, -1.0)


def backward(room: Room, factored: Factored, right: Block) -> None:
    """right becomes U^-1 right."""
    for number in reversed(range(len(factored.panels))):
        low, panel = number * factored.width, factored.panels[number]
        high = low + panel.shape[1]
        solve_upper(room.read(panel[low:high]), right[low:high])
        for start, strip in room.strips(panel, 0, low):
            multiply_add(strip, right[low:high], right[start : start + len(strip)], room.strip, -1.0)


@lean_heap()
def solve_columns(factored: Factored, right: Array) -> list[Array]:
    """A^-1 right, as panels of columns."""
    (n, columns), room = right.shape, Room.current()
    width = min(columns, room.width(n, 2.5, right.dtype.itemsize)) or 1
    parts = []
    for low in range(0, columns, width):
        part = right[:, low : low + width]
        found = _empty(part.shape, right.dtype)
        room.read(part, found)
        forward(room, factored, found)
        backward(room, factored, found)
        parts.append(room.keep(found))
        del found
    return parts


def log_determinant(factored: Factored) -> tuple[Any, float]:
    """(sign, logarithm of the size) of the determinant."""
    room, sign, total = Room.current(), math.prod(map(_parity, factored.orders)), 0.0
    for number, panel in enumerate(factored.panels):
        low = number * factored.width
        diagonal = np.diagonal(room.read(panel[low : low + panel.shape[1]]))
        sign = sign * np.prod(diagonal / np.abs(diagonal))
        total += float(np.log(np.abs(diagonal)).sum())
    return sign, total


def _parity(order: Block) -> int:
    """1 for an even permutation, -1 for an odd one."""
    seen, swaps = np.zeros(len(order), bool), 0
    for start in range(len(order)):
        place, length = start, 0
        while not seen[place]:
            seen[place] = True
            place, length = int(order[place]), length + 1
        swaps += max(0, length - 1)
    return -1 if swaps % 2 else 1
