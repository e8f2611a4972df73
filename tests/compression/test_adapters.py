"""Adapters beside frozen weights, optimizer state in fewer bits, and the bytes of training they save."""

import copy
import functools

import pytest
import small_networks
import torch

import outsize
from outsize.compression import adapt, load
from outsize.compression.narrow_state import NarrowState
from outsize.compression.training_bytes import count_step
from outsize.compression.weights import count_bytes
from outsize.core.errors import InputError


def wide(width=96, layers=1):
    torch.manual_seed(0)
    inner = [one for _ in range(layers) for one in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    return torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), *inner, torch.nn.Linear(width, 4))


def square_loss(model, batch):
    return (model(batch) - batch[:, :4].cumsum(1)).square().mean()


def held(model, make, steps=2):
    """Weights, gradients and state that are really there after a step."""
    optimizer = make([one for one in model.parameters() if one.requires_grad])
    for _ in range(steps):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    gradients = sum(one.grad.nbytes for one in model.parameters() if one.grad is not None)
    whole = [value for values in getattr(optimizer, "optimizer", optimizer).state.values() for value in values.values()]
    state = getattr(optimizer, "state_bytes", sum(one.nbytes for one in whole))
    return count_bytes(model), gradients, state


@pytest.mark.parametrize("bits", [None, 16, 8, 4])
def test_an_adapted_model_gives_the_same_at_first_and_trains_its_adapters_alone(bits):
    model, x = wide(), torch.randn(5, 8)
    adapted = adapt(model, rank=4, bits=bits)
    rounding = {None: 0, 16: 0.02, 8: 0.03, 4: 0.3}[bits]
    torch.testing.assert_close(adapted(x), model(x), atol=rounding, rtol=0)
    before = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
    optimizer = torch.optim.AdamW([one for one in adapted.parameters() if one.requires_grad], 1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        losses.append(square_loss(adapted, torch.randn(64, 8)))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    changed = {name for name, tensor in adapted.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed and all(".down." in name or ".up." in name for name in changed)
    assert all(
        parameter.requires_grad and parameter.grad is None for parameter in model.parameters()
    )  # yours is as it was


@pytest.mark.parametrize("bits", [0, 8, 4])
def test_the_bytes_of_training_are_those_that_a_step_holds(bits):
    make = functools.partial(torch.optim.AdamW, lr=1e-3)
    narrow = (lambda parameters: NarrowState(make(parameters), bits)) if bits else make
    for model in (wide(), adapt(wide(), rank=4, bits=8)):
        found = count_step(model, make, bits)
        assert (found.weights, found.gradients, found.state) == held(model, narrow)


def test_state_in_fewer_bits_trains_as_well():
    losses = []
    for bits in (0, 8, 4):
        model = wide()
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        optimizer = NarrowState(optimizer, bits) if bits else optimizer
        torch.manual_seed(1)
        for _ in range(60):
            optimizer.zero_grad()
            loss = square_loss(model, torch.randn(64, 8))
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[1] < 1.3 * losses[0] and losses[2] < 2 * losses[0]
    assert len(optimizer.whole().state_dict()["state"]) == 6


def test_shrink_counts_the_bytes_of_training():
    model, data = wide(128, 6), [torch.randn(16, 8) for _ in range(4)]
    small = outsize.shrink(model, data, loss=square_loss, to="75%", of="training", methods=["state8"])
    assert small.plan.of == "training" and small.plan.before == count_step(model, None).total
    optimizer = small.optimizer()
    assert isinstance(optimizer, NarrowState) and optimizer.bits == 8
    assert sum(held(small.model, lambda parameters: optimizer)) < small.plan.chosen.bytes <= 0.75 * small.plan.before
    training = [torch.randn(64, 8) for _ in range(4)]
    healed = outsize.shrink(
        model, data, loss=square_loss, to="75%", of="training", methods=["state8"], within=1.0, heal=4, training=training
    )  # fmt: skip
    assert healed.plan.chosen.healed < healed.plan.loss
    with pytest.raises(InputError, match="no step can train"):
        outsize.shrink(model, data, loss=square_loss, of="training", methods=["int8"])
    with pytest.raises(InputError, match="of='training'"):
        outsize.shrink(model, data, loss=square_loss, methods=["state8"])


def test_shrink_makes_adapters_where_they_are_named_and_files_keep_what_is_frozen(tmp_path):
    model, data = wide(128, 6), [torch.randn(16, 8) for _ in range(4)]
    small = outsize.shrink(model, data, loss=square_loss, to="30%", of="training", methods=["lora"], within=1.0)
    assert small.plan.chosen.parts[0].startswith("lora rank 16, frozen weights in")
    small.save(tmp_path / "small.safetensors")
    again = load(wide(128, 6), tmp_path / "small.safetensors")
    x = torch.randn(3, 8)
    torch.testing.assert_close(again(x), small.model(x))
    assert [one.requires_grad for one in again.parameters()] == [one.requires_grad for one in small.model.parameters()]
    healed = outsize.shrink(
        model, data, loss=square_loss, to="45%", methods=["lora"], within=10.0, heal=10,
        training=[torch.randn(64, 8) for _ in range(10)], optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-2),
    )  # fmt: skip
    assert healed.plan.chosen.healed < healed.plan.chosen.loss


def test_an_adapted_model_is_fitted_into_a_budget_that_the_whole_model_cannot_reach():
    model, batch = wide(512), torch.randn(16, 8)
    small = adapt(model, rank=4, bits=4)
    optimizer = torch.optim.AdamW([one for one in small.parameters() if one.requires_grad])
    fitted = outsize.fit(
        small, square_loss, optimizer, batch, budget="3MiB"
    )  # weights alone were 1 MiB, AdamW's step 4
    fitted.step(batch)
    assert count_step(model, None).total > 3 * 2**20


def test_layers_whose_weights_are_read_by_other_code_are_adapted():
    model, _, data = small_networks.encoder(1)
    adapted = adapt(model, rank=2, bits=8).eval()
    with torch.no_grad():
        torch.testing.assert_close(adapted(data[0]), model.eval()(data[0]), atol=0.1, rtol=0)
    copy.deepcopy(adapted)(data[0])


def test_adapters_of_peft_are_used_where_it_is_installed():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = wide()
    adapted = adapt(model, rank=4, bits=4, peft=True)
    assert any(isinstance(one, peft.tuners.lora.LoraLayer) for one in adapted.modules())
    square_loss(adapted, torch.randn(4, 8)).backward()
    assert all((one.grad is not None) == ("lora_" in name) for name, one in adapted.named_parameters())
    assert set(peft.get_peft_model_state_dict(adapted)) and all(one.requires_grad for one in model.parameters())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rank": 0}, "rank is 0"),
        ({"bits": 3}, "bits is 3"),
        ({"model": 7}, "model is int"),
        ({"model": torch.nn.ReLU()}, "no Linear"),
    ],
)
def test_a_mistake_with_adapters_is_one_sentence(given, words):
    with pytest.raises(InputError, match=words):
        adapt(**{"model": wide()} | given)
