"""Updates of a few parameters at a time, in the backward pass or after it: the bits of the plain optimizer, in few calls."""

import copy

import networks as nets
import pytest
import streams as pretended
import torch
from torch.utils.checkpoint import checkpoint

import outsize
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.stores import DiskStore, HostStore
from outsize.model.fitting.plan.dry_run import Stage
from outsize.model.fitting.run.loss import Normaliser
from outsize.model.fitting.run.resident import open_resident
from outsize.model.fitting.run.runner import Work
from outsize.model.fitting.update import resident_update as update
from outsize.model.fitting.update.optimizer_subset import ONE_BY_ONE, largest_part, room_of, sizeof

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
CHOICES = [
    Choice(in_backward=True), Choice(in_backward=True, state_away=True), Choice(state_away=True),
    Choice(state_away=0.4), Choice(in_backward=True, state_away=0.6),
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
    mine = [p for name, p in model.named_parameters() if name != "foreign"]
    return kind([p for p in mine if p.dim() == 2] if optimizer == "Muon" else mine)


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
            runner = open_resident(Work(model=model, loss=nets.language_loss, optimizer=ours), choice, store)
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
        sizes = [sizeof(p) for p in moved or model.parameters()]
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
        runner = open_resident(Work(model=model, loss=nets.language_loss, optimizer=ours), choice, store)
        for late in (None, model.blocks[0].norm.bias, model.embed.weight, None):
            if late is not None:
                handle = late.register_hook(lambda gradient: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    runner.step(batch)
                handle.remove()
                assert runner.sink._log and not runner.half_updated
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
    runner = open_resident(Work(model=model, loss=nets.language_loss, optimizer=ours), Choice(in_backward=True), store)
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
    runner = open_resident(work, Choice(in_backward=True), DiskStore(str(tmp_path)))
    with pytest.raises(outsize.InputError, match="complete twice"):
        runner.step(batch)
    runner.roll_back()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def state_of(optimizer):
    return [
        v for values in optimizer.state.values() for v in values.values() if isinstance(v, torch.Tensor) and v.dim()
    ]


def test_part_of_the_state_is_elsewhere_that_of_the_largest_parameters_and_comes_home_with_another_plan(tmp_path):
    model, batch = nets.Language(), nets.make_tokens(rows=3)
    twin = copy.deepcopy(model)
    ours, plain = (torch.optim.AdamW(m.parameters()) for m in (model, twin))
    work, store = Work(model=model, loss=nets.language_loss, optimizer=ours), DiskStore(str(tmp_path))
    runner = open_resident(work, Choice(state_away=True), store)
    seen = []
    for part in (1.0, 0.5, 0.2, 0.0, 0.7):
        runner = open_resident(work, Choice(state_away=part), store, evicted=runner.weights.evicted)
        runner.weights.settle(runner.sink)
        runner.step(batch)
        nets.plain_step(twin, nets.language_loss, plain, batch)
        sizes = sorted((sizeof(p) for p in model.parameters()), reverse=True)
        held = sum(2 * sizeof(p) for p in largest_part(list(model.parameters()), part))
        away = sum(v.numel() * v.element_size() for v in state_of(ours) if not v.untyped_storage().nbytes())
        assert part * 2 * sum(sizes) <= held + 1e-9 and held <= 2 * (part * sum(sizes) + sizes[0])
        assert away == store.held == held
        seen.append(away)
    assert seen[0] > seen[1] > seen[2] > seen[3] == 0 < seen[4]
    runner.gather()
    store.close()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(state_of(ours), state_of(plain), strict=True))


def test_as_much_of_the_state_is_elsewhere_as_the_budget_asks_for():
    batch = nets.make_tokens(rows=2, length=4, words=50)
    others = (
        "checkpoint",
        "offload",
        "recipes",
        "tensors_away",
        "in_backward",
        "slices",
        "gradients_away",
        "stream",
        "chunks",
    )
    parts = []
    for share in (1.0, 0.85, 0.7, 0.0):
        model = nets.Language(width=64, words=50)
        optimizer = torch.optim.AdamW(model.parameters())
        state = 2 * sum(map(sizeof, model.parameters()))
        plain = outsize.fit(model, nets.language_loss, optimizer, batch, budget="1GiB", dry_run=True).plan.plain
        budget = plain - int((1 - share) * state * 0.5)
        try:
            fitted = outsize.fit(model, nets.language_loss, optimizer, batch, budget=budget, without=others)
        except outsize.BudgetError as error:
            assert not share and error.smallest > budget
            continue
        for _ in range(2):
            fitted.step(batch)
        pool = fitted.plan.budgets[0].pool
        assert fitted.measured <= fitted.plan.peak(pool) <= budget
        parts.append(fitted.choice.state_away)
        away = sum(v.numel() * v.element_size() for v in state_of(optimizer) if not v.untyped_storage().nbytes())
        assert away == round(fitted.choice.state_away * state)  # what is told is what parameters can be divided into
        fitted.undo()
    assert parts[0] == 0 and sorted(parts) == parts and 0 < parts[1] < 1


def runner_with_state_elsewhere(folder):
    """One that updates in the backward pass, after its first step; and a batch."""
    model, batch = nets.Language(), nets.make_tokens(rows=3)
    work = Work(model=model, loss=nets.language_loss, optimizer=torch.optim.AdamW(model.parameters()))
    runner = open_resident(work, Choice(in_backward=True, state_away=True), DiskStore(str(folder)))
    runner.step(batch)
    return runner, batch


def test_state_that_came_from_elsewhere_is_logged_where_it_came_from(tmp_path):
    """Its bytes cross the link twice, in and out, and not a third time."""
    runner, batch = runner_with_state_elsewhere(tmp_path)
    store, sizes = runner.weights.store, []
    put = store.put
    store.put = lambda data, land=None: sizes.append(data.numel()) or put(data, land)
    runner.step(batch)
    weights = sum(map(sizeof, runner.work.model.parameters()))
    assert sum(sizes) == 3 * weights  # weights to the log, two moments back to where they live
    assert store.held == 2 * weights
    runner.gather()
    store.close()


def test_state_comes_when_the_gradient_is_there_and_not_when_its_group_is_full(tmp_path):
    runner, batch = runner_with_state_elsewhere(tmp_path)
    home, accumulated = [], runner.sink.accumulated

    def listen(parameter, holder):
        accumulated(parameter, holder)
        if runner.sink.waits(parameter):
            home.append(all(v.untyped_storage().nbytes() for v in runner.sink._state([parameter])))

    runner.sink.accumulated = listen
    runner.step(batch)
    assert home and all(home)
    runner.gather()
    runner.weights.store.close()


class Anew(torch.optim.Optimizer):
    """Makes new tensors for its state in every step."""

    one_by_one = True

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            state["mean"] = parameter.grad + 0.9 * state.get("mean", 0.0)
            parameter.sub_(0.01 * state["mean"])


@pytest.mark.parametrize("make", [torch.optim.AdamW, Anew])
@pytest.mark.parametrize("choice", [choice for choice in CHOICES if choice.state_away])
def test_only_state_that_the_optimizer_has_waits_elsewhere_whatever_failed_or_was_replaced(tmp_path, choice, make):
    model, batch, store = nets.Language(), nets.make_tokens(rows=5), DiskStore(str(tmp_path))
    twin = copy.deepcopy(model)
    ours, plain = make(model.parameters()), make(twin.parameters())
    runner = open_resident(Work(model=model, loss=nets.language_loss, optimizer=ours), choice, store)
    for fails in (True, False, True, False):
        if fails:
            handle = model.embed.weight.register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                runner.step(batch)
            handle.remove()
            runner.roll_back()
        else:
            runner.step(batch)
            nets.plain_step(twin, nets.language_loss, plain, batch)
        streamed = [p for p in model.parameters() if runner.weights.streamer and id(p) in runner.weights.streamer.ids]
        away = {id(tensor) for tensor in (*streamed, *runner.sink.state_away())}
        assert {key for storage in runner.weights.evicted._all.values() for key in storage.tensors} == away
        assert store.held == sum(storage.bytes for storage in runner.weights.evicted._all.values())
    runner.gather()
    assert store.held == 0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9)])
@pytest.mark.parametrize("choice", [*CHOICES, Choice(slices=2, state_away=1.0, gradients_away=True, offload=BLOCKS)])
def test_a_plan_says_how_many_bytes_wait_elsewhere_at_most_once_there_is_state(tmp_path, choice, make):
    model, batch, store = nets.Language(width=64), nets.make_tokens(rows=6), DiskStore(str(tmp_path))
    work = Work(model=model, loss=nets.language_loss, optimizer=make(model.parameters()))
    said = Stage(work, batch).project(choice).away
    runner = open_resident(work, choice, store)
    for _ in range(3):
        runner.step(batch)
    assert store.peak == said
    runner.gather()


def summed(model, tokens):
    loss = torch.nn.functional.cross_entropy(
        model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
    )
    return loss, tokens[:, 1:].numel()


@pytest.mark.parametrize("away", [{}, {"state_away": 1.0}, {"state_away": 1.0, "gradients_away": True}])
@pytest.mark.parametrize("slices", [1, 2])
def test_parameters_that_come_later_are_scaled_and_clipped_once_and_their_state_waits_too(tmp_path, slices, away):
    choice = Choice(slices=slices, **away)
    model, batch, store = nets.Language(), nets.make_tokens(rows=4), DiskStore(str(tmp_path))
    twin = copy.deepcopy(model)
    for one in (model, twin):
        one.blocks[2].requires_grad_(False)
    ours, plain = (torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.1, 0.9) for m in (model, twin))
    work = Work(model=model, loss=summed, optimizer=ours, clip=0.1, normaliser=Normaliser(rule="count"))
    runner = open_resident(work, choice, store)
    for number in range(3):
        if number == 1:
            for one, optimizer in ((model, ours), (twin, plain)):
                optimizer.add_param_group({"params": list(one.blocks[2].requires_grad_().parameters())})
        runner.step(batch)
        plain.zero_grad()
        total, count = summed(twin, batch)
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        plain.step()
    assert store.held == (sum(map(sizeof, model.parameters())) if choice.state_away else 0)
    runner.gather()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)
