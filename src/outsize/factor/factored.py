"""The array that a decomposition gives: a few factors that stand for a large tensor, and how far they are from it.

`Factored` is an `Array`, so it is sliced, computed, saved and used in lazy expressions as any other: what is asked for is rebuilt
region by region inside the budget. Work that is linear along a mode stays in factors: indices and slices, sums and means,
products with vectors and matrices, sums of two, norms and inner products. Everything else gives a lazy `Array`.

What is known of the error goes along as a bound on its Frobenius norm (`lost`): a part of the data has lost at most what the
whole has, a sum at most what both have, and so on.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from outsize.array.api.lazy import Array
from outsize.array.graph.build import source
from outsize.array.store.base import Block
from outsize.core.errors import InputError
from outsize.core.memory import HOST
from outsize.core.noun import Known
from outsize.core.outcomes.factoring import Factoring, Spectrum
from outsize.core.plan import Plan
from outsize.core.units import format_bytes
from outsize.factor.facts import Facts
from outsize.factor.formats import KINDS, Cut, Factors, Form, Narrow, Resident
from outsize.factor.formats.form import multiply_mode
from outsize.factor.keys import Part, read_key
from outsize.factor.store import FactorStore

_OPERATORS = {np.add: "add", np.subtract: "sub", np.multiply: "mul", np.true_divide: "truediv", np.matmul: "matmul"}
_SPECTRAL = 1024
"""Shorter side of a matrix whose largest singular value is worth computing; of larger ones the Frobenius norm is its bound."""


class Factored(Array):
    """A tensor in fewer bytes, with a known error."""

    __slots__ = ("facts", "form")

    def __init__(self, form: Form, *, error: float | None, **known: Any) -> None:
        """`error` is relative to the Frobenius norm of the data; None where it is unknown. What else is `known` are fields of
        `Facts`."""
        if known.get("original") is not None:
            known["original"] = np.dtype(known["original"])
        self._fill(form, Facts(error=error, **known))

    def _fill(self, form: Form, facts: Facts, path: str | None = None) -> None:
        if isinstance(form, Resident):
            node: Any = source(FactorStore(form, path or form.method, path))
        else:
            assert isinstance(form, Narrow), form
            node = form.array.node
        Array.__init__(self, node)
        self.form, self.facts = form, facts

    @classmethod
    def of(cls, form: Form, facts: Facts, path: str | None = None) -> Factored:
        """Factors with what is known of them; `path` is the file that they were read from."""
        made = cls.__new__(cls)
        made._fill(form, facts, path)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        path = self.node.store.paths[0] if isinstance(self.form, Resident) and self.node.store.paths else None  # type: ignore[attr-defined]
        return Factored.of, (self.form, self.facts, path)

    def __copy__(self) -> Factored:
        return Factored.of(self.form, self.facts)

    # What it is

    @property
    def array(self) -> Array:
        """The same values as a plain lazy array, for what only that has: `f.array.plan(...)`."""
        return Array(self.node)

    @property
    def method(self) -> str:
        """`tucker`, `tt`, `cp`, `svd`, or a narrower dtype."""
        return self.form.method

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of each mode; of each cut of a tensor train; the one rank of CP and SVD."""
        return self.form.ranks

    @property
    def nbytes(self) -> int:
        """Bytes of the factors."""
        return self.form.nbytes

    @property
    def ratio(self) -> float:
        """How many times smaller than the data."""
        return self.summary().ratio

    @property
    def lost(self) -> float | None:
        """At most this is the Frobenius norm of what is lost; None if nothing is known."""
        facts = self.facts
        if facts.lost is not None or facts.error is None:
            return facts.lost
        if facts.norm is not None:
            return facts.error * facts.norm
        return facts.error * self.norm() / (1 - facts.error) if facts.error < 1 else math.inf

    @property
    def error(self) -> float | None:
        """Frobenius norm of what is lost, relative to that of the data (or of its part); None if nothing is known."""
        facts = self.facts
        if facts.error is not None or facts.lost is None:
            return facts.error
        if facts.lost == 0:
            return 0.0
        least = self.norm() - facts.lost  # of the data, which are not here
        return facts.lost / least if least > 0 else math.inf

    @property
    def known(self) -> Known:
        """How the error is known."""
        return self.facts.known

    @property
    def asked(self) -> float | None:
        """The error that was asked for."""
        return self.facts.asked

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know, a sentence each."""
        return self.facts.notes

    @property
    def spectra(self) -> tuple[Spectrum, ...]:
        """Singular values along each mode, and how many were kept."""
        return self.facts.spectra

    @property
    def plan(self) -> Plan | None:  # type: ignore[override]  # of the decomposition; `f.array.plan(...)` is of a rebuild
        """What the decomposition was going to read and hold; None where it was not planned."""
        return self.facts.plan

    def summary(self, **more: Any) -> Factoring:
        """All this as a value that prints, with a picture of the singular values."""
        facts = self.facts
        itemsize = (facts.original or self.dtype).itemsize
        said: dict[str, Any] = {
            "method": self.method, "shape": self.shape, "dtype": str(self.dtype), "ranks": self.ranks, "error": self.error,
            "known": facts.known, "asked": facts.asked, "bytes_before": self.size * itemsize, "bytes_after": self.nbytes,
            "spectra": facts.spectra, "notes": facts.notes, "seconds": facts.seconds, "read": facts.read,
            "measured": facts.measured, "projected": (facts.plan.peak() or None) if facts.plan else None,
            "budget": next((a.bytes for a in facts.plan.budgets if a.pool == HOST), None) if facts.plan else None,
        }  # fmt: skip
        return Factoring(**said | more)

    def to_dict(self) -> dict[str, Any]:
        """Its numbers as plain data."""
        return self.summary().to_dict()

    def __repr__(self) -> str:
        about = "about" if self.known is Known.ESTIMATE else "<="
        error = "unknown" if self.error is None else f"{about} {self.error:.3g}"
        ranks = f" ranks {'x'.join(map(str, self.ranks))}" if self.ranks else ""
        shape = ", ".join(map(str, self.shape))
        times = f"{self.ratio:,.0f}" if self.ratio >= 100 else f"{self.ratio:.3g}"
        size = f"{format_bytes(self.nbytes)}, {times} times smaller"
        return f"<outsize.Factored {self.dtype}[{shape}] {self.method}{ranks}: {size}, error {error}>"

    def __str__(self) -> str:
        return str(self.summary())

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_() or ""

    # What stays in factors

    def _derive(self, form: Form, lost: float | None, known: Known | None = None) -> Factored:
        """Other factors that follow from these."""
        return Factored.of(form, Facts(lost=lost, known=known or self.known, original=self.facts.original))

    def _linear(self) -> Factors | None:
        """The factors, where this has some."""
        return self.form if isinstance(self.form, Factors) else None

    def _computed(self, form: Factors, lost: float | None, gain: float = 1.0) -> Factored:
        """Factors that were computed from these, and so are rounded to their dtype; they are at most `gain` times as large."""
        before = gain * self._factors("compute").magnitude() if lost is not None else 0.0
        return self._derive(form, None if lost is None else lost + form.rounding(before))

    def __setitem__(self, key: Any, value: Any) -> None:
        raise InputError(
            "single elements of factors cannot be replaced: take x = f.array, a lazy array that can be written into, or add "
            "factors of the change"
        )

    def __getitem__(self, key: Any) -> Array:
        """A part of it, in factors where whole numbers, slices and one list of indices say which."""
        rebuilt = super().__getitem__(key)  # says what is wrong with a key
        form, parts = self._linear(), read_key(key, self.shape)
        if form is None or parts is None:
            return rebuilt
        for axis, part in enumerate(parts):
            if not isinstance(part, int):
                form = form.along(axis, _taking(part))
        for axis in reversed(range(len(parts))):
            part = parts[axis]
            if isinstance(part, int):
                form = form.along(axis, _taking(slice(part, part + 1))).drop(axis)
        gain = math.sqrt(_most_often(parts, self.shape))
        lost = None if self.lost is None else self.lost * gain
        exact = not any(isinstance(part, int) for part in parts)
        return self._derive(form, lost) if exact else self._computed(form, lost, gain)

    def contract(self, operand: Any, axis: int = -1) -> Factored:
        """Along one axis, the product with a vector (the axis goes) or with the rows of a matrix (it gets a new length)."""
        form, axis = self._factors("contract"), self._axis(axis)
        matrix = np.asarray(operand)
        if matrix.ndim not in (1, 2) or matrix.shape[-1] != self.shape[axis] or matrix.dtype.kind not in "biufc":
            raise InputError(
                f"axis {axis} has length {self.shape[axis]}: give a vector of that length or a matrix (m, {self.shape[axis]}), "
                f"not {matrix.dtype}{list(matrix.shape)}"
            )
        form = form.cast(np.result_type(form.dtype, matrix.dtype if matrix.dtype.kind in "fc" else form.dtype))
        made: Factors = form.along(axis, _multiplying(np.atleast_2d(matrix), form.dtype))
        if matrix.ndim == 1:
            made = made.drop(axis)
        lost, gain = self.lost, _spectral(matrix)
        return self._computed(made, None if lost is None else lost * gain, gain)

    def sum(self, axis: Any = None, *, dtype: Any = None, keepdims: bool = False) -> Array:
        """Sum of elements, in factors."""
        if self._linear() is None or dtype is not None:
            return super().sum(axis, dtype=dtype, keepdims=keepdims)
        return self._summed(axis, keepdims, lambda _: 1.0)

    def mean(self, axis: Any = None, *, keepdims: bool = False) -> Array:
        """Arithmetic mean, in factors."""
        if self._linear() is None:
            return super().mean(axis, keepdims=keepdims)
        return self._summed(axis, keepdims, lambda length: 1 / length if length else math.nan)

    def _summed(self, axis: Any, keepdims: bool, weight: Callable[[int], float]) -> Factored:
        axes = range(self.ndim) if axis is None else [axis] if isinstance(axis, int | np.integer) else axis
        chosen = [self._axis(one) for one in axes]
        if len(set(chosen)) < len(chosen):
            raise InputError(f"axis {axis} names an axis twice")
        form, gain = self._factors("sum"), 1.0
        for one in sorted(chosen, reverse=True):
            row = np.full((1, self.shape[one]), weight(self.shape[one]))
            form = form.along(one, _multiplying(row, form.dtype))
            form = form if keepdims else form.drop(one)
            gain *= float(np.linalg.norm(row))
        return self._computed(form, None if self.lost is None else self.lost * gain, gain)

    def _times(self, factor: Any) -> Factored:
        form, lost = self._factors("multiply"), self.lost
        form = form.cast(np.result_type(form.dtype, factor))
        number = complex(factor) if np.iscomplexobj(factor) else float(factor)
        made = self._computed(form.scaled(number), None if lost is None else lost * abs(number), abs(number))
        error, exact = self.facts.error, number != 0 and math.frexp(abs(number))[0] == 0.5
        return Factored.of(made.form, replace(made.facts, error=error, lost=None)) if exact else made

    def __mul__(self, other: Any) -> Array:
        return self._times(other) if self._scales(other) else Array.__mul__(self, other)

    def __rmul__(self, other: Any) -> Array:
        return self._times(other) if self._scales(other) else Array.__rmul__(self, other)

    def __truediv__(self, other: Any) -> Array:
        if self._scales(other) and other != 0:
            return self._times(np.reciprocal(other) if isinstance(other, np.inexact) else 1 / other)
        return Array.__truediv__(self, other)

    def __neg__(self) -> Array:
        return self._times(-1.0) if self._linear() is not None else Array.__neg__(self)

    def _scales(self, other: Any) -> bool:
        number = isinstance(other, int | float | complex | np.number)
        return self._linear() is not None and number and bool(np.isfinite(other))

    def __add__(self, other: Any) -> Array:
        return self._plus(other) if self._adds(other) else Array.__add__(self, other)

    def __sub__(self, other: Any) -> Array:
        return self._plus(-other) if self._adds(other) else Array.__sub__(self, other)

    def _adds(self, other: Any) -> bool:
        alike = isinstance(other, Factored) and self._linear() is not None and type(other.form) is type(self.form)
        return alike and other.shape == self.shape

    def _plus(self, other: Any) -> Factored:
        dtype = np.result_type(self.dtype, other.dtype)
        form = self._factors("add").cast(dtype).plus(other.form.cast(dtype))
        lost = None if self.lost is None or other.lost is None else self.lost + other.lost
        known = Known.ESTIMATE if Known.ESTIMATE in (self.known, other.known) else Known.BOUND
        return self._derive(form, lost, known)

    def __matmul__(self, other: Any) -> Array:
        """f @ b for a vector or a matrix in memory, in factors."""
        if self._linear() is not None and isinstance(other, np.ndarray) and other.ndim in (1, 2) and self.ndim:
            return self.contract(other.T, -1)
        return super().__matmul__(other)

    def __rmatmul__(self, other: Any) -> Array:
        if self._linear() is not None and isinstance(other, np.ndarray) and other.ndim in (1, 2) and self.ndim:
            return self.contract(other, -2 if self.ndim > 1 else -1)
        return super().__rmatmul__(other)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """NumPy's own names of operators are the operators: `np.float32(2) * f`, `matrix @ f`."""
        name = _OPERATORS.get(ufunc)
        if name is None or method != "__call__" or options:
            return super().__array_ufunc__(ufunc, method, *inputs, **options)
        first, second = inputs
        if isinstance(first, Array):
            return getattr(first, f"__{name}__")(second)
        return getattr(second, f"__r{name}__")(first)

    def norm(self) -> float:
        """Frobenius norm of these factors (of the data, it is within `lost` of it)."""
        form = self._linear()
        if form is not None:
            return form.norm()
        import outsize.array as xp

        return float(xp.linalg.vector_norm(self.array))

    def inner(self, other: Any) -> float | complex:
        """Sum of the products of elements, those of the first conjugated; with factors of the same format nothing is rebuilt."""
        if isinstance(other, Factored) and self._adds(other):
            found = self._factors("inner").inner(other.form)  # type: ignore[arg-type]
            return found if np.iscomplexobj(np.empty(0, np.result_type(self.dtype, other.dtype))) else found.real
        import outsize.array as xp

        there = xp.asarray(other)
        if there.shape != self.shape:
            raise InputError(f"an inner product needs two equal shapes, not {self.shape} and {there.shape}")
        product = (xp.conj(self.array) * there).sum()
        return complex(product) if product.dtype.kind == "c" else float(product)

    def distance(self, other: Any, *, relative: bool = False) -> float:
        """Frobenius norm of the difference, to other factors or to data, which are then read once."""
        if isinstance(other, Factored) and self._adds(other):
            apart, size = (self - other).norm(), other.norm()  # type: ignore[attr-defined]
        else:
            import outsize.array as xp

            there = xp.asarray(other)
            if there.shape != self.shape:
                raise InputError(f"a distance needs two equal shapes, not {self.shape} and {there.shape}")
            high = np.complex128 if "c" in (self.dtype.kind, there.dtype.kind) else np.float64
            apart = float(xp.linalg.vector_norm(self.array.astype(high) - there.astype(high)))
            size = float(xp.linalg.vector_norm(there.astype(high))) if relative else 1.0
        return float(apart / size if relative and size else apart)

    def truncate(self, error: float) -> Factored:
        """Fewer columns, as far as that changes these factors by at most `error` of their norm; `.error` is then of both."""
        if isinstance(error, bool) or not isinstance(error, int | float | np.floating) or not 0 <= error < 1:
            raise InputError(f"error is a share of the norm, 0 <= error < 1, not {error!r}")
        form = self._factors("truncate")
        return self._cut(form.rounded(float(error) * form.norm()))

    def _cut(self, cut: Cut) -> Factored:
        """What a rounding left, with its picture."""
        lost = self.lost
        made = self._computed(cut.form, None if lost is None else lost + cut.lost)
        return Factored.of(
            made.form, replace(made.facts, spectra=describe_cut(cut.spectra, cut.kept, self.method, self.shape))
        )

    def append(self, block: Any, axis: int = 0, error: float | None = None, budget: Any = None) -> Factored:
        """With more data behind these along one axis; the past data are not needed.

        The error of the whole stays within `error`, by default within what was asked of these.
        """
        from outsize.factor.append import append

        return append(self, block, self._axis(axis), error, budget)

    def save(
        self, path: str | os.PathLike[str], budget: int | str | None = None, progress: Any = None, resume: bool = True,
        **options: Any,
    ) -> Array:  # fmt: skip
        """Write the factors to one file (.tucker, .tt, .cp, .svd, .safetensors); with any other suffix, the rebuilt tensor."""
        from outsize.factor.files import save_factors, save_narrow

        suffix = os.path.splitext(os.fspath(path))[1].lower()
        if isinstance(self.form, Narrow):
            return save_narrow(self, os.fspath(path), budget, progress, resume, options)
        if suffix not in (".safetensors", *(one for form in KINDS.values() for one in form.suffixes)):
            return super().save(path, budget, progress, resume, **options)
        return save_factors(self, os.fspath(path))

    # Other libraries

    def to_tensorly(self) -> Any:
        """TensorLy's own object: TuckerTensor, TTTensor, CPTensor; of an SVD the tuple (u, s, vh)."""
        from outsize.factor.exchange import to_tensorly

        return to_tensorly(self._factors("give to TensorLy"))

    def to_torch(self, device: Any = None) -> dict[str, Any]:
        """The factors as torch tensors by name; they share memory with these on the CPU."""
        from outsize.factor.exchange import to_torch

        return to_torch(self._factors("give to torch"), device)

    def to_numpy(self) -> dict[str, Block]:
        """The factors as NumPy arrays by name; `np.asarray(f)` is the rebuilt tensor."""
        return dict(self._factors("give to NumPy").arrays())

    # Small things

    def _factors(self, what: str) -> Factors:
        form = self._linear()
        if form is None:
            raise InputError(f"cannot {what}: this is the data as {self.method}, which has no factors")
        return form

    def _axis(self, axis: Any) -> int:
        if isinstance(axis, bool) or not isinstance(axis, int | np.integer) or not -self.ndim <= axis < self.ndim:
            raise InputError(f"axis {axis!r} is not one of the {self.ndim} axes")
        return int(axis) % self.ndim


def describe_cut(
    spectra: Sequence[Block], all_kept: Sequence[int], method: str, shape: tuple[int, ...]
) -> tuple[Spectrum, ...]:
    """Singular values at each cut and how many of them stay, as they are drawn."""
    rows = []
    for place, (values, kept) in enumerate(zip(spectra, all_kept, strict=True)):
        name = {"tt": f"cut {place} | {place + 1}", "svd": "matrix"}.get(method, f"mode {place}")
        length = shape[place] if method == "tucker" else len(values)
        rows.append(Spectrum(name=name, values=tuple(map(float, values)), kept=kept, length=length))
    return tuple(rows)


def _most_often(parts: list[Part], shape: tuple[int, ...]) -> int:
    """How often a key takes the element that it takes most often: what is lost of that element counts as often."""
    lists = [(part, length) for part, length in zip(parts, shape, strict=True) if isinstance(part, np.ndarray)]
    return math.prod(int(np.bincount(part % length).max()) for part, length in lists if part.size)


def _taking(part: Any) -> Callable[[Block, int], Block]:
    return lambda leaf, where: leaf[(slice(None),) * where + (part,)]


def _multiplying(matrix: Block, dtype: np.dtype[Any]) -> Callable[[Block, int], Block]:
    def change(leaf: Block, where: int) -> Block:
        high = np.complex128 if "c" in (matrix.dtype.kind, leaf.dtype.kind) else np.float64
        return multiply_mode(leaf.astype(high), matrix.astype(high), where).astype(dtype)

    return change


def _spectral(matrix: Block) -> float:
    """A bound on how much longer a product with it can be."""
    if matrix.ndim == 1 or min(matrix.shape) > _SPECTRAL or not matrix.size:
        return float(np.linalg.norm(matrix.astype(np.result_type(matrix, np.float64))))
    return float(np.linalg.norm(matrix.astype(np.result_type(matrix, np.float64)), 2))
