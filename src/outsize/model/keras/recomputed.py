"""A model whose layers are computed again in the backward pass, in place of keeping what is between them.

In: a functional or sequential model, a number of segments. Out: `Again`, which runs the model's graph segment by segment while it
is in use, and keeps only what stands between segments. Layers that draw, or that write variables, are run once and kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from math import isqrt, prod
from typing import Any, NamedTuple

from outsize.model.cuts import bytes_across, narrowest_cuts
from outsize.model.keras import port

RUN = "_run_through_graph"


class Segment(NamedTuple):
    """Nodes that follow one another."""

    nodes: list[Any]
    takes: list[int]
    """ids of the symbolic tensors that come from before."""
    gives: list[int]
    """ids of those that are read behind it."""
    again: bool


class Again:
    """Computes segments of a model again."""

    def __init__(self, model: Any) -> None:
        self.graph = port.graph_of(model)
        self.segments = [] if self.graph is None else _segments(self.graph)

    @property
    def useful(self) -> bool:
        """True where something can be computed again."""
        return any(segment.again for segment in self.segments)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """The model runs by segments."""
        object.__setattr__(self.graph, RUN, self._run)
        try:
            yield
        finally:
            object.__delattr__(self.graph, RUN)

    def _run(self, inputs: Any, operation_fn: Callable[[Any], Any] = lambda op: op, call_fn: Any = None) -> Any:
        nest, tensors = port.keras().tree, {}
        for symbol, value in zip(self.graph.inputs, nest.flatten(inputs), strict=True):
            tensors[id(symbol)] = value
        for segment in self.segments:
            if not segment.again:
                _run_nodes(segment.nodes, tensors, operation_fn)
                continue
            masks: dict[int, Any] = {}
            run = _forgotten(_function(segment, tensors, operation_fn, masks))
            made = run(*(tensors[key] for key in segment.takes))
            for key, value in zip(segment.gives, made, strict=True):
                _mask(value, masks[key])
                tensors[key] = value
        return nest.pack_sequence_as(self.graph._outputs_struct, [tensors[id(symbol)] for symbol in self.graph.outputs])


class AgainStep:
    """Takes the place of `model.train_step`: the model's own, with segments computed again."""

    def __init__(self, model: Any, again: Again) -> None:
        self.model, self.again = model, again

    def __call__(self, data: Any) -> Any:
        """One step on (x, y, sample_weight)."""
        with self.again.in_use():
            return type(self.model).train_step(self.model, data)


def _forgotten(run: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    """A function that is run again for its gradient.

    `tf.recompute_grad` lets gradients of weights wait, with all that they read, while segments before are computed again. Here a
    segment gives its gradient on when those of its weights are done, so that one segment is in memory at a time.
    """
    tf = port.tensorflow()

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def once(*values: Any) -> Any:
        with port.not_recorded():
            made = run(*values)

        def gradient(*upstream: Any, variables: Any = ()) -> Any:
            with tf.control_dependencies(upstream):
                given = [tf.identity(value) for value in values]
            with tf.GradientTape() as tape:
                tape.watch(given)
                again = run(*given)
            found = tape.gradient(
                again,
                [*given, *variables],
                output_gradients=upstream,
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
            to_inputs, to_weights = found[: len(given)], found[len(given) :]
            with tf.control_dependencies([getattr(each, "values", each) for each in to_weights]):
                to_inputs = [tf.identity(each) for each in to_inputs]
            return (to_inputs, to_weights) if variables else to_inputs

        return made, gradient

    return once  # type: ignore[no-any-return]


def _function(segment: Segment, tensors: dict[int, Any], operation_fn: Any, masks: dict[int, Any]) -> Any:
    """A segment as a function of tensors. Masks come with the tensors, and leave in `masks`."""
    given = [getattr(tensors[key], "_keras_mask", None) for key in segment.takes]

    def run(*values: Any) -> tuple[Any, ...]:
        for value, mask in zip(values, given, strict=True):
            _mask(value, mask)
        here = dict(zip(segment.takes, values, strict=True))
        _run_nodes(segment.nodes, here, operation_fn)
        for key in segment.gives:
            masks.setdefault(key, getattr(here[key], "_keras_mask", None))
        return tuple(here[key] for key in segment.gives)

    return run


def _mask(value: Any, mask: Any) -> None:
    if mask is not None:
        value._keras_mask = mask


def _run_nodes(nodes: list[Any], tensors: dict[int, Any], operation_fn: Any) -> None:
    nest = port.keras().tree
    for node in nodes:
        args, kwargs = node.arguments.fill_in(tensors)
        made = nest.flatten(operation_fn(node.operation)(*args, **kwargs))
        tensors.update((id(symbol), value) for symbol, value in zip(node.outputs, made, strict=True))


def _segments(graph: Any) -> list[Segment]:
    """Runs of nodes that may be computed again, cut at their narrowest places: as many as the root of their number."""
    depths = sorted(graph._nodes_by_depth, reverse=True)
    nodes = [node for depth in depths for node in graph._nodes_by_depth[depth] if node.operation and not node.is_input]
    cuts = {0, len(nodes)}
    may = [_may_run_twice(node) for node in nodes]
    cuts |= {place for place in range(1, len(nodes)) if may[place] != may[place - 1]}
    made = [[(id(symbol), _bytes(symbol)) for symbol in node.outputs] for node in nodes]
    read = [[id(symbol) for symbol in node.input_tensors] for node in nodes]
    results = [id(symbol) for symbol in graph.outputs]
    sizes = [sum(size for _, size in values) for values in made]
    cuts |= set(narrowest_cuts(sizes, bytes_across(made, read, results), isqrt(max(1, 2 * len(nodes)))))
    found = []
    for start, end in pairwise(sorted(cuts)):
        inside = {key for values in made[start:end] for key, _ in values}
        takes = [key for keys in read[start:end] for key in keys if key not in inside]
        later = {key for keys in read[end:] for key in keys} | set(results)
        gives = [key for values in made[start:end] for key, _ in values if key in later]
        found.append(Segment(nodes[start:end], list(dict.fromkeys(takes)), gives, may[start] and end < len(nodes)))
    return found


def _may_run_twice(node: Any) -> bool:
    """True for what neither draws nor writes nor adds a loss, and reads numbers that have gradients."""
    if any("float" not in str(symbol.dtype) for symbol in node.input_tensors):
        return False
    layers = node.operation._flatten_layers() if hasattr(node.operation, "_flatten_layers") else ()
    return not any(
        layer.non_trainable_variables or getattr(layer, "activity_regularizer", None) is not None for layer in layers
    )


def _bytes(symbol: Any) -> int:
    """Bytes of a symbolic tensor for one sample."""
    return int(prod(size or 1 for size in symbol.shape)) * 4
