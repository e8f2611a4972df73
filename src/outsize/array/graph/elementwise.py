"""Elementwise operations: NumPy's ufuncs and the few that are not ufuncs, one row each.

The result's dtype is NumPy's own answer: the operation is asked on arrays of no elements, so that promotion (weak
Python scalars included) is never imitated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from outsize.array.graph.node import Node, Shape
from outsize.array.store.base import Block, Region
from outsize.core.errors import InputError

if TYPE_CHECKING:
    from outsize.array.graph.frame import Frame


@dataclass(frozen=True, slots=True)
class Operation:
    """One elementwise function."""

    name: str
    apply: Callable[..., Any]
    """apply(out, *blocks): writes the result into `out`."""
    probe: Callable[..., Any]
    """probe(*empty arrays or scalars) -> an array of the result's dtype."""
    again: str | tuple[Any, ...]
    """What pickle keeps of it: the name of a constant of this module, or (function, arguments) that make it."""
    in_place: bool = True
    """True where `out` may be one of the blocks."""

    def __reduce__(self) -> str | tuple[Any, ...]:
        return self.again


@dataclass(frozen=True, slots=True)
class Scalar:
    """A Python or NumPy scalar among the operands."""

    value: Any
    """The scalar itself: Python's stay weak in promotion."""


def _where(out: Block, condition: Block, x: Any, y: Any) -> None:
    # as arrays: Python's -1 among unsigned numbers wraps, as NumPy's does
    np.copyto(out, np.asarray(y), casting="unsafe")
    np.copyto(out, np.asarray(x), casting="unsafe", where=condition)


CAST = Operation("astype", lambda out, block: np.copyto(out, block, casting="unsafe"), lambda block: block, "CAST")
WHERE = Operation("where", _where, lambda _, x, y: np.empty(0, np.result_type(x, y)), "WHERE", in_place=False)
REAL = Operation("real", lambda out, block: np.copyto(out, block.real), lambda b: b.real, "REAL", in_place=False)
IMAG = Operation("imag", lambda out, block: np.copyto(out, block.imag), lambda b: b.imag, "IMAG", in_place=False)


SLOW = frozenset(
    ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "sinh", "cosh", "tanh", "power",
     "arcsin", "arccos", "arctan", "arctan2", "hypot", "logaddexp")
)  # fmt: skip
"""Names of operations that take several times as long as plain arithmetic."""


def rounding(decimals: int) -> Operation:
    """np.round to a number of decimals."""
    return Operation(
        f"round({decimals})", lambda out, block: np.round(block, decimals, out=out), lambda b: np.round(b, decimals),
        (rounding, (decimals,)),
    )  # fmt: skip


@functools.cache
def operation(ufunc: np.ufunc) -> Operation:
    """The operation of a ufunc with one output and no core dimensions."""
    if ufunc.nout != 1 or ufunc.signature is not None:
        why = f"it returns {ufunc.nout} arrays" if ufunc.nout != 1 else "it works on whole axes"
        raise InputError(
            f"np.{ufunc.__name__} has no elementwise rule: {why}; call it on x.compute() if that fits in memory"
        )
    return Operation(ufunc.__name__, lambda out, *blocks: ufunc(*blocks, out=out), ufunc, (operation, (ufunc,)))


class Elementwise(Node):
    """An operation on blocks that broadcast together."""

    operation: Operation
    args: tuple[Any, ...] = field(repr=False)
    """Operands in order, each a `Node` or a `Scalar`; None for a node where it stands alone."""

    def evaluate(self, region: Region, frame: Frame, out: Block | None) -> Block:
        return frame.evaluate_chain(self, region, out)

    def detail(self) -> tuple[Any, ...]:
        return (self.operation.name, tuple(repr(a.value) if isinstance(a, Scalar) else "" for a in self.args))

    def label(self) -> str:
        return self.operation.name

    def alone(self) -> Node:
        return replace(self, inputs=(), args=tuple(arg if isinstance(arg, Scalar) else None for arg in self.args))

    def with_inputs(self, inputs: tuple[Node, ...]) -> Node:
        left = iter(inputs)
        return replace(self, inputs=inputs, args=tuple(a if isinstance(a, Scalar) else next(left) for a in self.args))


def make_elementwise(op: Operation, args: tuple[Node | Scalar, ...], dtype: Any = None) -> Elementwise:
    """The node of an operation on operands, its shape and dtype worked out."""
    nodes = tuple(arg for arg in args if isinstance(arg, Node))
    shape = nodes[0].shape if len(nodes) == 1 else broadcast_shapes(*(node.shape for node in nodes))
    if dtype is None:
        dtype = _result_dtype(op, args)
    return Elementwise(shape=shape, dtype=np.dtype(dtype), inputs=nodes, operation=op, args=args)


_KNOWN: dict[tuple[Any, ...], np.dtype[Any]] = {}
"""Results of ufuncs that were asked for: (ufunc, dtypes, and types of scalars whose value decides nothing)."""


def _result_dtype(op: Operation, args: tuple[Node | Scalar, ...]) -> np.dtype[Any]:
    """NumPy's own answer for operands of no elements, asked once for each kind of operands."""
    key: tuple[Any, ...] | None = (op.probe,) if isinstance(op.probe, np.ufunc) else None
    for arg in args if key is not None else ():
        kind = arg.dtype if isinstance(arg, Node) else type(arg.value)
        if kind is int and not 0 <= arg.value <= 127:  # type: ignore[union-attr]
            key = None  # NumPy refuses integers that a dtype does not hold
            break
        key = (*key, kind)  # type: ignore[misc]
    found = None if key is None else _KNOWN.get(key)
    if found is None:
        probe = op.probe(*(np.empty(0, arg.dtype) if isinstance(arg, Node) else arg.value for arg in args))
        found = np.asarray(probe).dtype
        if key is not None:
            _KNOWN[key] = found
    return found


def broadcast_shapes(*shapes: Shape) -> Shape:
    """The common shape, or an `InputError` that names the shapes; any length goes, NumPy's own function stops at
    2**63."""
    if len(set(shapes)) == 1:
        return tuple(shapes[0])
    ndim = max((len(shape) for shape in shapes), default=0)
    result = [1] * ndim
    for shape in shapes:
        for axis, length in enumerate(shape, ndim - len(shape)):
            if length != 1 and result[axis] not in (1, length):
                raise InputError(f"shapes {' and '.join(map(str, shapes))} do not broadcast together")
            result[axis] = length if length != 1 else result[axis]
    return tuple(result)


def broadcast_region(region: Region, shape: Shape) -> Region:
    """The region that an operand of this shape contributes to a region of the result."""
    tail = region[len(region) - len(shape) :]
    return tuple((0, 1) if length == 1 else span for span, length in zip(tail, shape, strict=True))
