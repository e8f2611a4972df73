"""Modules that are computed again draw, count and average as in the plain step, whatever they do in between."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import outsize
from outsize.model.fitting.arguments import read_request
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.learn.findings import look
from outsize.model.fitting.move.stores import DiskStore
from outsize.model.fitting.plan.remedies import describe, predict
from outsize.model.fitting.run.resident import open_resident
from outsize.model.fitting.run.runner import Work
from outsize.model.fitting.training import TrainingPlanner

WIDTH = 8


class Net(nn.Module):
    """Two blocks between two layers."""

    def __init__(self, *blocks):
        super().__init__()
        self.begin, self.blocks, self.end = nn.Linear(WIDTH, WIDTH), nn.ModuleList(blocks), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.begin(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x)


class Forked(nn.Module):
    """Draws numbers and puts the generator back."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.layer(x)
        with torch.random.fork_rng([]):
            return (h * torch.rand_like(h)).tanh()


class Forces(nn.Module):
    """Takes gradients in its forward pass."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.3))

    def forward(self, x):
        place = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.layer(place).pow(2).sum(), place, create_graph=True)
        return x + force


class Averaged(nn.Module):
    """Writes a BatchNorm's averages with a momentum of its own."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        norm = self.norm
        return functional.batch_norm(
            self.layer(x), norm.running_mean, norm.running_var, norm.weight, norm.bias, True, 0.3
        )


class Counted(nn.Module):
    """Its result depends on a buffer that it writes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x):
        self.calls += 1
        return (self.layer(x) * self.calls).tanh()


class Rare(nn.Module):
    """Few samples go past it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    def forward(self, x):
        return self.layer(x).tanh() if len(x) > 3 else x


class Careful(nn.Module):
    """Has another way where one fails."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.layer(x)
        try:
            return h.exp()
        except Exception:
            return h.tanh().sin()


class Once(nn.Sequential):
    """Cannot run twice on the same iterator."""

    def forward(self, x, turns):
        assert next(turns)
        return super().forward(x)


def distance(model, batch):
    return functional.mse_loss(model(batch[0]), batch[1])


def penalty(model, batch):
    x = batch[0].clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return functional.mse_loss(out, batch[1]) + slope.pow(2).mean()


def make_batch(rows=6):
    torch.manual_seed(3)
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


def run_steps(model, loss, choice, tmp_path):
    """Everything that two steps leave behind."""
    batch = make_batch()
    work = Work(model=model, loss=loss, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    work.written = look(work, batch).written
    store = DiskStore(str(tmp_path))
    runner = open_resident(work, choice, store)
    torch.manual_seed(5)
    for _ in range(2):
        runner.step(batch)
    store.close()
    return [*model.parameters(), *model.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize(
    ("blocks", "loss"),
    [
        ((Forked(), nn.Dropout(0.4)), distance),
        ((Forces(), Forces()), distance),
        ((Averaged(), nn.Tanh()), distance),
        ((Counted(), Counted()), penalty),
        ((Rare(), Rare()), distance),
        ((Careful(), nn.Tanh()), distance),
        ((nn.BatchNorm1d(WIDTH, momentum=None), nn.BatchNorm1d(WIDTH, momentum=0.0)), penalty),
    ],
    ids=["forked", "forces", "averaged", "counted", "rare", "careful", "norms"],
)
def test_a_second_run_leaves_no_trace(tmp_path, blocks, loss):
    plain = Net(*copy.deepcopy(blocks))
    model = copy.deepcopy(plain)
    expected = run_steps(plain, loss, Choice(), tmp_path)
    got = run_steps(model, loss, Choice(checkpoint=("blocks.0", "blocks.1")), tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
def test_a_second_run_that_is_stopped_leaves_the_module_as_it_was(tmp_path, failure):
    runs = []

    def stop(*_):
        runs.append(None)
        if len(runs) == 2:
            torch.rand(3)
            raise failure

    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Identity(), nn.Tanh())
    model, batch = Net(block), make_batch()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    store = DiskStore(str(tmp_path))
    written = {block[1]: tuple(block[1]._buffers)}
    runner = open_resident(
        Work(model=model, loss=distance, optimizer=optimizer, written=written), Choice(checkpoint=("blocks.0",)), store
    )
    block[2].register_forward_hook(stop)
    before = torch.get_rng_state()
    with pytest.raises(failure):
        runner.step(batch)
    store.close()
    assert block[1].momentum == 0.1 and int(block[1].num_batches_tracked) == 1 and "forward" not in block.__dict__
    assert torch.equal(torch.get_rng_state(), before)


def make_block(*first):
    return nn.Sequential(*first, nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Tanh(), nn.Linear(8 * WIDTH, WIDTH))


def fit_tightly(model, loss, part, *without):
    batch, optimizer = make_batch(256), torch.optim.SGD(model.parameters(), 0.1)
    peak = outsize.fit(model, loss, optimizer, batch, budget="1GiB", dry_run=True).plan.plain
    fitted = outsize.fit(
        model, loss, optimizer, batch, budget=int(part * peak), without=("slices", "recipes", "tensors_away", *without)
    )
    fitted.step(batch)
    assert fitted.measured <= fitted.plan.peak(fitted.plan.budgets[0].pool) <= part * peak
    return fitted


def test_a_block_that_writes_into_its_input_is_not_computed_again_and_others_are():
    blocks = [make_block(nn.ReLU(inplace=True)) for _ in range(2)] + [make_block() for _ in range(4)]
    fitted = fit_tightly(Net(*blocks), distance, 0.63, "offload")
    assert {name.split(".")[1] for name in fitted.choice.checkpoint} & {"2", "3", "4", "5"}
    assert not {"blocks.0", "blocks.1"} & set(fitted.choice.checkpoint)
    with pytest.raises(outsize.BudgetError):
        fit_tightly(Net(*blocks), distance, 0.5, "offload")


def test_where_blocks_cannot_run_twice_another_remedy_is_found():
    class Turns(Net):
        def forward(self, x):
            x = self.begin(x)
            for block in self.blocks:
                x = block(x, iter([True]))
            return self.end(x)

    fitted = fit_tightly(Turns(*(Once(make_block()) for _ in range(4))), distance, 0.7)
    assert not {"blocks.0", "blocks.1", "blocks.2", "blocks.3"} & set(fitted.choice.checkpoint)


def test_results_that_depend_on_a_buffer_do_not_forbid_computing_again():
    blocks = [nn.Sequential(Counted(), make_block()) for _ in range(4)]
    assert fit_tightly(Net(*blocks), distance, 0.6).choice.checkpoint


def test_modules_inside_torch_func_are_fitted():
    class Slopes(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = make_block()

        def forward(self, x):
            return torch.func.vmap(torch.func.grad(lambda row: self.block(row).pow(2).sum()))(x) + x

    batch, model = make_batch(256), Net(Slopes(), Slopes())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    peak = outsize.fit(model, distance, optimizer, batch, budget="1GiB", dry_run=True).plan.plain
    fitted = outsize.fit(model, distance, optimizer, batch, budget=int(0.7 * peak))
    fitted.step(batch)
    assert fitted.choice.slices > 1 and fitted.measured <= 0.7 * peak


def test_what_a_module_compiles_does_not_compile_the_hooks(tmp_path):
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    calls = []

    def note(graph, _):
        calls.append([node.target for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    compiled = torch.compile(lambda x: layer(x), backend=note)

    class Compiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return compiled(x)

    run_steps(Net(Compiled()), distance, Choice(checkpoint=("blocks.0",)), tmp_path)
    assert not any("detach" in names for names in calls)


def test_a_batch_that_is_not_cut_has_no_first_slice():
    batch, model = make_batch(64), Net(make_block())
    request = read_request(model, distance, torch.optim.SGD(model.parameters(), 0.1), batch, budget=2**30)
    planner = TrainingPlanner(request)
    planner.look_once()
    facts = planner.facts
    whole, uncut = Choice(checkpoint=("blocks.0",)), Choice(checkpoint=("blocks.0",), first=40)
    assert predict(uncut, facts) == predict(whole, facts)


def test_only_slices_are_said_to_have_a_first_one():
    assert describe(Choice(slices=3, first=5, chunks=3)).count("the first of 5") == 1
