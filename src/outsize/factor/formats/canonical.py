"""Canonical polyadic (CP): a sum of outer products."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from outsize.array.store.base import Block, Region
from outsize.core.errors import InputError
from outsize.factor.formats.form import Cut, Factors, Moded, expect, scale, settle, wide
from outsize.factor.workspace import Workspace


@dataclass(frozen=True, slots=True, eq=False)
class Canonical(Moded):
    """x = sum over r of weights[r] * outer(factors[0][:, r], factors[1][:, r], ...)"""

    method = "cp"
    suffixes = (".cp",)

    weights: Block
    """(r,)."""
    factors: tuple[Block, ...]
    """(n_k, r) each."""

    def __post_init__(self) -> None:
        settle(self, weights=self.weights, factors=self.factors)
        shapes = [self.weights.shape, *(factor.shape for factor in self.factors)]
        fits = self.weights.ndim == 1 and all(len(s) == 2 and s[1] == shapes[0][0] for s in shapes[1:])
        expect(fits, "weights are (rank,) and factors (length, rank)", shapes)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.weights.shape

    def rebuild(self, region: Region, work: Workspace) -> Block:
        """Columnwise products of the modes before a cut and of those after it, multiplied."""
        lengths = [stop - start for start, stop in region]
        leaves = [factor[start:stop] for factor, (start, stop) in zip(self.factors, region, strict=True)]
        cut = min(range(len(leaves) + 1), key=lambda cut: math.prod(lengths[:cut]) + math.prod(lengths[cut:]))
        left = self._columns(leaves[:cut], work, work.copy(self.weights[None]))
        right = self._columns(leaves[cut:], work, work.fill((1, self.ranks[0]), 1))
        return work.multiply(left, right.T).reshape(lengths)

    def _columns(self, leaves: list[Block], work: Workspace, first: Block) -> Block:
        """Columnwise Kronecker (Khatri-Rao) products."""
        made = first
        for leaf in leaves:
            made = work.scale(made[:, None], leaf[None]).reshape(made.shape[0] * leaf.shape[0], leaf.shape[1])
        return made

    def drop(self, axis: int) -> Factors:
        weights = (wide(self.weights) * wide(self.factors[axis][0])).astype(self.dtype)
        return Canonical(weights, self.factors[:axis] + self.factors[axis + 1 :])

    def scaled(self, factor: complex) -> Self:
        return type(self)(scale(self.weights, factor), self.factors)

    def plus(self, other: Self) -> Self:
        factors = tuple(np.hstack(pair) for pair in zip(self.factors, other.factors, strict=True))
        return type(self)(np.concatenate([self.weights, other.weights]), factors)

    def inner(self, other: Self) -> complex:
        grams = (wide(a).conj().T @ wide(b) for a, b in zip(self.factors, other.factors, strict=True))
        product = functools.reduce(np.multiply, grams, np.ones((len(self.weights), len(other.weights))))
        return complex(wide(self.weights).conj() @ product @ wide(other.weights))

    def careful_norm(self) -> float:
        """From products of columns, too: true to about 1e-8 of the largest component."""
        return math.sqrt(max(0.0, self.inner(self).real))

    def magnitude(self) -> float:
        sizes = (np.linalg.norm(wide(factor), axis=0) for factor in self.factors)
        return float(functools.reduce(np.multiply, sizes, np.abs(wide(self.weights))).sum())

    def rounded(self, allowed: float) -> Cut:
        raise InputError(
            "CP cannot be truncated: no theorem says which components may go; decompose it anew, or keep Tucker or a tensor train"
        )
