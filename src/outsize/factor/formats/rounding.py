"""The last cut, in memory: as few columns as what may still be lost allows, or as many as were asked for.

In: a core with its bases (or the cores of a train), all that the projections left, in double precision. Out: the same, smaller,
what that lost, and the singular values at which it was cut. Triangular factors stand for the unfoldings, so that no digit is
lost to squaring.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outsize.array.store.base import Block
from outsize.factor.formats.form import svd

_BLOCK = 1 << 16
"""Elements of a block of rows of a tall matrix, at the least."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """Arrays that were cut."""

    arrays: tuple[Block, ...]
    """The core and its bases, or the cores of a train."""
    lost2: float
    """Squares of what was lost."""
    values: tuple[Block, ...]
    """Singular values before the cut: of each mode, or at each cut of a train."""
    kept: tuple[int, ...]
    """How many of each stay."""


def left_vectors(matrix: Block) -> tuple[Block, Block]:
    """(left singular vectors, singular values), the long side of the matrix never copied twice."""
    if matrix.shape[0] >= matrix.shape[1] or not matrix.size:
        return svd(matrix)[:2]
    triangle: Block = np.asarray(np.linalg.qr(matrix.conj().T, mode="r"))
    return svd(triangle.conj().T)[:2]


def count_kept(values: Block, allowed2: float, rank: int | None) -> tuple[int, float]:
    """(how many of falling singular values stay, squares of the others)."""
    squares = values**2
    tails = np.concatenate([np.cumsum(squares[::-1])[::-1], [0.0]])
    kept = min(rank, len(values)) if rank is not None else int(np.flatnonzero(tails <= max(allowed2, 0.0))[0])
    kept = min(max(1, kept), len(values))
    return kept, float(tails[kept])


def round_tucker(core: Block, bases: Sequence[Block], allowed2: float, ranks: Sequence[int] | None) -> Rounded:
    """Cut every mode of the core, the one that shrinks most first."""
    order = sorted(range(core.ndim), key=lambda mode: -core.shape[mode])
    factors, values, kept = list(bases), [np.zeros(0)] * core.ndim, [0] * core.ndim
    lost2 = 0.0
    for place, mode in enumerate(order):
        share, rank = (allowed2 - lost2) / (core.ndim - place), None if ranks is None else ranks[mode]
        turned = np.moveaxis(core, mode, 0)
        if tall_step(core.shape, mode):
            u, core, values[mode], lost = _cut_tall(turned, tall_step(core.shape, mode), share, rank)
        else:
            u, values[mode] = left_vectors(turned.reshape(len(turned), math.prod(turned.shape[1:])))
            count, lost = count_kept(values[mode], share, rank)
            u = u[:, :count]
            core = np.tensordot(u.conj(), core, axes=(0, mode))
        core = np.moveaxis(core, 0, mode)
        kept[mode], lost2 = u.shape[1], lost2 + lost
        factors[mode] = u if factors[mode].size == 0 else factors[mode] @ u
    return Rounded((np.asarray(core, order="C"), *factors), lost2, tuple(values), tuple(kept))


def tall_step(shape: tuple[int, ...], mode: int) -> int:
    """Rows of a block, where the unfolding of a mode is so much longer than wide that it is cut by blocks of rows; else 0."""
    length = shape[mode]
    wide = max(1, math.prod(shape) // max(1, length))
    step = max(4 * wide, _BLOCK // wide)
    return step if length >= 4 * step else 0


def _cut_tall(core: Block, step: int, allowed2: float, rank: int | None) -> tuple[Block, Block, Block, float]:
    """(vectors of the first mode, the core that is left, singular values, squares lost): triangular factors of blocks of rows
    are factored together (TSQR: Demmel, Grigori, Hoemmen, Langou 2012). The blocks are factored again for the vectors, so that
    there is only one array as long as the core, with the columns that stay."""
    length, rest = len(core), core.shape[1:]
    edges = np.linspace(0, length, length // step + 1).astype(int).tolist()
    blocks = list(itertools.pairwise(edges))
    triangles: list[Block] = [
        np.asarray(np.linalg.qr(core[low:high].reshape(high - low, -1), mode="r")) for low, high in blocks
    ]
    wide = triangles[0].shape[1]
    top, triangle = np.linalg.qr(np.concatenate(triangles))
    u, s, vh = svd(triangle)
    kept, lost2 = count_kept(s, allowed2, rank)
    turn = top @ u[:, :kept]
    vectors: Block = np.empty((length, kept), turn.dtype)
    for place, (low, high) in enumerate(blocks):
        q = np.linalg.qr(core[low:high].reshape(high - low, -1))[0]
        np.matmul(q, turn[place * wide : (place + 1) * wide], out=vectors[low:high])
    return vectors, (s[:kept, None] * vh[:kept]).reshape(kept, *rest), s, lost2


def from_right(cores: Sequence[Block]) -> list[Block]:
    """A train whose cores but the first have orthonormal rows."""
    made = [np.asarray(core) for core in cores]
    for place in range(len(made) - 1, 0, -1):
        left, n, right = made[place].shape
        q, r = np.linalg.qr(made[place].reshape(left, n * right).conj().T)
        made[place] = np.ascontiguousarray(q.conj().T).reshape(q.shape[1], n, right)
        made[place - 1] = np.tensordot(made[place - 1], r.conj().T, axes=(2, 0))
    return made


def round_train(cores: Sequence[Block], allowed2: float, ranks: Sequence[int] | None) -> Rounded:
    """Make all cores but the first orthogonal from the right, then cut from the left (Oseledets 2011)."""
    made, lost2, values, kept = from_right(cores), 0.0, [], []
    for place in range(len(made) - 1):
        left, n, right = made[place].shape
        u, s, vh = svd(made[place].reshape(left * n, right))
        share = (allowed2 - lost2) / (len(made) - 1 - place)
        count, lost = count_kept(s, share, None if ranks is None else ranks[place])
        lost2 += lost
        values.append(s)
        kept.append(count)
        made[place] = u[:, :count].reshape(left, n, count)
        made[place + 1] = np.tensordot(s[:count, None] * vh[:count], made[place + 1], axes=(1, 0))
    return Rounded(tuple(np.ascontiguousarray(core) for core in made), lost2, tuple(values), tuple(kept))


def tucker_bytes(shape: tuple[int, ...], core: tuple[int, ...], itemsize: int) -> int:
    """Bytes that `round_tucker` takes at most: the core a few times, and every basis twice."""
    size = math.prod(core)
    small = [min(rank, size // rank) for rank in core]
    tall = max(range(len(core)), key=lambda mode: core[mode])
    step = tall_step(core, tall)
    if step:
        wide = small[tall]
        blocks = 5 * 2 * step * wide + 4 * (core[tall] // step + 1) * wide * wide
        left = tuple(wide if mode == tall else rank for mode, rank in enumerate(core))
        based = 0 if shape[tall] == core[tall] else shape[tall]
        return itemsize * (size + blocks) + tucker_bytes((*shape[:tall], based, *shape[tall + 1 :]), left, itemsize)
    return itemsize * (6 * size + sum(2 * n * r + 4 * r * r for n, r in zip(shape, small, strict=True)))


def train_bytes(cores: Sequence[tuple[int, int, int]], itemsize: int) -> int:
    """Bytes that `round_train` takes at most, beside the cores that it is given."""
    sizes = [math.prod(core) for core in cores]
    return itemsize * (2 * sum(sizes) + 6 * max(sizes))


def split_train(block: Block) -> list[Block]:
    """The middle (left, modes ..., right) as cores, without loss: QR from the left."""
    cores, left, modes, right = [], block.shape[0], block.shape[1:-1], block.shape[-1]
    for mode in modes[:-1]:
        q, r = np.linalg.qr(block.reshape(left * mode, -1))
        cores.append(q.reshape(left, mode, -1))
        left, block = q.shape[1], r
    return [*cores, block.reshape(left, modes[-1], right)]
