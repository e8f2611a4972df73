"""NumPy's ufuncs over lazy arrays, under the names of the array API standard, which NumPy has too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

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

Function = TypeVar("Function", bound=Callable[..., Array])


def _one(name: str) -> Callable[[Any], Array]:
    def function(x: Any, /) -> Array:
        return apply(operation(getattr(np, name)), x)

    return _named(name, function)


def _two(name: str) -> Callable[[Any, Any], Array]:
    def function(x1: Any, x2: Any, /) -> Array:
        return apply(operation(getattr(np, name)), x1, x2)

    return _named(name, function)


def _named(name: str, function: Function) -> Function:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"NumPy's `{getattr(np, name).__name__}`, element by element."
    return function


(
    abs, absolute, acos, acosh, asin, asinh, atan, atanh, bitwise_invert, ceil, conj, cos, cosh, exp, exp2, expm1,
    floor, isfinite, isinf, isnan, log, log1p, log2, log10, logical_not, negative, positive, reciprocal, rint, sign,
    signbit, sin, sinh, sqrt, square, tan, tanh, trunc,
) = map(_one, (name for name in __all__ if getattr(np, name).nin == 1))  # fmt: skip
(
    add, atan2, bitwise_and, bitwise_left_shift, bitwise_or, bitwise_right_shift, bitwise_xor, copysign, divide,
    equal, floor_divide, greater, greater_equal, hypot, less, less_equal, logaddexp, logical_and, logical_or,
    logical_xor, maximum, minimum, multiply, nextafter, not_equal, pow, remainder, subtract,
) = map(_two, (name for name in __all__ if getattr(np, name).nin == 2))  # fmt: skip
