"""A graph of TensorFlow as plain values: which operator reads what, which waits for which, what its results look like.

In: a `FuncGraph`. Out: `Flat`, with calls of functions laid open, as TensorFlow's runtime does it, and without operators whose
results nobody needs. Loops and branches stay one node, with the graphs that they run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

CALLS = ("PartitionedCall", "StatefulPartitionedCall")
FUNCTIONS = {
    "While": ("cond", "body"), "StatelessWhile": ("cond", "body"), "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
}  # fmt: skip
"""Operators that run functions -> the attributes that name them."""
GRADIENTS = ("gradient_tape/", "gradients/")
"""Scopes that TensorFlow puts before the names of operators of the backward pass."""
CASES = ("Case", "StatelessCase")
KNOWN = 64
"""Elements of a constant whose values are read."""


@dataclass(slots=True, eq=False)
class Node:
    type: str
    name: str
    op: Any
    """TensorFlow's operator, for attributes and the line that made it; None for a join of others."""
    inputs: list[tuple[int, int]]
    """(node, output) of every input."""
    waits: list[int]
    """Nodes that have to run before it, beside those it reads."""
    shapes: list[tuple[int | None, ...] | None]
    """Of every output; None where not even the rank is known."""
    widths: list[int]
    """Bytes of an element of every output; 0 for handles and lists."""
    graphs: list[Flat] = field(default_factory=list)
    """What it runs: condition and body of a loop, the branches of a choice."""
    value: Any = None
    """Elements of a small constant."""


@dataclass(slots=True, eq=False)
class Flat:
    """A graph without calls."""

    nodes: list[Node]
    inputs: list[int]
    """Nodes that stand for the arguments."""
    outputs: list[tuple[int, int]]
    needed: list[bool]
    """By node: its results or its effects are needed."""
    readers: list[list[int]]
    """By node: nodes that read or await it, in the order in which they were made."""
    pending: list[int]
    """By node: how many nodes it reads or awaits."""
    uses: dict[tuple[int, int], int]
    """How often an output is read, as an output of the graph too."""
    memory: dict[str, Any] = field(default_factory=dict)
    """What the one who runs it keeps from run to run."""


def is_gradient(name: str) -> bool:
    """True for an operator of the backward pass, by its name."""
    return any(part in name for part in GRADIENTS)


def flatten(graph: Any, outer: Any = None) -> Flat:
    """The graph and all that it calls."""
    builder = _Builder(outer)
    inputs, outputs, ends = builder.add(graph, None, [])
    return finish(builder.nodes, inputs, outputs, ends)


class _Builder:
    def __init__(self, outer: Any) -> None:
        self.nodes: list[Node] = []
        self.outer = outer

    def add(
        self, graph: Any, given: list[tuple[int, int]] | None, waits: list[int]
    ) -> tuple[list[int], list[tuple[int, int]], list[int]]:
        """(nodes of the inputs, outputs, nodes with effects) of a graph; `given`: what stands for its inputs."""
        at: dict[tuple[str, int], tuple[int, int]] = {}
        ends: dict[str, list[int]] = {}
        arguments = {tensor.op.name: number for number, tensor in enumerate(graph.inputs)}
        for op in _in_order(graph):
            if given is not None and op.name in arguments:
                at[op.name, 0] = given[arguments[op.name]]
                ends[op.name] = []
                continue
            sources = [at[tensor.op.name, tensor.value_index] for tensor in op.inputs]
            controls = [*waits, *(node for before in op.control_inputs for node in ends[before.name])]
            if op.type in CALLS:
                inner = _function(op.get_attr("f").name, graph, self.outer)
                begin = self._join(controls, op.name)
                _, results, effects = self.add(inner, sources, [begin])
                ends[op.name] = [self._join([begin, *effects], op.name)]
                at.update({(op.name, number): result for number, result in enumerate(results)})
                continue
            number = self._node(op, sources, controls, graph)
            ends[op.name] = [number]
            at.update({(op.name, output): (number, output) for output in range(len(op.outputs))})
        outputs = [at[tensor.op.name, tensor.value_index] for tensor in graph.outputs]
        effects = [node for op in _effects(graph) for node in ends[op.name]]
        inputs = [] if given is not None else [at[tensor.op.name, 0][0] for tensor in graph.inputs]
        return inputs, outputs, effects

    def _join(self, waits: list[int], name: str) -> int:
        self.nodes.append(Node("NoOp", name, None, [], waits, [], []))
        return len(self.nodes) - 1

    def _node(self, op: Any, sources: list[tuple[int, int]], controls: list[int], graph: Any) -> int:
        names = [op.get_attr(name).name for name in FUNCTIONS.get(op.type, ())]
        if op.type in CASES:
            names = [function.name for function in op.get_attr("branches")]
        shapes = [None if out.shape.rank is None else tuple(out.shape.as_list()) for out in op.outputs]
        self.nodes.append(
            Node(
                op.type, op.name, op, sources, controls, shapes, [_width(out.dtype) for out in op.outputs],
                graphs=[flatten(_function(name, graph, self.outer), self.outer or graph) for name in names],
                value=_constant(op, shapes),
            )
        )  # fmt: skip
        return len(self.nodes) - 1


def _in_order(graph: Any) -> list[Any]:
    """The operators, each after those that it reads or awaits: a wait may be for one that was made later."""
    ops, done, found = graph.get_operations(), set(), []
    for op in ops:
        left = [op]
        while left:
            last = left[-1]
            if last.name in done:
                left.pop()
                continue
            before = [
                each for each in (*(tensor.op for tensor in last.inputs), *last.control_inputs) if each.name not in done
            ]
            if before:
                left += before
                continue
            done.add(last.name)
            found.append(left.pop())
    return found


def _function(name: str, graph: Any, outer: Any) -> Any:
    """The graph of a function of the library."""
    for library in (graph, outer):
        found = None if library is None else library._get_function(name)
        if found is not None:
            return found.graph
    raise LookupError(name)


def _effects(graph: Any) -> list[Any]:
    """Operators that run for what they do, not for what they give."""
    found = getattr(graph, "control_outputs", None) or []
    if found:
        return list(found)
    return [op for op in graph.get_operations() if op.op_def is not None and op.op_def.is_stateful]


def _width(dtype: Any) -> int:
    name = dtype.name
    if name in ("resource", "variant"):
        return 0
    return 16 if name == "string" else int(dtype.size)


def _constant(op: Any, shapes: list[tuple[int | None, ...] | None]) -> Any:
    if op.type != "Const" or shapes[0] is None or int(np.prod([size or 0 for size in shapes[0]])) > KNOWN:
        return None
    from tensorflow.python.framework import tensor_util

    return tensor_util.constant_value(op.outputs[0])


def finish(nodes: list[Node], inputs: list[int], outputs: list[tuple[int, int]], effects: list[int]) -> Flat:
    """Marks what is needed, and who reads whom."""
    needed = [False] * len(nodes)
    left = [number for number, _ in outputs] + effects
    while left:
        number = left.pop()
        if not needed[number]:
            needed[number] = True
            left += [source for source, _ in nodes[number].inputs] + nodes[number].waits
    readers: list[list[int]] = [[] for _ in nodes]
    pending = [0] * len(nodes)
    uses: dict[tuple[int, int], int] = {}
    for number, node in enumerate(nodes):
        if needed[number]:
            before = {source for source, _ in node.inputs} | set(node.waits)
            pending[number] = len(before)
            for source in before:
                readers[source].append(number)
            for each in node.inputs:
                uses[each] = uses.get(each, 0) + 1
    for each in outputs:
        uses[each] = uses.get(each, 0) + 1
    return Flat(nodes, inputs, outputs, needed, readers, pending, uses)
