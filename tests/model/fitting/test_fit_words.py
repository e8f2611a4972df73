"""Mistakes in what is asked of fit, batch_size and loader: one sentence each, before anything is changed."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import outsize


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(6, 8)


def square(model, batch):
    return model(batch).square().mean()


def fit(*args, budget="1GiB", **settings):
    return outsize.fit(*args, budget=budget, **settings)


MISTAKES = {
    "allow": (lambda m, o, b: fit(m, square, o, b, allow=["exact"]), "allow=.*one of exact"),
    "without as text": (lambda m, o, b: fit(m, square, o, b, without="stream"), r"without=\('stream',\)"),
    "without as nothing": (lambda m, o, b: fit(m, square, o, b, without=None), "without=None"),
    "clip below zero": (lambda m, o, b: fit(m, square, o, b, clip=-1.0), "clip=-1.0 is no norm"),
    "clip as text": (lambda m, o, b: fit(m, square, o, b, clip="1"), "clip='1' is no norm"),
    "clip of another's step": (lambda m, o, b: fit(m, square, o, b, clip=1.0, own_step=True), "you clip between"),
    "scaler": (lambda m, o, b: fit(m, square, o, b, scaler="x"), "GradScaler"),
    "optimizer as text": (lambda m, o, b: fit(m, square, "adam", b), "not str"),
    "optimizer's class": (lambda m, o, b: fit(m, square, torch.optim.AdamW, b), "not AdamW"),
    "a scheduler": (lambda m, o, b: fit(m, square, torch.optim.lr_scheduler.StepLR(o, 1), b), "not StepLR"),
    "a loss without a model": (lambda m, o, b: fit(m, nn.CrossEntropyLoss(), o, b), "failed with TypeError"),
    "a loss that fails": (lambda m, o, b: fit(m, lambda m, b: {}["key"], o, b), "failed with KeyError: 'key'"),
    "a detached loss": (lambda m, o, b: fit(m, lambda m, b: square(m, b).detach(), o, b), "has no gradient"),
    "a loss and outputs": (lambda m, o, b: fit(m, lambda m, b: (square(m, b), m(b)), o, b), r"shape \(3, 4\)\): it must"),
    "a loss and a dict": (lambda m, o, b: fit(m, lambda m, b: (square(m, b), {}), o, b), r"shape \(\), dict\): it must"),
    "a NumPy array": (
        lambda m, o, b: fit(m, lambda m, b: square(m, b["x"]), o, {"x": b, "y": np.zeros(6)}), r"from_numpy\(batch\['y'\]\)",
    ),
    "a sparse batch": (lambda m, o, b: fit(m, lambda m, b: square(m, b.to_dense()), o, b.to_sparse()), "to_dense"),
    "a lazy model": (
        lambda m, o, b: fit(nn.Sequential(nn.LazyLinear(4)), square, o, b), "0.weight has no shape before a first forward pass",
    ),
    "sparse gradients": (
        lambda m, o, b: fit(nn.Sequential(nn.Embedding(9, 4, sparse=True)), square, o, b), "build it with sparse=False",
    ),
    "a device's name": (lambda m, o, b: fit(m, square, o, b, device="gpu0"), "device='gpu0' is no device"),
    "a hosted loss that fails": (lambda m, o, b: fit(m, lambda m, b: {}["key"], o, b, device="cpu"), "KeyError: 'key'"),
    "a hosted detached loss": (lambda m, o, b: fit(m, lambda m, b: square(m, b).detach(), o, b, device="cpu"), "no gradient"),
    "a frozen hosted model": (lambda m, o, b: fit(m.requires_grad_(False), square, o, b, device="cpu"), "nothing to train"),
    "weights": (lambda m, o, b: fit(m, None, None, b, weights=m.state_dict()), "path of a file or folder, not OrderedDict"),
    "backward of answers": (lambda m, o, b: fit(m, None, None, b).backward(b), "fitted for inference"),
    "a size that does not go": (
        lambda m, o, b: outsize.batch_size(m, lambda m, b: square(m, b.view(6, 8)), o, b, budget="1MiB"), "with 1 samples failed",
    ),
    "a batch size as text": (lambda m, o, b: outsize.data_loader(b, "4", budget="1MiB"), "whole number of samples"),
    "an empty dataset": (lambda m, o, b: outsize.data_loader(b[:0], 4, budget="1MiB"), "is empty"),
    "a stream": (lambda m, o, b: outsize.data_loader(iter([b]), 4, budget="1MiB"), "no length"),
    "workers below zero": (lambda m, o, b: outsize.data_loader(b, 4, budget="1MiB", workers=-1), "workers=-1"),
    "num_workers": (lambda m, o, b: outsize.data_loader(b, 4, budget="1MiB", num_workers=1), "takes workers="),
}  # fmt: skip


@pytest.mark.parametrize(("ask", "said"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_sentence_and_changes_nothing(ask, said):
    model, optimizer, batch = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(outsize.InputError, match=said) as error:
        ask(model, optimizer, batch)
    assert "\n" not in str(error.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, b: m(b.view(6, 8)).square().mean(),
        lambda m, b: m(b).square().mean(1).topk(5).values.mean(),
        lambda m, b: functional.mse_loss(m(b), torch.ones(6, 4)),
    ],
)
def test_a_loss_that_only_takes_the_whole_batch_is_fitted_without_slices(loss):
    model, optimizer, batch = make()
    expected = torch.autograd.grad(loss(model, batch), list(model.parameters()))
    fitted = outsize.fit(model, loss, optimizer, batch, budget="1GiB", own_step=True)
    assert any("of 3 of 6 samples fails" in note for note in fitted.plan.notes)
    fitted.backward(batch)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))
    fitted.undo()


def test_a_loss_that_writes_its_value_into_a_text_is_traced():
    model, optimizer, batch = make()

    def loss(model, batch):
        value = square(model, batch)
        assert f"{value:.3f} {value}"
        return value

    assert outsize.fit(model, loss, optimizer, batch, budget="1GiB", dry_run=True).plan.peak()


def test_a_count_of_nothing_gives_no_number_as_without_us():
    model, optimizer, batch = make()
    fitted = outsize.fit(model, lambda m, b: (m(b).square().sum(), 0), optimizer, batch, budget="1GiB", own_step=True)
    assert torch.isinf(fitted.backward(batch))
    fitted.undo()


def test_a_budget_without_a_plan_says_why_the_batch_is_not_sliced():
    model, optimizer, batch = make()
    with pytest.raises(
        outsize.BudgetError,
        match="smallest that has one; the batch is not sliced: the loss of the first samples is nan",
    ):
        fit(model, lambda m, b: square(m, b) * float("nan"), optimizer, batch, budget=1000)
