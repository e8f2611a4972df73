"""Healing: a few steps of training through `fit`, which lower the loss and keep the bytes."""

import pytest
import small_networks
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

import outsize
from outsize.compression.healing import Healing
from outsize.compression.method import Subject
from outsize.compression.overlap import separate
from outsize.compression.weights import count_bytes
from outsize.core.errors import InputError


def test_healing_lowers_the_loss_and_keeps_the_bytes():
    model, loss, data = small_networks.tokens(25)
    training = [torch.randint(0, small_networks.VOCABULARY, (8, 8)) for _ in range(10)]
    small = outsize.shrink(
        model, data, loss=loss, to="14%", within=1e6, heal=15, training=training, methods=["int4", "low-rank"],
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-3),
    )  # fmt: skip
    chosen = small.plan.chosen
    assert chosen.healed < chosen.loss
    assert count_bytes(small.model) == chosen.bytes <= small.plan.target
    assert small.model.head.weight_codes is small.model.embedding.weight_codes
    assert "healed from" in str(small.plan)


def test_healing_leaves_the_users_model_alone():
    model, loss, data = small_networks.pictures(2)
    before = [tensor.clone() for tensor in model.state_dict().values()]
    outsize.shrink(model, data, loss=loss, to="40%", within=1e6, heal=2, training=data, methods=["int8", "tucker"])
    assert all(torch.equal(one, two) for one, two in zip(before, model.state_dict().values(), strict=True))


def test_a_healing_that_does_harm_is_not_used():
    model, loss, data = small_networks.tokens(60)
    small = outsize.shrink(
        model, data, loss=loss, to="30%", within=1e6, heal=2, training=data, methods=["int8"],
        optimizer=lambda parameters: torch.optim.SGD(parameters, 1e3),
    )  # fmt: skip
    assert small.plan.chosen.healed is None and "healed from" not in str(small.plan)
    assert small.plan.chosen.loss < 2 * small.plan.loss


@pytest.mark.parametrize("copies", [False, True])
def test_a_healing_that_learns_the_data_by_heart_is_not_used(copies):
    """The answers are drawn by lot: nothing can be learned from them that helps elsewhere."""
    torch.manual_seed(0)
    answers = [(torch.randn(8, 16), torch.randint(0, 4, (8,))) for _ in range(40)]
    data, fresh = answers[:20], answers[20:]
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    asked = []

    def loss(model, batch):
        asked.append(model.training)
        return small_networks.picture_loss(model, batch)

    training = [tuple(tensor.clone() for tensor in batch) for batch in data] if copies else data
    small = outsize.shrink(
        model, data, loss=loss, to="50%", within=0.05, methods=["bf16", "int8"], heal=200, training=training,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-2),
    )  # fmt: skip
    assert any(asked) and small.plan.chosen.healed is None
    assert small.plan.batches == 10
    assert small.plan.notes[0].startswith(
        "20 batches are in training and in data: 10 are left out of the training, and"
    )

    def mean(model):
        with torch.no_grad():
            return sum(float(small_networks.picture_loss(model, batch)) for batch in fresh) / len(fresh)

    assert mean(small.model) == pytest.approx(mean(model), rel=0.01)


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=12), st.lists(st.integers(0, 30), min_size=1), st.integers(1, 40)
)
@examples(100)
def test_no_batch_is_trained_on_and_measured_on(data, training, steps):
    subject = Subject(model=None, batches=[torch.tensor([one]) for one in data], loss=max)
    healing = Healing(
        steps=steps, batches=[torch.tensor([one]) for one in training], seen=[], optimizer=None, budget=None
    )
    if set(data) <= set(training[: steps + len(data)]) and len(set(training[: steps + len(data)])) == 1:
        with pytest.raises(InputError, match="give other batches"):
            separate(subject, healing)
        return
    judged, parted, notes = separate(subject, healing)
    used = [int(batch) for batch, _ in zip(parted.walk(), range(steps), strict=False)]
    measured = {int(batch) for batch in judged.batches}
    assert used and measured and not measured & set(used)
    assert bool(notes) == bool(set(data) & set(training[: steps + len(data)]))
    assert notes or (judged is subject and parted is healing)
