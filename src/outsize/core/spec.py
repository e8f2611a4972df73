"""A tensor before it exists: its shape and dtype, and so its exact bytes."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from outsize.core.dtypes import DType, parse_dtype
from outsize.core.errors import InputError
from outsize.core.noun import Noun

_LONG = 32
"""Length of an axis that can be shortened much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec(Noun):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    """Lengths of the axes; () is a scalar."""
    dtype: DType

    @classmethod
    def of(cls, shape: Iterable[Any] | int, dtype: Any = "float32") -> Spec:
        """A spec from what users write; an `InputError` where it makes no sense."""
        return cls(shape=parse_shape(shape), dtype=parse_dtype(dtype))

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Exact bytes of the data, packed types rounded up to a whole byte."""
        return -(-self.elements * self.dtype.bits // 8)

    def __str__(self) -> str:
        return f"{self.dtype.name}[{', '.join(map(str, self.shape))}]"


def may_be_low_rank(spec: Spec) -> bool:
    """True where a tensor is large along two axes at least, of real or complex numbers: factors may then be much smaller."""
    return spec.dtype.kind in ("float", "complex") and sum(length >= _LONG for length in spec.shape) > 1


def parse_shape(shape: Iterable[Any] | int) -> tuple[int, ...]:
    """A tuple of non-negative whole numbers, or an `InputError` that names the axis that is not one."""
    axes = list(shape) if isinstance(shape, Iterable) else [shape]
    lengths = []
    for position, axis in enumerate(axes):
        try:
            length = operator.index(axis)
        except TypeError:
            raise InputError(f"axis {position} of the shape is {axis!r}: lengths are whole numbers") from None
        if length < 0:
            raise InputError(f"axis {position} of the shape is {length}: lengths cannot be negative")
        lengths.append(length)
    return tuple(lengths)
