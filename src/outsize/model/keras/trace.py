"""A step traced to a graph and followed: in a step and its arguments, out what it allocates, event by event.

A compiled model's step is its `train_step`: forward pass, gradients, update of the weights. Nothing is computed: the graph is
made on tensors without contents. State of an optimizer that does not exist yet is made without memory, on a copy of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from outsize.core.errors import InputError, OutsizeError
from outsize.model.keras import port
from outsize.model.keras.any_order import Lives
from outsize.model.keras.buffers import Buffer, Memory, Tensor, Variable
from outsize.model.keras.contentless import empty_variables, spec_of
from outsize.model.keras.executor import Executor, Order
from outsize.model.keras.graph import Flat, Node, flatten, is_gradient


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """A step as a graph, with what its handles stand for."""

    name: str
    flat: Flat
    inputs: list[tuple[str, Any]]
    """(kind, what) of every input of the graph: ("variable", name, shape ...) as `Variable` makers, or specs."""
    notes: tuple[str, ...]
    weights: int
    """Bytes of trainable variables."""


@dataclass(frozen=True, slots=True, eq=False)
class Followed:
    """What happened when a graph was followed."""

    events: list[tuple[bool, Buffer]]
    start: int
    """Events before the first step: variables and the batch."""
    peak: int
    guesses: tuple[str, ...]
    most: int = 0
    """Bytes that no order of its operators passes, where that was asked."""


def trace_model(model: Any, data: Any, step: Callable[[Any], Any] | None = None) -> Traced:
    """The training step of a compiled model on data (x, y[, sample_weight]); `step` takes the place of `train_step`."""
    tf = port.tensorflow()
    if getattr(model, "optimizer", None) is None or not getattr(model, "compiled", True):
        raise InputError(f"the model {model.name} is not compiled: model.compile(optimizer, loss) comes first")
    specs = tf.nest.map_structure(lambda leaf: None if leaf is None else spec_of(leaf), data)
    notes = []
    if not model.built:
        notes.append("the model was not built: its weights were made for this, and are in memory now")
        model.build(tf.nest.map_structure(lambda spec: tuple(spec.shape), specs[0]))
    if model.jit_compile is True:
        notes.append("jit_compile=True: XLA fuses operators, so that less is held than is said here")
    if model.run_eagerly:
        notes.append("run_eagerly: operators run one by one; the graph of the same step was followed")
    with _optimizer_of(model) as optimizer:
        graph = _graph(model.name, step or model.train_step, (specs,), autograph=False)
        return _traced(model.name, graph, _kinds(model, optimizer), notes)


def trace_function(step: Any, args: tuple[Any, ...]) -> Traced:
    """A function of TensorFlow code, or a `tf.function`."""
    tf = port.tensorflow()

    def bare(leaf: Any) -> Any:
        return spec_of(leaf) if hasattr(leaf, "shape") and not isinstance(leaf, tf.Variable) else leaf

    name = getattr(step, "__name__", type(step).__name__)
    graph = _graph(name, step, tf.nest.map_structure(bare, args), autograph=True)
    return _traced(name, graph, {}, [])


def _graph(name: str, step: Any, args: tuple[Any, ...], autograph: bool) -> Any:
    tf = port.tensorflow()
    try:
        function = step if hasattr(step, "get_concrete_function") else tf.function(step, autograph=autograph)
        return function.get_concrete_function(*args).graph
    except OutsizeError:
        raise
    except Exception as error:
        lines = [line for line in str(error).strip().splitlines() if line.strip()]
        raise InputError(f"{name} raised {type(error).__name__}: {lines[-1].strip() if lines else ''}") from error


@contextlib.contextmanager
def _optimizer_of(model: Any) -> Iterator[Any]:
    """An optimizer whose state exists: the model's own, or a copy with state that has no memory."""
    own = model.optimizer
    if own.built:
        yield own
        return
    with empty_variables():
        copy = type(own).from_config(own.get_config())
        copy.build(model.trainable_variables)
    object.__setattr__(model, "optimizer", copy)
    try:
        yield copy
    finally:
        object.__setattr__(model, "optimizer", own)


def _kinds(model: Any, optimizer: Any) -> dict[int, str]:
    """Handles of variables -> what they are."""
    found = {id(variable.value.handle): "optimizer state" for variable in optimizer.variables}
    found |= {id(variable.value.handle): "buffers" for variable in model.non_trainable_variables}
    return found | {id(variable.value.handle): "weights" for variable in model.trainable_variables}


def _traced(name: str, graph: Any, kinds: dict[int, str], notes: list[str]) -> Traced:
    tf = port.tensorflow()
    outside = {id(inside): value for value, inside in graph.captures}
    trainable = {id(variable.handle) for variable in graph.variables if variable.trainable}
    inputs: list[tuple[str, Any]] = []
    weights = 0
    for tensor in graph.inputs:
        value = outside.get(id(tensor))
        if tensor.dtype == tf.resource and value is not None:
            data = value._handle_data.shape_and_type[0]
            shape, dtype = tuple(size.size for size in data.shape.dim), tf.as_dtype(data.dtype)
            kind = kinds.get(id(value)) or ("weights" if id(value) in trainable else "buffers")
            weights += prod(shape) * dtype.size * (kind == "weights")
            inputs.append((kind, (id(value), shape, dtype.size, tensor.op.name)))
        else:
            shape = tuple(size or 0 for size in tensor.shape.as_list())
            inputs.append(("inputs", (id(tensor), shape, tensor.dtype.size, tensor.op.name)))
    return Traced(name, flatten(graph), inputs, tuple(notes), weights)


def follow(traced: Traced, order: Order, steps: int = 2, any_order: bool = False) -> Followed:
    """Runs the graph several times on tensors without contents; `any_order` looks for the most of all orders in the last step."""
    memory = Memory()
    traced.flat.memory.clear()
    _forget(traced.flat)
    executor = Executor(memory, order)
    variables: dict[int, Variable] = {}
    given = []
    for kind, (key, shape, width, name) in traced.inputs:
        if kind == "inputs":
            buffer = memory.take(prod(shape) * width, None, name, kind)
            memory.keep(buffer)
            given.append(Tensor(shape, width, buffer))
            continue
        if key not in variables:
            buffer = memory.take(prod(shape) * width, None, name, kind)
            memory.keep(buffer)
            variables[key] = Variable(shape, width, kind, name, buffer)
        given.append(Tensor((), 0, variable=variables[key]))
    start, most = len(memory.events), 0
    for memory.step in range(steps):
        there = memory.held
        if any_order and memory.step == steps - 1:
            executor.lives = Lives(traced.flat)
        for each in given:
            memory.keep(each.buffer)
        results = executor.run(traced.flat, list(given))
        most = executor.lives.most(there) if executor.lives else 0
        for result in results:
            memory.drop(result.buffer)
    return Followed(memory.events, start, memory.peak, tuple(executor.kernels.guesses), most)


def _forget(flat: Flat) -> None:
    """Constants of an earlier run."""
    for node in flat.nodes:
        for inner in node.graphs:
            inner.memory.clear()
            _forget(inner)


def phase_of(node: Node | None, after: set[str]) -> str:
    """`forward`, `backward` or `optimizer`."""
    if node is None or not node.name:
        return "forward"
    if is_gradient(node.name):
        return "backward"
    return "optimizer" if node.name in after else "forward"


def after_gradients(flat: Flat) -> set[str]:
    """Names of nodes that use gradients: the update."""
    found: set[int] = set()
    for number, node in enumerate(flat.nodes):
        if not flat.needed[number] or is_gradient(node.name):
            continue
        sources = {source for source, _ in node.inputs}
        if sources & found or any(is_gradient(flat.nodes[source].name) for source in sources):
            found.add(number)
    return {flat.nodes[number].name for number in found}
