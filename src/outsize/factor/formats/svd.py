"""Truncated singular value decomposition of a matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from outsize.array.store.base import Block, Region
from outsize.factor.formats.form import (
    Change,
    Cut,
    Factors,
    expect,
    orthonormal,
    scale,
    settle,
    spectral,
    svd,
    wide,
)
from outsize.factor.formats.rounding import count_kept
from outsize.factor.formats.tucker import Tucker
from outsize.factor.workspace import Workspace


@dataclass(frozen=True, slots=True, eq=False)
class Svd(Factors):
    """x = (u * s) @ vh"""

    method = "svd"
    suffixes = (".svd",)

    u: Block
    """(m, r); columns are orthonormal where `decompose` or `truncate` made them."""
    s: Block
    """(r,); real, falling."""
    vh: Block
    """(r, n); rows are orthonormal where `decompose` or `truncate` made them."""

    def __post_init__(self) -> None:
        settle(self, u=self.u, s=np.asarray(self.s).real, vh=self.vh)
        shapes = [self.u.shape, self.s.shape, self.vh.shape]
        fits = [len(shape) for shape in shapes] == [2, 1, 2] and shapes[0][1] == shapes[1][0] == shapes[2][0]
        expect(fits, "u, s, vh are (m, rank), (rank,), (rank, n)", shapes)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.u.shape[0], self.vh.shape[1])

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.s.shape

    def rebuild(self, region: Region, work: Workspace) -> Block:
        (top, bottom), (left, right) = region
        return work.multiply(work.scale(self.u[top:bottom], self.s), self.vh[:, left:right])

    def along(self, axis: int, change: Change) -> Self:
        if axis == 0:
            return type(self)(change(self.u, 0), self.s, self.vh)
        return type(self)(self.u, self.s, change(self.vh, 1))

    def drop(self, axis: int) -> Factors:
        """A vector: one row of a factor times the other factor."""
        row, leaf = (self.u[0], self.vh.T) if axis == 0 else (self.vh[:, 0], self.u)
        return Tucker((wide(row) * wide(self.s)).astype(self.dtype), (leaf,))

    def scaled(self, factor: complex) -> Self:
        size = abs(factor)
        return type(self)(scale(self.u, factor / size if size else factor), scale(self.s, size), self.vh)

    def plus(self, other: Self) -> Self:
        s = np.concatenate([self.s, other.s])
        return type(self)(np.hstack([self.u, other.u]), s, np.vstack([self.vh, other.vh]))

    def inner(self, other: Self) -> complex:
        left = wide(self.u).conj().T @ wide(other.u)
        right = wide(self.vh).conj() @ wide(other.vh).T
        return complex(wide(self.s) @ (left * right) @ wide(other.s))

    def careful_norm(self) -> float:
        return float(np.linalg.norm(self._middle()[1]))

    def magnitude(self) -> float:
        return spectral(self.u) * float(np.linalg.norm(self.s)) * spectral(self.vh)

    def _middle(self) -> tuple[Block, Block, Block]:
        """(orthonormal columns, a small matrix, orthonormal columns) in double precision: x = first @ middle @ last.conj().T"""
        (q, r), (p, t) = orthonormal(self.u), orthonormal(self.vh.conj().T)
        return q, (r * wide(self.s)) @ t.conj().T, p

    def rounded(self, allowed: float) -> Cut:
        q, middle, p = self._middle()
        u, values, vh = svd(middle)
        kept, lost2 = count_kept(values, allowed**2, None)
        made = (q @ u[:, :kept], values[:kept], vh[:kept] @ p.conj().T)
        form = Svd(*(one.astype(self.dtype if one.ndim == 2 else one.dtype) for one in made))
        return Cut(form.cast(self.dtype), math.sqrt(lost2), (values,), (kept,))
