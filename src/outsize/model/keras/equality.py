"""Whether a step in slices gives the gradient of the whole batch: tried on a few samples, before anything is changed.

In: the model and the user's batch. Out: the rules that hold, or a sentence that says why slices would not be the same. What the
trial writes (statistics, seeds, metrics) is put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from outsize.core.errors import InputError
from outsize.model.keras import port
from outsize.model.keras.sliced_step import Rules, SlicedStep

SAMPLES = 5
"""Cut into 3 and 2: slices of different sizes."""
CLOSE = {"float32": 1e-4, "float64": 1e-9}
"""Part of the largest gradient by which others may differ; lower precision: 2 %."""


class Learned(NamedTuple):
    """What was found out about slices."""

    rules: Rules
    why_not: str
    """Why slices are not used; empty where they may be."""
    notes: tuple[str, ...] = ()


def learn(model: Any, data: Any, allow: str) -> Learned:
    """Compares gradients of a few samples, whole and in slices."""
    if type(model).train_step is not port.keras().Model.train_step:
        return Learned(Rules(), "the model has a train_step of its own, whose losses cannot be told apart")
    few = _few(data)
    with state_kept(model):
        random = _is_random(model, few)
        if random and allow == "exact":
            return Learned(
                Rules(), "random numbers are drawn (dropout): slices draw others; allow='distribution' permits that"
            )
        with _without_dropout(model) if random else contextlib.nullcontext():
            whole = _whole(model, few)
            for added in ("mean", "sum"):
                rules = Rules(added=added)
                if _is_equal(whole, _sliced(model, few, rules), model):
                    return Learned(rules, "", ("dropout masks are others than in the plain step",) if random else ())
    return Learned(Rules(), _culprit(model))


def is_same_again(model: Any, data: Any, again: Any) -> bool:
    """True where segments that are computed again give the plain gradient of a few samples."""
    few = _few(data)
    with state_kept(model):
        whole = _whole(model, few)
        with again.in_use():
            return _is_equal(whole, _whole(model, few), model)


def _few(data: Any) -> Any:
    tf = port.tensorflow()
    if len({int(leaf.shape[0]) for leaf in port.flatten(data) if len(leaf.shape)}) != 1:
        raise InputError("the arrays of the batch have different numbers of samples along their first axis")

    def cut(leaf: Any) -> Any:
        if leaf is None:
            return None
        return tf.convert_to_tensor(leaf[:SAMPLES] if len(leaf.shape) else leaf)

    return tf.nest.map_structure(cut, data)


@contextlib.contextmanager
def state_kept(model: Any) -> Iterator[None]:
    """Variables that are no weights have their values again afterwards."""
    kept = [
        (variable, np.asarray(variable.value).copy())
        for variable in (*model.non_trainable_variables, *model.metrics_variables)
    ]
    try:
        yield
    finally:
        for variable, value in kept:
            variable.assign(value)


def _is_random(model: Any, data: Any) -> bool:
    """True where a forward pass moves the state of a generator."""
    x, _, _ = port.keras().utils.unpack_x_y_sample_weight(data)
    seeds = [variable for variable in model.non_trainable_variables if "seed" in variable.path]
    before = [np.asarray(variable.value).copy() for variable in seeds]
    model(x, training=True) if model._call_has_training_arg else model(x)
    return any(not np.array_equal(old, np.asarray(new.value)) for old, new in zip(before, seeds, strict=True))


@contextlib.contextmanager
def _without_dropout(model: Any) -> Iterator[None]:
    layers = [layer for layer in model._flatten_layers() if isinstance(getattr(layer, "rate", None), float)]
    rates = [layer.rate for layer in layers]
    for layer in layers:
        layer.rate = 0
    try:
        yield
    finally:
        for layer, rate in zip(layers, rates, strict=True):
            layer.rate = rate


def _whole(model: Any, data: Any) -> list[Any]:
    """The plain gradient, as Keras computes it."""
    tf = port.tensorflow()
    x, y, sample_weight = port.keras().utils.unpack_x_y_sample_weight(data)

    def gradient() -> list[Any]:
        with tf.GradientTape() as tape:
            y_pred = model(x, training=True) if model._call_has_training_arg else model(x)
            loss = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
        return [_array(each) for each in tape.gradient(loss, model.trainable_weights)]

    with state_kept(model):
        return gradient()


def _sliced(model: Any, data: Any, rules: Rules) -> list[Any]:
    rows = -(-int(port.flatten(data)[0].shape[0]) // 2)
    with state_kept(model):
        return [_array(each) for each in SlicedStep(model, rows, rules).sum_up(data).gradients]


def _array(gradient: Any) -> Any:
    return None if gradient is None else np.asarray(port.tensorflow().convert_to_tensor(gradient)).astype("float64")


def _is_equal(whole: list[Any], sliced: list[Any], model: Any) -> bool:
    close = max(CLOSE.get(str(layer.compute_dtype), 0.02) for layer in model._flatten_layers())
    for one, other in zip(whole, sliced, strict=True):
        if (one is None) != (other is None):
            return False
        if (
            one is not None
            and not np.max(np.abs(one - other), initial=0.0) <= close * np.max(np.abs(one), initial=0.0) + 1e-7
        ):
            return False
    return True


def _culprit(model: Any) -> str:
    """What mixes samples, by name where it is known."""
    names = [
        layer.name
        for layer in model._flatten_layers()
        if "BatchNormalization" in type(layer).__name__ and layer.trainable
    ]
    if names:
        more = "" if len(names) == 1 else f" and {len(names) - 1} more"
        return f"{names[0]}{more} normalises over the batch (BatchNormalization): a slice has other statistics"
    return "the loss or a layer mixes samples: the gradient of slices is not that of the whole batch"
