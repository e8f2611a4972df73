"""Kinds of networks whose parts a planner could overlook, and whose gradients a comparison could misjudge."""

import networks as nets
import pytest
import torch
from torch import nn
from torch.nn import functional

import outsize
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.learn.findings import look
from outsize.model.fitting.learn.gradients_equal import FAR_BELOW, TINY, compare, find_rounding
from outsize.model.fitting.move.stores import open_store
from outsize.model.fitting.plan.dry_run import Stage
from outsize.model.fitting.run.runner import Work

WAYS = (
    "slices", "checkpoint", "offload", "recipes", "tensors_away", "in_backward", "state_away", "gradients_away", "stream",
    "chunks",
)  # fmt: skip


def only(*names):
    return tuple(name for name in WAYS if name not in names)


def plain_of(model, loss, batch, **settings):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return outsize.fit(model, loss, optimizer, batch, budget="1GiB", dry_run=True, **settings).plan.plain


def make_normed():
    """Convolutions whose biases change nothing: what they add, the norm behind them takes away."""
    blocks = [nn.Conv2d(3, 8, 3, padding=1)]
    for _ in range(2):
        layers = (nn.Sequential(nn.InstanceNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)) for _ in range(3))
        blocks.append(nn.Sequential(*layers))
    return nn.Sequential(*blocks), lambda model, images: model(images).square().mean(), torch.randn(6, 3, 24, 24)


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


@pytest.mark.parametrize(("way", "names"), [("checkpoint", {"first"}), ("offload", {"first"})])
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


LEAVES = tuple(f"{block}.{leaf}" for block in range(3) for leaf in (0, 1, 3))


@pytest.mark.parametrize("again", [("0", "1", "2"), ("0.0:3", "1.0:1", "2.1:3")])
@pytest.mark.parametrize("frozen", [(), ("1.1.weight", "2.0.bias"), tuple(f"0.{leaf}.weight" for leaf in (0, 1, 3))])
def test_weights_that_visit_inside_a_module_that_is_computed_again_stay_for_its_backward_pass(tmp_path, again, frozen):
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8)) for _ in range(3))
    model, batch = nn.Sequential(*blocks), torch.randn(3, 8)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    work = Work(
        model=model,
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
    )
    store = open_store(torch.device("cpu"), str(tmp_path))
    choice = Choice(checkpoint=again, stream=LEAVES, in_backward=True)
    assert compare(work, choice, batch, store) == (0.0, "")
    store.close()


def make_small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)), torch.randn(6, 8)


def square(model, batch):
    return model(batch).square().mean()


@pytest.mark.parametrize("part", ["the model", "1"])
def test_what_torchscript_has_compiled_is_refused_and_stays_as_it_was(part):
    model, batch = make_small()
    model = torch.jit.script(model) if part == "the model" else nn.Sequential(nn.Linear(8, 8), torch.jit.script(model))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(outsize.InputError, match=f"^{part} is compiled by TorchScript"):
        outsize.fit(model, square, optimizer, batch, budget="1GiB")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_trace_that_cannot_begin_gives_the_model_back():
    model, batch = make_small()
    work = Work(model=model, loss=square, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    stage = Stage(work, batch)
    model[2].late = nn.Parameter(torch.ones(3))
    before = list(model.parameters())
    with pytest.raises(KeyError):
        stage.project(Choice())
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))


class Counting(torch.optim.Optimizer):
    """An optimizer of a user, which counts its steps and remembers what it did."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.count, self.seen = 0, []

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        self.seen.append(self.count)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] / self.count)


def test_what_a_users_optimizer_counts_is_known_to_the_trace_and_not_changed_by_it():
    (model, batch), (twin, _) = make_small(), make_small()
    ours, plain = Counting(model.parameters()), Counting(twin.parameters())
    fitted = outsize.fit(model, square, ours, batch, budget="1GiB")
    assert (ours.count, ours.seen) == (0, [])
    for _ in range(3):
        fitted.step(batch)
        plain.zero_grad()
        square(twin, batch).backward()
        plain.step()
    assert ours.seen == plain.seen
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    fitted.undo()


class Recurrent(nn.Module):
    """A unit that gives rows and, on another axis, what it remembers of them."""

    def __init__(self):
        super().__init__()
        self.embed, self.rest = nn.Embedding(50, 24), nn.LSTM(24, 24, 2, batch_first=True)
        self.head = nn.Linear(24, 50)

    def forward(self, tokens):
        return self.head(self.rest(self.embed(tokens))[0])


def test_a_unit_that_gives_more_than_rows_is_planned_whole():
    torch.manual_seed(0)
    model, batch = Recurrent(), torch.randint(0, 50, (8, 20))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with pytest.raises(outsize.BudgetError):
        outsize.fit(model, nets.language_loss, optimizer, batch, device="cpu", budget=1, host="8GiB", dry_run=True)


class Cached(nn.Linear):
    """Writes a buffer, and the same one whatever it is given."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("places", torch.zeros(sizes[0]))

    def forward(self, x):
        self.places.copy_(torch.arange(len(self.places)))
        return super().forward(x + self.places)


@pytest.mark.parametrize("kind", ["averages", "iterations", "a cache"])
def test_buffers_that_slices_would_leave_otherwise_forbid_them(kind):
    torch.manual_seed(0)
    if kind == "averages":
        part = nn.Sequential(nn.Unflatten(1, (4, 4)), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten())
    else:
        spectral = torch.nn.utils.parametrizations.spectral_norm
        part = Cached(16, 16) if kind == "a cache" else spectral(nn.Linear(16, 16))
    model, batch = nn.Sequential(nn.Linear(8, 16, bias=False), part, nn.Tanh(), nn.Linear(16, 3)), torch.randn(6, 8)
    found = look(Work(model=model, loss=square, optimizer=torch.optim.SGD(model.parameters(), 0.1)), batch)
    if kind == "a cache":
        assert found.normaliser is not None
    else:
        assert found.normaliser is None
        assert "writes its buffers in every forward pass" in found.why_not
