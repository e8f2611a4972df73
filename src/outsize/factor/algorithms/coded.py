"""zfp as an answer of `auto`: a tolerance found on a sample, then one pass that compresses, decodes and measures.

zfp bounds the difference of each element. What counts here is the Frobenius norm, which comes out several times smaller, so the
tolerance is looked for and the error measured. The blocks are held in memory: where they would not fit, there is no answer.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, replace

import numpy as np

from outsize.array.api.lazy import Array
from outsize.array.graph.node import Node, Source, walk
from outsize.array.passes.tiling import Grid
from outsize.array.store.base import Block, Region, whole
from outsize.array.store.io.chunks import cut_regular
from outsize.factor.algorithms.session import Session
from outsize.factor.formats import Coded
from outsize.factor.formats.coded import choose_box, decode, encode, most_bytes

_SAMPLE = 24
"""Blocks on which a tolerance is tried."""
_CAREFUL = 0.9
"""Part of the asked error that the sample may show."""
_TRIES = 4
"""Passes, each with half the tolerance, until the measured error is small enough."""


@dataclass(frozen=True, slots=True)
class Compressed:
    """Blocks and what they have lost."""

    form: Coded
    error: float
    """Relative Frobenius error, measured."""
    norm: float
    """Frobenius norm of the data."""


def coded(session: Session, node: Node, error: float, limit: int, *, must: bool = False) -> Compressed | None:
    """The tensor in blocks of zfp, in fewer bytes than `limit`; None where that is not to be had. Where it must be, a
    `BudgetError` says that the budget is too small for it; else that is no answer either."""
    if not can_code(node):
        return None
    x, box = Array(node), choose_box(node.shape)
    each = math.prod(box) * node.dtype.itemsize
    block = 4 * each + 24 * math.prod(box) + most_bytes(box)  # while it is coded, decoded and compared
    norm = math.sqrt(float(session.compute((x.astype(np.float64) ** 2).sum(), "norm")))
    count = max(1, min(_SAMPLE, session.room // (8 * each)))
    if not must and not session.has_room(2 * count * each + block):
        return None
    if not session.dry and (not math.isfinite(norm) or limit <= 0 or (norm == 0 and not must)):
        return None
    with session.work_in_memory("sample of blocks", 2 * count * each + block):
        if session.dry:
            guess = node.dtype.itemsize if session.at_once else (1 + math.log2(1 / error)) / 8
            rate = session.ranks.coded or guess
        else:
            tolerance, rate = _sample(x, box, count, error * (norm or 1.0) / math.sqrt(x.size), session.room)
    tile = _tile(node, box, session.room // 8)
    fixed = 3 * math.prod(tile) * node.dtype.itemsize + block
    if rate * x.size > limit:
        return None
    limit = min(limit, max(int(1.1 * rate * x.size) + each, (session.room - fixed) // 4))
    if not must and not session.has_room(2 * limit + fixed):
        return None
    session.ranks.coded = rate if must else None
    with session.work_in_memory("blocks of zfp", 2 * limit + fixed):
        return None if session.dry else _try(session, node, box, tile, tolerance, error * norm, norm, limit)


def can_code(node: Node) -> bool:
    """True where zfp takes these numbers, and is there."""
    return node.dtype.char in "fd" and node.dtype.byteorder != ">" and importlib.util.find_spec("zfpy") is not None


def _try(
    session: Session, node: Node, box: tuple[int, ...], tile: tuple[int, ...], tolerance: float, allowed: float, norm: float,
    limit: int,
) -> Compressed | None:  # fmt: skip
    """Code all blocks, again with half the tolerance where the measured error is too large."""
    traffic = sum(each.store.traffic(whole(each.shape)) for each in walk(node) if isinstance(each, Source))
    for number in range(_TRIES):
        session.steps[-1] = replace(session.steps[-1], read=(1 + number) * traffic)
        made = _compress(Array(node), box, tile, tolerance, limit, session.room // 2)
        if made is None:
            return None
        form, lost = made
        if form.nbytes >= limit:
            return None
        if lost <= allowed:
            return Compressed(form, lost / (norm or 1.0) * (1 + 1e-9), norm)
        tolerance /= 2
    return None


def _sample(x: Array, box: tuple[int, ...], count: int, rms: float, budget: int) -> tuple[float, float]:
    """(the largest tolerance whose root mean square error is small enough on some blocks, bytes for an element)."""
    grid = Grid(x.shape, box)
    places = sorted({round(place) for place in np.linspace(0, len(grid) - 1, min(_SAMPLE, len(grid)))})
    regions = [grid.region(tuple(map(int, np.unravel_index(place, grid.counts)))) for place in places]
    blocks = [_read(x, region, budget) for region in regions]
    size = sum(block.size for block in blocks)
    tolerance = 256 * rms
    while True:
        packed = [encode(block, tolerance) for block in blocks]
        lost = sum(_lost(block, one, box, tolerance) for block, one in zip(blocks, packed, strict=True))
        if lost <= size * (_CAREFUL * rms) ** 2 or tolerance < 1e-3 * rms:
            return tolerance, sum(map(len, packed)) / size
        tolerance /= 2  # zfp takes the next power of two


def _lost(block: Block, packed: bytes, box: tuple[int, ...], tolerance: float) -> float:
    """Squares of the differences after decoding."""
    held = np.zeros(most_bytes(box), np.uint8)
    held[: len(packed)] = np.frombuffer(packed, np.uint8)
    again = np.empty_like(block)
    decode(held, again, tolerance)
    return float(np.sum((again.astype(np.float64) - block) ** 2))


def _compress(
    x: Array, box: tuple[int, ...], tile: tuple[int, ...], tolerance: float, limit: int, budget: int
) -> tuple[Coded, float] | None:
    """(the blocks, norm of what they lost); None where they come out larger than the limit."""
    grid, found, lost, total = Grid(x.shape, box), {}, 0.0, 0
    for region in Grid(x.shape, tile):
        values = _read(x, region, budget)
        for piece in cut_regular(region, box):
            number = int(np.ravel_multi_index(piece.chunk, grid.counts))
            block = np.ascontiguousarray(values[piece.target])
            packed = encode(block, tolerance)
            lost += _lost(block, packed, box, tolerance)
            found[number], total = packed, total + len(packed)
        if total > limit:
            return None
    data = np.frombuffer(b"".join(found[number] for number in range(len(grid))), np.uint8)
    offsets = np.cumsum([0, *(len(found[number]) for number in range(len(grid)))], dtype=np.int64)
    layout = np.array([*x.shape, *box, x.dtype.itemsize], np.int64)
    return Coded(data, offsets, layout, np.array([tolerance])), math.sqrt(lost)


def _tile(node: Node, box: tuple[int, ...], room: int) -> tuple[int, ...]:
    """Whole blocks that are read at once, along the fastest axes first."""
    tile = list(box)
    for axis in reversed(range(len(box))):
        while tile[axis] < node.shape[axis] and 2 * math.prod(tile) * node.dtype.itemsize <= room:
            tile[axis] *= 2
    return tuple(tile)


def _read(x: Array, region: Region, budget: int) -> Block:
    found: Block = x[tuple(slice(start, stop) for start, stop in region)].compute(budget=budget)
    return found.astype(found.dtype.newbyteorder("="), copy=False)
