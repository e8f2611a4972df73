"""A narrower element type: the data where they lie, rounded as they are read.

Nothing is held in memory. It is what `auto` takes when no factors are smaller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.array.api.lazy import Array
from outsize.factor.formats.form import Form

_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "complex64": 8}


@dataclass(frozen=True, slots=True, eq=False)
class Narrow(Form):
    """x rounded to `stored`"""

    suffixes = (".safetensors",)

    array: Array
    """The rounded values, lazy, in the dtype that users see."""
    stored: str
    """`float16`, `bfloat16`, or a narrower float or complex type."""

    @property
    def method(self) -> str:  # type: ignore[override]
        """The element type."""
        return self.stored

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def ranks(self) -> tuple[int, ...]:
        return ()

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _BYTES[self.stored]
