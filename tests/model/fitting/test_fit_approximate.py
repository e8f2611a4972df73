"""`allow="approximate"`: numbers in fewer bits come after all that is exact, are said, and hold what was projected."""

import copy
import itertools

import networks as nets
import pytest
import torch
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import outsize
from outsize.core.failure import Exactness
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.codes import decode, encode, sizes_of
from outsize.model.fitting.move.stores import DiskStore
from outsize.model.fitting.run.resident import open_resident
from outsize.model.fitting.run.runner import Work

EXACT = (
    "slices",
    "checkpoint",
    "offload",
    "recipes",
    "tensors_away",
    "in_backward",
    "state_away",
    "gradients_away",
    "stream",
    "chunks",
    "autocast",
)
NARROW = {
    "state_bits": "optimizer state in fewer bits",
    "frozen_bits": "frozen weights in 8 bits",
    "kept_bits": "activations in 8 bits",
}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def make(frozen=False, rows=16, optimizer=torch.optim.AdamW):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), Block(64), Block(64), nn.Linear(64, 4))
    for parameter in model[1].parameters():
        parameter.requires_grad_(not frozen)
    x = torch.randn(rows, 16, 16)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, optimizer(trained, 1e-2), (x, torch.stack([x.sum(-1), x[..., 0], x[..., 1] ** 2, x.mean(-1)], -1))


def loss(model, batch):
    return functional.mse_loss(model(batch[0]), batch[1])


def fit(key, budget, **more):
    model, optimizer, batch = make(frozen=key == "frozen_bits", rows=2 if key == "state_bits" else 16)
    without = (*EXACT, *(other for other in NARROW if other != key))
    return outsize.fit(model, loss, optimizer, batch, budget=budget, without=without, **more), model, optimizer, batch


@pytest.fixture(scope="module")
def smallest():
    """The budget that each remedy alone reaches, and that of the plain step."""
    found = {}
    for key in NARROW:
        with pytest.raises(outsize.BudgetError) as exact:
            fit(key, 1)
        with pytest.raises(outsize.BudgetError) as narrow:
            fit(key, 1, allow="approximate")
        found[key] = (narrow.value.smallest, exact.value.smallest)
    return found


@pytest.mark.parametrize("key", NARROW)
def test_what_runs_holds_what_was_projected_and_is_said(key, smallest):
    budget, plain = smallest[key]
    assert budget < 0.97 * plain
    with pytest.raises(outsize.BudgetError, match="no exact plan"):
        fit(key, budget)
    fitted, _, _, batch = fit(key, budget, allow="approximate")
    remedies = {remedy.name: remedy for remedy in fitted.plan.remedies}
    assert remedies[NARROW[key]].exactness == Exactness.APPROXIMATE and remedies[NARROW[key]].how
    losses = [float(fitted.step(batch)) for _ in range(8)]
    assert losses[-1] < losses[0]
    assert fitted.measured <= max(peak.bytes for step in fitted.plan.steps for peak in step.peaks) <= budget
    assert "bound" in str(fitted.plan)
    fitted.undo()


def test_what_is_exact_comes_first():
    model, optimizer, batch = make(rows=16)
    plan = outsize.fit(model, loss, optimizer, batch, budget="2MiB", allow="approximate", dry_run=True).plan
    assert plan.remedies and all(remedy.exactness != Exactness.APPROXIMATE for remedy in plan.remedies)
    assert not {remedy.name for remedy in plan.remedies} & set(NARROW.values())


def test_state_in_few_bits_trains_as_the_plain_state_and_is_saved_whole():
    ends = {}
    for bits in (0, 8, 4):
        model, optimizer, batch = make(rows=4)
        work = Work(model=model, loss=loss, optimizer=optimizer)
        store = DiskStore("/tmp")
        runner = open_resident(work, Choice(state_bits=bits), store)
        for _ in range(60):
            ends[bits] = float(runner.step(batch))
        packed = sum(tensor.nbytes for tensor in runner.weights.packed())
        whole = 2 * sum(parameter.nbytes for parameter in model.parameters())
        assert packed < (0.35 if bits == 8 else 0.22) * whole if bits else not packed
        runner.gather()
        saved = optimizer.state_dict()
        assert all(value.shape == p.shape for p, s in optimizer.state.items() for n, value in s.items() if n != "step")
        other = torch.optim.AdamW(model.parameters())
        other.load_state_dict(saved)
        runner.close()
        store.close()
    assert ends[8] < 1.5 * ends[0] + 0.02 and ends[4] < 2.5 * ends[0] + 0.05, ends


def test_frozen_weights_are_rounded_once_and_stay_within_a_percent(smallest):
    fitted, model, _, batch = fit("frozen_bits", smallest["frozen_bits"][0], allow="approximate")
    before = make(frozen=True)[0][1].up.weight
    for _ in range(3):
        fitted.step(batch)
    fitted.undo()
    after = model[1].up.weight
    assert type(after) is nn.Parameter and not torch.equal(after, before)
    assert (after - before).norm() < 0.01 * before.norm()


def test_a_step_that_fails_leaves_packed_state_and_weights_as_they_were():
    model, optimizer, batch = make(rows=4)
    store = DiskStore("/tmp")
    fails = []

    def broken(module, part):
        value = loss(module, part)
        if fails:
            value.register_hook(lambda _: (_ for _ in ()).throw(ValueError("no")))
        return value

    for choice in (Choice(state_bits=8), Choice(state_bits=8, in_backward=True), Choice(state_bits=4, slices=2)):
        runner = open_resident(Work(model=model, loss=broken, optimizer=optimizer), choice, store)
        runner.step(batch)
        runner.gather()
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        runner.sink.begin_step()
        fails.append(True)
        with pytest.raises(ValueError, match="no"):
            runner.step(batch)
        runner.roll_back()
        fails.clear()
        runner.gather()
        assert all(torch.equal(a, b) for a, b in zip(before[0].values(), model.state_dict().values(), strict=True))
        for number, values in optimizer.state_dict()["state"].items():
            for name, value in values.items():
                torch.testing.assert_close(value, before[1][number][name], rtol=0.1, atol=1e-3)
    store.close()


OTHERS = {
    "slices": {"slices": 2},
    "checkpoint": {"checkpoint": ("blocks.0",)},
    "in_backward": {"in_backward": True},
    "chunks": {"chunks": 3},
}


@pytest.mark.parametrize("bits", [{"state_bits": 8}, {"state_bits": 4}, {"kept_bits": 8}, {"frozen_bits": 8}])
def test_few_bits_go_together_with_every_other_remedy(bits, tmp_path):
    torch.manual_seed(0)
    base, batch = nets.Language(2, 32, 67, 0.0, False), nets.make_tokens(6, 40, 67)
    for parameter in base.blocks[1].parameters():
        parameter.requires_grad_(False)
    ends = []
    for names in ((), *((name,) for name in OTHERS), *itertools.combinations(OTHERS, 2)):
        if set(names) == {"slices", "in_backward"}:
            continue
        model = copy.deepcopy(base)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
        work = Work(model=model, loss=nets.language_loss, optimizer=optimizer, heads=("head",))
        store = DiskStore(str(tmp_path))
        changes = {key: value for name in names for key, value in OTHERS[name].items()}
        runner = open_resident(work, Choice(**bits, **changes), store)
        ends.append([float(runner.step(batch)) for _ in range(3)])
        runner.close()
        assert store.held == 0
    for end in ends:
        assert end == pytest.approx(ends[0], rel=0.02)


@examples(60)
@given(
    count=st.integers(1, 70_000), bits=st.sampled_from([8, 4]), decades=st.integers(0, 6), seed=st.integers(0, 99),
    kind=st.sampled_from(["signed", "squares", "steps"]),
)  # fmt: skip
def test_numbers_in_few_bits_come_back_within_their_error(count, bits, decades, seed, kind):
    if kind == "steps":
        bits = 8
    torch.manual_seed(seed)
    values = torch.randn(count) * 10 ** (-decades * torch.rand(count))
    values = values**2 if kind == "squares" else values
    codes = encode(values, bits, kind == "steps")
    assert codes.codes.nbytes == sizes_of(count, bits)[0] and codes.scales.numel() == sizes_of(count, bits)[1]
    found = torch.empty(count)
    decode(codes, found)
    largest = functional.pad(values.abs(), (0, -count % 128)).view(-1, 128).amax(1).repeat_interleave(128)[:count]
    allowed = {
        ("signed", 8): 0.036,
        ("squares", 8): 0.074,
        ("steps", 8): 0.008,
        ("signed", 4): 0.16,
        ("squares", 4): 0.07,
    }[kind, bits]
    assert ((found - values).abs() <= allowed * largest + 1e-12).all()
    if kind == "squares":
        assert (found[values > 0] > 0).all()
    if kind == "steps":
        assert (found.sign() == values.sign()).all()
