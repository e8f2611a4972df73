"""Hosted steps: the model stays on the host, the step runs on a device that it does not fit on, and is the plain step."""

import contextlib
import copy
import json
import math

import forks
import lanes
import networks as nets
import pytest
import torch
from effort import examples, long, points
from hosting import NETS, OPTIMIZERS, open_runner
from hypothesis import Phase, given
from hypothesis import strategies as st
from torch import nn

import outsize
from outsize.core.memory import HOST, Pool
from outsize.model.fitting import without_weights
from outsize.model.fitting.move.mover import LEAVING, CardMover, Leaving
from outsize.model.fitting.move.pinned_blocks import State, Weights
from outsize.model.fitting.move.ring import Ring
from outsize.model.fitting.move.units import cut_model, sizeof
from outsize.model.fitting.plan.describe import HOSTED_MARGIN
from outsize.model.fitting.plan.dry_run import Stage
from outsize.model.fitting.run.runner import Work
from outsize.model.fitting.update.gradient_sink import Collected

HUGE = 1 << 40
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@examples(16, phases=PHASES)
@given(
    net=st.sampled_from(list(NETS)), optimizer=st.sampled_from(list(OPTIMIZERS)), inputs=st.booleans(),
    update=st.sampled_from(["card", "host", "kept"]), limit=st.sampled_from([1, 4_000, 20_000, 60_000, HUGE]),
    rows=st.integers(1, 7), seed=st.integers(0, 99), later=st.booleans(),
)  # fmt: skip
def test_a_hosted_step_is_the_plain_step_whatever_the_copies_do(
    net, optimizer, inputs, update, limit, rows, seed, later
):
    make, loss, data = NETS[net]
    torch.manual_seed(seed)
    model, batch = make(), data(rows)
    twin = copy.deepcopy(model)
    ours, plain = (OPTIMIZERS[optimizer](m.parameters()) for m in (model, twin))
    clip = 0.5 if update == "kept" else None
    runner, _ = open_runner(
        model, loss, ours, batch, lanes.LateLane(seed), clip=clip, later=later and update == "kept", limit=limit,
        inputs=inputs, update=update,
    )  # fmt: skip
    for step in range(3):
        torch.manual_seed(step)
        got = runner.step(batch)
        torch.manual_seed(step)
        expected = loss(twin, batch)
        expected.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(twin.parameters(), clip)
        plain.step()
        plain.zero_grad()
        assert torch.allclose(got, expected, rtol=1e-6)
    for (name, one), two in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-6), name
    mine, theirs = ours.state_dict(), plain.state_dict()
    assert mine["param_groups"] == theirs["param_groups"] and mine["state"].keys() == theirs["state"].keys()
    for key, values in theirs["state"].items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                assert torch.allclose(mine["state"][key][name], value, rtol=1e-4, atol=1e-6), (key, name)
    runner.close()


@examples(6, phases=PHASES)
@given(net=st.sampled_from(["language", "patches", "vision"]), pieces=st.integers(2, 5), rows=st.integers(2, 7))
def test_rows_in_pieces_give_the_same_gradients(net, pieces, rows):
    make, loss, data = NETS[net]
    model, batch = make().double(), data(rows)
    batch = {**batch, "image": batch["image"].double()} if isinstance(batch, dict) else batch
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    runner, _ = open_runner(
        model, loss, optimizer, batch, lanes.LateLane(), limit=90_000, inputs=True, update="card", pieces=pieces
    )
    sink = Collected()
    runner.collect(batch, sink)
    found = sink.gradients
    loss(twin, batch).backward()
    expected = [p.grad for p in twin.parameters()]
    assert nets.worst_difference([found[id(p)] for p in model.parameters()], expected) < 1e-12


@examples(40)
@given(sizes=st.lists(st.integers(1, 4000), min_size=1, max_size=40), seed=st.integers(0, 9))
def test_a_ring_never_gives_away_what_is_in_use_and_waits_for_all_it_replaces(sizes, seed):
    ring = Ring(torch.empty(8192, dtype=torch.uint8))
    chance = torch.Generator().manual_seed(seed)
    live, last = [], {}
    for number, size in enumerate(sizes):
        lease = ring.take(size)
        if lease is None:
            assert live
            gone = live.pop(0)
            gone.release(f"mark {number}")
            last.update(dict.fromkeys(range(gone.start, gone.stop, 512), f"mark {number}"))
            continue
        for other in live:
            assert lease.stop <= other.start or other.stop <= lease.start
        needed = {mark for byte, mark in last.items() if lease.start <= byte < lease.stop}
        assert needed <= set(lease.waits)
        last = {byte: mark for byte, mark in last.items() if not lease.start <= byte < lease.stop}
        live.append(lease)
        if torch.rand((), generator=chance) < 0.5:
            gone = live.pop(int(torch.randint(len(live), (), generator=chance)))
            gone.release(f"mark {number}")
            last.update(dict.fromkeys(range(gone.start, gone.stop, 512), f"mark {number}"))


def test_what_a_traced_step_holds_is_what_the_real_one_takes_in_rings():
    model, batch = nets.Language(blocks=6, width=64), nets.make_tokens()
    optimizer = torch.optim.AdamW(model.parameters())
    lane = lanes.LateLane(limit=1 << 20)
    runner, sketch = open_runner(model, nets.language_loss, optimizer, batch, lane, limit=200_000, update="card")
    runner.step(batch)
    assert lane.taken <= sketch.peak


def fit(model, loss, optimizer, batch, budget, **more):
    return outsize.fit(model, loss, optimizer, batch, device="cpu", budget=budget, host="16GiB", **more)


def weights_of(model):
    return sum(sizeof(p) for p in model.parameters())


def test_training_inside_less_than_the_weights_is_the_plain_training():
    model, batch = nets.Language(blocks=12, width=64), nets.make_tokens()
    twin = copy.deepcopy(model)
    ours, plain = (torch.optim.SGD(m.parameters(), 1e-3, momentum=0.9) for m in (model, twin))
    budget = weights_of(model) * 3 // 4
    fitted = fit(model, nets.language_loss, ours, batch, budget)
    assert fitted.plan.fits and fitted.plan.moved > weights_of(model) and fitted.plan.seconds > 0
    assert {"stream weights", "update in the backward pass"} <= {remedy.name for remedy in fitted.plan.remedies}
    text = str(fitted.plan)
    for word in ("host", "over the link", "stream weights"):
        assert word in text
    for _ in range(5):
        assert torch.allclose(fitted.step(batch), nets.plain_step(twin, nets.language_loss, plain, batch), rtol=1e-4)
    names = list(model.state_dict())
    assert fitted.undo() is model
    assert names == list(twin.state_dict())
    assert nets.worst_difference(list(model.parameters()), list(twin.parameters())) < 1e-4
    nets.plain_step(model, nets.language_loss, ours, batch)


def test_saving_and_loading_in_the_middle_changes_nothing(tmp_path):
    model, batch = nets.Language(blocks=8, width=32), nets.make_tokens()
    twin = copy.deepcopy(model)
    ours, plain = (torch.optim.AdamW(m.parameters(), 1e-3) for m in (model, twin))
    fitted = fit(model, nets.language_loss, ours, batch, "4MiB")
    for _ in range(2):
        fitted.step(batch)
        nets.plain_step(twin, nets.language_loss, plain, batch)
    torch.save({"model": model.state_dict(), "optimizer": ours.state_dict()}, tmp_path / "saved.pt")
    assert (tmp_path / "saved.pt").stat().st_size < 3.5 * weights_of(model)
    for _ in range(2):
        fitted.step(batch)
    saved = torch.load(tmp_path / "saved.pt")
    model.load_state_dict(saved["model"])
    ours.load_state_dict(saved["optimizer"])
    got, expected = fitted.step(batch), nets.plain_step(twin, nets.language_loss, plain, batch)
    assert torch.allclose(got, expected, rtol=1e-5)
    assert torch.allclose(fitted.step(batch), nets.plain_step(twin, nets.language_loss, plain, batch), rtol=1e-5)


def test_clipping_and_own_steps_leave_gradients_on_the_host():
    model, batch = nets.Language(), nets.make_tokens()
    twin = copy.deepcopy(model)
    ours, plain = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, twin))
    fitted = fit(model, nets.language_loss, ours, batch, "8MiB", clip=0.5)
    assert fitted.choice.update == "kept" and any("clipping" in note for note in fitted.plan.notes)
    assert fitted._now.sink.on_card is not None
    fitted.step(batch)
    nets.language_loss(twin, batch).backward()
    nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    plain.step()
    plain.zero_grad()
    assert nets.worst_difference(list(model.parameters()), list(twin.parameters())) < 1e-6
    fitted.undo()
    fitted = fit(model, nets.language_loss, ours, batch, "8MiB", own_step=True)
    fitted.backward(batch)
    fitted.backward(batch)
    nets.language_loss(twin, batch).backward()
    expected = [2 * p.grad for p in twin.parameters()]
    assert nets.worst_difference([p.grad for p in model.parameters()], expected) < 1e-5


def test_the_smallest_budgets_are_named_before_anything_is_changed():
    model, batch = nets.Language(blocks=4, width=64), nets.make_tokens()
    before = [(p.data_ptr(), p.detach().clone()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(outsize.BudgetError) as caught:
        fit(model, nets.language_loss, optimizer, batch, "64KiB")
    assert caught.value.smallest > 64 * 1024
    with pytest.raises(outsize.BudgetError, match="host") as caught:
        outsize.fit(model, nets.language_loss, optimizer, batch, device="cpu", budget="8MiB", host="1MiB")
    assert caught.value.smallest > 2**20 and caught.value.culprit == "host"
    for p, (address, value) in zip(model.parameters(), before, strict=True):
        assert p.data_ptr() == address and torch.equal(p, value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: a.update(scaler=object()), "GradScaler"),
        (lambda a: a.update(loss=None), "needs a function loss"),
        (lambda a: a.update(optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters())), "another model"),
        (lambda a: a.update(device="cuda"), "no card"),
        (lambda a: a.update(weights="nowhere.safetensors", optimizer=None), "nowhere"),
        (lambda a: a.update(without=("magic",)), "no remedy"),
        (lambda a: a.update(model=nn.Linear(2, 2, device="meta"), optimizer=None), "host memory"),
    ],
)
def test_mistakes_are_named(change, said):
    model, batch = nets.Language(), nets.make_tokens()
    given = {
        "model": model, "loss": nets.language_loss, "optimizer": torch.optim.SGD(model.parameters()), "batch": batch,
        "device": "cpu", "budget": "8MiB", "host": "16GiB",
    }  # fmt: skip
    change(given)
    with pytest.raises(outsize.OutsizeError, match=said):
        outsize.fit(**given)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.bad = Adds()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.bad(x)


class Adds(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x.add_(self.weight)


def test_a_module_that_changes_its_input_is_named():
    model = InPlace()
    with pytest.raises(outsize.InputError, match="Adds changes its input"):
        fit(model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters()), torch.ones(2, 8), "1MiB")


@pytest.mark.parametrize("kind", ["host", "safetensors", "torch", "shards"])
def test_inference_with_weights_that_visit_gives_the_plain_output(kind, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, batch = nets.Language(blocks=12, width=64).eval(), nets.make_tokens(4, 8)
    expected = model(batch).detach()
    budget = weights_of(model) // 2
    if kind == "host":
        fitted = fit(model, None, None, batch, budget)
    else:
        path = tmp_path / {"safetensors": "m.safetensors", "torch": "m.pt", "shards": "shards"}[kind]
        state = {name: t for name, t in model.state_dict().items() if name != "head.weight"}
        if kind == "torch":
            torch.save(state, path)
        elif kind == "safetensors":
            safetensors.save_file(state, path)
        else:
            path.mkdir()
            for number, some in enumerate((list(state)[::2], list(state)[1::2])):
                safetensors.save_file({name: state[name] for name in some}, path / f"part-{number}.safetensors")
        with without_weights():
            empty = nets.Language(blocks=12, width=64).eval()
        empty.head.weight = empty.embed.weight
        fitted = fit(empty, None, None, batch, budget, weights=str(path))
        assert all(p.device.type == "meta" for p in empty.parameters())
    assert fitted.plan.fits and fitted.plan.peak(fitted.plan.budgets[0].pool) < weights_of(model)
    for _ in range(3):
        assert torch.allclose(fitted.infer(batch), expected, rtol=1e-5, atol=1e-5)
    fitted.undo()


def test_a_file_of_other_tensors_is_refused_and_says_which(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    batch = nets.make_tokens()
    state = {name: t.clone() for name, t in nets.Language().state_dict().items()}
    safetensors.save_file({name: t for name, t in state.items() if "up" not in name}, tmp_path / "a.safetensors")
    safetensors.save_file({name: t.half() for name, t in state.items()}, tmp_path / "b.safetensors")
    with without_weights():
        model = nets.Language()
    for file, said in (
        ("a", "6 tensors of the model are not in the file, the first is blocks.0.up.weight"),
        ("b", "float16"),
    ):
        with pytest.raises(outsize.InputError, match=said):
            fit(model, None, None, batch, "8MiB", weights=tmp_path / f"{file}.safetensors")


def test_a_weights_file_that_is_not_there_is_named_with_what_is_there_and_what_to_give(tmp_path):
    batch, (empty, some) = nets.make_tokens(), (tmp_path / name for name in ("empty", "some"))
    for folder in (empty, some):
        folder.mkdir()
    (some / "model-1.safetensors").write_bytes(b"")
    (some / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-2.safetensors"}}))
    (some / "bad.index.json").write_text("[]")
    with without_weights():
        model = nets.Language()
    for path, error, said in (
        (
            empty / "none.safetensors",
            outsize.StoreError,
            "none.safetensors cannot be read .*there is none in .*empty: give",
        ),
        (
            some / "none.pt",
            outsize.StoreError,
            "none.pt cannot be read .*there are model-1.safetensors in .*some: give",
        ),
        (some / "no" / "one.pt", outsize.StoreError, "one.pt cannot be read .*No such file"),
        (some / "model.safetensors.index.json", outsize.StoreError, "model-2.safetensors cannot be read"),
        (some / "none.index.json", outsize.StoreError, "none.index.json cannot be read"),
        (some / "bad.index.json", outsize.InputError, "bad.index.json is no index of shards"),
        (empty, outsize.InputError, "holds no .safetensors, .bin, .pt or .pth file"),
    ):
        with pytest.raises(error, match=said):
            fit(model, None, None, batch, "8MiB", weights=path)


def test_a_larger_batch_runs_in_more_pieces_and_a_net_that_mixes_rows_says_so():
    model, batch = nets.Language(), nets.make_tokens()
    twin = copy.deepcopy(model)
    ours, plain = (torch.optim.SGD(m.parameters(), 0.01) for m in (model, twin))
    fitted = fit(model, nets.language_loss, ours, batch, "8MiB")
    larger = nets.make_tokens(15)
    assert torch.allclose(fitted.step(larger), nets.plain_step(twin, nets.language_loss, plain, larger), rtol=1e-5)
    assert nets.worst_difference(list(model.parameters()), list(twin.parameters())) < 1e-5

    class Mixing(nn.Linear):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    model = nn.Sequential(nn.Linear(8, 8), Mixing(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    fitted = fit(model, lambda m, x: m(x).square().mean(), optimizer, torch.randn(4, 8), "1MiB")
    fitted.step(torch.randn(4, 8))
    with pytest.raises(outsize.InputError, match="cannot run on a few rows"):
        fitted.step(torch.randn(9, 8))


class Event:
    def __init__(self):
        self.passed = False

    def query(self):
        return self.passed

    def synchronize(self):
        self.passed = True


class Stream:
    def __init__(self, log):
        self.log = log

    def wait_event(self, event):
        self.log.append(event)

    def record_event(self):
        self.log.append(Event())
        return self.log[-1]


def test_a_card_holds_few_tensors_on_their_way_out_and_lets_go_of_those_that_are_there(monkeypatch):
    lane = object.__new__(CardMover)
    lane.device, lane.leaving, log = torch.device("cpu"), Leaving(LEAVING), []
    lane._in, lane._out, computing = Stream(log), Stream(log), Stream(log)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    home = torch.zeros(8)
    marks = []
    for number in range(6):
        marks.append(lane.send(home, torch.full((8,), float(number)), hold=True))
        assert torch.equal(home, torch.full((8,), float(number))) and len(lane.leaving) <= 2
    assert [mark.passed for mark in marks] == [True] * 4 + [False] * 2
    marks[4].passed = marks[5].passed = True
    assert lane.send(home, home, hold=True) in [row[1] for row in lane.leaving._rows] and len(lane.leaving) == 1
    lane.send(home, home)
    assert len(lane.leaving) == 1
    ready = lane.bring(torch.zeros(8), home, [None, marks[0]])
    assert marks[0] in log and log.index(ready) > log.index(marks[0])


class Borrowing(nn.Module):
    """Uses the weights of its children without calling them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(101, 32)
        self.blocks = nn.ModuleList(nets.Block(32) for _ in range(4))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.embed.weight)


def test_weights_used_outside_of_their_module_stay_on_the_device():
    model, batch = Borrowing(), nets.make_tokens()
    twin = copy.deepcopy(model)
    ours, plain = (torch.optim.SGD(m.parameters(), 1e-3) for m in (model, twin))
    fitted = fit(model, nets.language_loss, ours, batch, "2MiB")
    assert "embed.weight" in fitted.choice.held
    for _ in range(3):
        assert torch.allclose(fitted.step(batch), nets.plain_step(twin, nets.language_loss, plain, batch), rtol=1e-5)
    layers = nn.Sequential(*(nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True) for _ in range(6))).eval()
    x = torch.randn(2, 8, 32)
    found = fit(layers, None, None, x, weights_of(layers) // 2)
    assert torch.allclose(found.infer(x), layers(x), atol=1e-5)


class Failing(nn.Module):
    """Runs out of memory when it is told to."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.due = False

    def forward(self, tokens):
        out = self.net(tokens)
        if self.due and torch.is_grad_enabled() and tokens.device.type == "cpu":
            self.due = False
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return out


def test_memory_that_runs_out_in_the_forward_pass_loses_nothing(monkeypatch):
    monkeypatch.setattr("outsize.model.fitting.arguments.open_mover", lambda device: lanes.LateLane(3))
    model, batch = Failing(nets.Language(blocks=8, width=64, dropout=0.1)), nets.make_tokens()
    twin = copy.deepcopy(model)
    ours, plain = (torch.optim.AdamW(m.parameters(), 1e-4) for m in (model, twin))
    fitted = fit(model, nets.language_loss, ours, batch, weights_of(model) * 3)
    before = fitted.plan.peak(fitted.plan.budgets[0].pool)
    for step in range(4):
        model.due = step in (0, 2)
        torch.manual_seed(step)
        if model.due:
            with pytest.warns(UserWarning, match="nothing was lost"):
                got = fitted.step(batch)
        else:
            got = fitted.step(batch)
        torch.manual_seed(step)
        assert torch.allclose(got, nets.plain_step(twin, nets.language_loss, plain, batch), rtol=1e-5)
    assert fitted.plan.peak(fitted.plan.budgets[0].pool) < before
    assert nets.worst_difference(list(model.parameters()), list(twin.parameters())) < 1e-4


def test_weights_and_state_move_to_other_places_without_a_second_copy_of_all():
    model, batch = nets.Language(blocks=4), nets.make_tokens()
    optimizer = torch.optim.AdamW(model.parameters())
    nets.plain_step(model, nets.language_loss, optimizer, batch)
    layout = Stage(
        Work(model=model, loss=nets.language_loss, optimizer=optimizer), batch, device=torch.device("cpu")
    ).layout()
    values = [p.detach().clone() for p in model.parameters()]
    state = copy.deepcopy(optimizer.state_dict())
    coarse, fine = cut_model(model, 60_000), cut_model(model, 1)
    assert not coarse.lies_like(fine) and coarse.lies_like(cut_model(model, 60_000))
    weights, moments = Weights(coarse), State(coarse, layout)
    moments.move_in(optimizer)
    moved, other = Weights(fine, weights), State(fine, layout)
    other.take_over(moments, optimizer)
    assert not weights.blocks and not moments.blocks
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))
    for key, row in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, state["state"][key][name]) for name, value in row.items())
    assert set(moved.blocks) == {name for name, unit in fine.units.items() if unit.own}


def test_a_plan_for_a_card_needs_no_card():
    with torch.device("meta"):
        model = nets.Language(blocks=4, width=1024, words=8000)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = nets.make_tokens(8, 512, 8000)
    wanted = 150 * 2**20
    found = outsize.fit(
        model, nets.language_loss, optimizer, batch, device="cuda", budget=4 * wanted, host="64GiB", dry_run=True
    )
    assert found.plan.fits and 12 * sum(p.numel() for p in model.parameters()) > 4 * wanted
    assert math.isfinite(found.plan.slow_down)
    assert found.plan.pool == Pool(kind="device", index=0) and 0 < found.plan.peak() <= 4 * wanted < found.plan.peak(
        HOST
    )
    replayed = found._used.replan.__self__._found[found.choice][1].peaks["reserved"]
    assert found.plan.peak() == min(int(replayed * (1 + HOSTED_MARGIN)), 4 * wanted) > replayed
    with pytest.raises(outsize.InputError, match="over"):
        found.step(batch)


FROM_DISK = """
import sys, torch, outsize
from torch import nn
from outsize.model.fitting import without_weights

def read(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

def make():
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(64))).eval()

with without_weights():
    model = make()
x = torch.randn(4, 1024)
fitted = outsize.fit(model, None, None, x, weights=sys.argv[1], device="cpu", budget="32MiB", host="8GiB")
open("/proc/self/clear_refs", "w").write("5")
before = read("VmRSS")
for _ in range(3):
    fitted.infer(x)
print(read("VmHWM") - before)
"""


def test_weights_from_a_file_are_never_all_in_memory(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    big = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(64)))
    safetensors.save_file(big.state_dict(), tmp_path / "big.safetensors")
    child = forks.start(FROM_DISK, tmp_path / "big.safetensors", imported=forks.TORCH)
    out, err = child.communicate()
    if "clear_refs" in err:
        pytest.skip("the kernel does not let a process reset its peak")
    assert child.returncode == 0, err
    assert int(out) < 64 * 2**20 < weights_of(big) // 4


class Lends(nn.Module):
    """A part that runs inside of others, as an embedding that encoder and decoder share; `deep`: inside of others in others."""

    def __init__(self, deep):
        super().__init__()
        self.shared = nn.Linear(64, 64)
        self.middle = Borrows(self.shared, 8)
        self.blocks = nn.ModuleList(Borrows(self.middle if deep else self.shared, 8 if deep else 256) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Borrows(nn.Module):
    def __init__(self, shared, width):
        super().__init__()
        self.shared, self.wide, self.narrow = shared, nn.Linear(64, width), nn.Linear(width, 64)

    def forward(self, x):
        return self.narrow(torch.relu(self.wide(self.shared(x))))


@pytest.mark.parametrize("deep", [False, True])
def test_a_module_that_runs_inside_of_another_ones_turn_comes_with_it_or_stays(deep):
    model, batch = Lends(deep), torch.randn(6, 64)
    twin = copy.deepcopy(model)
    loss = lambda m, x: m(x).square().mean()  # noqa: E731
    ours, plain = (torch.optim.AdamW(m.blocks.parameters(), 1e-3) for m in (model, twin))
    fitted = fit(model, loss, ours, batch, 2**18 if deep else 2**20)
    for _ in range(2):
        assert torch.allclose(fitted.step(batch), nets.plain_step(twin, loss, plain, batch), rtol=1e-6)
    fitted.undo()


def make_gpt2(tf):
    config = tf.GPT2Config(n_embd=64, n_layer=6, n_head=4, vocab_size=300, bos_token_id=0, eos_token_id=0)
    return tf.GPT2LMHeadModel(config)


def make_t5(tf):
    config = tf.T5Config(
        d_model=64, d_ff=128, num_layers=3 if long() else 2, num_heads=4, d_kv=16, vocab_size=300, dropout_rate=0.1,
        decoder_start_token_id=0,
    )  # fmt: skip
    return tf.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("make", points([make_t5, make_gpt2], 1))
def test_transformers_models_with_dropout_ties_and_caches_are_trained_and_run_as_without_us(make):
    model = make(pytest.importorskip("transformers")).train()
    tokens = torch.randint(0, 300, (4, 24))
    batch = {"input_ids": tokens, "labels": tokens}
    twin = copy.deepcopy(model)
    ours, plain = (torch.optim.AdamW(m.parameters(), 1e-3) for m in (model, twin))
    fitted = fit(model, lambda m, b: m(**b).loss, ours, batch, 2 * weights_of(model))
    assert fitted.plan.peak(fitted.plan.budgets[0].pool) < 2 * weights_of(model)  # plain: four times and activations
    for step in range(2):
        torch.manual_seed(step)
        got = fitted.step(batch)
        torch.manual_seed(step)
        assert torch.allclose(got, nets.plain_step(twin, lambda m, b: m(**b).loss, plain, batch), rtol=1e-6)
    fitted.undo()
    model.eval()
    found = fit(model, None, None, batch, weights_of(model) * 9 // 10)
    with torch.no_grad():
        assert torch.allclose(found.infer(batch).logits, model(**batch).logits, atol=1e-5)


class Early(torch.optim.Optimizer):
    """Momentum whose buffers are made with it, as Adagrad's were before torch 2.13."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"buffer": torch.full_like(parameter, 0.01), "step": torch.tensor(0.0)}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] += 1
                    state["buffer"].mul_(0.9).add_(parameter.grad)
                    parameter.add_(state["buffer"], alpha=-group["lr"])


@pytest.mark.parametrize("make", [Early, torch.optim.Adagrad])
def test_an_optimizer_that_has_its_state_from_the_beginning_is_hosted(make):
    model, batch = nets.Language(blocks=2), nets.make_tokens()
    plain = copy.deepcopy(model)
    ours, other = make(model.parameters()), make(plain.parameters())
    fitted = outsize.fit(model, nets.language_loss, ours, batch, device="cpu", budget="64MiB", host="16GiB")
    for _ in range(4):
        fitted.step(batch)
        nets.plain_step(plain, nets.language_loss, other, batch)
    fitted.undo()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for name, value in other.state[theirs].items():
            assert torch.equal(torch.as_tensor(ours.state[mine][name]), torch.as_tensor(value)), name
