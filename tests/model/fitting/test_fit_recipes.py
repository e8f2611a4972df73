"""Saved tensors that are made again or moved one by one, whatever code made them: the same bits, or a loud error."""

import copy
import random
import time

import pytest
import torch
from effort import examples, points
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import outsize
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.stores import DiskStore
from outsize.model.fitting.plan.dry_run import Stage
from outsize.model.fitting.recipes.forward_pass import ALL
from outsize.model.fitting.recipes.survey import Survey
from outsize.model.fitting.run.meter import Meter
from outsize.model.fitting.run.resident import open_resident
from outsize.model.fitting.run.runner import Work

WIDE = 24


class Steep(torch.autograd.Function):
    """Saves what it takes, what it makes on the way and what it gives."""

    @staticmethod
    def forward(ctx, x):
        middle = x.sin() + 1
        out = middle * x
        ctx.save_for_backward(x, middle, out)
        return out

    @staticmethod
    def backward(ctx, gradient):
        x, middle, out = ctx.saved_tensors
        return gradient * (middle + x.cos()) + 0.01 * out


def write_part(m, x, seen):
    y = x * 2
    y[:, ::2] = y[:, 1::2] * 0.5  # through a view
    return y


def write_source(m, x, seen):
    y = x + 1
    out = torch.relu(y) * torch.sigmoid(x)  # relu saves what it gives, so nobody but a recipe needs y
    y.mul_(3)
    return out + y


def write_buffer(m, x, seen):
    out = torch.tanh(x + m.scale)
    with torch.no_grad():
        m.scale.mul_(0.9)
    return out * m.scale.clone()


def penalised(m, x, seen):
    (slope,) = torch.autograd.grad(m.first(x).tanh().sum(), x, create_graph=True)
    return x + slope


def list_of_all(m, x, seen):
    seen.append(x.tanh())
    return torch.cat(seen[-3:], 1).view(len(x), -1, WIDE).mean(1)


def cast_down(m, x, seen):
    return (x.bfloat16() @ m.first.weight.bfloat16()).float().sin()


def gather_and_add(m, x, seen):
    half = torch.arange(len(x)) // 2
    return torch.zeros_like(x).index_add(0, half, x.tanh()) + x[half]


def shuffle_axes(m, x, seen):
    return x.view(-1, 4, WIDE // 4).transpose(1, 2).reshape(len(x), WIDE).square().sqrt()


PARTS = {
    "linear": lambda m, x, seen: m.first(x), "gelu": lambda m, x, seen: functional.gelu(m.second(x)), "views": shuffle_axes,
    "relu": lambda m, x, seen: x.relu(), "in place": lambda m, x, seen: (x + 1).add_(0.1).relu_(), "part": write_part,
    "norm": lambda m, x, seen: functional.layer_norm(x, (WIDE,)), "norms of rows": lambda m, x, seen: m.norm(x),
    "softmax": lambda m, x, seen: x.softmax(-1) * x, "dropout": lambda m, x, seen: functional.dropout(x, 0.3),
    "noise": lambda m, x, seen: x + torch.randn_like(x) * x.exp().clamp(max=2), "source": write_source, "list": list_of_all,
    "twice": lambda m, x, seen: x * x.sigmoid() + x.cos(), "cell": lambda m, x, seen: m.cell(x, x.tanh()),
    "branch": lambda m, x, seen: x.abs().log1p() if len(seen) % 2 else x.expm1(), "buffer": write_buffer,
    "mask": lambda m, x, seen: torch.where(x > 0, x * 1.5, x.exp()), "scatter": gather_and_add, "bfloat16": cast_down,
    "double": lambda m, x, seen: x.double().pow(2).float() * x, "own": lambda m, x, seen: Steep.apply(x), "penalty": penalised,
    "maximum": lambda m, x, seen: torch.maximum(x, m.second(x)).clamp(-3, 3),
    "ones": lambda m, x, seen: x.exp() * torch.ones_like(x).mul(2) * torch.arange(WIDE).add(x),
    "no gradient": lambda m, x, seen: x * x.detach().softmax(0),
}  # fmt: skip


class Program(nn.Module):
    """Parts in a row, as functions outside every module but the layers that they call."""

    def __init__(self, names):
        super().__init__()
        self.names = names
        self.first, self.second = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.norm, self.cell = nn.BatchNorm1d(WIDE), nn.GRUCell(WIDE, WIDE)
        self.register_buffer("scale", torch.ones(()))


def loss(model, batch):
    x, seen = model.first(batch), []
    for name in model.names:
        seen.append(x)
        x = PARTS[name](model, x, seen)
    return functional.mse_loss(functional.normalize(x), batch)


def run(base, batch, choice, store, survey=False, loss=loss):
    """(gradients, buffers, random state after, loss) of a backward pass, and what was surveyed."""
    model = copy.deepcopy(base)
    torch.manual_seed(5)
    runner = open_resident(Work(model=model, loss=loss, optimizer=None), choice, store)
    if survey:
        runner.weights.survey = Survey(model, time.perf_counter)
    value = runner.backward(batch)
    found = [p.grad for p in model.parameters()] + list(model.buffers()) + [torch.get_rng_state(), value]
    return found, runner.weights.survey


def held_and_projected(base, batch, choice, store, loss=loss):
    """Bytes of a backward pass: by the allocator's events, and as projected."""
    work = Work(model=copy.deepcopy(base), loss=loss, optimizer=None)
    projected = Stage(work, batch).project(choice).peak
    runner, meter = open_resident(work, choice, store), Meter("cpu")
    assert meter.begin(lambda: [*work.model.parameters(), *work.model.buffers(), batch])
    runner.backward(batch)
    return meter.end(), projected


def equal(got, expected):
    """To the bit; what is no number is equal to itself."""

    def same(a, b):
        return (a is None) == (b is None) and (a is None or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))

    return all(same(a, b) for a, b in zip(got, expected, strict=True))


@examples(120)
@given(
    names=st.lists(st.sampled_from(sorted(PARTS)), min_size=2, max_size=9), part=st.sampled_from([0.1, 0.4, 0.8, 1.0]),
    away=st.sampled_from(["none", "some", "all"]), slices=st.sampled_from([1, 1, 2]), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_random_programs_with_random_recipes_have_the_plain_gradients_to_the_bit(
    tmp_path_factory, names, part, away, slices, seed
):
    torch.manual_seed(seed)
    base, batch = Program(names), torch.randn(6, WIDE)
    store = DiskStore(str(tmp_path_factory.mktemp("store")))
    plain = Choice(slices=slices)
    expected, _ = run(base, batch, plain, store)
    _, survey = run(base, batch, Choice(), store, survey=True)
    sites = [row.site for row in survey.rows]
    chance = random.Random(seed)
    again = tuple(chance.sample(sites, int(part * len(sites))))
    moved = {"none": (), "some": tuple(chance.sample(sites, len(sites) // 2)), "all": (ALL,)}[away]
    got, _ = run(base, batch, Choice(slices=slices, recipes=again, tensors_away=moved), store)
    assert equal(got, expected)
    assert store.held == 0
    store.close()


@examples(60)
@given(
    names=st.lists(st.sampled_from(sorted(PARTS)), min_size=2, max_size=9), part=st.sampled_from([0.2, 0.6, 1.0]),
    away=st.booleans(), slices=st.sampled_from([1, 1, 4]), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_no_random_program_with_random_recipes_holds_more_than_its_trace(
    tmp_path_factory, names, part, away, slices, seed
):
    torch.manual_seed(seed)
    model, batch = Program(names), torch.randn(11, WIDE)
    store = DiskStore(str(tmp_path_factory.mktemp("store")))
    _, survey = run(model, batch, Choice(), store, survey=True)
    sites = [row.site for row in survey.rows]
    again = tuple(random.Random(seed).sample(sites, int(part * len(sites))))
    choice = Choice(slices=slices, recipes=again, tensors_away=(ALL,) if away else ())
    held, projected = held_and_projected(model, batch, choice, store)
    assert held <= projected
    store.close()


def test_what_is_made_anew_in_the_backward_pass_is_projected(tmp_path):
    """Zeros and counts have no tensor whose place they take."""
    torch.manual_seed(0)
    model, batch = Program(["scatter", "ones", "scatter"]), torch.randn(256, WIDE)
    store = DiskStore(str(tmp_path))
    _, survey = run(model, batch, Choice(), store, survey=True)
    held, projected = held_and_projected(model, batch, Choice(recipes=tuple(row.site for row in survey.rows)), store)
    assert 0.99 * projected < held <= projected


def test_slices_that_are_shorter_than_others_are_projected_too(tmp_path):
    """Tensors that are too small to be moved are there at once, and those of larger slices are not."""
    torch.manual_seed(0)
    model, batch = Program(["gelu", "twice", "own"] * 20), torch.randn(11, WIDE)
    store = DiskStore(str(tmp_path))
    held, projected = held_and_projected(model, batch, Choice(slices=2, tensors_away=(ALL,)), store)
    assert held <= projected
    store.close()


class Layer(nn.Module):
    """A recurrent layer in both directions."""

    def __init__(self, kind):
        super().__init__()
        self.first = getattr(nn, kind)(16, 16, 2, bidirectional=True)

    def forward(self, x):
        return self.first(x)[0]


@pytest.mark.parametrize("kind", ["GRU", "RNN"])
def test_outputs_of_recurrent_cells_are_projected_until_their_layer_ends(tmp_path, kind):
    torch.manual_seed(0)
    choice, store = Choice(tensors_away=(ALL,)), DiskStore(str(tmp_path))
    square = lambda m, b: m(b).square().mean()  # noqa: E731
    held, projected = held_and_projected(Layer(kind), torch.randn(20, 9, 16), choice, store, square)
    assert held <= projected
    store.close()


def test_numbers_that_autograd_keeps_as_tensors_are_projected(tmp_path):
    def chain(m, b):
        x = m(b)
        for _ in range(40):
            x = (x * 0.5).sum(1, keepdim=True) / 3.0 + x
        return x.square().mean()

    held, projected = held_and_projected(nn.Linear(8, 8), torch.randn(9, 8), Choice(), DiskStore(str(tmp_path)), chain)
    assert held <= projected


@pytest.mark.parametrize("names", points([(name,) for name in sorted(PARTS)] + [tuple(sorted(PARTS))], 6))
def test_calls_have_the_same_names_without_contents_as_in_the_real_step(tmp_path, names):
    base, batch, store = Program(names), torch.randn(6, WIDE), DiskStore(str(tmp_path))
    _, real = run(base, batch, Choice(), store, survey=True)
    stage = Stage(Work(model=base, loss=loss, optimizer=None), batch)
    stage.project(Choice(), survey=True)
    assert [row.site for row in stage.surveyed.rows] == [row.site for row in real.rows]
    assert [stage.surveyed.sizes[item] for item in stage.surveyed.saved] == [real.sizes[item] for item in real.saved]
    store.close()


# writes in place


def write_later(model, batch):
    """The backward pass of the second half writes what a recipe of the first starts from."""
    y = model.first(batch)
    out = torch.relu(y) if model.names == ("recipe",) else torch.exp(y)
    held = [y if model.names == ("recipe",) else out]

    def write(gradient):
        with torch.no_grad():
            held[0].add_(1)
        return gradient

    later = out * 1.0
    later.register_hook(write)
    return later.square().mean()


@pytest.mark.parametrize("kind", ["recipe", "kept"])
def test_a_write_after_the_forward_pass_is_an_error_and_never_a_wrong_gradient(tmp_path, kind):
    base, batch, store = Program((kind,)), torch.randn(6, WIDE), DiskStore(str(tmp_path))
    sites = (":relu:0",) if kind == "recipe" else (":mean:0",)
    with pytest.raises(RuntimeError, match="changed in place"):
        run(base, batch, Choice(recipes=sites), store, loss=write_later)
    store.close()


# plans


class Functions(nn.Module):
    """Layers without activations of their own: all that is large is made by functions, in lists, outside every module."""

    def __init__(self, wide=32, deep=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(wide, wide) for _ in range(deep))


def functions_loss(m, x):
    seen = [x]
    for layer in m.layers:
        h = layer(torch.stack(seen, 0).mean(0))
        seen.append(Steep.apply(functional.gelu(h)) * torch.sigmoid(h) + functional.dropout(h.tanh(), 0.2))
    return (
        functional.layer_norm(torch.cat(seen, 1), (x.shape[1] * len(seen),)).square().mean() + seen[-1].square().mean()
    )


def fit_in(part, base, loss, batch, **words):
    """A fitted twin with what a plain step leaves, both from the same state."""
    model, plain = copy.deepcopy(base), copy.deepcopy(base)
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, plain))
    peak = outsize.fit(plain, loss, theirs, batch, budget="1GiB", dry_run=True).plan.plain
    fitted = outsize.fit(model, loss, ours, batch, budget=int(part * peak), **words)
    for _ in range(2):
        torch.manual_seed(3)
        fitted.step(batch)
        torch.manual_seed(3)
        loss(plain, batch).backward()
        theirs.step()
        theirs.zero_grad()
    fitted.gather()
    assert fitted.measured <= fitted.plan.peak() <= part * peak
    assert equal([*model.parameters(), *model.buffers()], [*plain.parameters(), *plain.buffers()])
    return fitted


@pytest.mark.parametrize("part", [0.6, 0.45])
def test_what_functions_and_lists_keep_outside_modules_is_fitted_to_the_bit(part):
    fitted = fit_in(part, Functions(), functions_loss, torch.randn(256, 32), without=("slices",))
    assert fitted.choice.recipes or fitted.choice.tensors_away
    assert any(
        remedy.name in ("make saved tensors again", "keep saved tensors elsewhere") for remedy in fitted.plan.remedies
    )
    fitted.undo()


def test_a_refusal_names_a_budget_that_works_and_has_tried_every_saved_tensor():
    model, batch = Functions(), torch.randn(256, 32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(outsize.BudgetError) as refused:
        outsize.fit(model, functions_loss, optimizer, batch, budget=1000, without=("slices",))
    plain = outsize.fit(model, functions_loss, optimizer, batch, budget="1GiB", dry_run=True).plan.plain
    assert refused.value.smallest < 0.45 * plain
    fitted = outsize.fit(model, functions_loss, optimizer, batch, budget=refused.value.smallest, without=("slices",))
    fitted.step(batch)
    assert fitted.measured <= refused.value.smallest
    fitted.undo()


def test_tensors_that_are_made_again_cost_less_than_modules_that_run_again():
    """Of a block only what is cheap runs again, where that frees enough."""
    model, batch = Functions(128, 3), torch.randn(128, 128)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plain = outsize.fit(model, functions_loss, optimizer, batch, budget="1GiB", dry_run=True).plan.plain
    plan = outsize.fit(
        model,
        functions_loss,
        optimizer,
        batch,
        budget=int(0.7 * plain),
        without=("slices", "tensors_away"),
        dry_run=True,
    )
    assert plan.choice.recipes and not any(":addmm:" in site for site in plan.choice.recipes)


# failures


class Stops(torch.utils._python_dispatch.TorchDispatchMode):
    """Something happens once, at a given operator."""

    def __init__(self, at, error):
        super().__init__()
        self.left, self.error = at, error

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            raise self.error("no")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_after_a_step_that_is_stopped_anywhere_the_next_one_is_as_if_it_had_not_been(tmp_path, error):
    """Torch itself may hold on to hooks of a graph whose backward pass has failed, so bytes elsewhere are not counted here."""
    names = ("source", "dropout", "buffer", "own", "list", "cell", "norms of rows")
    torch.manual_seed(0)
    base, batch, store = Program(names), torch.randn(6, WIDE), DiskStore(str(tmp_path))
    _, survey = run(base, batch, Choice(), store, survey=True)
    sites = tuple(row.site for row in survey.rows)
    choices = [Choice(recipes=sites), Choice(recipes=sites[::2], tensors_away=(ALL,)), Choice(tensors_away=sites)]
    expected, _ = run(base, batch, Choice(), store)
    for number in points(range(1, 200), 12):
        model = copy.deepcopy(base)
        runner = open_resident(Work(model=model, loss=loss, optimizer=None), choices[number % 3], store)
        before = copy.deepcopy(list(model.buffers()))
        torch.manual_seed(5)
        try:
            with Stops(number, error):
                runner.backward(batch)
        except error:
            for buffer, old in zip(model.buffers(), before, strict=True):
                buffer.copy_(old)
        else:
            continue
        assert all(p.grad is None for p in model.parameters())
        torch.manual_seed(5)
        value = runner.backward(batch)
        assert (
            equal([p.grad for p in model.parameters()] + list(model.buffers()), expected[:-2]) and value == expected[-1]
        )
    store.close()
