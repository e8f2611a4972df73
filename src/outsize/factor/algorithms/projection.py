"""Fibres written in a basis that is checked on every chunk, and grows where it does not suffice.

In: a basis B of a mode (orthonormal columns), how much of the squares may be lost. Out: y = B^H x, a tensor whose mode is as
short as the basis, and what was lost, exactly: the squares of a chunk less those of its y (or, for small errors, the squares of
x - B y themselves). Where a chunk would lose more than its part, what it lacks is added to the basis; chunks before it lack
nothing of that, since theirs was small enough. So the promise does not depend on how the basis was guessed, and the data are read
once. A part on a worker of a cluster does not grow the basis, which others use as well: what all have lost is counted in the end.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from outsize.array.kernels.blas import Packing
from outsize.array.store.base import Block, Region, region_shape
from outsize.factor.algorithms.fibers import Fibers, product_packing, sum_squares
from outsize.factor.algorithms.sampling import finite
from outsize.factor.algorithms.stream import Kernel
from outsize.factor.algorithms.tensor import Target


class BasisTooSmall(Exception):
    """The basis would have to grow beyond what was set aside for it."""


class Projection(Kernel):
    """y = B^H x, and what is lost."""

    def __init__(
        self, basis: Block, used: int, axis: int, target: Target, name: str, *, allowed: float | None, expected: float,
        size: int, direct: bool,
    ) -> None:  # fmt: skip
        """`basis` has room for more columns than the `used` ones; `allowed` is the share of squares that may be lost, None
        where any may; `expected` is a guess of all squares, `size` the number of elements."""
        self.name, self.written = name, target.written
        self.basis, self.used, self.axis, self.target = basis, used, axis, target
        self.allowed, self.expected, self.size, self.direct = allowed, expected, size, direct
        self.grows = True
        self.norm2, self.lost2, self.kept2, self.seen = 0.0, 0.0, 0.0, 0
        self._slack = 1e-11 + 4 * basis.shape[0] * 2.0**-53 * math.sqrt(basis.shape[1])

    @property
    def bases(self) -> tuple[tuple[int, Block], ...]:
        """Each mode that becomes shorter, and its basis."""
        return ((self.axis, self.basis),)

    def made(self, region: Region) -> Region:
        """Where in the target a chunk goes."""
        columns = {axis: basis.shape[1] for axis, basis in self.bases}
        return tuple((0, columns[axis]) if axis in columns else span for axis, span in enumerate(region))

    def held(self, chunk: tuple[int, ...]) -> int:
        length, columns = self.basis.shape
        fibers: int = math.prod(chunk) // length
        found = fibers * columns * self.basis.itemsize
        grown = 8 * fibers * columns + 5 * self.basis.nbytes if self.allowed is not None else self.basis.nbytes
        written = self.target.room(region_shape(self.made(tuple((0, n) for n in chunk))))
        return int(2 * self.basis.nbytes + 2 * found + grown + written)

    def packing(self, chunk: tuple[int, ...]) -> Packing:
        return product_packing(chunk, self.axis, self.basis.shape[1], self.basis.dtype)

    def fold(self, number: int, region: Region, fibers: Fibers) -> None:
        norm2 = finite(fibers, region, self.axis)
        found = fibers.project(self.basis)
        if self.direct:
            fibers.subtract(self.basis, found)
            lost2 = fibers.norm2()
        else:
            lost2 = max(norm2 - sum_squares(found), 0.0) + self._slack * norm2
        self.norm2 += norm2
        self.seen += fibers.data.size
        if self.grows and self.lost2 + lost2 > self._limit():
            if not self.direct:
                fibers.subtract(self.basis, found)
            lost2 = self._grow(number, fibers, found)
        self.lost2 += lost2
        self.kept2 += sum_squares(found)
        place = self.made(region)
        shape = region_shape(place)
        self.target.write(place, Fibers.lay(found, shape, self.axis) if found.ndim == 2 else found.reshape(shape))

    def take(self, norm2: float, kept2: float, size: int) -> bool:
        """The sums of a next chunk of so many elements, which somebody else has projected and written; False where the basis must
        grow for it first."""
        lost2 = max(norm2 - kept2, 0.0) + self._slack * norm2
        if self.lost2 + lost2 > self._limit(norm2, size):
            return False
        self.norm2, self.kept2, self.lost2 = self.norm2 + norm2, self.kept2 + kept2, self.lost2 + lost2
        self.seen += size
        return True

    def _limit(self, norm2: float = 0.0, size: int = 0) -> float:
        """Squares that may be lost by now, with a next chunk: of those seen, or of those that were to be expected by now."""
        if self.allowed is None:
            return math.inf
        return self.allowed * max(self.norm2 + norm2, 0.9 * self.expected * (self.seen + size) / self.size)

    def _grow(self, number: int, rest: Fibers, found: Block) -> float:
        """Add what a chunk lacks to the basis; `rest` is what is lost of it."""
        lost2 = rest.norm2()
        times = 0
        while self.lost2 + lost2 > self._limit() * 0.9:
            more = min(self.basis.shape[1] - self.used, self.basis.shape[0] - self.used, max(8, self.used // 8))
            if more <= 0:
                raise BasisTooSmall
            length = self.basis.shape[0]
            mixed: Block = np.zeros((length, more), self.basis.dtype)
            draws = np.random.Generator(np.random.Philox(key=[number, times + 1]))
            rest.mix(draws.standard_normal((rest.columns, more)), mixed)
            known = self.basis[:, : self.used]
            for _ in range(6):  # once more as a rule, since the first leaves rounding
                mixed -= known @ (known.conj().T @ mixed)
                mixed = np.linalg.qr(mixed)[0]
                if np.abs(known.conj().T @ mixed).max(initial=0.0) < 1e-14 * length:
                    break
            place = slice(self.used, self.used + more)
            self.basis[:, place] = mixed
            part = rest.project(mixed)
            rest.subtract(mixed, part)
            found[(Ellipsis, place) if found.ndim == 2 else (slice(None), place)] = part
            self.used += more
            lost2, times = rest.norm2(), times + 1
        return lost2

    def finish(self) -> None:
        """An error where more was lost than allowed after all."""
        if self.allowed is not None and self.lost2 > self.allowed * self.norm2:
            raise BasisTooSmall

    def state(self) -> dict[str, Any]:
        numbers = {name: getattr(self, name) for name in ("used", "norm2", "lost2", "kept2", "seen")}
        return {"basis": self.basis, **numbers, **self.target.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.basis, self.used, self.seen = state["basis"], int(state["used"]), int(state["seen"])
        self.norm2, self.lost2, self.kept2 = float(state["norm2"]), float(state["lost2"]), float(state["kept2"])
        self.target.restore(state)

    def __getstate__(self) -> dict[str, Any]:
        """For a worker that begins a part."""
        return {**self.__dict__, "grows": False, "norm2": 0.0, "lost2": 0.0, "kept2": 0.0, "seen": 0}

    def begin(self) -> None:
        self.target.create()

    def end(self) -> None:
        self.target.close()

    def sums(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("norm2", "lost2", "kept2", "seen")}

    def join(self, sums: dict[str, Any]) -> None:
        for name, kind in (("norm2", float), ("lost2", float), ("kept2", float), ("seen", int)):
            setattr(self, name, getattr(self, name) + kind(sums[name]))

    def flush(self) -> None:
        self.target.sync()


class Projections(Projection):
    """Several modes at once, in bases that stay as they are; where those do not suffice, nothing is kept. Only a device makes
    these: it saves the link what the first would leave."""

    def __init__(
        self, bases: tuple[tuple[int, Block], ...], target: Target, name: str, *, allowed: float, expected: float, size: int
    ) -> None:  # fmt: skip
        (axis, basis), *self._others = bases
        super().__init__(
            basis, basis.shape[1], axis, target, name, allowed=allowed, expected=expected, size=size, direct=False
        )
        self._slack *= len(bases)

    @property
    def bases(self) -> tuple[tuple[int, Block], ...]:
        return ((self.axis, self.basis), *self._others)

    def held(self, chunk: tuple[int, ...]) -> int:
        return 2 * sum(basis.nbytes for _, basis in self.bases)

    def fold(self, number: int, region: Region, fibers: Fibers) -> None:
        """Only what is no number comes here."""
        finite(fibers, region, self.axis)
        raise BasisTooSmall

    def take(self, norm2: float, kept2: float, size: int) -> bool:
        self.norm2, self.kept2, self.seen = self.norm2 + norm2, self.kept2 + kept2, self.seen + size
        self.lost2 += max(norm2 - kept2, 0.0) + self._slack * norm2
        assert self.allowed is not None
        if self.lost2 > self.allowed * max(self.norm2, 1.1 * self.expected):
            raise BasisTooSmall
        return True
