"""`outsize.shrink`: the size is reached, the loss is what was said, and the user's model is as it was."""

import copy
import json

import pytest
import small_networks
import torch

import outsize
from outsize.compression.evaluation import evaluate
from outsize.compression.method import Subject
from outsize.compression.weights import count_bytes
from outsize.core.answers import parse_answer
from outsize.report import to_json


@pytest.fixture(scope="module", params=["tokens", "pictures"])
def case(request):
    return getattr(small_networks, request.param)()


@pytest.mark.parametrize("to", ["50%", "25%"])
def test_the_size_is_reached_and_the_loss_is_what_the_plan_says(case, to):
    model, loss, data = case
    small = outsize.shrink(model, data, loss=loss, to=to, within=1.0)
    chosen = small.plan.chosen
    assert (
        count_bytes(small.model) == chosen.bytes <= small.plan.target == int(small.plan.before * float(to[:-1]) / 100)
    )
    subject = Subject(model=model, batches=data, loss=loss)
    assert evaluate(small.model, subject).loss == pytest.approx(chosen.loss, rel=1e-5)
    assert chosen.loss <= small.plan.allowed


def test_the_users_model_is_as_it_was(case):
    model, loss, data = case
    before = copy.deepcopy(model.state_dict())
    kinds = [type(module) for module in model.modules()]
    small = outsize.shrink(model, data, loss=loss, to="40%", within=1.0)
    with torch.no_grad():
        for parameter in small.model.parameters():
            if parameter.is_floating_point() and parameter.dtype.itemsize > 1:
                parameter.zero_()
    assert kinds == [type(module) for module in model.modules()]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.training


def test_a_plan_is_read_back_from_json(case):
    model, loss, data = case
    plan = outsize.shrink(model, data, loss=loss, to="50%", dry_run=True)
    assert parse_answer(to_json(plan)) == plan
    assert json.loads(to_json(plan))["fits"] is True
    assert "bf16" in str(plan) and "loss against size" in str(plan)
