"""Whose step it is, found without importing or calling anything."""

import dataclasses
import functools
import importlib.util
import sys
import types

import pytest
import torch

import outsize
from outsize.model.frameworks import framework_of


def stands_for(package):
    """A type of another framework, as far as its place goes."""
    return type("Array", (), {"__module__": f"{package}.arrays"})


JaxArray, KerasModel = stands_for("jaxlib"), stands_for("keras")
jax_names = types.ModuleType("jax.numpy")


def loss_of_torch(model, batch):
    return torch.relu(model(batch))


def loss_of_jax(weights, batch):
    return jax_names.dot(weights, batch)


def calls_it(weights, batch):
    return loss_of_jax(weights, batch)


def imports_inside():
    import tensorflow  # noqa: F401


def names_two(weights):
    return jax_names.sum(torch.ones(2))


@dataclasses.dataclass
class State:
    weights: object


class Trainer:
    def __init__(self):
        self.rate = 1.0

    def __call__(self, batch):
        return jax_names.sum(batch)

    def step(self, batch):
        return jax_names.sum(batch)


@pytest.mark.parametrize(
    ("given", "framework"),
    [
        ((), "torch"),
        ((lambda: 1,), "torch"),
        ((lambda: types.ModuleType("x"),), "torch"),
        ((loss_of_torch,), "torch"),
        ((loss_of_jax,), "jax"),
        ((calls_it,), "jax"),
        ((lambda: calls_it(1, 2),), "jax"),
        ((functools.partial(loss_of_jax, 1),), "jax"),
        ((imports_inside,), "keras"),
        ((names_two,), "torch"),
        ((names_two, {"weights": [JaxArray()]}), "jax"),
        ((None, State(JaxArray())), "jax"),
        ((KerasModel(), None, None, 3), "keras"),
        ((torch.nn.Linear(2, 2), loss_of_jax), "torch"),
        ((Trainer(),), "jax"),
        ((Trainer().step,), "jax"),
    ],
)  # fmt: skip
def test_objects_decide_then_what_functions_name(given, framework):
    assert framework_of(*given) == framework


def test_a_function_that_calls_itself_and_an_empty_cell_end():
    def step(count):
        return step(count - 1) or later

    assert framework_of(step) == "torch"
    if False:
        later = 1


def test_closures_are_looked_into():
    def make():
        weights_of = loss_of_jax
        return lambda batch: weights_of(1, batch)

    assert framework_of(make()) == "jax"


def uses_jax(x):
    import jax

    return jax.numpy.sum(x)


def test_a_framework_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)  # as if it were not installed
    for call in (lambda: outsize.estimate(uses_jax, 1.0), lambda: outsize.fit({}, uses_jax, None, {})):
        with pytest.raises(outsize.OutsizeError, match=r"outsize\[jax\]") as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is not None, reason="TensorFlow is installed")
def test_tensorflow_is_named_with_its_extra_where_it_is_not_installed():
    with pytest.raises(outsize.OutsizeError, match=r"pip install 'outsize\[tensorflow\]'"):
        outsize.estimate(imports_inside)
    with pytest.raises(outsize.OutsizeError, match="compiled Keras model"):
        outsize.fit(KerasModel(), batch=3)
