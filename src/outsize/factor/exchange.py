"""Factors from and for other libraries: TensorLy's objects, torch's tensors, tuples of arrays.

Each library is imported where it is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outsize.array.store.base import Block
from outsize.core.errors import InputError
from outsize.core.extras import need
from outsize.factor.factored import Factored
from outsize.factor.formats import Canonical, Factors, Svd, Train, Tucker

_KINDS = {"TuckerTensor": Tucker, "CPTensor": Canonical, "TTTensor": Train}
"""TensorLy's classes by name."""


def to_tensorly(form: Factors) -> Any:
    """TensorLy's object for these factors."""
    need("tensorly", "to_tensorly")
    from tensorly.cp_tensor import CPTensor
    from tensorly.tt_tensor import TTTensor
    from tensorly.tucker_tensor import TuckerTensor

    if isinstance(form, Tucker):
        return TuckerTensor((form.core, list(form.factors)))
    if isinstance(form, Canonical):
        return CPTensor((form.weights, list(form.factors)))
    if isinstance(form, Train):
        return TTTensor(list(form.cores))
    assert isinstance(form, Svd)
    return (form.u, form.s, form.vh)


def to_torch(form: Factors, device: Any = None) -> dict[str, Any]:
    """The factors as torch tensors."""
    torch = need("torch", "to_torch")
    found = {name: torch.from_numpy(array) for name, array in form.arrays().items()}
    return found if device is None else {name: tensor.to(device) for name, tensor in found.items()}


def from_factors(given: Any, *, error: float | None = None) -> Factored:
    """Factors that another library made, as an array: TensorLy's TuckerTensor, CPTensor or TTTensor, (core, factors),
    (weights, factors), (u, s, vh), or a list of the cores of a tensor train. `error` is what is known of them, if anything is.

    >>> f = outsize.factor.from_factors(tensorly.decomposition.tucker(x, rank=[5, 5, 5]))
    """
    kind = _KINDS.get(type(given).__name__)
    parts = list(given) if kind is not None or isinstance(given, tuple | list) else []
    if kind is Train or (kind is None and parts and all(_ndim(part) == 3 for part in parts)):
        return Factored(Train(tuple(map(_array, parts))), error=error)
    if kind is None and len(parts) == 3 and [_ndim(part) for part in parts] == [2, 1, 2]:
        return Factored(Svd(*map(_array, parts)), error=error)
    if len(parts) != 2 or not isinstance(parts[1], Sequence) or not parts[1]:
        raise InputError(
            f"cannot read factors from {type(given).__name__}: give (core, factors), (weights, factors), (u, s, vh), a list of "
            "cores, or TensorLy's objects"
        )
    first, factors = parts[0], tuple(map(_array, parts[1]))
    if kind is Canonical or first is None or (kind is None and _ndim(first) == 1 and len(factors) > 1):
        weights = np.ones(factors[0].shape[-1], factors[0].dtype) if first is None else _array(first)
        return Factored(Canonical(weights, factors), error=error)
    return Factored(Tucker(_array(first), factors), error=error)


def _ndim(value: Any) -> int:
    return len(getattr(value, "shape", ()))


def _array(value: Any) -> Block:
    """NumPy's view of an array of any library."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    return np.asarray(value)
