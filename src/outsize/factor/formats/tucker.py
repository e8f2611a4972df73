"""Tucker: a small core, and a matrix for each mode."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from outsize.array.store.base import Block, Region
from outsize.factor.formats.form import (
    Cut,
    Factors,
    Moded,
    expect,
    multiply_mode,
    orthonormal,
    scale,
    settle,
    spectral,
    wide,
)
from outsize.factor.formats.rounding import round_tucker
from outsize.factor.workspace import Workspace


@dataclass(frozen=True, slots=True, eq=False)
class Tucker(Moded):
    """x = core x_0 factors[0] x_1 factors[1] ..."""

    method = "tucker"
    suffixes = (".tucker",)

    core: Block
    """(r_0, r_1, ...)."""
    factors: tuple[Block, ...]
    """(n_k, r_k) each; columns are orthonormal where `decompose` or `truncate` made them."""

    def __post_init__(self) -> None:
        settle(self, core=self.core, factors=self.factors)
        shapes = [factor.shape for factor in self.factors]
        fits = all(len(shape) == 2 for shape in shapes) and tuple(s[-1] for s in shapes) == self.core.shape
        expect(fits, f"a core of {self.core.shape} needs factors of (length, {self.core.shape})", shapes)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.core.shape

    def rebuild(self, region: Region, work: Workspace) -> Block:
        """One mode after another, first those that make it smallest."""
        leaves = [factor[start:stop] for factor, (start, stop) in zip(self.factors, region, strict=True)]
        made = self.core if leaves else work.copy(self.core)
        for axis in sorted(range(len(leaves)), key=lambda axis: leaves[axis].shape[0] / max(1, leaves[axis].shape[1])):
            leaf = leaves[axis]
            before, after = math.prod(made.shape[:axis]), math.prod(made.shape[axis + 1 :])
            if after == 1:
                grown = work.multiply(made.reshape(before, leaf.shape[1]), leaf.T)
            else:
                stack = made.reshape(before, leaf.shape[1], after) if before > 1 else made.reshape(leaf.shape[1], after)
                grown = work.multiply(leaf, stack)
            made = grown.reshape(*made.shape[:axis], leaf.shape[0], *made.shape[axis + 1 :])
        return made

    def drop(self, axis: int) -> Factors:
        core = np.tensordot(wide(self.core), wide(self.factors[axis][0]), axes=(axis, 0)).astype(self.dtype)
        return Tucker(core, self.factors[:axis] + self.factors[axis + 1 :])

    def scaled(self, factor: complex) -> Self:
        return type(self)(scale(self.core, factor), self.factors)

    def plus(self, other: Self) -> Self:
        """Both cores, each in its corner of a larger one."""
        ranks = [a + b for a, b in zip(self.ranks, other.ranks, strict=True)]
        core = np.zeros(ranks, np.result_type(self.core, other.core))
        core[tuple(slice(rank) for rank in self.ranks)] = self.core
        core[tuple(slice(rank, None) for rank in self.ranks)] += other.core  # without modes, both are the same place
        return type(self)(core, tuple(np.hstack(pair) for pair in zip(self.factors, other.factors, strict=True)))

    def inner(self, other: Self) -> complex:
        there = wide(other.core)
        for axis, (ours, theirs) in enumerate(zip(self.factors, other.factors, strict=True)):
            there = multiply_mode(there, wide(ours).conj().T @ wide(theirs), axis)
        return complex(np.vdot(wide(self.core), there))

    def careful_norm(self) -> float:
        return float(np.linalg.norm(self._orthonormal()[0]))

    def magnitude(self) -> float:
        return float(np.linalg.norm(wide(self.core))) * math.prod(map(spectral, self.factors))

    def _orthonormal(self) -> tuple[Block, list[Block]]:
        """(core, factors) with orthonormal columns, in double precision."""
        core, factors = wide(self.core), []
        for axis, factor in enumerate(self.factors):
            q, r = orthonormal(factor)
            core = multiply_mode(core, r, axis)
            factors.append(q)
        return core, factors

    def rounded(self, allowed: float) -> Cut:
        """Sequentially truncated HOSVD of the core: what the modes lose adds up in squares."""
        cut = round_tucker(*self._orthonormal(), allowed**2, None)
        core, *factors = (array.astype(self.dtype) for array in cut.arrays)
        return Cut(Tucker(core, tuple(factors)), math.sqrt(cut.lost2), cut.values, cut.kept)
