"""Long sequences of single operators: runs of them are computed again, cut where little is handed on."""

import copy

import networks as nets
import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import outsize
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.learn.findings import look
from outsize.model.fitting.move.stores import NoStore
from outsize.model.fitting.run.resident import open_resident
from outsize.model.fitting.run.runner import Work
from outsize.model.fitting.run.sequential_runs import find_spans, is_span


def pictures(widths=(8, 16, 16), size=16, rows=6):
    """A VGG-like sequence with BatchNorm, in-place activations and dropout, which no batch may be cut for."""
    layers, before = [], 3
    for width in widths:
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        before = width
    head = nn.Sequential(
        nn.Flatten(),
        nn.Linear(before * (size // 2 ** len(widths)) ** 2, 32),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(32, 5),
    )
    batch = {"x": torch.randn(rows, 3, size, size), "y": torch.randint(0, 5, (rows,))}
    return nn.ModuleDict({"features": nn.Sequential(*layers), "head": head}), batch


def picture_loss(model, batch):
    return functional.cross_entropy(model["head"](model["features"](batch["x"])), batch["y"])


def tower(rows=16):
    """Many layers of one width, as a single sequence."""
    layers = [nn.Conv2d(3, 8, 3, padding=1)]
    for _ in range(9):
        layers += [nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(8, 5))
    batch = {"x": torch.randn(rows, 3, 24, 24), "y": torch.randint(0, 5, (rows,))}
    return nn.ModuleDict({"features": nn.Sequential(*layers), "head": head}), batch


def test_a_sequence_that_cannot_be_sliced_computes_spans_again_and_trains_the_same():
    torch.manual_seed(0)
    model, batch = tower()
    twin = copy.deepcopy(model)
    ours, plain = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, twin))
    peak = outsize.fit(model, picture_loss, ours, batch, budget="1GiB", dry_run=True).plan.plain
    fitted = outsize.fit(model, picture_loss, ours, batch, budget=int(0.6 * peak), without=("recipes", "tensors_away"))
    assert any(is_span(name) for name in fitted.choice.checkpoint) and fitted.choice.slices == 1
    for _ in range(3):
        torch.manual_seed(1)
        got = fitted.step(batch)
        torch.manual_seed(1)
        expected = nets.plain_step(twin, picture_loss, plain, batch)
        assert torch.equal(got, expected)
    assert fitted.measured <= fitted.plan.peak(fitted.plan.budgets[0].pool) <= int(0.6 * peak)
    for (name, a), b in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert "forward" not in model["features"].__dict__


@examples(15)
@given(widths=st.lists(st.integers(1, 9), min_size=1, max_size=3), chosen=st.data())
def test_any_spans_give_the_plain_gradients(widths, chosen):
    torch.manual_seed(0)
    model, batch = pictures(tuple(widths))
    names = [name for name, module in model.named_modules() if not list(module.children())]
    ran = {name: 1 for name, _ in model.named_modules()}
    sizes = {name: chosen.draw(st.integers(0, 9)) for name in names}
    gives = {name: chosen.draw(st.integers(0, 9)) for name in names}
    spans = find_spans(model, sizes, gives, ran, set(names), chosen.draw(st.integers(0, 30)))
    for children in spans.values():
        assert len(children) > 1
        after = names.index(children[-1]) + 1
        assert after == len(names) or not getattr(model.get_submodule(names[after]), "inplace", False)
    work = Work(model=model, loss=picture_loss, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    work.written = look(work, batch).written
    twin = copy.deepcopy(model)
    some = tuple(name for name in spans if chosen.draw(st.booleans()))
    torch.manual_seed(1)
    value = open_resident(work, Choice(checkpoint=some), NoStore()).backward(batch)
    torch.manual_seed(1)
    expected = picture_loss(twin, batch)
    expected.backward()
    assert torch.equal(value, expected.detach())
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    for a, b in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["blocks", "shared", "own forward"])
def test_sequences_of_blocks_shared_ones_and_those_with_a_forward_of_their_own_are_not_cut(kind):
    class Own(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + 1

    layers = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)]
    model = {
        "blocks": nn.Sequential(nn.Sequential(*layers), nn.Linear(4, 4)),
        "shared": nn.Sequential(layers[0], nn.ReLU(), layers[0]),
        "own forward": Own(*layers),
    }[kind]
    names = {name for name, module in model.named_modules() if not list(module.children())}
    ran = {name: 1 for name, _ in model.named_modules(remove_duplicate=False)}
    assert find_spans(model, dict.fromkeys(ran, 5), dict.fromkeys(ran, 1), ran, names - {"0.0", "0.1", "0.2"}, 1) == {}
