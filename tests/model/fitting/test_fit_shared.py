"""Modules that run more than once in a forward pass: weights shared over depth, two views of a batch, a critic on two inputs."""

import networks as nets
import pytest
import torch
from effort import long, points
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import outsize


class Layer(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(functional.gelu(self.up(self.norm(x)))))


class Deep(nn.Module):
    """One layer, several times."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = Layer(), nn.Linear(32, 8)

    def forward(self, x):
        for _ in range(8 if long() else 5):
            x = self.layer(x)
        return self.head(x)


class Views(nn.Module):
    """The same encoder on two views; statistics are those of each."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(*(nn.Sequential(Layer(), nn.BatchNorm1d(32)) for _ in range(4)))

    def forward(self, x, y):
        return self.encoder(x), self.encoder(y)


class Critic(nn.Module):
    """A flat sequence, cut in spans, on what is real and what is made."""

    def __init__(self):
        super().__init__()
        layers = [m for _ in range(8) for m in (nn.Linear(32, 32), nn.Tanh())]
        self.made, self.judge = nn.Linear(32, 32), nn.Sequential(*layers, nn.Linear(32, 1))

    def forward(self, x):
        return self.judge(x).mean() - self.judge(self.made(x)).mean()


def deep_loss(model, batch):
    return functional.cross_entropy(model(batch["x"]), batch["label"])


def views_loss(model, batch):
    a, b = (functional.normalize(v) for v in model(batch["x"], batch["y"]))
    return functional.cross_entropy(a @ b.T / 0.5, torch.arange(len(a)))


def critic_loss(model, batch):
    return model(batch["x"])


CASES = {"deep": (Deep, deep_loss), "views": (Views, views_loss), "critic": (Critic, critic_loss)}


def rows(count=64):
    return {"x": torch.randn(count, 32), "y": torch.randn(count, 32), "label": torch.randint(0, 8, (count,))}


def compare_steps(make, loss, batch, budget, steps=3, **options):
    """Fitted and plain steps from the same start: parameters, buffers and numbers drawn are equal."""
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(0)
    twin = make()
    optimizer, other = (torch.optim.SGD(m.parameters(), 0.01, momentum=0.9) for m in (model, twin))
    fitted = outsize.fit(model, loss, optimizer, batch, budget=budget, **options)
    for step in range(steps):
        torch.manual_seed(step)
        got, after = fitted.step(batch), torch.get_rng_state()
        torch.manual_seed(step)
        assert torch.allclose(got, nets.plain_step(twin, loss, other, batch), rtol=1e-5)
        assert torch.equal(after, torch.get_rng_state())
    assert fitted.measured <= fitted.plan.peak() <= budget
    fitted.undo()
    assert nets.worst_difference(list(model.parameters()), list(twin.parameters())) < 1e-5
    for a, b in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.allclose(a, b)
    return fitted


def plain_peak(make, loss, batch):
    model = make()
    return nets.plain_peak(model, loss, batch, torch.optim.SGD(model.parameters(), 0.01))


@pytest.mark.parametrize(
    ("case", "part"), [("deep", 0.8), ("deep", 0.5), ("views", 0.8), ("views", 0.5), ("critic", 0.75)]
)
def test_modules_that_run_several_times_are_computed_again(case, part):
    make, loss = CASES[case]
    batch = rows(128)
    only = ("slices", "offload", "recipes", "tensors_away", "in_backward", "state_away", "gradients_away", "stream")
    budget = int(part * plain_peak(make, loss, batch))
    fitted = compare_steps(make, loss, batch, budget, without=only)
    assert fitted.choice.checkpoint


@pytest.mark.parametrize("case", CASES)
def test_their_activations_wait_elsewhere(case):
    make, loss = CASES[case]
    batch = rows(128)
    only = ("slices", "checkpoint", "recipes", "tensors_away", "in_backward", "state_away", "gradients_away", "stream")
    budget = int(0.7 * plain_peak(make, loss, batch))
    assert compare_steps(make, loss, batch, budget, without=only).choice.offload


@pytest.mark.parametrize("case", points(sorted(CASES), 1))
def test_the_smallest_budget_that_is_named_works_and_their_weights_are_not_streamed(case):
    make, loss = CASES[case]
    batch = rows(128)
    with pytest.raises(outsize.BudgetError) as caught:
        compare_steps(make, loss, batch, 1000)
    assert caught.value.smallest < 0.6 * plain_peak(make, loss, batch)
    fitted = compare_steps(make, loss, batch, caught.value.smallest)
    shared = {"layer", "encoder", "judge"}
    assert not any(name.partition(".")[0] in shared for name in fitted.choice.stream)


class Checkpointed(nn.Module):
    """The user computes blocks again by themselves."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(6 if long() else 3)), nn.Linear(32, 8)

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


def test_what_the_user_computes_again_is_left_to_them():
    batch = rows(128)
    budget = int(0.8 * plain_peak(Checkpointed, deep_loss, batch))
    if long():  # as little as there can be
        with pytest.raises(outsize.BudgetError) as caught:
            compare_steps(Checkpointed, deep_loss, batch, 1000)
        budget = caught.value.smallest
    fitted = compare_steps(Checkpointed, deep_loss, batch, budget)
    assert not any("layers" in name for name in (*fitted.choice.checkpoint, *fitted.choice.offload))
