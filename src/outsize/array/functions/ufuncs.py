"""NumPy's ufuncs over lazy arrays, under the names of the array API standard."""

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


def _one(name: str, ufunc: np.ufunc) -> Callable[[Any], Array]:
    def function(x: Any, /) -> Array:
        return apply(operation(ufunc), x)

    return _named(name, ufunc, function)


def _two(name: str, ufunc: np.ufunc) -> Callable[[Any, Any], Array]:
    def function(x1: Any, x2: Any, /) -> Array:
        return apply(operation(ufunc), x1, x2)

    return _named(name, ufunc, function)


def _named(name: str, ufunc: np.ufunc, function: Function) -> Function:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"NumPy's `{ufunc.__name__}`, element by element."
    return function


abs = _one("abs", np.absolute)
absolute = _one("absolute", np.absolute)
acos = _one("acos", np.arccos)
acosh = _one("acosh", np.arccosh)
add = _two("add", np.add)
asin = _one("asin", np.arcsin)
asinh = _one("asinh", np.arcsinh)
atan = _one("atan", np.arctan)
atan2 = _two("atan2", np.arctan2)
atanh = _one("atanh", np.arctanh)
bitwise_and = _two("bitwise_and", np.bitwise_and)
bitwise_invert = _one("bitwise_invert", np.invert)
bitwise_left_shift = _two("bitwise_left_shift", np.left_shift)
bitwise_or = _two("bitwise_or", np.bitwise_or)
bitwise_right_shift = _two("bitwise_right_shift", np.right_shift)
bitwise_xor = _two("bitwise_xor", np.bitwise_xor)
ceil = _one("ceil", np.ceil)
conj = _one("conj", np.conjugate)
copysign = _two("copysign", np.copysign)
cos = _one("cos", np.cos)
cosh = _one("cosh", np.cosh)
divide = _two("divide", np.divide)
equal = _two("equal", np.equal)
exp = _one("exp", np.exp)
exp2 = _one("exp2", np.exp2)
expm1 = _one("expm1", np.expm1)
floor = _one("floor", np.floor)
floor_divide = _two("floor_divide", np.floor_divide)
greater = _two("greater", np.greater)
greater_equal = _two("greater_equal", np.greater_equal)
hypot = _two("hypot", np.hypot)
isfinite = _one("isfinite", np.isfinite)
isinf = _one("isinf", np.isinf)
isnan = _one("isnan", np.isnan)
less = _two("less", np.less)
less_equal = _two("less_equal", np.less_equal)
log = _one("log", np.log)
log10 = _one("log10", np.log10)
log1p = _one("log1p", np.log1p)
log2 = _one("log2", np.log2)
logaddexp = _two("logaddexp", np.logaddexp)
logical_and = _two("logical_and", np.logical_and)
logical_not = _one("logical_not", np.logical_not)
logical_or = _two("logical_or", np.logical_or)
logical_xor = _two("logical_xor", np.logical_xor)
maximum = _two("maximum", np.maximum)
minimum = _two("minimum", np.minimum)
multiply = _two("multiply", np.multiply)
negative = _one("negative", np.negative)
nextafter = _two("nextafter", np.nextafter)
not_equal = _two("not_equal", np.not_equal)
positive = _one("positive", np.positive)
pow = _two("pow", np.power)
reciprocal = _one("reciprocal", np.reciprocal)
remainder = _two("remainder", np.remainder)
rint = _one("rint", np.rint)
sign = _one("sign", np.sign)
signbit = _one("signbit", np.signbit)
sin = _one("sin", np.sin)
sinh = _one("sinh", np.sinh)
sqrt = _one("sqrt", np.sqrt)
square = _one("square", np.square)
subtract = _two("subtract", np.subtract)
tan = _one("tan", np.tan)
tanh = _one("tanh", np.tanh)
trunc = _one("trunc", np.trunc)
