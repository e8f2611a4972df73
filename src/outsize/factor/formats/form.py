"""What every format of factors is: a frozen value of NumPy arrays in memory that stand for a larger tensor.

Each mode of the tensor has one leaf, the only array whose length is that of the mode. Work along a mode (an index, a sum, a
product with a matrix) changes its leaf alone (`along`), so it takes as long as the leaf, not as the tensor. Arithmetic runs in
float64 (complex128) and is stored in the format's dtype.
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from outsize.array.store.base import Block, Region
from outsize.core.errors import InputError
from outsize.factor.workspace import Workspace

DTYPES = tuple(map(np.dtype, ("float32", "float64", "complex64", "complex128")))
"""Element types of factors."""

_CANCELLED = 1e-3
"""A norm that is this small beside the arrays is lost in the rounding of their products, whose squares are true to 1e-16."""

Change = Callable[[Block, int], Block]
"""(leaf, which of its axes is the mode) -> the leaf with that axis changed."""


class Cut(NamedTuple):
    """A format with fewer columns."""

    form: Factors
    lost: float
    """Frobenius norm of what was cut away."""
    spectra: tuple[Block, ...]
    """Singular values of each mode or cut, before."""
    kept: tuple[int, ...]
    """How many of each stay."""


class Form(abc.ABC):
    """A way to keep a tensor in fewer bytes."""

    __slots__ = ()

    method: ClassVar[str]
    """What `decompose(method=)` calls it."""
    suffixes: ClassVar[tuple[str, ...]]

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Lengths of the modes of the tensor."""

    @property
    @abc.abstractmethod
    def ranks(self) -> tuple[int, ...]:
        """How many columns the leaves have."""

    @property
    @abc.abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """Element type of the tensor."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes that it takes."""


class Resident(Form):
    """Arrays in memory from which any region is rebuilt."""

    __slots__ = ()

    def arrays(self) -> dict[str, Block]:
        """Its arrays by name, as they are written to a file: `factors` are `factor0`, `factor1`, ..."""
        found: dict[str, Block] = {}
        for name in _names(self):
            value = getattr(self, name)
            if isinstance(value, tuple):
                found |= {f"{name[:-1]}{place}": one for place, one in enumerate(value)}
            else:
                found[name] = value
        return found

    @classmethod
    def assemble(cls, arrays: Mapping[str, Block]) -> Self:
        """The format of which `arrays` is the result; a `KeyError` where one is missing, an `InputError` where they do not
        belong together."""
        given: dict[str, Any] = {}
        for name, kind in _names(cls).items():
            if kind.startswith("tuple"):
                places = itertools.takewhile(lambda key: key in arrays, (f"{name[:-1]}{n}" for n in itertools.count()))
                given[name] = tuple(arrays[key] for key in places)
            else:
                given[name] = arrays[name]
        return cls(**given)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays().values())

    @property
    def granule(self) -> tuple[int, ...]:
        """Shape of what is rebuilt as a whole."""
        return tuple(min(length, 1) for length in self.shape)

    @abc.abstractmethod
    def rebuild(self, region: Region, work: Workspace) -> Block:
        """The elements of a region, in memory of the workspace."""


def _names(form: Any) -> dict[str, str]:
    """The fields of a format, and how their types are written."""
    return {field.name: str(field.type) for field in fields(form)}


class Factors(Resident):
    """Factors: linear in each leaf."""

    __slots__ = ()

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of the tensor."""
        return np.result_type(*self.arrays().values())

    def cast(self, dtype: Any) -> Self:
        """The same with other elements."""
        return self.assemble({name: cast(array, np.dtype(dtype)) for name, array in self.arrays().items()})

    @abc.abstractmethod
    def along(self, axis: int, change: Change) -> Self:
        """The format whose leaf of one mode is another."""

    @abc.abstractmethod
    def drop(self, axis: int) -> Factors:
        """Without a mode, whose length is 1."""

    @abc.abstractmethod
    def scaled(self, factor: complex) -> Self:
        """Times a number."""

    @abc.abstractmethod
    def plus(self, other: Self) -> Self:
        """The sum; its ranks are the sums of ranks."""

    @abc.abstractmethod
    def inner(self, other: Self) -> complex:
        """Sum of the products of elements, those of the first conjugated."""

    def norm(self) -> float:
        size = math.sqrt(max(0.0, self.inner(self).real))
        return size if size > _CANCELLED * self.magnitude() else self.careful_norm()

    @abc.abstractmethod
    def careful_norm(self) -> float:
        """Frobenius norm, true to rounding where columns nearly cancel."""

    @abc.abstractmethod
    def magnitude(self) -> float:
        """At least the norm, and the norm where columns are orthonormal: what rounding errors of the arrays are relative to."""

    def rounding(self, computed_from: float = 0.0) -> float:
        """A bound on the Frobenius norm of what it loses when its arrays are rounded to their dtype, and were computed in double
        precision from others of this magnitude."""
        eps, double = float(np.finfo(self.dtype).eps), float(np.finfo(np.float64).eps)
        size = self.magnitude()
        return (eps * size + 64 * double * max(size, computed_from)) * (1 + sum(math.sqrt(rank) for rank in self.ranks))

    @abc.abstractmethod
    def rounded(self, allowed: float) -> Cut:
        """With as few columns as keep the Frobenius norm of what is lost within `allowed`."""


class Moded(Factors):
    """Factors of which each mode has a matrix of its own, its leaf."""

    __slots__ = ()

    factors: tuple[Block, ...]
    """(length, columns) each."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(factor.shape[0] for factor in self.factors)

    def along(self, axis: int, change: Change) -> Self:
        factors = list(self.factors)
        factors[axis] = change(factors[axis], 0)
        return replace(self, factors=tuple(factors))  # type: ignore[type-var]


def wide(array: Block) -> Block:
    """In float64 or complex128."""
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64, copy=False)


def cast(array: Block, dtype: np.dtype[Any]) -> Block:
    """Real parts of complex formats (singular values, weights) stay real."""
    real = dtype.kind == "c" and array.dtype.kind != "c"
    return np.asarray(array, np.empty(0, dtype).real.dtype if real else dtype, order="C")  # of no axes, too


def scale(array: Block, factor: complex) -> Block:
    """Times a number; what was real becomes complex where the number is."""
    dtype = np.result_type(array, np.complex64) if isinstance(factor, complex) else array.dtype
    return (wide(array) * factor).astype(dtype)


def spectral(matrix: Block) -> float:
    """The largest singular value, of a matrix that is much longer than wide or the other way."""
    if not matrix.size:
        return 0.0
    tall = wide(matrix if matrix.shape[0] >= matrix.shape[1] else matrix.conj().T)
    return math.sqrt(max(0.0, float(np.linalg.eigvalsh(tall.conj().T @ tall)[-1])))


def multiply_mode(tensor: Block, matrix: Block, axis: int) -> Block:
    """tensor x_axis matrix: the axis is replaced by the rows of the matrix."""
    return np.moveaxis(np.tensordot(matrix, tensor, axes=(1, axis)), 0, axis)


def orthonormal(matrix: Block) -> tuple[Block, Block]:
    """QR in double precision."""
    q, r = np.linalg.qr(wide(matrix))
    return q, r


def svd(matrix: Block) -> tuple[Block, Block, Block]:
    """Thin SVD; LAPACK's second way where the first does not converge."""
    try:
        return np.linalg.svd(matrix, full_matrices=False)
    except np.linalg.LinAlgError:
        q, r = np.linalg.qr(matrix)
        u, s, vh = np.linalg.svd(r, full_matrices=False)
        return q @ u, s, vh


def expect(fits: bool, what: str, shapes: Iterable[tuple[int, ...]]) -> None:
    """An `InputError` that shows the shapes where they do not belong together."""
    if not fits:
        raise InputError(f"{what}, not {', '.join(map(str, shapes))}")


def settle(form: Any, **arrays: Any) -> None:
    """Give a new format its arrays in one dtype, each as rows that lie one after another: what BLAS multiplies as it is."""
    found = {
        name: [np.asarray(one) for one in given] if isinstance(given, tuple | list) else np.asarray(given)
        for name, given in arrays.items()
    }
    flat = [one for given in found.values() for one in (given if isinstance(given, list) else [given])]
    dtype = np.result_type(*flat)
    if dtype not in DTYPES:
        raise InputError(f"factors are of {', '.join(map(str, DTYPES))}, not {dtype}")
    for name, given in found.items():
        made = tuple(cast(one, dtype) for one in given) if isinstance(given, list) else cast(given, dtype)
        object.__setattr__(form, name, made)
