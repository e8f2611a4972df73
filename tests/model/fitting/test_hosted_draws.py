"""Hosted steps whose units draw from other generators than torch's: what is computed again draws the same numbers."""

import random

import networks as nets
import pytest
import torch
from hosting import OPTIMIZERS
from test_fit_unseen import Own, draws, from_numpy, from_python, make_wide, rows, seed, wide_loss
from torch import nn

import outsize
from outsize.model.fitting import hosting as verb

SOURCES = {
    "numpy": (lambda: from_numpy, "numpy.random"),
    "python": (lambda: from_python, "Python's random"),
    "own": (Own, "rand"),
}


def fit(model, optimizer, batch):
    """At the smallest budget that has a plan."""
    with pytest.raises(outsize.BudgetError) as error:
        outsize.fit(model, wide_loss, optimizer, batch, device="cpu", budget=1, host="16GiB")
    return outsize.fit(model, wide_loss, optimizer, batch, device="cpu", budget=error.value.smallest, host="16GiB")


def own_states(model):
    return [
        m.chance.generator.get_state().tolist() for m in model.modules() if isinstance(getattr(m, "chance", 0), Own)
    ]


@pytest.mark.parametrize("compared", [True, False])
@pytest.mark.parametrize("name", SOURCES)
def test_hosted_training_with_draws_from_any_generator_is_the_plain_training(monkeypatch, name, compared):
    make, said = SOURCES[name]
    if not compared:
        monkeypatch.setattr(verb, "COMPARED", 0)  # as with a model that is too large for that
    models = []
    for _ in range(2):
        seed(0)
        models.append(make_wide(make))
    (model, twin), batch = models, rows()
    ours, plain = (OPTIMIZERS["SGD"](m.parameters()) for m in models)
    before, states = draws(), own_states(model)
    fitted = fit(model, ours, batch)
    assert draws() == before and own_states(model) == states
    assert any("random numbers are drawn" in note and said in note for note in fitted.plan.notes)
    for number in range(3):
        seed(number)
        got, after = fitted.step(batch), draws()
        seed(number)
        assert torch.allclose(got, nets.plain_step(twin, wide_loss, plain, batch), rtol=1e-6)
        assert draws() == after and own_states(model) == own_states(twin)
    fitted.undo()
    assert nets.worst_difference(list(model.parameters()), list(twin.parameters())) < 1e-5


class Chancy(nn.Module):
    """A unit that saves more or less, by chance."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x):
        for _ in range(random.randint(1, 4)):
            x = torch.tanh(self.layer(x))
        return x


def test_a_unit_that_takes_another_way_by_chance_takes_it_twice():
    models = []
    for _ in range(2):
        seed(0)
        models.append(nn.Sequential(*(Chancy() for _ in range(6)), nn.Linear(32, 8)))
    (model, twin), batch = models, rows()
    ours, plain = (OPTIMIZERS["AdamW"](m.parameters()) for m in models)
    fitted = fit(model, ours, batch)
    for number in range(4):
        seed(number)
        got = fitted.step(batch)
        seed(number)
        assert torch.allclose(got, nets.plain_step(twin, wide_loss, plain, batch), rtol=1e-6)
    fitted.undo()
    assert nets.worst_difference(list(model.parameters()), list(twin.parameters())) < 1e-4


@pytest.mark.parametrize("name", SOURCES)
def test_a_hosted_step_that_fails_before_its_update_draws_the_same_again(name):
    finals = []
    for planted in (False, True):
        seed(0)
        model, batch = make_wide(SOURCES[name][0]), rows()
        optimizer = OPTIMIZERS["SGD"](model.parameters())
        due = []

        def loss(model, batch, due=due):
            out = wide_loss(model, batch)
            if due:
                raise due.pop()
            return out

        fitted = outsize.fit(model, loss, optimizer, batch, device="cpu", budget="8MiB", host="16GiB")
        fitted._tighten = lambda failure: None  # the same plan again
        due += [torch.OutOfMemoryError("CUDA out of memory. (planted)")] if planted else []
        fitted.step(batch)
        assert not due
        fitted.undo()
        finals.append((draws(), own_states(model), [p.detach().clone() for p in model.parameters()]))
    assert finals[0][:2] == finals[1][:2]
    assert all(torch.equal(a, b) for a, b in zip(finals[0][2], finals[1][2], strict=True))


def test_planning_and_rehearsing_an_inference_draws_nothing():
    seed(0)
    model, batch = make_wide(lambda: from_numpy), rows()
    before = draws()
    fitted = outsize.fit(
        model, lambda model, batch: model(batch["x"]), None, batch, device="cpu", budget="1MiB", host="16GiB"
    )
    assert draws() == before
    seed(1)
    got = fitted.infer(batch)
    seed(1)
    assert torch.allclose(got, fitted.undo()(batch["x"]), rtol=1e-6)
