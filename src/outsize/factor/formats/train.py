"""Tensor train: a chain of three-dimensional cores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from outsize.array.store.base import Block, Region
from outsize.core.errors import InputError
from outsize.factor.formats.form import (
    Change,
    Cut,
    Factors,
    expect,
    scale,
    settle,
    spectral,
    wide,
)
from outsize.factor.formats.rounding import from_right, round_train
from outsize.factor.formats.tucker import Tucker
from outsize.factor.workspace import Workspace


@dataclass(frozen=True, slots=True, eq=False)
class Train(Factors):
    """x[i, j, ..., k] = cores[0][0, i] @ cores[1][:, j] @ ... @ cores[-1][:, k, 0]"""

    method = "tt"
    suffixes = (".tt", ".train")

    cores: tuple[Block, ...]
    """(r_k, n_k, r_(k+1)) each; r_0 = r_d = 1."""

    def __post_init__(self) -> None:
        if not self.cores:
            raise InputError("a tensor train has at least one core")
        settle(self, cores=self.cores)
        shapes = [core.shape for core in self.cores]
        fits = all(len(shape) == 3 for shape in shapes)
        ends = [1, *(shape[-1] for shape in shapes)]
        fits = fits and [shape[0] for shape in shapes] == ends[:-1] and ends[-1] == 1
        expect(fits, "cores are (rank, length, next rank), with ranks of 1 at both ends", shapes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(core.shape[1] for core in self.cores)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of the cuts between modes: one fewer than modes."""
        return tuple(core.shape[0] for core in self.cores[1:])

    def rebuild(self, region: Region, work: Workspace) -> Block:
        """The cores before a cut as one matrix, those after it as another, and their product; the cut is where that costs
        least."""
        lengths = [stop - start for start, stop in region]
        slabs = [core[:, start:stop] for core, (start, stop) in zip(self.cores, region, strict=True)]
        if len(slabs) == 1:
            return work.copy(slabs[0]).reshape(lengths)
        cut = min(range(1, len(slabs)), key=lambda cut: _operations(slabs, cut))
        left: Block = work.copy(slabs[0]).reshape(slabs[0].shape[1:])
        for slab in slabs[1:cut]:
            rank, length, after = slab.shape
            grown = work.multiply(left, work.copy(slab).reshape(rank, length * after))
            left = grown.reshape(left.shape[0] * length, after)
        right: Block = work.copy(slabs[-1]).reshape(slabs[-1].shape[:2])
        for slab in reversed(slabs[cut:-1]):
            rank, length, after = slab.shape
            grown = work.multiply(work.copy(slab).reshape(rank * length, after), right)
            right = grown.reshape(rank, length * right.shape[1])
        return work.multiply(left, right).reshape(lengths)

    def along(self, axis: int, change: Change) -> Self:
        cores = list(self.cores)
        cores[axis] = change(cores[axis], 1)
        return type(self)(tuple(cores))

    def drop(self, axis: int) -> Factors:
        """The core of one matrix goes into its neighbour."""
        matrix, cores = wide(self.cores[axis][:, 0]), list(self.cores)
        if len(cores) == 1:
            return Tucker(matrix.reshape(()).astype(self.dtype), ())
        near = axis + 1 if axis + 1 < len(cores) else axis - 1
        pair = (matrix, wide(cores[near])) if near > axis else (wide(cores[near]), matrix)
        cores[near] = np.tensordot(*pair, axes=1).astype(self.dtype)
        return Train(tuple(cores[:axis] + cores[axis + 1 :]))

    def scaled(self, factor: complex) -> Self:
        return type(self)((scale(self.cores[0], factor), *self.cores[1:]))

    def plus(self, other: Self) -> Self:
        """Cores side by side at the ends, and in two corners of larger ones between."""
        cores = []
        last = len(self.cores) - 1
        for place, (a, b) in enumerate(zip(self.cores, other.cores, strict=True)):
            first, end = (0 if place == 0 else a.shape[0]), (0 if place == last else a.shape[2])
            core = np.zeros((first + b.shape[0], a.shape[1], end + b.shape[2]), np.result_type(a, b))
            core[: a.shape[0], :, : a.shape[2]] = a
            core[first:, :, end:] += b
            cores.append(core)
        return type(self)(tuple(cores))

    def inner(self, other: Self) -> complex:
        joined = np.ones((1, 1))
        for a, b in zip(self.cores, other.cores, strict=True):
            joined = np.tensordot(wide(a).conj(), np.tensordot(joined, wide(b), axes=1), axes=([0, 1], [0, 1]))
        return complex(joined[0, 0])

    def careful_norm(self) -> float:
        return float(np.linalg.norm(from_right([wide(core) for core in self.cores])[0]))

    def magnitude(self) -> float:
        cores = [core.reshape(core.shape[0] * core.shape[1], core.shape[2]) for core in self.cores[:-1]]
        ahead = math.prod(map(spectral, cores)) * float(np.linalg.norm(wide(self.cores[-1])))
        cores = [core.reshape(core.shape[0], core.shape[1] * core.shape[2]) for core in self.cores[1:]]
        back = math.prod(map(spectral, cores)) * float(np.linalg.norm(wide(self.cores[0])))
        return min(ahead, back)

    def rounded(self, allowed: float) -> Cut:
        """Oseledets' rounding: what the cuts lose adds up in squares."""
        cut = round_train([wide(core) for core in self.cores], allowed**2, None)
        cores = tuple(core.astype(self.dtype) for core in cut.arrays)
        return Cut(Train(cores), math.sqrt(cut.lost2), cut.values, cut.kept)


def _operations(slabs: list[Block], cut: int) -> float:
    """Multiplications of a rebuild that meets at a cut."""
    lengths = [slab.shape[1] for slab in slabs]
    left = sum(math.prod(lengths[: k + 1]) * slabs[k].shape[0] * slabs[k].shape[2] for k in range(1, cut))
    right = sum(math.prod(lengths[k:]) * slabs[k].shape[0] * slabs[k].shape[2] for k in range(cut, len(slabs) - 1))
    return float(left + right + math.prod(lengths) * slabs[cut].shape[0])
