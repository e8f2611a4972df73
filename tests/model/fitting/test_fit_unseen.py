"""Steps that depend on chance beside torch's, or on values: the plan holds, and training is the user's own."""

import copy
import io
import random

import networks as nets
import numpy as np
import pytest
import torch
from effort import long
from torch import nn
from torch.nn import functional

import outsize


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def draws():
    state = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), state[1].tolist(), state[2]


class Wide(nn.Module):
    """A block that leaves some of its inside out; `chance(shape)` says which."""

    def __init__(self, chance, width=32):
        super().__init__()
        self.up, self.down, self.chance = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), chance

    def forward(self, x):
        inside = functional.gelu(self.up(x))
        return x + self.down(inside * self.chance(inside.shape))


class Own:
    """Masks from a generator of its own."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, shape):
        return torch.rand(shape, generator=self.generator) > 0.2


def from_numpy(shape):
    return torch.from_numpy(np.random.rand(*shape) > 0.2)


def from_python(shape):
    return torch.tensor([float(random.random() > 0.2) for _ in range(shape[-1])])


def make_wide(make):
    return nn.Sequential(*(Wide(make()) for _ in range(4)), nn.Linear(32, 8))


def wide_loss(model, batch):
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def rows(count=32):
    return {"x": torch.randn(count, 32), "y": torch.randint(0, 8, (count,))}


def train(make, loss, batch, part, steps=3, **options):
    """Fitted and plain steps side by side at `part` of the plain peak, or at the smallest budget that is named."""
    models = []
    for _ in range(2):
        seed(0)
        models.append(make())
    model, twin = models
    optimizer, other = (torch.optim.SGD(m.parameters(), 0.02, momentum=0.9) for m in models)
    budget, before = int(nets.plain_peak(model, loss, batch, optimizer) * part), draws()
    try:
        fitted = outsize.fit(model, loss, optimizer, batch, budget=budget, **options)
    except outsize.BudgetError as error:
        budget = error.smallest
        fitted = outsize.fit(model, loss, optimizer, batch, budget=budget, **options)
    assert draws() == before
    for step in range(steps):
        seed(step)
        got, after = fitted.step(batch), draws()
        seed(step)
        assert torch.allclose(got, nets.plain_step(twin, loss, other, batch), rtol=1e-5)
        assert draws() == after
    assert fitted.measured <= fitted.plan.peak() <= budget
    plan = fitted.plan
    fitted.undo()
    assert nets.worst_difference(list(model.parameters()), list(twin.parameters())) < 1e-5
    return plan


@pytest.mark.parametrize(
    ("make", "said"),
    [(lambda: from_numpy, "numpy.random"), (lambda: from_python, "Python's random"), (Own, "")],
    ids=["numpy", "python", "own"],
)
def test_numbers_from_any_generator_are_drawn_again_and_named(make, said):
    plan = train(lambda: make_wide(make), wide_loss, rows(), 0.5)
    forbidden = [note for note in plan.notes if "slice the batch" in note]
    assert any(said in note for note in forbidden) if said else not forbidden  # slices are given what torch draws
    assert plan.remedies


def test_a_block_with_draws_of_python_is_computed_again_as_it_ran():
    without = ("offload", "recipes", "tensors_away", "stream", "slices", "in_backward", "gradients_away", "state_away")
    plan = train(lambda: make_wide(lambda: from_python), wide_loss, rows(64), 0.85, without=without)
    assert [remedy.name for remedy in plan.remedies] == ["compute activations again"]


@pytest.mark.parametrize("chance", [from_numpy, from_python])
def test_numbers_from_global_generators_are_drawn_again_where_weights_visit(chance):
    seed(0)
    model, batch = make_wide(lambda: chance), rows()
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.AdamW(m.parameters()) for m in (model, twin))
    before = draws()
    fitted = outsize.fit(model, wide_loss, optimizer, batch, device="cpu", budget="2MiB", host="16GiB")
    assert draws() == before
    assert any("random" in note and "drawn again alike" in note for note in fitted.plan.notes)
    for step in range(2):
        seed(step)
        got, after = fitted.step(batch), draws()
        seed(step)
        assert torch.equal(got, nets.plain_step(twin, wide_loss, other, batch))
        assert draws() == after
    fitted.undo()
    assert nets.worst_difference(list(model.parameters()), list(twin.parameters())) < 1e-6


@pytest.mark.parametrize("make", [lambda: from_numpy, lambda: from_python, Own], ids=["numpy", "python", "own"])
def test_a_step_that_runs_again_after_a_failure_draws_what_it_drew_the_first_time(make):
    finals = []
    for planted in (False, True):
        seed(0)
        model, batch = make_wide(make), rows()
        fitted = outsize.fit(model, wide_loss, torch.optim.SGD(model.parameters(), 0.02), batch, budget="1GiB")
        fitted._tighten = lambda failure: None  # the same plan again
        due = iter([planted])

        def fail(gradient, due=due):
            if next(due, False):
                raise torch.OutOfMemoryError("CUDA out of memory. (planted)")

        model[0].up.weight.register_hook(fail)
        fitted.step(batch)
        finals.append((draws(), [p.detach().clone() for p in model.parameters()]))
    assert finals[0][0] == finals[1][0]
    assert all(torch.equal(a, b) for a, b in zip(finals[0][1], finals[1][1], strict=True))


class Dropping(nn.Module):
    """Layers are left out by chance."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32)) for _ in range(6))
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        for layer in self.layers:
            if not torch.rand([]) < 0.5:
                x = x + layer(x)
        return self.head(x)


@pytest.mark.parametrize("part", [1.0, 0.5])
def test_layers_that_are_left_out_by_chance_are_there_in_the_plan(part):
    batch = rows()
    train(Dropping, wide_loss, batch, part, steps=5)
    seed(0)
    model = Dropping()
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    plans = []
    for number in range(4 if long() else 2):
        torch.manual_seed(number)
        plans.append(outsize.fit(model, wide_loss, optimizer, batch, budget="1GiB", dry_run=True).plan.plain)
    assert len(set(plans)) == 1


class Experts(nn.Module):
    """Experts that are looked up by the name of their number, and a loss over how often each is asked."""

    def __init__(self, count=4, width=32):
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleDict(
            {f"expert_{i}": nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)) for i in range(count)}
        )
        self.head = nn.Linear(width, 8)

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        asked = functional.one_hot(chosen, len(self.experts)).sum(0)
        for number in asked.nonzero():
            places = (chosen == number).nonzero()[:, 0]
            answer = self.experts[f"expert_{number[0]}"](x[places])
            out = out.index_add(0, places, answer * weights[places, None])
        shares = torch.bincount(chosen, minlength=len(self.experts)) / len(x)
        return self.head(x + out), (shares * self.gate(x).softmax(-1).mean(0)).sum()


def expert_loss(model, batch):
    logits, balance = model(batch["x"])
    return functional.cross_entropy(logits, batch["y"]) + 0.1 * balance


@pytest.mark.parametrize("part", [1.0, 0.4])
def test_experts_that_are_looked_up_by_number_are_all_in_the_plan(part):
    plan = train(Experts, expert_loss, rows(), part)
    assert part == 1.0 or not any(remedy.name == "slice the batch" for remedy in plan.remedies)


class Listening(nn.Module):
    """A recurrent layer over sequences of their own lengths."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer, self.head = (
            nn.Embedding(50, 16),
            nn.LSTM(16, 24, 2, batch_first=True),
            nn.Linear(24, 50),
        )

    def forward(self, tokens, lengths):
        pack, pad = nn.utils.rnn.pack_padded_sequence, nn.utils.rnn.pad_packed_sequence
        packed = pack(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        return self.head(pad(self.layer(packed)[0], batch_first=True, total_length=tokens.shape[1])[0])


def counted_loss(model, batch):
    out = model(batch["tokens"], batch["lengths"])
    mask = torch.arange(out.shape[1])[None] < batch["lengths"][:, None]
    return (functional.cross_entropy(out.transpose(1, 2), batch["tokens"], reduction="none") * mask).sum(), mask.sum()


def test_sequences_of_their_own_lengths_are_traced_as_long_as_they_can_be():
    seed(0)
    model = Listening()
    batch = {"tokens": torch.randint(0, 50, (6, 10)), "lengths": torch.tensor([10, 3, 7, 5, 9, 2])}
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    plain = nets.plain_peak(model, counted_loss, batch, optimizer)
    budget = plain * 7 // 10  # oneDNN's scratch for a layer does not shrink with the batch
    fitted = outsize.fit(model, counted_loss, optimizer, batch, budget=budget)
    fitted.step(batch)
    assert fitted.measured <= fitted.plan.peak() <= budget


def alignment_loss(model, batch):
    scores = model(batch["x"]).log_softmax(-1).transpose(0, 1)
    if batch["labels"].max() >= 8:  # a check that reads the batch
        raise ValueError("a label is not in the vocabulary")
    times = torch.full((batch["x"].shape[0],), batch["x"].shape[1])
    return functional.ctc_loss(scores, batch["labels"], times, batch["lengths"], zero_infinity=True)


def test_an_alignment_loss_whose_labels_are_checked_is_fitted():
    batch = {
        "x": torch.randn(6, 20, 32),
        "labels": torch.randint(1, 8, (6, 5)),
        "lengths": torch.tensor([5, 3, 4, 2, 5, 1]),
    }
    train(lambda: make_wide(lambda: lambda shape: 1.0), alignment_loss, batch, 0.4)


def test_a_step_that_fails_without_the_contents_of_its_batch_is_told_them():
    def loss(model, batch):
        if not (batch["y"] > 0).any().item() or int(batch["y"].max()) < 7:
            raise ValueError("a batch without the last class")
        return wide_loss(model, batch)

    batch = rows()
    batch["y"][:3] = 7
    train(lambda: make_wide(lambda: lambda shape: 1.0), loss, batch, 0.5)


def test_a_step_that_cannot_be_followed_is_one_sentence():
    seen = []

    def loss(model, batch):
        out = model(batch["x"])
        seen.append(out.device.type)
        if not float(out.detach().abs().sum()) > 0.0:
            raise ValueError("nothing came out")
        return functional.cross_entropy(out, batch["y"])

    model = make_wide(lambda: lambda shape: 1.0)
    with pytest.raises(outsize.InputError, match=r"followed without contents.*nothing came out"):
        outsize.fit(model, loss, torch.optim.SGD(model.parameters(), 0.1), rows(), budget="1GiB")
    assert seen


def directed_loss(model, batch):
    out, slope = torch.func.jvp(model, (batch["x"],), (torch.ones_like(batch["x"]),))
    return functional.cross_entropy(out, batch["y"]) + slope.square().mean()


def test_directional_derivatives_in_a_loss_are_fitted_with_activations_elsewhere():
    def make():
        blocks = (nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4))
        return nn.Sequential(*blocks, nn.Linear(32, 8))

    train(make, directed_loss, rows(16), 0.6, without=("checkpoint", "recipes", "slices"))


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_training_goes_on_bitwise_from_a_file_with_state_elsewhere_by_the_plan_it_had(when):
    batch, models = rows(), []
    for _ in range(2):
        seed(0)
        models.append(make_wide(lambda: lambda shape: 1.0))
    model, other = models
    optimizer, second = (torch.optim.AdamW(m.parameters(), 1e-3) for m in models)
    plain = nets.plain_peak(model, wide_loss, batch, optimizer)
    fitted = outsize.fit(model, wide_loss, optimizer, batch, budget=plain // 3)
    assert fitted.choice.state_away
    again = outsize.fit(other, wide_loss, second, batch, budget=plain // 3) if when == "meanwhile" else None
    for _ in range(2):
        fitted.step(batch)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file)
    other.load_state_dict(weights)
    second.load_state_dict(state)
    again = again or outsize.fit(other, wide_loss, second, batch, budget=plain // 3)
    plans = fitted.plan, again.plan
    for _ in range(2):
        assert torch.equal(fitted.step(batch), again.step(batch))
    assert (fitted.plan, again.plan) == plans  # state that came home to be saved or loaded is not what a step held
    fitted.undo()
    again.undo()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


class Placed(nn.Module):
    """Positions come with the batch and as a buffer, both repeated for every sample without a copy."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.register_buffer("steps", torch.arange(8).expand(4, 8))

    def forward(self, tokens, places):
        return self.head(self.words(tokens) + (places + self.steps[:1]).unsqueeze(-1))


def test_tensors_that_repeat_their_elements_are_part_of_a_batch_and_of_a_model_like_others():
    batch = {"tokens": torch.randint(0, 50, (4, 8)), "places": torch.arange(8).expand(4, 8)}
    train(Placed, lambda m, b: functional.cross_entropy(m(**b).flatten(0, 1), b["tokens"].flatten()), batch, 0.8)
