"""What was asked for: a method, and an error or ranks."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.core.errors import InputError

METHODS = ("auto", "tucker", "tt", "cp", "svd", "zfp", "float16", "bfloat16")

_NARROW = "?bBhHef"
"""dtypes whose values float32 holds."""
_FINE = 1e-4
"""From this error on, what lies between passes is kept in single precision; its rounding is part of the promise."""
_LEAST = 1e-12
"""Smaller errors cannot be promised in double precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Checked arguments."""

    method: str
    """One of `METHODS`."""
    error: float | None
    """Share of the Frobenius norm that may be lost; None where ranks are given, or where `largest` is."""
    largest: float | None = None
    """Largest difference of an element, as a share of the largest element; None where the norm counts."""
    ranks: tuple[int, ...] | None = None
    """One for each mode (of a train: for each cut; of CP and SVD: one)."""

    @property
    def known(self) -> bool:
        """True where a plan needs nothing of the data: ranks are given, or there are none."""
        return self.ranks is not None or self.method in ("float16", "bfloat16")

    def left_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype of what lies between passes."""
        single = dtype.char in _NARROW or dtype.char == "F"
        if single and (self.error is None or self.error >= _FINE):
            return np.dtype(np.complex64 if dtype.kind == "c" else np.float32)
        return np.dtype(np.complex128 if dtype.kind == "c" else np.float64)

    def text(self) -> str:
        """All of it, for a digest."""
        return f"{self.method} {self.error!r} {self.largest!r} {self.ranks}"


def read_request(method: str, error: Any, rank: Any, shape: tuple[int, ...]) -> Request:
    """Check what a user gave."""
    if method not in METHODS:
        raise InputError(f"method={method!r} is none: say one of {', '.join(METHODS)}")
    if not shape or math.prod(shape) == 0:
        raise InputError(f"an array of shape {shape} has nothing to decompose")
    if method == "svd" and len(shape) != 2:
        raise InputError(f"svd is for matrices, this array has {len(shape)} axes: use method='tucker' or 'tt'")
    if method == "cp" and len(shape) < 2:
        raise InputError("cp needs two axes or more: one axis is a column already")
    if rank is not None:
        if method in ("auto", "zfp", "float16", "bfloat16"):
            raise InputError(f"rank= needs a method that has ranks, not {method!r}: 'tucker', 'tt', 'cp' or 'svd'")
        return Request(method=method, error=None, ranks=_read_ranks(method, rank, shape))
    relative, largest = _read_error(error)
    return Request(method=method, error=relative, largest=largest)


def _read_error(error: Any) -> tuple[float | None, float | None]:
    largest = False
    if isinstance(error, str):
        match = re.fullmatch(r"\s*([0-9.eE+-]+)\s*(%?)\s*(max)?\s*", error)
        if match is None:
            raise InputError(f"error={error!r} is none: say 0.01, '1 %', or '1e-3 max' for the largest difference")
        value = _number(match[1]) / (100 if match[2] else 1)
        largest = bool(match[3])
    else:
        value = _number(error)
    if not _LEAST <= value < 1:
        raise InputError(
            f"error={error!r}: an error between {_LEAST:g} and 1 can be promised, 0.01 is one hundredth of the norm"
        )
    return (None, value) if largest else (value, None)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InputError(f"error={value!r} is no number: say 0.01, '1 %', or '1e-3 max'") from None


def _read_ranks(method: str, rank: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    count = {"tucker": len(shape), "tt": max(0, len(shape) - 1)}.get(method, 1)
    given = tuple(rank) if isinstance(rank, tuple | list) or np.ndim(rank) == 1 else (rank,) * count
    if len(given) != count or any(isinstance(r, bool) or not isinstance(r, int | np.integer) or r < 1 for r in given):
        raise InputError(f"rank={rank!r}: {method} of {len(shape)} axes takes one whole number, or {count} of them")
    return tuple(int(r) for r in given)
