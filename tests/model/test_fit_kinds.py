"""Kinds of networks whose parts a planner could overlook, and whose gradients a comparison could misjudge."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import outsize
from outsize.model.fitting.check import look
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.equality import FAR_BELOW, TINY, compare, find_rounding
from outsize.model.fitting.runner import Work
from outsize.model.fitting.stores import open_store

WAYS = ("slices", "checkpoint", "offload", "in_backward", "state_away", "gradients_away", "stream", "chunks")


def only(*names):
    return tuple(name for name in WAYS if name not in names)


def plain_of(model, loss, batch, **settings):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return outsize.fit(model, loss, optimizer, batch, budget="1GiB", dry_run=True, **settings).plan.plain


def make_normed():
    """Convolutions whose biases change nothing: what they add, the norm behind them takes away."""
    layers = [nn.Conv2d(3, 8, 3, padding=1)]
    for _ in range(6):
        layers += [nn.InstanceNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
    return nn.Sequential(*layers), lambda model, images: model(images).square().mean(), torch.randn(6, 3, 24, 24)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_that_are_all_rounding_do_not_forbid_slices(seed):
    torch.manual_seed(seed)
    model, loss, batch = make_normed()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plain = plain_of(model, loss, batch)
    fitted = outsize.fit(model, loss, optimizer, batch, budget=plain // 2, without=only("slices"))
    assert fitted.choice.slices > 1
    fitted.undo()


def test_a_wrong_gradient_is_told_from_rounding_however_small_it_is(tmp_path):
    torch.manual_seed(0)
    model, loss, batch = make_normed()
    model[0].small = nn.Parameter(torch.ones(()))

    def wrong(model, images):  # in slices of fewer than six samples the small parameter has another gradient
        return loss(model, images) + 3e-6 * model[0].small * (1.0 if len(images) == 6 else 1.01)

    work = Work(model=model, loss=wrong, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    work.normaliser = look(work, batch).normaliser
    store = open_store(torch.device("cpu"), str(tmp_path))
    rounding = find_rounding(work, batch, store)
    found = compare(work, Choice(slices=3), batch, store, rounding)
    store.close()
    assert found[1] == "0.small"
    assert 1e-4 < found[0] <= TINY / FAR_BELOW


class Attention(nn.Module):
    """Attention whose children never run, and a module that does most of its work itself."""

    def __init__(self):
        super().__init__()
        self.first = nn.MultiheadAttention(16, 4, 0.2, batch_first=True)
        self.second = Own()
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.second(self.first(x, x, x)[0]).mean(1))


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        x = self.norm(x)
        for _ in range(8):
            x = functional.dropout(torch.tanh(x), 0.1, self.training)
        return self.out(x)


@pytest.mark.parametrize(("way", "names"), [("checkpoint", {"first", "second"}), ("offload", {"first"})])
def test_a_module_that_keeps_what_its_children_do_not_is_treated_by_itself(way, names):
    torch.manual_seed(0)
    model = Attention()
    batch = {"x": torch.randn(35, 12, 16), "y": torch.randint(0, 3, (35,))}

    def loss(model, batch):
        return functional.cross_entropy(model(batch["x"]), batch["y"])

    plain = plain_of(model, loss, batch)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(outsize.BudgetError) as refused:
        outsize.fit(model, loss, optimizer, batch, budget=1, without=only(way))
    smallest = refused.value.smallest
    assert smallest < 0.8 * plain
    fitted = outsize.fit(model, loss, optimizer, batch, budget=smallest, without=only(way))
    assert names <= set(getattr(fitted.choice, way))
    fitted.step(batch)
    assert fitted.measured <= smallest
    fitted.undo()


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(16, 16), nn.ReLU())))
        self.head = nn.Linear(32, 3)

    def forward(self, left, right):
        return self.head(torch.cat([self.encoder(left), self.encoder(right)], -1))


def test_where_remedies_take_more_than_they_save_the_plain_step_is_the_smallest():
    torch.manual_seed(0)
    model, batch = Pair(), (torch.randn(7, 16), torch.randn(7, 16), torch.randint(0, 3, (7,)))

    def loss(model, batch):
        return functional.cross_entropy(model(*batch[:2]), batch[2])

    plain = plain_of(model, loss, batch, own_step=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(outsize.BudgetError) as refused:
        outsize.fit(model, loss, optimizer, batch, budget=1, own_step=True)
    assert refused.value.smallest <= plain
    outsize.fit(model, loss, optimizer, batch, budget=refused.value.smallest, own_step=True).undo()
