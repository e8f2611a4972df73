"""What spans the fibres of a mode: found from a random mixture of some of them, or from the Gram matrix of all.

A mixture S = X W of a few chunks, W Gaussian with c columns, is made in one pass that keeps n x c numbers. The leading left
singular vectors of S span what the fibres span, to the extent that the chunks stand for all (Halko, Martinsson, Tropp 2011). That
is a guess: the projection that follows checks every chunk (`projection.py`). The Gram matrix of all fibres gives the best basis
there is, in one reading of everything and n x n numbers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from outsize.array.kernels.blas import Packing
from outsize.array.store.base import Block, Region, region_shape
from outsize.core.errors import InputError
from outsize.factor.algorithms.fibers import Fibers, product_packing
from outsize.factor.algorithms.stream import Kernel

_SEED = 20
"""Of the random mixtures: any number; always the same, so that every run gives the same factors."""


class Summing(Kernel):
    """A matrix to which each chunk that passes adds, and the squares of all."""

    axis: int
    total: Block
    norm2: float

    def state(self) -> dict[str, Any]:
        return {"total": self.total, "norm2": self.norm2}

    def restore(self, state: dict[str, Any]) -> None:
        self.total, self.norm2 = state["total"], float(state["norm2"])

    def join(self, sums: dict[str, Any]) -> None:
        self.total += sums["total"]
        self.norm2 += float(sums["norm2"])

    def packing(self, chunk: tuple[int, ...]) -> Packing:
        return product_packing(chunk, self.axis, self.total.shape[1], self.total.dtype)


class Mixing(Summing):
    """S = X W of the chunks that pass."""

    def __init__(self, length: int, columns: int, axis: int, dtype: np.dtype[Any], name: str) -> None:
        self.name, self.axis = name, axis
        self.total = np.zeros((length, columns), dtype)
        self.norm2 = 0.0

    def held(self, chunk: tuple[int, ...]) -> int:
        fibers: int = math.prod(chunk) // self.total.shape[0]
        return int(3 * self.total.nbytes + 2 * fibers * self.total.shape[1] * 8)

    def fold(self, number: int, region: Region, fibers: Fibers) -> None:
        self.norm2 += finite(fibers, region, self.axis)
        weights = np.random.Generator(np.random.Philox(key=[_SEED, number])).standard_normal(
            (fibers.columns, self.total.shape[1])
        )
        fibers.mix(weights, self.total)

    def __reduce__(self) -> Any:  # for a worker that begins a part
        return type(self), (*self.total.shape, self.axis, self.total.dtype, self.name)

    def basis(self) -> tuple[Block, Block]:
        """(orthonormal columns, share of all squares along each), falling."""
        u, s, _ = np.linalg.svd(self.total, full_matrices=False)
        energy = s**2
        total = float(energy.sum())
        return u, energy / total if total > 0 else energy


class Gram(Summing):
    """G = X X^H of all chunks."""

    def __init__(self, length: int, axis: int, dtype: np.dtype[Any], name: str) -> None:
        self.name, self.axis = name, axis
        self.total = np.zeros((length, length), dtype)
        self.norm2 = 0.0

    def held(self, chunk: tuple[int, ...]) -> int:
        return gram_bytes(self.total.shape[0], self.total.dtype)

    def fold(self, number: int, region: Region, fibers: Fibers) -> None:
        self.norm2 += finite(fibers, region, self.axis)
        fibers.gram(self.total)

    def __reduce__(self) -> Any:
        return type(self), (len(self.total), self.axis, self.total.dtype, self.name)  # for a worker that begins a part

    def basis(self) -> tuple[Block, Block]:
        """(orthonormal columns, share of all squares along each), falling."""
        values, vectors = np.linalg.eigh(self.total)
        energy = np.maximum(values[::-1], 0.0)
        total = float(energy.sum())
        return np.ascontiguousarray(vectors[:, ::-1]), energy / total if total > 0 else energy


def gram_bytes(length: int, dtype: np.dtype[Any]) -> int:
    """Bytes that a Gram matrix and its eigenvectors take: LAPACK works on a copy, with twice as much beside it."""
    return 6 * length * length * dtype.itemsize


def count_needed(energy: Block, allowed: float, length: int, mixed: int | None) -> int | None:
    """How many columns leave at most `allowed` of the squares outside; None where a mixture of so many columns is too few to
    say. A mixture sees of what lies outside of r columns only as much as its other c - r columns hold; the rest is added."""
    tails = np.concatenate([np.cumsum(energy[::-1])[::-1], [0.0]])  # tails[r]: outside of r columns
    if mixed is not None and mixed < length:
        kept = np.arange(len(tails), dtype=np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            tails = tails * (mixed * (length - kept)) / (length * np.maximum(mixed - kept, 1e-9))
        tails = tails[: len(energy) // 2 + 1]
    enough = np.flatnonzero(tails <= allowed)
    return int(enough[0]) if len(enough) else None


def finite(fibers: Fibers, region: Region, axis: int) -> float:
    """Sum of squares of a chunk; an `InputError` that says where it is not a finite number."""
    norm2 = fibers.norm2()
    if np.isfinite(norm2) and (norm2 > 1e-290 or not fibers.data.any()):
        return norm2
    values = Fibers.lay(fibers.data, region_shape(region), axis)
    bad = np.argwhere(~np.isfinite(values))
    if not len(bad):
        most = float(np.abs(values).max())
        raise InputError(
            f"the data have values of about {most:.0e}, whose squares float64 does not hold: decompose x / {most:.0e} instead"
        )
    place = ", ".join(str(int(at) + start) for at, (start, _) in zip(bad[0], region, strict=True))
    raise InputError(
        f"x[{place}] is {values[tuple(bad[0])]}, and no error can be promised for data that are not numbers: replace them first, "
        "for instance with outsize.array.where(outsize.array.isfinite(x), x, 0)"
    )
