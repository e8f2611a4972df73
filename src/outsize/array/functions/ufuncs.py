"""NumPy's ufuncs over lazy arrays, under the names of the array API standard, which NumPy has too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from outsize.array.api.lazy import Array, apply
from outsize.array.graph.elementwise import operation

__all__ = [
    "abs", "absolute", "acos", "acosh", "add", "asin", "asinh", "atan", "atan2", "atanh", "bitwise_and",
    "bitwise_invert", "bitwise_left_shift", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "ceil", "conj",
    "copysign", "cos", "cosh", "divide", "equal", "exp", "exp2", "expm1", "floor", "floor_divide", "greater",
    "greater_equal", "hypot", "isfinite", "isinf", "isnan", "less", "less_equal", "log", "log1p", "log2", "log10",
    "logaddexp", "logical_and", "logical_not", "logical_or", "logical_xor", "maximum", "minimum", "multiply",
    "negative", "nextafter", "not_equal", "positive", "pow", "reciprocal", "remainder", "rint", "sign", "signbit",
    "sin", "sinh", "sqrt", "square", "subtract", "tan", "tanh", "trunc",
]  # fmt: skip


def _function(name: str) -> Callable[..., Array]:
    ufunc: np.ufunc = getattr(np, name)

    def one(x: Any, /) -> Array:
        return apply(operation(ufunc), x)

    def two(x1: Any, x2: Any, /) -> Array:
        return apply(operation(ufunc), x1, x2)

    function = one if ufunc.nin == 1 else two
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"NumPy's `{ufunc.__name__}`, element by element."
    return function


(
    abs, absolute, acos, acosh, add, asin, asinh, atan, atan2, atanh, bitwise_and,
    bitwise_invert, bitwise_left_shift, bitwise_or, bitwise_right_shift, bitwise_xor, ceil, conj,
    copysign, cos, cosh, divide, equal, exp, exp2, expm1, floor, floor_divide, greater,
    greater_equal, hypot, isfinite, isinf, isnan, less, less_equal, log, log1p, log2, log10,
    logaddexp, logical_and, logical_not, logical_or, logical_xor, maximum, minimum, multiply,
    negative, nextafter, not_equal, positive, pow, reciprocal, remainder, rint, sign, signbit,
    sin, sinh, sqrt, square, subtract, tan, tanh, trunc,
) = map(_function, __all__)  # fmt: skip
