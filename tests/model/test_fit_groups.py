"""Updates of a few parameters at a time, in the backward pass or after it: the bits of the plain optimizer, in few calls."""

import copy

import networks as nets
import pytest
import streams as pretended
import torch
from torch.utils.checkpoint import checkpoint

import outsize
from outsize.model.fitting import update
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.runner import Runner, Work
from outsize.model.fitting.stores import DiskStore, HostStore
from outsize.model.fitting.update import ONE_BY_ONE, bytes_of, room_of

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
CHOICES = [
    Choice(in_backward=True), Choice(in_backward=True, state_away=True), Choice(state_away=True),
    Choice(in_backward=True, state_away=True, checkpoint=BLOCKS, stream=("embed", *BLOCKS, "head")),
    Choice(state_away=True, gradients_away=True, stream=BLOCKS),
]  # fmt: skip


class Odd(nets.Language):
    """Tied weights, a parameter without gradient, one that is not trained, one that the optimizer does not know."""

    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Linear(7, 5)
        self.embed.fixed = torch.nn.Parameter(torch.randn(3), requires_grad=False)
        self.foreign = torch.nn.Parameter(torch.randn(32))

    def forward(self, tokens):
        return super().forward(tokens) + self.foreign.sum() * tokens.unsqueeze(-1)


class Sparse(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Embedding(101, 8, sparse=True) for _ in range(3))
        self.embed, self.head = (torch.nn.Embedding(101, 8, sparse=True) for _ in range(2))

    def forward(self, tokens):
        return sum(part(tokens) for part in (self.embed, *self.blocks, self.head)) @ torch.ones(8, 101)


def known(optimizer, model):
    kind = getattr(torch.optim, optimizer)
    return kind([p for name, p in model.named_parameters() if name != "foreign"])


@pytest.mark.parametrize("optimizer", ONE_BY_ONE)
def test_groups_give_the_bits_of_the_plain_optimizer_in_few_calls(tmp_path, monkeypatch, optimizer):
    for number, choice in enumerate(CHOICES[: -1 if optimizer == "SparseAdam" else None]):
        torch.manual_seed(number)
        model = Sparse() if optimizer == "SparseAdam" else Odd()
        twin = copy.deepcopy(model)
        ours, plain = known(optimizer, model), known(optimizer, twin)
        calls, step = [], ours.step
        ours.step = lambda step=step, calls=calls: calls.append(1) or step()
        queue = pretended.Streams(number, 0.1)
        with pretended.installed(monkeypatch, queue):
            store = HostStore(torch.device("cpu")) if number % 2 else DiskStore(str(tmp_path))
            runner = Runner(Work(model=model, loss=nets.language_loss, optimizer=ours), choice, store)
            for rows in (5, 3, 1):
                batch = nets.make_tokens(rows=rows)
                runner.step(batch)
                twin.zero_grad()
                nets.plain_step(twin, nets.language_loss, plain, batch)
            runner.gather()
            store.close()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True)), choice
        moved = [p for p in model.parameters() if p in ours.state]
        assert all(
            torch.equal(a, plain.state[q][name])
            for p, q in zip(model.parameters(), twin.parameters(), strict=True)
            for name, a in ours.state.get(p, {}).items()
            if isinstance(a, torch.Tensor)
        )
        sizes = [bytes_of(p) for p in moved or model.parameters()]
        assert len(calls) <= 3 * (2 * sum(sizes) // room_of(max(sizes), sum(sizes)) + 2)


@pytest.mark.parametrize("choice", [choice for choice in CHOICES if choice.in_backward])
@pytest.mark.parametrize("cloned", [1, 3000, 2**26])
def test_a_failure_late_in_the_backward_pass_takes_all_groups_back(monkeypatch, choice, cloned):
    monkeypatch.setattr(update, "CLONED", cloned)
    model, batch = nets.Language(), nets.make_tokens(rows=5)
    twin = copy.deepcopy(model)
    ours, plain = (torch.optim.AdamW(m.parameters()) for m in (model, twin))
    with pretended.installed(monkeypatch, pretended.Streams(0, 0.0)):
        store = HostStore(torch.device("cpu"))
        runner = Runner(Work(model=model, loss=nets.language_loss, optimizer=ours), choice, store)
        for late in (None, model.blocks[0].norm.bias, model.embed.weight, None):
            if late is not None:
                handle = late.register_hook(lambda gradient: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    runner.step(batch)
                handle.remove()
                assert runner.update._log and not runner.half_updated
                runner.roll_back()
            runner.step(batch)
            nets.plain_step(twin, nets.language_loss, plain, batch)
        runner.gather()
        store.close()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_gradient_that_nobody_uses_stays_and_adds_up_as_without_us(tmp_path):
    model = Odd()
    twin = copy.deepcopy(model)
    ours, plain = known("SGD", model), known("SGD", twin)
    store = DiskStore(str(tmp_path))
    runner = Runner(Work(model=model, loss=nets.language_loss, optimizer=ours), Choice(in_backward=True), store)
    for rows in (5, 3):
        batch = nets.make_tokens(rows=rows)
        runner.step(batch)
        nets.plain_step(twin, nets.language_loss, plain, batch)
    assert torch.equal(model.foreign.grad, twin.foreign.grad)


class Twofold(torch.nn.Module):
    """A weight whose gradient comes in parts: each nested backward pass completes it."""

    def __init__(self):
        super().__init__()
        self.first, self.shared = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.others = torch.nn.ModuleList(torch.nn.Linear(4, 1) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for other in self.others:
            x = checkpoint(lambda x, other=other: other(self.shared(x)).mean(-1, True) + x, x, use_reentrant=True)
        return x


def test_a_gradient_that_comes_in_parts_is_refused_and_nothing_is_changed(tmp_path):
    model, batch = Twofold(), torch.randn(6, 4)
    twin = copy.deepcopy(model)
    work = Work(model=model, loss=lambda m, b: m(b).square().mean(), optimizer=torch.optim.SGD(model.parameters(), 0.1))
    runner = Runner(work, Choice(in_backward=True), DiskStore(str(tmp_path)))
    with pytest.raises(outsize.InputError, match="complete twice"):
        runner.step(batch)
    runner.roll_back()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
