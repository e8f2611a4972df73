"""Hosted steps whose weights, state and gradients the host has no room for: they are in a scratch file, the step is the same."""

import copy
import errno
import json
import os
import random
import signal
import sys

import cgroup
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
from outsize.array.store.io.file import AlignedFile
from outsize.core.memory import DISK, HOST
from outsize.model.fitting.arguments import _hosted_budgets
from outsize.model.fitting.move.mover import Mover
from outsize.model.fitting.move.out_of_memory import give_back_heap
from outsize.model.fitting.move.units import sizeof

PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
MIB = 2**20


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def assert_same(model, optimizer, twin, plain, rtol=1e-5, atol=1e-6):
    for (name, one), two in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.allclose(one, two, rtol=rtol, atol=atol), name
    mine, theirs = optimizer.state_dict(), plain.state_dict()
    assert mine["state"].keys() == theirs["state"].keys()
    for key, values in theirs["state"].items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                assert torch.allclose(mine["state"][key][name], value, rtol=10 * rtol, atol=atol), (key, name)


@examples(16, phases=PHASES)
@given(
    net=st.sampled_from(list(NETS)), optimizer=st.sampled_from(list(OPTIMIZERS)), inputs=st.booleans(),
    update=st.sampled_from(["card", "kept"]), limit=st.sampled_from([1, 4_000, 20_000, 60_000, 1 << 40]),
    rows=st.integers(1, 7), seed=st.integers(0, 99), late=st.booleans(), scaled=st.booleans(),
)  # fmt: skip
def test_a_step_from_disk_is_the_plain_step_whatever_lies_there(
    net, optimizer, inputs, update, limit, rows, seed, late, scaled, tmp_path_factory
):
    make, plain_loss, data = NETS[net]
    times = [1.0]

    def loss(model, batch):
        return plain_loss(model, batch) * times[0]

    torch.manual_seed(seed)
    model, batch = make(), data(rows)
    twin = copy.deepcopy(model)
    ours, plain = (OPTIMIZERS[optimizer](m.parameters()) for m in (model, twin))
    clip = 0.5 if update == "kept" else None
    chance = random.Random(seed)
    names = [name for name, _ in model.named_parameters()]
    disk = {kind: [n for n in names if chance.random() < 0.6] for kind in ("state", "weights", "gradients")}
    lane = lanes.LateLane(seed) if late else Mover(torch.device("cpu"))
    on = scaled and update == "kept"
    mine, theirs = (torch.amp.GradScaler("cpu", 2.0**10, growth_interval=1, enabled=on) for _ in range(2))
    runner, _ = open_runner(
        model, loss, ours, batch, lane, clip=clip, later=True, disk=disk, folder=tmp_path_factory.getbasetemp(),
        limit=limit, inputs=inputs, update=update, scaler=mine if on else None,
    )  # fmt: skip
    for step in range(3):
        times[0] = 1e38 if on and step == seed % 3 else 1.0
        torch.manual_seed(step)
        got = runner.step(batch)
        torch.manual_seed(step)
        expected = loss(twin, batch)
        theirs.scale(expected).backward()
        theirs.unscale_(plain)
        if clip is not None:
            nn.utils.clip_grad_norm_(twin.parameters(), clip)
        theirs.step(plain)
        theirs.update()
        plain.zero_grad()
        assert torch.allclose(got, expected, rtol=1e-6) and mine.get_scale() == theirs.get_scale()
    assert_same(model, ours, twin, plain)
    runner.close()
    assert_same(model, ours, twin, plain)
    nets.plain_step(model, plain_loss, ours, batch)


def make_wide(layers=6, width=1024):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)), nn.Linear(width, 10))


def wide_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]) * batch[2].mean(), batch[1])


def make_rows(rows=8, width=1024, by=1.0):
    return torch.randn(rows, width), torch.randint(0, 10, (rows,)), torch.full((rows,), by)


BESIDE = {}
"""What a plan holds of the host beside what the process holds already, by what is planned: all tests plan the same few."""


def fit_short(model, optimizer, batch, short, **more):
    """Fit with a host budget that is `short` bytes less than all of it would take."""
    give_back_heap()  # what the process holds is part of it: it must not shrink in between
    where = {"device": "cpu", "budget": "48MiB"}
    kind = (repr(model), repr(optimizer), bool(optimizer.state), *(f"{key} {value}" for key, value in more.items()))
    if kind not in BESIDE:
        whole = outsize.fit(model, wide_loss, optimizer, batch, host="64GiB", dry_run=True, **where, **more)
        BESIDE[kind] = whole.plan.peak(HOST) - whole._used.replan.__self__._host.base
    _, base, _ = _hosted_budgets(model, optimizer, torch.device("cpu"), "48MiB", "64GiB")
    return outsize.fit(model, wide_loss, optimizer, batch, host=base + BESIDE[kind] - short, **where, **more)


@pytest.fixture(autouse=True, scope="module")
def imported():
    """The first fit imports what later ones find in the process."""
    model = make_wide(1, 64)
    fit = (model, wide_loss, torch.optim.AdamW(model.parameters()), make_rows(width=64))
    outsize.fit(*fit, device="cpu", budget="48MiB", host="64GiB", clip=1.0, dry_run=True)


def make_pair(make=make_wide, optimizer=torch.optim.AdamW):
    model = make()
    twin = copy.deepcopy(model)
    return model, optimizer(model.parameters()), twin, optimizer(twin.parameters())


def test_training_with_less_host_memory_than_state_and_weights_is_bitwise_the_plain_training(tmp_path):
    model, ours, twin, plain = make_pair(lambda: make_wide(12))
    batch = make_rows()
    fitted = fit_short(model, ours, batch, 50 * MIB)
    plan = fitted.plan
    assert plan.fits and plan.peak(DISK) >= 50 * MIB and plan.read >= plan.peak(DISK) and plan.written > 50 * MIB
    note = next(note for note in plan.notes if "in a file in" in note)
    assert "of state" in note and "GB/s measured" in note and "disk" in str(plan)
    disk = fitted.choice.disk
    large = [name for name, weight in model.named_parameters() if sizeof(weight) >= 4096]
    assert "weights" not in disk or set(disk["state"]) >= set(large)  # only where all state is not enough
    for _ in range(2):
        assert torch.equal(fitted.step(batch), nets.plain_step(twin, wide_loss, plain, batch))
    saved = tmp_path / "saved.pt"
    torch.save({"model": model.state_dict(), "optimizer": ours.state_dict()}, saved)
    assert saved.stat().st_size < 3.1 * sum(map(sizeof, model.parameters()))
    fitted.step(batch)
    found = torch.load(saved)
    model.load_state_dict(found["model"])
    ours.load_state_dict(found["optimizer"])
    for _ in range(2):
        assert torch.equal(fitted.step(batch), nets.plain_step(twin, wide_loss, plain, batch))
    assert_same(model, ours, twin, plain, rtol=0.0, atol=0.0)
    with pytest.warns(UserWarning, match="stay in their file"):
        assert fitted.undo() is model
    assert torch.equal(nets.plain_step(model, wide_loss, ours, batch), nets.plain_step(twin, wide_loss, plain, batch))
    assert_same(model, ours, twin, plain, rtol=0.0, atol=0.0)


def test_a_training_that_has_begun_goes_on_from_disk():
    model, ours, twin, plain = make_pair()
    batch = make_rows()
    for one, optimizer in ((model, ours), (twin, plain)):
        nets.plain_step(one, wide_loss, optimizer, batch)
        optimizer.zero_grad()
    fitted = fit_short(model, ours, batch, 15 * MIB, clip=1.0)
    assert fitted.choice.disk
    assert_same(model, ours, twin, plain, rtol=0.0, atol=0.0)
    for _ in range(2):
        assert torch.equal(fitted.step(batch), clipped_step(twin, plain, batch))
    assert_same(model, ours, twin, plain, rtol=0.0, atol=0.0)


def test_weights_on_disk_may_be_read_and_changed_between_steps():
    model, ours, twin, plain = make_pair()
    batch = make_rows()
    fitted = fit_short(model, ours, batch, 60 * MIB, clip=1.0)
    assert {"state", "weights"} <= set(fitted.choice.disk)
    for _ in range(2):
        assert torch.equal(fitted.step(batch), clipped_step(twin, plain, batch))
        with torch.no_grad():
            for one, two in zip(model.parameters(), twin.parameters(), strict=True):
                assert torch.equal(one, two)
                one.mul_(0.9)
                two.mul_(0.9)
    assert torch.equal(fitted.step(batch), clipped_step(twin, plain, batch))
    assert_same(model, ours, twin, plain, rtol=0.0, atol=0.0)


def clipped_step(twin, plain, batch, scaler=None):
    value = wide_loss(twin, batch)
    (value if scaler is None else scaler.scale(value)).backward()
    if scaler is not None:
        scaler.unscale_(plain)
    nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    if scaler is None:
        plain.step()
    else:
        scaler.step(plain)
        scaler.update()
    plain.zero_grad()
    return value.detach()


def test_gradients_that_the_optimizer_does_not_use_stay_for_the_user():
    model, _, twin, _ = make_pair(lambda: make_wide(6))
    ours, plain = (torch.optim.SGD(list(m.parameters())[:-2], 0.1, momentum=0.9) for m in (model, twin))
    batch = make_rows()
    fitted = fit_short(model, ours, batch, 50 * MIB, clip=1.0)
    assert {"state", "weights", "gradients"} == set(fitted.choice.disk)
    assert torch.equal(fitted.step(batch), clipped_step(twin, plain, batch))
    assert_same(model, ours, twin, plain, rtol=0.0, atol=0.0)
    assert torch.allclose(model[6].weight.grad, twin[6].weight.grad) and model[0].weight.grad is None


def test_undo_brings_everything_home_where_it_has_room():
    model, ours, twin, plain = make_pair()
    batch = make_rows()
    fitted = fit_short(model, ours, batch, 15 * MIB, clip=1.0)  # gradients are gone then
    clipped_step(twin, plain, batch)
    fitted.step(batch)
    fitted.undo()
    assert_same(model, ours, twin, plain, rtol=0.0, atol=0.0)


def test_a_scratch_folder_without_room_is_named_before_anything_is_changed():
    model, ours, _, _ = make_pair()
    before = [p.data_ptr() for p in model.parameters()]
    with outsize.budget(disk="1MiB"), pytest.raises(outsize.BudgetError, match=r"scratch folder .* room for 1.00 MiB"):
        fit_short(model, ours, make_rows(), 30 * MIB)
    assert before == [p.data_ptr() for p in model.parameters()] and not ours.state


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"own_step": True}, "you step the optimizer yourself"),
        ({"without": ("state_away",)}, "you forbade state_away"),
        ({"without": ("disk",)}, "you forbade disk"),
    ],
)
def test_what_cannot_be_on_disk_says_why(more, said):
    model, ours, _, _ = make_pair()
    with pytest.raises(outsize.BudgetError, match=said):
        fit_short(model, ours, make_rows(), 50 * MIB, **more)


def full(monkeypatch, when):
    """From now on writes fail while `when()` holds."""
    write = AlignedFile._pwrite

    def fail(self, offset, parts):
        if when():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, offset, parts)

    monkeypatch.setattr(AlignedFile, "_pwrite", fail)


def test_a_disk_that_is_full_while_gradients_wait_loses_nothing(monkeypatch):
    model, ours, twin, plain = make_pair()
    batch = make_rows()
    fitted = fit_short(model, ours, batch, 75 * MIB, clip=1.0)
    assert "gradients" in fitted.choice.disk
    fitted.step(batch)
    clipped_step(twin, plain, batch)
    state = torch.random.get_rng_state()
    with monkeypatch.context() as patch:
        full(patch, lambda: True)
        with pytest.raises(outsize.StoreError, match="no space is left") as caught:
            fitted.step(batch)
        assert not getattr(caught.value, "__notes__", [])
    assert torch.equal(state, torch.random.get_rng_state())
    assert_same(model, ours, twin, plain, rtol=0.0, atol=0.0)
    assert torch.equal(fitted.step(batch), clipped_step(twin, plain, batch))


def test_a_disk_that_cannot_be_read_in_the_forward_pass_loses_nothing(monkeypatch):
    model, ours, twin, plain = make_pair()
    batch = make_rows()
    fitted = fit_short(model, ours, batch, 60 * MIB)
    assert "weights" in fitted.choice.disk

    def fail(self, piece, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(AlignedFile, "_pread", fail)
        with pytest.raises(outsize.StoreError, match="Input/output error"):
            fitted.step(batch)
    assert torch.equal(fitted.step(batch), nets.plain_step(twin, wide_loss, plain, batch))
    assert_same(model, ours, twin, plain, rtol=0.0, atol=0.0)


def test_a_scratch_folder_in_memory_is_no_disk():
    model, ours, _, _ = make_pair()
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no folder in memory here")
    with (
        outsize.budget(scratch="/dev/shm/outsize"),
        pytest.raises(outsize.BudgetError, match="/dev/shm/outsize is in RAM"),
    ):
        fit_short(model, ours, make_rows(), 50 * MIB)


def test_a_disk_that_is_full_in_the_middle_of_the_update_is_said(monkeypatch):
    model, ours, _, _ = make_pair()
    batch = make_rows()
    fitted = fit_short(model, ours, batch, 30 * MIB)
    fitted.step(batch)
    full(monkeypatch, lambda: True)
    with pytest.raises(outsize.StoreError, match="no space is left") as caught:
        fitted.step(batch)
    assert "load the last saved state" in caught.value.__notes__[0]


def test_a_disk_that_fails_while_weights_move_there_leaves_the_model_as_it_was(monkeypatch):
    model, ours, twin, _ = make_pair()
    calls = iter(range(1000))
    with monkeypatch.context() as patch:
        full(patch, lambda: next(calls) > 20)
        patch.setattr("outsize.model.fitting.hosting.measure_disk", lambda *_: (1e9, 1e9))
        with pytest.raises(outsize.StoreError, match="no space is left"):
            fit_short(model, ours, make_rows(), 60 * MIB, clip=1.0)
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, two)
    assert os.listdir(os.environ["OUTSIZE_SCRATCH"]) == []


class Interrupted(torch.autograd.Function):
    """Ctrl-C in the middle of the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Pressing.due:
            os.kill(os.getpid(), signal.SIGINT)
        return gradient


class Pressing(nn.Linear):
    due = False

    def forward(self, x):
        return Interrupted.apply(super().forward(x))


def make_pressed():
    model = make_wide()
    model[2] = Pressing(1024, 1024)
    return model


def test_an_interrupt_in_the_backward_pass_waits_until_the_step_is_whole(monkeypatch):
    model, ours, twin, plain = make_pair(make_pressed)
    batch = make_rows()
    fitted = fit_short(model, ours, batch, 30 * MIB)
    nets.plain_step(twin, wide_loss, plain, batch)
    monkeypatch.setattr(Pressing, "due", True)
    with pytest.raises(KeyboardInterrupt):
        fitted.step(batch)
    monkeypatch.setattr(Pressing, "due", False)
    assert_same(model, ours, twin, plain, rtol=0.0, atol=0.0)


class Failing(nn.Module):
    """Runs out of memory when it is told to."""

    def __init__(self):
        super().__init__()
        self.net = make_wide()
        self.due = False

    def forward(self, x):
        out = self.net(x)
        if self.due and torch.is_grad_enabled():
            self.due = False
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return out


def test_memory_that_runs_out_makes_a_tighter_plan_and_what_is_on_disk_stays_right():
    model, ours, twin, plain = make_pair(Failing)
    batch = make_rows()
    fitted = fit_short(model, ours, batch, 40 * MIB)
    for step in range(3):
        model.due = step == 1
        if model.due:
            with pytest.warns(UserWarning, match="nothing was lost"):
                got = fitted.step(batch)
        else:
            got = fitted.step(batch)
        assert torch.allclose(got, nets.plain_step(twin, wide_loss, plain, batch), rtol=1e-6)
    assert fitted.choice.disk
    assert_same(model, ours, twin, plain)


def make_mapped(tmp_path, make):
    """A model whose weights are a map of a file, and one whose are in memory."""
    twin = make()
    torch.save(twin.state_dict(), tmp_path / "weights.pt")
    with torch.device("meta"):
        model = make()
    model.load_state_dict(torch.load(tmp_path / "weights.pt", mmap=True), assign=True)
    return model, twin


def test_a_model_that_was_never_in_memory_is_trained_and_run_from_disk(tmp_path):
    model, twin = make_mapped(tmp_path, lambda: make_wide(8))
    ours, plain = (torch.optim.AdamW(m.parameters()) for m in (model, twin))
    batch = make_rows()
    fitted = fit_short(model, ours, batch, 90 * MIB)
    assert {"state", "weights"} == set(fitted.choice.disk)
    for _ in range(2):
        assert torch.equal(fitted.step(batch), nets.plain_step(twin, wide_loss, plain, batch))
    with pytest.warns(UserWarning, match="stay in their file"):
        fitted.undo()
    model.eval()
    arguments = (model, None, None, batch[0])
    whole = outsize.fit(*arguments, device="cpu", budget="16MiB", host="64GiB", dry_run=True).plan.peak(HOST)
    fitted = outsize.fit(*arguments, device="cpu", budget="16MiB", host=whole - 20 * MIB)
    assert set(fitted.choice.disk) == {"weights"}
    for _ in range(2):
        assert torch.equal(fitted.infer(batch[0]), twin(batch[0]).detach())


class Together(torch.optim.AdamW):
    """Not known to treat parameters one by one: it steps on the host."""


@pytest.mark.parametrize(
    ("kind", "short"),
    [(torch.optim.AdamW, -100 * MIB), (torch.optim.AdamW, 75 * MIB), (Together, -100 * MIB)],
    ids=["memory", "disk", "host"],
)
@pytest.mark.parametrize("clip", points([None, 1.0], 1))
def test_a_gradscaler_takes_the_course_it_takes_in_the_plain_loop(kind, short, clip):
    model, ours, twin, plain = make_pair(lambda: make_wide(5), kind)
    mine, theirs = (torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2) for _ in range(2))
    batches = [make_rows(), make_rows(), make_rows(by=1e36), make_rows(), make_rows()]
    fitted = fit_short(model, ours, batches[0], short, clip=clip, scaler=mine)
    assert bool(fitted.choice.disk) == (short > 0)
    course = []
    for batch in batches:
        value = wide_loss(twin, batch)
        theirs.scale(value).backward()
        if clip is not None:
            theirs.unscale_(plain)
            nn.utils.clip_grad_norm_(twin.parameters(), clip)
        theirs.step(plain)
        theirs.update()
        plain.zero_grad()
        assert torch.equal(fitted.step(batch), value.detach())
        course.append(theirs.get_scale())
        assert mine.get_scale() == course[-1]
    assert course == [2.0**14, 2.0**15, 2.0**14, 2.0**14, 2.0**15]
    assert mine.state_dict() == theirs.state_dict()
    assert_same(model, ours, twin, plain, rtol=0.0, atol=0.0)


def test_a_gradscaler_works_with_steps_of_your_own_and_another_kind_is_refused():
    model, ours, twin, plain = make_pair(lambda: make_wide(3))
    mine, theirs = (torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2))
    batch = make_rows()
    fitted = outsize.fit(
        model, wide_loss, ours, batch, device="cpu", budget="48MiB", host="64GiB", own_step=True, scaler=mine
    )
    fitted.backward(batch)
    mine.unscale_(ours)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    mine.step(ours)
    mine.update()
    clipped_step(twin, plain, batch, theirs)
    assert_same(model, ours, twin, plain, rtol=0.0, atol=0.0)
    fitted.undo()

    class Strange(torch.amp.GradScaler):
        def unscale_(self, optimizer):
            super().unscale_(optimizer)

    with pytest.raises(outsize.InputError, match="Strange unscales gradients in its own way"):
        outsize.fit(model, wide_loss, ours, batch, device="cpu", budget="48MiB", host="64GiB", scaler=Strange("cpu"))


LARGER_THAN_MEMORY = """
import json, torch, outsize
from torch import nn
torch.set_num_threads(1)

def read(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
batch = torch.randn(4, WIDTH)
loss = lambda model, batch: model(batch).square().mean()
fitted = outsize.fit(model, loss, optimizer, batch, device="cpu", budget="96MiB", host=HOST)
values = [float(fitted.step(batch)) for _ in range(STEPS)]
print(json.dumps({
    "values": values, "projected": fitted.plan.peak(outsize.core.memory.HOST), "measured": read("VmHWM"),
    "weights": sum(4 * p.numel() for p in model.parameters()), "disk": fitted.plan.peak(outsize.core.memory.DISK),
}))
"""


@pytest.mark.parametrize("clip", points(["None", "1.0"], 1))
def test_weights_and_state_larger_than_the_limit_of_the_process_are_trained(tmp_path, clip):
    host, (layers, width), steps = 680 * MIB, (64, 1024) if long() else (32, 1448), 4 if long() else 2
    code = (
        LARGER_THAN_MEMORY.replace("host=HOST", f"host={host}")
        .replace("LAYERS", str(layers))
        .replace("WIDTH", str(width))
        .replace("STEPS", str(steps))
        .replace("host=", f"clip={clip}, host=")
    )
    done = cgroup.run([sys.executable, "-c", code], host, cwd=str(tmp_path))
    assert done.status == 0, done.stderr
    assert not done.killed
    found = json.loads(done.stdout)
    assert 3 * found["weights"] > host and found["disk"] > 0
    assert done.peak <= host and found["measured"] <= found["projected"] <= host
    assert found["values"][-1] < found["values"][0]
