"""Plain narrower dtypes, as a yardstick and as an answer: rounded as they are read, their error measured in one pass."""

from __future__ import annotations

import math

from outsize.array import float16, float32, float64
from outsize.array.api.lazy import Array
from outsize.array.graph.node import Node
from outsize.factor.algorithms.session import Session


def rounded(node: Node, name: str) -> Array:
    """The values of an array in a narrower dtype, lazy: float16 as such, bfloat16 in float32, whose upper half it is."""
    x = Array(node)
    if name == "float16":
        return x.astype(float16)
    # Dekker's splitting: a product with 2**16 + 1 pushes the lower 16 bits of the significand out; rounds to nearest
    single = x.astype(float32)
    pushed = single * float32.type(65537.0)
    return pushed - (pushed - single)


def narrow_error(session: Session, node: Node, name: str) -> float:
    """Relative Frobenius error, measured; infinite where values are beyond the dtype's."""
    x = Array(node).astype(float64)
    away = x - rounded(node, name).astype(float64)
    lost2, norm2 = (float(session.compute((each * each).sum(), f"error of {name}")) for each in (away, x))
    if norm2 == 0:
        return 0.0
    error = math.sqrt(lost2 / norm2) * (1 + 1e-6)
    return error if math.isfinite(error) else math.inf
