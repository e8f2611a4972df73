"""Models and arguments without contents: variables that have a shape and no memory, specs instead of arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from math import prod
from typing import Any

from outsize.core.errors import InputError
from outsize.model.keras import port

SMALL = 2**16
"""Bytes of variables that are made as they are: counters, rates, metrics."""


@contextlib.contextmanager
def empty_variables() -> Iterator[None]:
    """Variables that are made inside have no memory, unless they are small or their values are given."""
    tf = port.tensorflow()
    from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

    def create(after: Any, **given: Any) -> Any:
        value = given.get("initial_value")
        if not callable(value):
            return after(**given)
        spec = tf.function(value, autograph=False).get_concrete_function().outputs[0]
        if spec.shape.rank is None or None in spec.shape or prod(spec.shape) * spec.dtype.size <= SMALL:
            return after(**given)
        kept = ("trainable", "name", "aggregation", "synchronization")
        return UninitializedVariable(
            shape=spec.shape, dtype=spec.dtype, **{name: given[name] for name in kept if given.get(name) is not None}
        )

    with tf.variable_creator_scope(create):
        yield


def spec_of(leaf: Any, rows: int | None = None) -> Any:
    """The shape and dtype of an array, with another number of samples where one is given."""
    tf = port.tensorflow()
    if isinstance(leaf, tf.TensorSpec):
        shape, dtype = list(leaf.shape), leaf.dtype
    elif hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        shape, dtype = list(leaf.shape), tf.as_dtype(leaf.dtype)
    else:
        raise InputError(f"an array, a tensor or a tf.TensorSpec is needed here, not {leaf!r:.60}")
    if rows is not None and shape:
        shape[0] = rows
    if any(size is None for size in shape):
        raise InputError(f"a shape with sizes that are not known, {shape}, needs batch= or an array as example")
    return tf.TensorSpec(shape, dtype)


def data_of(model: Any, rows: int) -> tuple[Any, Any]:
    """Specs of a batch (x, y) of a model, from its inputs, its outputs and its losses."""
    tf = port.tensorflow()
    if not getattr(model, "inputs", None):
        raise InputError("batch= as a number needs a model that knows its inputs: give a batch (x, y) as example")

    def bound(tensor: Any) -> Any:
        shape = [rows, *tensor.shape[1:]]
        if None in shape:
            raise InputError(
                f"the input {tensor.name} has sizes that are not known, {tensor.shape}: give a batch (x, y) as example"
            )
        return tf.TensorSpec(shape, tf.as_dtype(tensor.dtype))

    def target(tensor: Any, loss: Any) -> Any:
        spec = bound(tensor)
        sparse = "sparse" in str(getattr(loss, "name", loss)).lower()
        return tf.TensorSpec(spec.shape[:-1], tf.int32) if sparse else tf.TensorSpec(spec.shape, tf.float32)

    losses = tf.nest.flatten(model.loss)
    outputs = tf.nest.flatten(model.outputs)
    losses = losses * len(outputs) if len(losses) == 1 else losses
    inputs = [bound(tensor) for tensor in model.inputs]
    targets = [target(tensor, loss) for tensor, loss in zip(outputs, losses, strict=True)]
    return inputs[0] if len(inputs) == 1 else inputs, targets[0] if len(targets) == 1 else targets
