"""What operators take and give: which share their input's buffer, which may write over it, which hold lists or variables.

In: a node and its inputs. Out: its results, with buffers from `Memory`. An operator without a rule gets a new buffer for each
result of the size that the graph says.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from outsize.model.keras.buffers import UPDATES, Buffer, Memory, Shape, Tensor
from outsize.model.keras.graph import Flat, Node, is_gradient
from outsize.model.keras.known_values import value_of

SHARE = frozenset((
    "Identity", "IdentityN", "StopGradient", "PreventGradient", "Reshape", "ExpandDims", "Squeeze", "Bitcast", "EnsureShape",
    "Snapshot", "CheckNumerics", "DebugGradientIdentity", "PlaceholderWithDefault", "OptionalGetValue",
))  # fmt: skip
"""Operators whose results are their inputs, seen in another way."""

IN_PLACE = frozenset((
    "Abs", "Add", "AddN", "AddV2", "Atan2", "BiasAdd", "Ceil", "ClipByValue", "Cos", "Digamma", "Div", "DivNoNan", "Elu",
    "EluGrad", "Erf", "Erfinv", "Exp", "Expm1", "Floor", "FloorDiv", "FloorMod", "Inv", "InvGrad", "LeakyRelu", "LeakyReluGrad",
    "Log", "Log1p", "LogicalAnd", "LogicalNot", "LogicalOr", "LogSoftmax", "Maximum", "Minimum", "Mod", "Mul", "MulNoNan", "Neg",
    "Pow", "RealDiv", "Reciprocal", "ReciprocalGrad", "Relu", "Relu6", "Relu6Grad", "ReluGrad", "Round", "Rsqrt", "RsqrtGrad",
    "Select", "SelectV2", "Selu", "SeluGrad", "Sigmoid", "SigmoidGrad", "Sign", "Sin", "Softmax", "SoftmaxCrossEntropyWithLogits",
    "Softplus", "SoftplusGrad", "Softsign", "SoftsignGrad", "SparseSoftmaxCrossEntropyWithLogits", "Sqrt", "SqrtGrad", "Square",
    "SquaredDifference", "Sub", "Tan", "Tanh", "TanhGrad", "TensorScatterUpdate", "TensorScatterAdd", "Xdivy", "Xlogy",
    "ZerosLike",
))  # fmt: skip
"""Operators that write over an input that nobody else reads, where sizes are equal."""

BROADCAST = ("Cast", "OnesLike", "Equal", "Less", "Greater", "LessEqual", "GreaterEqual", "NotEqual")
"""Further operators on elements whose shapes follow from each other."""

Run = Callable[["Kernels", Flat, list[Tensor]], list[Tensor]]


class Kernels:
    """Runs nodes, one at a time."""

    def __init__(self, memory: Memory, run: Run, writes_over: Callable[[Buffer], bool]) -> None:
        self.memory, self.run, self.writes_over = memory, run, writes_over
        self.guesses: dict[str, None] = {}
        """What had to be guessed, a sentence each."""
        self.left = MOST_RUNS
        """Operators in loops that are still followed."""
        self._let_go: list[Buffer] = []

    def let_go(self) -> list[Buffer]:
        """Buffers that the node held once and that it lets go when it has run."""
        found, self._let_go = self._let_go, []
        return found

    def execute(self, node: Node, given: list[Tensor], flat: Flat) -> list[Tensor]:
        """The results of a node; its inputs are still held."""
        special = SPECIAL.get(node.type)
        if special is not None:
            return special(self, node, given, flat)
        if node.type in SHARE:
            return [self._shared(node, number, each) for number, each in enumerate(given[: len(node.shapes)])]
        return self._plain(node, given)

    def _plain(self, node: Node, given: list[Tensor]) -> list[Tensor]:
        values = [each.value for each in given]
        found = []
        for number, width in enumerate(node.widths):
            shape = self.shape_of(node, number, given)
            tensor = Tensor(shape, width, value=value_of(node, values) if number == 0 else None)
            tensor.buffer = self._over(node, given, tensor) if number <= 1 else None
            if tensor.buffer is None:
                tensor.buffer = self.memory.take(tensor.bytes, node, node.name)
            found.append(tensor)
        return found

    def _over(self, node: Node, given: list[Tensor], made: Tensor) -> Buffer | None:
        """The buffer of an input that the result may take the place of."""
        if node.type not in IN_PLACE:
            return None
        for each in given:
            buffer = each.buffer
            if (
                buffer is not None
                and buffer.items is None
                and buffer.refs == 1
                and each.bytes == made.bytes == buffer.bytes
                and self.writes_over(buffer)
            ):
                if is_gradient(node.name) == is_gradient(buffer.name):
                    buffer.node, buffer.name = node, node.name
                return buffer
        return None

    def _shared(self, node: Node, number: int, given: Tensor) -> Tensor:
        shape = node.shapes[number]
        known = given.shape if shape is None or None in shape else tuple(size or 0 for size in shape)
        if node.type == "Reshape" and prod(known) != prod(given.shape):
            known = given.shape
        value = (
            None
            if given.value is None
            else np.reshape(given.value, known)
            if prod(known) == np.size(given.value)
            else None
        )
        return Tensor(known, given.width, given.buffer, value, given.variable)

    def shape_of(self, node: Node, number: int, given: list[Tensor]) -> Shape:
        """The shape of a result: as the graph has it, else from the inputs."""
        shape = node.shapes[number]
        if shape is not None and None not in shape:
            return tuple(size or 0 for size in shape)
        guess = _shape_from(node, given)
        if guess is not None:
            return guess
        if node.widths[number] == 0:
            return ()
        largest = max(given, key=lambda each: prod(each.shape), default=None)
        if largest is None or (shape is not None and len(shape) == 0):
            return ()
        self.guesses[
            f"the size of {node.name} ({node.type}) is not known before it runs: its largest input's is assumed"
        ] = None
        return largest.shape


MOST_RUNS = 3_000_000


def _shape_from(node: Node, given: list[Tensor]) -> Shape | None:
    """Shapes that follow from inputs, for operators whose graph leaves them open."""
    kind = node.type
    if kind in IN_PLACE or kind in BROADCAST:
        try:
            return tuple(int(size) for size in np.broadcast_shapes(*(each.shape for each in given)))
        except ValueError:
            return None
    if kind in ("MatMul", "BatchMatMulV2", "BatchMatMul", "BatchMatMulV3") and all(
        len(each.shape) > 1 for each in given
    ):
        names = ("transpose_a", "transpose_b") if kind == "MatMul" else ("adj_x", "adj_y")
        one, other = (node.op.get_attr(name) for name in names)
        rows, columns = given[0].shape[-1 if one else -2], given[1].shape[-2 if other else -1]
        return (*np.broadcast_shapes(given[0].shape[:-2], given[1].shape[:-2]), rows, columns)
    if kind in ("Fill", "RandomUniform", "RandomStandardNormal", "StatelessRandomUniformV2", "StatelessRandomNormalV2"):
        return _sizes(given[0])
    if kind in ("BroadcastTo", "Reshape") and len(given) > 1:
        return _sizes(given[1])
    if kind == "Shape":
        return (len(given[0].shape),)
    if kind == "BroadcastGradientArgs":
        return (max((prod(each.shape) for each in given), default=0),)
    return None


def _sizes(tensor: Tensor) -> Shape | None:
    if tensor.value is None:
        return None
    sizes = tuple(int(size) for size in np.ravel(tensor.value))
    return None if any(size < 0 for size in sizes) else sizes


Rule = Callable[[Kernels, Node, list[Tensor], Flat], list[Tensor]]


def _nothing(kernels: Kernels, node: Node, given: list[Tensor], flat: Flat) -> list[Tensor]:
    return [Tensor((), width) for width in node.widths]


def _constant(kernels: Kernels, node: Node, given: list[Tensor], flat: Flat) -> list[Tensor]:
    """A constant is made once and stays."""
    buffer = flat.memory.get(node.name)
    shape = tuple(size or 0 for size in node.shapes[0] or ())
    tensor = Tensor(shape, node.widths[0], value=node.value)
    if buffer is None:
        buffer = flat.memory[node.name] = kernels.memory.take(tensor.bytes, node, node.name, kind="buffers")
        kernels.memory.keep(buffer)
    tensor.buffer = buffer
    return [tensor]


def _sizes_as(kernels: Kernels, node: Node, number: int, shape: Shape) -> Tensor:
    """A shape as a result."""
    buffer = kernels.memory.take(8 * len(shape), node, node.name)
    return Tensor((len(shape),), node.widths[number], buffer, np.array(shape))


def _shape(kernels: Kernels, node: Node, given: list[Tensor], flat: Flat) -> list[Tensor]:
    return [_sizes_as(kernels, node, number, each.shape) for number, each in enumerate(given)]


def _variable_shape(kernels: Kernels, node: Node, given: list[Tensor], flat: Flat) -> list[Tensor]:
    return [_sizes_as(kernels, node, 0, () if given[0].variable is None else given[0].variable.shape)]


def _read(kernels: Kernels, node: Node, given: list[Tensor], flat: Flat) -> list[Tensor]:
    """A variable is read without a copy."""
    variable = given[0].variable
    if variable is None:
        return kernels._plain(node, given)
    return [Tensor(variable.shape, variable.width, variable.buffer)]


def _assign(kernels: Kernels, node: Node, given: list[Tensor], flat: Flat) -> list[Tensor]:
    """A variable takes the place of its new value where nobody else reads that, else a copy of it."""
    variable, value = given[0].variable, given[1]
    if variable is None or value.buffer is None:
        return []
    old, memory = variable.buffer, kernels.memory
    new = value.buffer
    if node.type in UPDATES:
        if old is not None and old.refs == 1:
            return []
        new = memory.take(prod(variable.shape) * variable.width, node, variable.name, variable.kind)
    elif new.refs > 1 or new.kind == "inputs" or new.bytes != value.bytes:
        new = memory.take(value.bytes, node, variable.name, variable.kind)
    new.kind, new.name = variable.kind, variable.name
    memory.keep(new)
    variable.buffer = new
    memory.drop(old)
    return []


def _new_list(kernels: Kernels, node: Node, given: list[Tensor], flat: Flat) -> list[Tensor]:
    count = int(given[1].value) if node.type == "TensorListReserve" and given[1].value is not None else 0
    buffer = kernels.memory.take(0, node, node.name)
    buffer.items = [None] * count
    return [Tensor((), 0, buffer)]


def _own_list(kernels: Kernels, node: Node, given: Tensor) -> Buffer:
    """The list itself where nobody else reads it, else a copy with the same elements."""
    old = given.buffer
    assert old is not None and old.items is not None
    if old.refs == 1:
        return old
    copy = kernels.memory.take(0, node, node.name)
    copy.items = list(old.items)
    for item in copy.items:
        if item is not None:
            kernels.memory.keep(item.buffer)
    return copy


def _push(kernels: Kernels, node: Node, given: list[Tensor], flat: Flat) -> list[Tensor]:
    if given[0].buffer is None or given[0].buffer.items is None:
        return _nothing(kernels, node, given, flat)
    buffer = _own_list(kernels, node, given[0])
    assert buffer.items is not None
    buffer.items.append(given[1])
    kernels.memory.keep(given[1].buffer)
    return [Tensor((), 0, buffer)]


def _pop(kernels: Kernels, node: Node, given: list[Tensor], flat: Flat) -> list[Tensor]:
    if given[0].buffer is None or not given[0].buffer.items:
        return [Tensor((), 0), *kernels._plain(node, given)[1:]]
    buffer = _own_list(kernels, node, given[0])
    assert buffer.items is not None
    last = buffer.items.pop()
    if last is None:
        return [Tensor((), 0, buffer), *kernels._plain(node, given)[1:]]
    if last.buffer is not None:
        kernels._let_go.append(last.buffer)  # the list's hold of it ends when the node has run
    return [Tensor((), 0, buffer), Tensor(last.shape, last.width, last.buffer, last.value)]


def _set_item(kernels: Kernels, node: Node, given: list[Tensor], flat: Flat) -> list[Tensor]:
    if given[0].buffer is None or given[0].buffer.items is None:
        return _nothing(kernels, node, given, flat)
    buffer = _own_list(kernels, node, given[0])
    assert buffer.items is not None
    at = 0 if given[1].value is None else int(given[1].value)
    buffer.items.extend([None] * (at + 1 - len(buffer.items)))
    old, buffer.items[at] = buffer.items[at], given[2]
    kernels.memory.keep(given[2].buffer)
    if old is not None:
        kernels.memory.drop(old.buffer)
    return [Tensor((), 0, buffer)]


def _get_item(kernels: Kernels, node: Node, given: list[Tensor], flat: Flat) -> list[Tensor]:
    items = None if given[0].buffer is None else given[0].buffer.items
    at = 0 if given[1].value is None else int(given[1].value)
    item = items[at] if items and at < len(items) else None
    if item is None:
        return kernels._plain(node, given)
    return [Tensor(item.shape, item.width, item.buffer, item.value)]


def _from_tensor(kernels: Kernels, node: Node, given: list[Tensor], flat: Flat) -> list[Tensor]:
    """The elements are copies of parts of the tensor, unless these lie aligned: then they share its buffer."""
    shape = given[0].shape
    buffer = kernels.memory.take(0, node, node.name)
    buffer.items = []
    size = prod(shape[1:]) * given[0].width
    for _ in range(shape[0] if shape else 0):
        part = given[0].buffer if size % 64 == 0 else kernels.memory.take(size, node, node.name)
        kernels.memory.keep(part)
        buffer.items.append(Tensor(shape[1:], given[0].width, part))
    return [Tensor((), 0, buffer)]


def _stack(kernels: Kernels, node: Node, given: list[Tensor], flat: Flat) -> list[Tensor]:
    items = [item for item in (given[0].buffer.items if given[0].buffer else None) or () if item is not None]
    if not items or given[0].buffer is None:
        return kernels._plain(node, given)
    shape = (len(given[0].buffer.items or ()), *items[0].shape)
    tensor = Tensor(shape, node.widths[0])
    tensor.buffer = kernels.memory.take(tensor.bytes, node, node.name)
    return [tensor]


def _concat(kernels: Kernels, node: Node, given: list[Tensor], flat: Flat) -> list[Tensor]:
    items = [item for item in (given[0].buffer.items if given[0].buffer else None) or () if item is not None]
    if not items:
        return kernels._plain(node, given)
    tensor = Tensor((sum(item.shape[0] for item in items), *items[0].shape[1:]), node.widths[0])
    tensor.buffer = kernels.memory.take(tensor.bytes, node, node.name)
    lengths = Tensor((len(items),), 8, kernels.memory.take(8 * len(items), node, node.name))
    return [tensor, lengths]


def _length(kernels: Kernels, node: Node, given: list[Tensor], flat: Flat) -> list[Tensor]:
    items = None if given[0].buffer is None else given[0].buffer.items
    return [Tensor((), node.widths[0], kernels.memory.take(4, node, node.name), np.int32(len(items or ())))]


def _element_shape(kernels: Kernels, node: Node, given: list[Tensor], flat: Flat) -> list[Tensor]:
    items = None if given[0].buffer is None else given[0].buffer.items
    item = next((each for each in items or () if each is not None), None)
    if item is None:
        return kernels._plain(node, given)
    return [_sizes_as(kernels, node, 0, item.shape)]


def _loop(kernels: Kernels, node: Node, given: list[Tensor], flat: Flat) -> list[Tensor]:
    """Runs the body as often as the condition says, where that is known."""
    condition, body = node.graphs
    memory, state = kernels.memory, list(given)
    for each in state:
        memory.keep(each.buffer)
    size = sum(body.needed)
    for number in range(10**9):
        goes_on = _holds(kernels, condition, state)
        if goes_on is None:
            kernels.guesses[f"how often the loop {node.name} runs is not known before it runs: one pass is counted"] = (
                None
            )
            goes_on = number == 0
        if not goes_on:
            break
        if kernels.left < size:
            kernels.guesses[f"the loop {node.name} is too long to be followed to its end"] = None
            break
        kernels.left -= size
        state = kernels.run(kernels, body, state)
    kernels._let_go += [each.buffer for each in state if each.buffer is not None]  # its readers take over
    return state


def _holds(kernels: Kernels, condition: Flat, state: list[Tensor]) -> bool | None:
    for each in state:
        kernels.memory.keep(each.buffer)
    answer = kernels.run(kernels, condition, list(state))[0]
    if answer.buffer is not None:
        kernels.memory.drop(answer.buffer)
    return None if answer.value is None else bool(np.all(answer.value))


def _choice(kernels: Kernels, node: Node, given: list[Tensor], flat: Flat) -> list[Tensor]:
    """The branch that runs, or the one that makes most where that is not known."""
    value = given[0].value
    if value is None:
        branch = max(node.graphs, key=_made)
    elif node.type in ("If", "StatelessIf"):
        branch = node.graphs[0 if bool(value) else 1]
    else:
        branch = node.graphs[min(int(value), len(node.graphs) - 1)]
    inputs = given[1:]
    for each in inputs:
        kernels.memory.keep(each.buffer)
    state = kernels.run(kernels, branch, inputs)
    kernels._let_go += [each.buffer for each in state if each.buffer is not None]
    return state


def _made(flat: Flat) -> int:
    """Bytes that a graph's operators give, as far as it says."""
    return sum(
        prod(size or 1 for size in shape or ()) * width
        for node, needed in zip(flat.nodes, flat.needed, strict=True)
        if needed
        for shape, width in zip(node.shapes, node.widths, strict=True)
    )


SPECIAL: dict[str, Rule] = {
    "Const": _constant, "NoOp": _nothing, "Assert": _nothing, "Shape": _shape, "ShapeN": _shape, "VariableShape": _variable_shape,
    "ReadVariableOp": _read, "AssignVariableOp": _assign, "AssignAddVariableOp": _assign, "AssignSubVariableOp": _assign,
    "EmptyTensorList": _new_list, "TensorListReserve": _new_list, "TensorListPushBack": _push, "TensorListPopBack": _pop,
    "TensorListSetItem": _set_item, "TensorListGetItem": _get_item, "TensorListFromTensor": _from_tensor,
    "TensorListStack": _stack, "TensorListConcatV2": _concat, "TensorListConcat": _concat,
    "TensorListLength": _length, "TensorListElementShape": _element_shape,
    "While": _loop, "StatelessWhile": _loop, "If": _choice, "StatelessIf": _choice, "Case": _choice, "StatelessCase": _choice,
}  # fmt: skip
"""Operators that do more than give new tensors."""
