"""Healing: a few steps of training through `fit`, which lower the loss and keep the bytes."""

import small_networks
import torch

import outsize
from outsize.compression.weights import count_bytes


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
