"""An expression as text -> a lazy array, with nothing but the namespace's functions and the arrays that were named.

The text is parsed, not run: a walk over its syntax allows numbers, names, operators, indices, calls of the namespace's
functions and of the array's own methods. Attributes that begin with an underscore, and anything else Python can say,
are refused.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from outsize.core.errors import InputError, OutsizeError

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.MatMult: operator.matmul,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}  # fmt: skip
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert,
}  # fmt: skip
_METHODS = frozenset(
    ("sum", "prod", "mean", "var", "std", "min", "max", "any", "all", "argmin", "argmax", "cumsum", "astype", "reshape",
     "transpose")
)  # fmt: skip
_PROPERTIES = frozenset(("T", "mT", "shape", "ndim", "size", "dtype"))
_FORBIDDEN = frozenset({"open", "asarray", "map_blocks", "map_overlap"})
_PARTS = ("fft", "linalg")
"""Namespaces of functions."""
_SAID = 80
"""Characters of an expression that a message repeats."""
_LONGEST = 10_000
_BIGGEST = 1 << 20
"""Powers of plain numbers may not pass this many bits: `9**9**9` is a way to hang."""


def evaluate(text: str, arrays: Mapping[str, Any]) -> Any:
    """The value of an expression over named arrays; an `InputError` where it says more than arrays can."""
    if len(text) > _LONGEST:
        raise InputError(f"the expression has {len(text)} characters: {_LONGEST} are enough")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise InputError(f"cannot read {_short(text)} as an expression: {getattr(error, 'msg', error)}") from None
    try:
        return _Walker(text, arrays).visit(tree.body)
    except RecursionError:
        raise InputError("the expression is nested too deeply") from None
    except OutsizeError:
        raise
    except (
        TypeError,
        ValueError,
        ArithmeticError,
        LookupError,
        AttributeError,
    ) as error:  # NumPy's, of what was written
        raise InputError(f"{_short(text)}: {error}") from None


def _short(text: str) -> str:
    return repr(text if len(text) <= _SAID else text[:_SAID] + "...")


class _Walker:
    def __init__(self, text: str, arrays: Mapping[str, Any]) -> None:
        self._text, self._arrays = text, arrays

    def visit(self, node: ast.AST) -> Any:
        """The value of one piece of syntax."""
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise self._refuse(node, f"{type(node).__name__} is not allowed in an expression")
        return method(node)

    def _refuse(self, node: ast.AST, why: str) -> InputError:
        piece = ast.get_source_segment(self._text.strip(), node) or type(node).__name__
        return InputError(f"{_short(piece)}: {why}")

    def _constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, bool | int | float | complex | str) or node.value in (None, Ellipsis):
            return node.value
        raise self._refuse(node, "only numbers and names of dtypes stand for themselves")

    def _name(self, node: ast.Name) -> Any:
        import outsize.array as namespace

        if node.id in self._arrays:
            return self._arrays[node.id]
        if node.id in namespace.__all__ and node.id not in _FORBIDDEN:
            return getattr(namespace, node.id)
        known = ", ".join(sorted(self._arrays)) or "none were given"
        raise self._refuse(node, f"no array or function has this name (arrays: {known})")

    def _binop(self, node: ast.BinOp) -> Any:
        left, right = self.visit(node.left), self.visit(node.right)
        plain = isinstance(left, int) and isinstance(right, int)
        if plain and isinstance(node.op, ast.Pow) and left.bit_length() * max(right, 0) > _BIGGEST:
            raise self._refuse(node, "the number is too large")
        if plain and isinstance(node.op, ast.LShift) and right > _BIGGEST:
            raise self._refuse(node, "the number is too large")
        if isinstance(left, str) or isinstance(right, str):
            raise self._refuse(node, "text cannot be computed with")
        return _BINARY[type(node.op)](left, right)

    def _unaryop(self, node: ast.UnaryOp) -> Any:
        if type(node.op) not in _UNARY:
            raise self._refuse(node, "use logical_not(...) instead of 'not'")
        return _UNARY[type(node.op)](self.visit(node.operand))

    def _compare(self, node: ast.Compare) -> Any:
        if len(node.ops) != 1 or type(node.ops[0]) not in _COMPARE:
            raise self._refuse(node, "compare two values at a time, with < <= > >= == !=")
        return _COMPARE[type(node.ops[0])](self.visit(node.left), self.visit(node.comparators[0]))

    def _tuple(self, node: ast.Tuple) -> Any:
        return tuple(self.visit(item) for item in node.elts)

    def _list(self, node: ast.List) -> Any:
        return [self.visit(item) for item in node.elts]

    def _slice(self, node: ast.Slice) -> Any:
        return slice(*(None if part is None else self.visit(part) for part in (node.lower, node.upper, node.step)))

    def _subscript(self, node: ast.Subscript) -> Any:
        return self.visit(node.value)[self.visit(node.slice)]

    def _attribute(self, node: ast.Attribute) -> Any:
        import outsize.array as namespace
        from outsize.array.api.lazy import Array

        value = self.visit(node.value)
        if isinstance(node.value, ast.Name) and node.value.id in _PARTS and value is getattr(namespace, node.value.id):
            if node.attr not in value.__all__:
                raise self._refuse(node, f"{node.value.id} has {', '.join(sorted(value.__all__))}")
            return getattr(value, node.attr)
        if not isinstance(value, Array) or node.attr not in _METHODS | _PROPERTIES:
            raise self._refuse(node, f"arrays have {', '.join(sorted(_METHODS | _PROPERTIES))} here and nothing else")
        return getattr(value, node.attr)

    def _call(self, node: ast.Call) -> Any:
        function = self.visit(node.func)
        if not callable(function) or isinstance(function, type):
            raise self._refuse(node, "this cannot be called")
        if any(isinstance(arg, ast.Starred) for arg in node.args) or any(word.arg is None for word in node.keywords):
            raise self._refuse(node, "* and ** are not allowed in a call")
        options = {word.arg: self.visit(word.value) for word in node.keywords if word.arg is not None}
        return function(*(self.visit(arg) for arg in node.args), **options)
