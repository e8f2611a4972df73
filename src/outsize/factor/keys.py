"""What users write between brackets, as one part for each axis, where factors can follow it."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

Part = int | slice | np.ndarray[Any, Any]
"""A whole number (the axis goes), a slice, or indices."""


def read_key(key: Any, shape: tuple[int, ...]) -> list[Part] | None:
    """A part for each axis; None where the key says more: new axes, several lists, a list beside whole numbers, masks of
    several axes. The key is already known to be valid."""
    given = list(key) if isinstance(key, tuple) else [key]
    dots = [place for place, part in enumerate(given) if part is Ellipsis]
    if dots:
        given[dots[0] : dots[0] + 1] = [slice(None)] * (len(shape) - len(given) + 1)
    given += [slice(None)] * (len(shape) - len(given))
    parts = [_read_part(part, length) for part, length in zip(given, shape, strict=False)]
    if len(given) != len(shape) or any(part is None for part in parts):
        return None
    lists = sum(isinstance(part, np.ndarray) for part in parts)
    if lists > 1 or (lists and any(isinstance(part, int) for part in parts)):
        return None
    return parts  # type: ignore[return-value]


def _read_part(part: Any, length: int) -> Part | None:
    if isinstance(part, slice):
        return part
    if isinstance(part, list | range | np.ndarray) and np.ndim(part) == 1:
        indices = np.asarray(part) if len(part) else np.empty(0, np.intp)
        return np.flatnonzero(indices) if indices.dtype == bool else indices.astype(np.intp)
    if part is None or isinstance(part, bool | np.bool_):
        return None
    try:
        return operator.index(part) % length
    except TypeError:
        return None
