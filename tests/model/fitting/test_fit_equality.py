"""Gradients of the plain and the fitted step are compared as they come, and nothing wrong passes."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from outsize.model.fitting.choice import Choice
from outsize.model.fitting.learn import gradients_equal as equality
from outsize.model.fitting.learn.gradients_equal import Collect, compare
from outsize.model.fitting.move.stores import DiskStore
from outsize.model.fitting.run.runner import Work


class Shared(nn.Module):
    """One layer in two parts that are run again by themselves, so that its gradient comes twice."""

    def __init__(self):
        super().__init__()
        self.first, self.both, self.unused = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda x: self.both(x).tanh(), x, use_reentrant=True)
        return x


@pytest.fixture
def store(tmp_path):
    store = DiskStore(str(tmp_path))
    yield store
    store.close()


def work_of(model):
    return Work(model=model, loss=lambda m, x: m(x).pow(2).mean(), optimizer=torch.optim.SGD(model.parameters(), 0.1))


def gradient_bytes(model):
    return sum(p.numel() * p.element_size() for p in model.parameters())


def test_only_the_plain_gradients_wait_elsewhere(store):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    assert compare(work_of(model), Choice(checkpoint=("0", "2")), torch.randn(3, 16), store) == (0.0, "")
    assert store.peak == gradient_bytes(model)
    assert compare(work_of(model), Choice(slices=3), torch.randn(3, 16), store)[0] < 1e-5
    assert store.peak == 2 * gradient_bytes(model)
    assert store.held == 0


def test_a_gradient_that_comes_in_two_parts_is_taken_in_two_parts(store):
    model = Shared()
    assert compare(work_of(model), Choice(checkpoint=("first",)), torch.randn(3, 16), store)[0] < 1e-6
    assert compare(work_of(model), Choice(slices=3), torch.randn(3, 16), store)[0] < 1e-5


@pytest.mark.parametrize("what", ["scaled", "missing", "more", "no number"])
def test_another_gradient_is_found(store, monkeypatch, what):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    wrong = model[0].weight
    taken = Collect.accumulated

    def accumulated(self, parameter, holder):
        fitted = self.other is not None
        if fitted and parameter is wrong and what == "missing":
            parameter.grad = None
            return
        if fitted and parameter is wrong:
            parameter.grad.mul_(float("nan") if what == "no number" else 1.01)
        if not fitted and parameter is wrong and what == "more":
            parameter.grad = None
            return
        taken(self, parameter, holder)

    monkeypatch.setattr(Collect, "accumulated", accumulated)
    worst, name = compare(work_of(model), Choice(checkpoint=("0",)), torch.randn(3, 16), store)
    assert name == "0.weight"
    assert {"scaled": abs(worst - 0.01) < 1e-4, "no number": worst != worst}.get(what, worst == float("inf"))


def test_where_two_gradients_have_no_room_both_wait_elsewhere(store, monkeypatch):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    ways = []
    real = equality._differences

    def differences(*given, at_once):
        ways.append(at_once)
        if at_once:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*given, at_once=at_once)

    monkeypatch.setattr(equality, "_differences", differences)
    assert compare(work_of(model), Choice(checkpoint=("0",)), torch.randn(3, 16), store) == (0.0, "")
    assert ways == [True, False]
