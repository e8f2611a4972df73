"""What the namespace is: limits of dtypes, devices, and what it can do, in the words of the array API standard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.array.api.lazy import Array, check_device
from outsize.core.errors import InputError

__all__ = ["finfo", "iinfo"]

_DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64", "complex64",
    "complex128",
)  # fmt: skip
_KINDS = "bool, signed integer, unsigned integer, integral, real floating, complex floating, numeric"


@dataclass(frozen=True, slots=True)
class Limits:
    """Numbers of a dtype, as plain numbers."""

    dtype: np.dtype[Any]
    bits: int
    min: Any
    max: Any
    eps: float | None = None
    smallest_normal: float | None = None


def finfo(type: Any, /) -> Limits:
    """Limits of a floating-point dtype; of a complex one, those of its parts."""
    found = np.finfo(_dtype(type, "fc", "floating-point"))
    return Limits(
        found.dtype, found.bits, float(found.min), float(found.max), float(found.eps), float(found.smallest_normal)
    )


def iinfo(type: Any, /) -> Limits:
    """Limits of an integer dtype."""
    found = np.iinfo(_dtype(type, "iu", "integer"))
    return Limits(found.dtype, found.bits, int(found.min), int(found.max))


def _dtype(type: Any, kinds: str, name: str) -> np.dtype[Any]:
    found = type.dtype if isinstance(type, Array) else np.dtype(type)
    if found.kind not in kinds:
        raise InputError(
            f"{found} is no {name} dtype: {'iinfo' if found.kind in 'iu' else 'finfo'} has its limits, if any"
        )
    return found


class Info:
    """What `__array_namespace_info__` gives."""

    def capabilities(self) -> dict[str, Any]:
        """A shape that depends on data is found by a counting pass; dimensions as in NumPy."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> str:
        """Arrays are planned on the processor unless a device is named."""
        return "cpu"

    def devices(self) -> tuple[str, ...]:
        """Where arrays lie; `compute(device=)` says where they are worked on."""
        return ("cpu",)

    def default_dtypes(self, *, device: Any = None) -> dict[str, np.dtype[Any]]:
        """dtypes of numbers that do not name theirs."""
        check_device(device)
        names = {
            "real floating": "float64", "complex floating": "complex128", "integral": "int64", "indexing": "int64",
        }  # fmt: skip
        return {kind: np.dtype(name) for kind, name in names.items()}

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, np.dtype[Any]]:
        """dtypes of a kind, or all."""
        check_device(device)
        found = {name: np.dtype(name) for name in _DTYPES}
        try:
            return {name: dtype for name, dtype in found.items() if kind is None or np.isdtype(dtype, kind)}
        except (TypeError, ValueError):
            raise InputError(f"{kind!r} is no kind of dtype: one of {_KINDS}") from None
