"""Losses whose number of terms depends on the batch's contents: what the first samples do not show is found all the same."""

import networks as nets
import pytest
import torch
from torch import nn
from torch.nn import functional

import outsize
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.learn.findings import look
from outsize.model.fitting.move.stores import NoStore
from outsize.model.fitting.run.resident import open_resident
from outsize.model.fitting.run.runner import Work


def each(model, batch):
    return functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def hidden(batch):
    return batch["y"].masked_fill(batch["y"] == 3, -100)


def hidden_in_place(batch):
    labels = batch["y"].clone()
    labels[1:][batch["y"][1:] == 3] = -100
    return labels


def active(model, batch):
    gone = functional.relu(model(batch["x"]) + 1.0 - 2.0 * (batch["mask"][:, None] == 0))
    return gone[gone > 0].mean()


COUNTED = {
    "a mask's sum": lambda m, b: (each(m, b) * b["mask"]).sum() / b["mask"].sum(),
    "a mask's sum as a number": lambda m, b: (each(m, b) * b["mask"]).sum() / b["mask"].sum().item(),
    "a mask's sum the other way round": lambda m, b: (each(m, b) * b["mask"]).sum() * (1.0 / b["mask"].sum().clamp(min=1)),
    "a mean of picked elements": lambda m, b: each(m, b)[b["mask"] > 0].mean(),
    "a mean of picked rows": lambda m, b: functional.cross_entropy(m(b["x"])[b["mask"] > 0], b["y"][b["mask"] > 0]),
    "picked elements and their number": lambda m, b: (lambda e: e.sum() / len(e))(each(m, b)[b["mask"] > 0]),
    "a mean of active elements": active,
    "a sum over labels above zero": lambda m, b: each(m, b).sum() / (b["y"] != 3).sum(),
    "a mean of numbers": lambda m, b: torch.where(b["mask"] > 0, each(m, b), torch.nan).nanmean(),
    "labels made in the loss": lambda m, b: functional.cross_entropy(m(b["x"]), hidden(b)),
    "labels changed in the loss": lambda m, b: functional.cross_entropy(m(b["x"]), hidden_in_place(b)),
    "labels and a mask": lambda m, b: functional.cross_entropy(m(b["x"]), b["y"]) + COUNTED["a mask's sum"](m, b),
}  # fmt: skip

PLAIN = {
    "a mean over labels": lambda m, b: functional.cross_entropy(m(b["x"]), b["y"]),
    "smoothed labels": lambda m, b: functional.cross_entropy(m(b["x"]), b["y"], label_smoothing=0.1),
    "labels that are moved": lambda m, b: functional.cross_entropy(
        m(b["x"]), functional.pad(b["y"][:, None].repeat(1, 2), (0, 1), value=-100)[:, :2].T.reshape(2, -1)[1]
    ),
    "labels of fewer bits": lambda m, b: functional.cross_entropy(m(b["x"]), b["short"].long()),
    "a mean in which a mask weighs": lambda m, b: (each(m, b) * b["mask"]).mean(),
    "a mean for each sample": lambda m, b: (m(b["x"]) * b["wide"]).sum(1).div(b["wide"].sum(1)).square().mean(),
    "an accuracy beside it": lambda m, b: each(m, b).mean() + 0 * (m(b["x"]).argmax(1) == b["y"]).float().mean().item(),
}  # fmt: skip


def make():
    torch.manual_seed(0)
    labels = torch.tensor([0, 1, 2, 1, 3, 3, 3, 0, 3, 2])
    batch = {
        "x": torch.randn(10, 8), "y": labels, "short": labels.to(torch.int16), "mask": (labels != 3).float(),
        "wide": torch.rand(10, 4).round() + 0.5,
    }  # fmt: skip
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return model, batch


@pytest.mark.parametrize("loss", COUNTED.values(), ids=COUNTED.keys())
def test_a_loss_that_counts_what_the_first_samples_all_have_is_not_cut(loss):
    model, batch = make()
    found = look(Work(model=model, loss=loss, optimizer=torch.optim.SGD(model.parameters(), 0.1)), batch)
    assert found.normaliser is None
    assert "(total, count)" in found.why_not


@pytest.mark.parametrize("loss", PLAIN.values(), ids=PLAIN.keys())
def test_a_loss_whose_terms_are_known_beforehand_is_cut_and_its_gradients_are_the_plain_ones(loss):
    model, batch = make()
    batch["y"][5] = batch["short"][5] = -100
    if loss in (PLAIN["a mean in which a mask weighs"], PLAIN["an accuracy beside it"]):
        batch["y"][5] = 3
    work = Work(model=model, loss=loss, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    work.normaliser = look(work, batch).normaliser
    assert work.normaliser is not None
    value = open_resident(work, Choice(slices=4), NoStore()).backward(batch)
    ours = [p.grad for p in model.parameters()]
    model.zero_grad()
    expected = loss(model, batch)
    expected.backward()
    assert torch.allclose(value, expected.detach(), rtol=1e-5)
    assert nets.worst_difference(ours, [p.grad for p in model.parameters()]) < 1e-5


@pytest.mark.parametrize("kept", [2, 3])
def test_a_loss_that_fails_on_a_slice_of_few_samples_is_not_cut(kept):
    model, batch = make()
    work = Work(model=model, loss=lambda m, b: each(m, b).topk(kept).values.mean(), optimizer=None)
    found = look(work, batch)
    assert found.normaliser is None and "fails with RuntimeError" in found.why_not


def test_numbers_that_no_cross_entropy_counts_are_left_as_they_are():
    model, batch = make()
    seen = []

    def loss(model, batch):
        seen.append(int(batch["y"].min()))
        return (model(batch["x"]) * batch["y"][:, None]).square().mean()

    assert look(Work(model=model, loss=loss, optimizer=None), batch).normaliser.rule == "samples"
    assert min(seen) >= 0


def two_means(model, batch):
    found = model(batch["x"])
    return functional.cross_entropy(found, batch["y"]) + functional.cross_entropy(found.roll(1, 1), batch["second"])


def test_means_over_several_labels_are_cut_while_all_of_them_count():
    model, batch = make()
    batch["second"] = batch["y"].flip(0)
    work = Work(model=model, loss=two_means, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    work.normaliser = look(work, batch).normaliser
    assert work.normaliser is not None
    runner = open_resident(work, Choice(slices=4), NoStore())
    runner.backward(batch)
    ours = [p.grad for p in model.parameters()]
    model.zero_grad()
    two_means(model, batch).backward()
    assert nets.worst_difference(ours, [p.grad for p in model.parameters()]) < 1e-5
    batch["second"][7] = -100
    before = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(outsize.InputError, match=r"batch\['second'\] that are not -100.*without=\('slices',\)"):
        runner.backward(batch)
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), before, strict=True))
    found = look(work, batch)
    assert found.normaliser is None
    assert "(total, count)" in found.why_not


def test_a_small_term_beside_a_mean_over_labels_forbids_slices_where_labels_are_left_out_later():
    model, batch = make()
    batch["y"][5] = -100

    def loss(model, batch):
        found = model(batch["x"])
        return functional.cross_entropy(found, batch["y"]) + 1e-3 * found.square().mean()

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ways = (
        "checkpoint",
        "offload",
        "recipes",
        "tensors_away",
        "in_backward",
        "state_away",
        "gradients_away",
        "stream",
        "chunks",
    )
    plain = outsize.fit(model, loss, optimizer, batch, budget="1GiB", dry_run=True, own_step=True).plan.plain
    with pytest.raises(outsize.BudgetError) as refused:
        outsize.fit(model, loss, optimizer, batch, budget=plain - 1, without=ways, own_step=True)
    assert refused.value.smallest == plain
