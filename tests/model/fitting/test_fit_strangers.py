"""Training code as other people write it: what it draws, how its batches are laid out, what its modules take."""

import dataclasses
import itertools
import warnings

import pytest
import torch
from torch import nn

import outsize
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.learn.findings import look
from outsize.model.fitting.move.stores import DiskStore
from outsize.model.fitting.run.random_sources import draws
from outsize.model.fitting.run.replayed_draws import Replay
from outsize.model.fitting.run.resident import open_resident
from outsize.model.fitting.run.runner import Work

torch.manual_seed(0)  # for the batches of this file


def fit_at(part, model, loss, batch, **words):
    """Fitted at this part of the plain peak, with plain SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = outsize.fit(model, loss, optimizer, batch, budget="4GiB", dry_run=True, **words).plan
    return outsize.fit(model, loss, optimizer, batch, budget=int(part * plain.peak(plain.pool)), **words)


def gradients(model, run):
    """Name -> gradient after `run`, which leaves nothing."""
    model.zero_grad()
    torch.manual_seed(7)
    run()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def assert_same_gradients(fitted, model, loss, batch):
    plain = gradients(model, lambda: loss(model, batch).backward())
    got = gradients(model, lambda: fitted.backward(batch))
    largest = max(gradient.norm() for gradient in plain.values())
    for name, gradient in plain.items():
        assert (got[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6 * largest, name


# draws


def test_dropout_of_zero_and_dropout_at_rest_draw_nothing():
    aten, x, nothing = torch.ops.aten, torch.ones(3), torch.empty(0)
    recurrent = [x, [x], 4, None, x, x, 2, 8, 0, 1, True, 0.0, True, False, [], None]
    assert not draws(aten._cudnn_rnn.default, recurrent, {})
    assert draws(aten._cudnn_rnn.default, [*recurrent[:11], 0.2, *recurrent[12:]], {})
    assert not draws(aten._cudnn_rnn.default, [*recurrent[:11], 0.2, False, *recurrent[13:]], {})
    assert not draws(aten.native_dropout.default, [x, 0.0, True], {})
    assert not draws(aten.native_dropout.default, [x, 0.5, False], {})
    assert not draws(aten.rrelu_with_noise.default, [x, nothing, 0.1, 0.3, False], {})
    assert not draws(aten.bernoulli_.float, [x, 1.0], {})
    assert not draws(aten.bernoulli.default, [x], {})
    assert draws(aten.bernoulli.default, [x / 2], {})
    assert draws(aten.bernoulli_.float, [torch.zeros(3)], {})  # by default the chance is a half
    assert draws(aten.randn.default, [[3]], {})
    assert not draws(aten._scaled_dot_product_flash_attention_for_cpu.default, [x, x, x], {})


class Certain(nn.Module):
    """Drops by hand, with a chance of zero."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Dropout(0.0), nn.Linear(256, 256), nn.GELU())

    def forward(self, x):
        out = self.layers(x)
        return out * torch.bernoulli(torch.ones_like(out))


def test_a_mask_that_keeps_everything_is_not_taken_for_random():
    fitted = fit_at(
        0.4,
        Certain(),
        lambda m, b: m(b).pow(2).mean(),
        torch.randn(256, 32),
        without=("offload", "checkpoint", "recipes", "tensors_away"),
    )
    assert fitted.choice.slices > 1


# batches


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layers, self.head = nn.Embedding(40, 24), nn.LSTM(24, 32, 2), nn.Linear(32, 40)

    def forward(self, tokens, state=None):
        out, _ = self.layers(self.embedding(tokens), state)
        return self.head(out).view(-1, 40)


class Encoder(nn.Module):
    """Torch's own transformer as it is by default: time first."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0)
        self.embedding, self.layers = nn.Embedding(40, 32), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 40)

    def forward(self, tokens, mask):
        return self.head(self.layers(self.embedding(tokens), mask)).flatten(0, 1)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(40, 32), nn.Embedding(64, 32)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 40))

    def forward(self, tokens, positions):
        return self.layers(self.tokens(tokens) + self.positions(positions)).flatten(0, 1)


class Packed(nn.Module):
    """Attention inside each of the sequences that follow each other."""

    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.layers = nn.Embedding(40, 32), nn.Linear(32, 96), nn.Linear(32, 40)

    def forward(self, tokens, ends):
        ends, outs = ends.tolist(), []
        for start, stop in itertools.pairwise(ends):
            q, k, v = self.mix(self.embedding(tokens[start:stop]))[None].chunk(3, -1)
            outs.append(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0])
        return self.layers(torch.cat(outs))


class Own:
    """Somebody's own batch."""

    def __init__(self, x, y):
        self.x, self.y, self.name = x, y, "batch"


def tokens(*shape):
    return torch.randint(0, 40, shape, generator=torch.Generator().manual_seed(0))


def entropy(out, labels, **words):
    return nn.functional.cross_entropy(out, labels.flatten(), **words)


def perceptron():
    return nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))


STATE = (torch.zeros(2, 16, 32), torch.zeros(2, 16, 32))
ENDS = torch.tensor([0, 30, 75, 100, 160, 170, 200, 256], dtype=torch.int32)
BATCHES = {
    "time first": (Recurrent, lambda m, b: entropy(m(b[0]), b[1]), (tokens(20, 16), tokens(20, 16))),
    "time first, states": (
        Recurrent,
        lambda m, b: entropy(m(b[0], b[2]), b[1]),
        (tokens(20, 16), tokens(20, 16), STATE),
    ),
    "time first, a mask": (
        Encoder,
        lambda m, b: entropy(m(b["x"], b["mask"]), b["y"]),
        {"x": tokens(20, 16), "y": tokens(20, 16), "mask": nn.Transformer.generate_square_subsequent_mask(20)},
    ),
    "positions": (
        Positions,
        lambda m, b: entropy(m(b["x"], b["at"]), b["y"]),
        {"x": tokens(32, 20), "at": torch.arange(20)[None], "y": tokens(32, 20)},
    ),
    "class weights": (
        perceptron,
        lambda m, b: entropy(m(b["x"]), b["y"], weight=b["weights"], reduction="sum"),
        {"x": torch.randn(300, 8), "y": tokens(300) % 8, "weights": torch.rand(8)},
    ),
    "as many classes as samples": (
        perceptron,
        lambda m, b: entropy(m(b["x"]).flatten(0, 1), b["y"], weight=b["weights"], reduction="sum"),
        {"x": torch.randn(8, 50, 8), "y": tokens(8, 50) % 8, "weights": torch.rand(8)},
    ),
    "packed": (
        Packed,
        lambda m, b: entropy(m(b["x"], b["cu_seqlens"]), b["y"]),
        {"x": tokens(256), "y": tokens(256), "cu_seqlens": ENDS},
    ),
    "an own class": (perceptron, lambda m, b: entropy(m(b.x), b.y), Own(torch.randn(300, 8), tokens(300) % 8)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_the_axis_that_counts_samples_is_found(name):
    make, loss, batch = BATCHES[name]
    torch.manual_seed(0)
    model = make()
    fitted = fit_at(
        0.7, model, loss, batch, own_step=True, without=("offload", "checkpoint", "recipes", "tensors_away", "chunks")
    )
    assert fitted.choice.slices > 1
    assert_same_gradients(fitted, model, loss, batch)


class Doubled(nn.Module):
    """Sums over time by hand: nothing in it says that time comes first."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x):
        return self.layers(x).cumsum(0)


def test_the_axis_that_counts_samples_can_be_said():
    model, batch = Doubled(), {"x": torch.randn(10, 48, 16), "scale": torch.rand(16)}

    def loss(m, b):
        return (m(b["x"]) * b["scale"]).pow(2).mean()

    words = {"own_step": True, "without": ("offload", "checkpoint", "recipes", "tensors_away")}
    with pytest.raises(outsize.BudgetError, match="batch_axis"):
        fit_at(0.5, model, loss, batch, **words)
    fitted = fit_at(0.5, model, loss, batch, batch_axis={"x": 1, "scale": None}, **words)
    assert fitted.choice.slices > 1
    assert_same_gradients(fitted, model, loss, batch)


@pytest.mark.parametrize(
    ("said", "words"),
    [({"z": 1}, "no tensor of the batch"), ({"x": 3}, "the axis 3"), ("x", "no table"), ({"x": 1}, "disagree")],
)
def test_a_wrong_axis_is_named(said, words):
    model, batch = perceptron(), {"x": torch.randn(4, 8), "y": torch.randn(4)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(outsize.InputError, match=words):
        outsize.fit(model, lambda m, b: m(b["x"]).mean(), optimizer, batch, budget="1GiB", batch_axis=said)


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(4)])

    def forward(self, x, edges):
        for layer in self.layers:
            x = x + torch.zeros_like(x).index_add(0, edges[1], layer(x)[edges[0]])
        return x


class Store(dict):
    """Where torch_geometric's data keep their tensors."""


class Data:
    """Like torch_geometric's: attributes come from a store, and it can be called."""

    def __init__(self, **tensors):
        self.__dict__["_store"] = Store(tensors)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__["_store"][name]

    def __call__(self, *names):
        return iter(names)


@pytest.mark.parametrize("kind", [dict, Data])
def test_a_graph_is_fitted_whole(kind):
    model, edges = Graph(), torch.randint(0, 300, (2, 400))
    batch = kind(x=torch.randn(300, 32), edge_index=edges)

    def loss(m, b):
        x, found = (b.x, b.edge_index) if kind is Data else (b["x"], b["edge_index"])
        return m(x, found).pow(2).mean()

    fitted = fit_at(0.75, model, loss, batch, own_step=True)
    assert fitted.choice.slices == 1 and not fitted.choice.plain
    assert_same_gradients(fitted, model, loss, batch)


# draws of slices


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(64, 256), nn.Linear(16, 256)
        self.mean, self.spread, self.out = nn.Linear(256, 16), nn.Linear(256, 16), nn.Linear(256, 64)

    def forward(self, x):
        hidden = torch.relu(self.encoder(x))
        mean, spread = self.mean(hidden), self.spread(hidden)
        drawn = mean + torch.randn_like(spread) * torch.exp(0.5 * spread)
        return self.out(torch.relu(self.decoder(drawn))), mean, spread


def bound(model, x):
    out, mean, spread = model(x)
    return (out - x).square().sum() - 0.5 * torch.sum(1 + spread - mean.square() - spread.exp())


class Digits(nn.Module):
    """Drops single numbers and whole channels."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Dropout2d(0.3), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Dropout(0.25),
            nn.Flatten(), nn.Linear(16 * 100, 10),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x)


def denoise(model, x):
    """A step of a diffusion model: times and noise for each sample, and one number for all."""
    times = torch.randint(0, 10, (len(x),), device=x.device)
    noise = torch.randn_like(x)
    mixed = x + noise * times[:, None] / 10
    return (model(mixed) * (1 + torch.rand(1) + torch.randperm(4)[0]) - noise).square().mean()


DRAWING = {
    "noise": (Autoencoder, bound, torch.rand(400, 64)),
    "dropout": (Digits, lambda m, b: entropy(m(b[0]), b[1]), (torch.rand(24, 1, 12, 12), tokens(24) % 10)),
    "times": (
        lambda: nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 32)),
        denoise,
        torch.randn(300, 32),
    ),
}


@pytest.mark.parametrize("name", DRAWING)
def test_slices_take_the_draws_of_the_whole(name):
    make, loss, batch = DRAWING[name]
    torch.manual_seed(0)
    model = make()
    fitted = fit_at(
        0.7, model, loss, batch, own_step=True, without=("offload", "checkpoint", "recipes", "tensors_away")
    )
    assert fitted.choice.slices > 1
    assert all(remedy.exactness != "distribution" for remedy in fitted.plan.remedies)
    assert_same_gradients(fitted, model, loss, batch)
    after = torch.rand(1)
    torch.manual_seed(7)
    loss(model, batch)
    assert torch.equal(after, torch.rand(1))  # the next step draws what it would have drawn


@pytest.mark.parametrize("name", DRAWING)
def test_a_slice_that_is_computed_again_takes_its_draws_again(name, tmp_path):
    make, loss, batch = DRAWING[name]
    torch.manual_seed(0)
    model = make()
    work = Work(model=model, loss=loss, optimizer=None)
    findings = look(work, batch)
    work.normaliser, work.replay = findings.normaliser, Replay(findings.draws)
    blocks = tuple(n for n, m in model.named_modules() if n and (next(m.children(), None) is not None or "." not in n))
    store = DiskStore(str(tmp_path))
    runner = open_resident(work, Choice(slices=3, checkpoint=blocks), store)
    assert_same_gradients(runner, model, loss, batch)
    store.close()


def test_with_other_draws_allowed_slices_draw_their_own_numbers_times_and_orders():
    def loss(model, x):
        times = torch.randint(0, 10, (len(x),)).float() + torch.randperm(8)[0]
        return (model(x) * torch.rand_like(x) - times[:, None]).square().mean()

    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32))
    fitted = fit_at(
        0.5,
        model,
        loss,
        torch.randn(300, 32),
        allow="distribution",
        without=("offload", "checkpoint", "recipes", "tensors_away"),
    )
    assert fitted.choice.slices > 1


# noise


class Noisy(nn.Module):
    """Differs by a little with the size of the batch, as kernels of low precision do, or mixes samples by as little."""

    def __init__(self, mixes):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32))
        self.mixes = mixes

    def forward(self, x):
        out = self.layers(x)
        if self.mixes:
            return out + 1e-3 * out.mean(0)
        return out * (1 + 2e-4 * (len(x) % 2))


@pytest.mark.parametrize("mixes", [False, True])
def test_what_kernels_differ_by_themselves_is_no_difference_and_what_samples_do_is(mixes):
    torch.manual_seed(0)

    def loss(model, x):
        return (model(x) - 1).square().mean()

    words = {"own_step": True, "without": ("offload", "checkpoint", "recipes", "tensors_away")}
    model, batch = Noisy(mixes), torch.randn(300, 32)
    if mixes:
        with pytest.raises(outsize.BudgetError):
            fit_at(0.5, model, loss, batch, **words)
    else:
        assert fit_at(0.5, model, loss, batch, **words).choice.slices > 1


# modules


class DenseLayer(nn.Module):
    """Takes all that the layers before it gave, in a list that its caller goes on filling."""

    def __init__(self, before, width):
        super().__init__()
        self.norm, self.narrow = nn.BatchNorm2d(before), nn.Conv2d(before, width, 1)

    def forward(self, found):
        return torch.relu(self.narrow(torch.relu(self.norm(torch.cat(found, 1)))))


class DenseBlock(nn.Module):
    def __init__(self, layers, before, width):
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(before + number * width, width) for number in range(layers))

    def forward(self, x):
        found = [x]
        for layer in self.layers:
            found.append(layer(found))
        return torch.cat(found, 1)


@dataclasses.dataclass
class Both:
    x: torch.Tensor
    y: torch.Tensor


class Structured(nn.Module):
    """Takes and gives tensors in a tuple, a dict or a dataclass."""

    def __init__(self, kind):
        super().__init__()
        self.layers, self.kind = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)), kind

    def forward(self, given):
        x, y = (
            (given.x, given.y)
            if self.kind == "dataclass"
            else (given["x"], given["y"])
            if self.kind == "dict"
            else given
        )
        pair = x + self.layers(y), y + self.layers(x)
        return (
            Both(*pair)
            if self.kind == "dataclass"
            else dict(zip("xy", pair, strict=True))
            if self.kind == "dict"
            else pair
        )


class Stack(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers, self.kind = nn.ModuleList(Structured(kind) for _ in range(4)), kind

    def forward(self, x):
        pair = {"dataclass": Both(x, -x), "dict": {"x": x, "y": -x}, "tuple": (x, -x)}[self.kind]
        for layer in self.layers:
            pair = layer(pair)
        return pair.x if self.kind == "dataclass" else pair["x"] if self.kind == "dict" else pair[0]


TAKING = {
    "a list": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), DenseBlock(4, 8, 8), nn.Conv2d(40, 16, 1), DenseBlock(4, 16, 8)),
        torch.randn(4, 3, 16, 16),
    ),
    "a tuple": lambda: (Stack("tuple"), torch.randn(128, 32)),
    "a dict": lambda: (Stack("dict"), torch.randn(128, 32)),
    "a dataclass": lambda: (Stack("dataclass"), torch.randn(128, 32)),
}


@pytest.mark.parametrize("name", TAKING)
def test_modules_that_take_more_than_tensors_are_computed_again(name):
    torch.manual_seed(0)
    model, batch = TAKING[name]()

    def loss(m, b):
        return m(b).square().mean()

    fitted = fit_at(0.7, model, loss, batch, own_step=True, without=("slices", "offload", "recipes", "tensors_away"))
    assert fitted.choice.checkpoint
    assert_same_gradients(fitted, model, loss, batch)


def test_what_a_loss_warns_of_comes_once_and_under_its_own_name():
    def loss(m, b):
        warnings.warn("this loss is old", DeprecationWarning, stacklevel=2)
        return m(b).square().mean()

    model, batch = perceptron(), torch.randn(64, 8)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        outsize.fit(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch, budget="1GiB")
    assert [(str(one.message), one.filename) for one in seen] == [("this loss is old", __file__)]


class Masked(nn.Module):
    """Builds a mask only where something is padded, as transformers does."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x, kept):
        if not kept.all():
            x = x + (kept[:, :, None] * kept[:, None, :]).float().expand(-1, -1, -1).exp() @ x
        return self.layers(x)


def test_what_the_batch_holds_decides_where_it_asks_for_more():
    model, kept = Masked(), torch.ones(8, 100, dtype=torch.bool)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    peaks = []
    for padded in (False, True):
        kept[0, 50:] = not padded
        batch = {"x": torch.randn(8, 100, 16), "kept": kept}
        fitted = outsize.fit(model, lambda m, b: m(b["x"], b["kept"]).square().mean(), optimizer, batch, budget="1GiB")
        peaks.append(fitted.plan.plain)
        fitted.undo()
    assert peaks[1] > 1.2 * peaks[0]


def test_an_inference_is_cut_where_samples_share_a_tensor():
    model, batch = Positions().eval(), {"tokens": tokens(32, 20), "positions": torch.arange(20)[None]}

    def call(m, b):
        return m(**b).unflatten(0, (-1, 20))

    plain = outsize.fit(model, call, None, batch, budget="1GiB", dry_run=True).plan
    fitted = outsize.fit(model, call, None, batch, budget=plain.peak() // 2)
    assert fitted.choice.slices > 1
    torch.testing.assert_close(fitted.infer(batch), call(model, batch))
