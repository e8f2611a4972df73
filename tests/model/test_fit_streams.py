"""Copies beside kernels: whatever order the streams run in, a fitted step is the plain one, also after a failure."""

import copy

import networks as nets
import pytest
import streams as pretended
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from outsize.model.fitting import activations, runner
from outsize.model.fitting import stage as stages
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.guarded import Snapshot
from outsize.model.fitting.runner import Runner, Work
from outsize.model.fitting.stage import Stage
from outsize.model.fitting.stores import DiskStore, HostStore

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")


class Failing(TorchDispatchMode):
    """Memory runs out at one operator of those that make something."""

    def __init__(self, due):
        super().__init__()
        self.left = due

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= func.namespace == "aten" and not (func.is_view or func._schema.is_mutable)
        if self.left == 0:
            raise RuntimeError("CUDA out of memory. (planted)")
        return func(*args, **(kwargs or {}))


@st.composite
def choices(draw):
    slices = draw(st.integers(1, 3))
    in_backward = slices == 1 and draw(st.booleans())
    return Choice(
        slices=slices,
        in_backward=in_backward,
        gradients_away=not in_backward and draw(st.booleans()),
        state_away=draw(st.booleans()),
        stream=BLOCKS if draw(st.booleans()) else (),
        checkpoint=tuple(n for n in BLOCKS if draw(st.booleans())),
        offload=tuple(n for n in BLOCKS if draw(st.booleans())),
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    choice=choices(),
    seed=st.integers(0, 99),
    eager=st.sampled_from((0.0, 0.1, 0.6)),
    room=st.sampled_from((1, 5000, 2**30)),
    due=st.integers(1, 500),
)
def test_a_step_with_copies_beside_kernels_is_the_plain_one_in_any_order(monkeypatch, choice, seed, eager, room, due):
    torch.manual_seed(seed)
    monkeypatch.setattr(activations, "SMALL", 64)
    monkeypatch.setattr(runner, "Offload", lambda store, ahead, device: activations.Offload(store, True, "cpu"))
    streamer = runner.Streamer
    monkeypatch.setattr(runner, "Streamer", lambda units, parcels, ahead: streamer(units, parcels, True))
    model, batch = nets.Language(shared=seed % 3 == 0 and not choice.stream), nets.make_tokens(rows=5)
    twin = copy.deepcopy(model)
    ours, plain = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, twin))
    queue = pretended.Streams(seed, eager)
    with pretended.installed(monkeypatch, queue):
        store = HostStore(torch.device("cpu"))
        store._in_flight = room
        work = Work(model=model, loss=nets.language_loss, optimizer=ours)
        step = Runner(work, choice, store)
        for number in range(3):
            if number == 1:
                before = Snapshot(work)
                try:
                    with Failing(due):
                        got = step.step(batch)
                except RuntimeError as error:
                    assert "planted" in str(error)
                    if step.half_updated:
                        return
                    step.roll_back()
                    before.restore()
                    got = step.step(batch)
            else:
                got = step.step(batch)
            assert torch.allclose(got, nets.plain_step(twin, nets.language_loss, plain, batch), rtol=1e-5)
        step.gather()
        store.close()
        assert store.held == 0
        assert nets.worst_difference(list(model.parameters()), list(twin.parameters())) < 1e-4
    monkeypatch.undo()


@pytest.mark.parametrize("name", ["blocks.0", "blocks.0.self_attn"])
def test_attention_on_one_tensor_is_computed_again_as_such_where_its_input_was_elsewhere(tmp_path, monkeypatch, name):
    monkeypatch.setattr(activations, "SMALL", 64)
    model, batch = nets.Patches(), nets.make_images()
    twin = copy.deepcopy(model)
    ours, plain = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, twin))
    work = Work(model=model, loss=nets.vision_loss, optimizer=ours)
    choice = Choice(checkpoint=(name,), offload=("blocks.0",))
    assert Stage(work, batch).project(choice).peak
    Runner(work, choice, DiskStore(str(tmp_path))).step(batch)
    nets.plain_step(twin, nets.vision_loss, plain, batch)
    assert nets.worst_difference(list(model.parameters()), list(twin.parameters())) < 1e-6


class Cramped(DiskStore):
    """Has no room once: for what is put (`due` puts from now), or for what comes back."""

    def __init__(self, folder):
        super().__init__(folder)
        self.puts = self.begins = 0

    def put(self, data, emptied=False):
        self.puts -= 1
        if self.puts == 0:
            raise RuntimeError("CUDA error: out of memory (planted)")
        return super().put(data, emptied)

    def begin(self, slot, into, emptied=False):
        self.begins -= 1
        if self.begins == 0:
            raise RuntimeError("CUDA out of memory. (planted)")
        super().begin(slot, into, emptied)


def cramped_steps(folder, choice, **due):
    """Weights after a step that ran out of memory once, and those of the plain step."""
    model, batch = nets.Language(), nets.make_tokens()
    twin = copy.deepcopy(model)
    ours, plain = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, twin))
    store = Cramped(str(folder))
    step = Runner(Work(model=model, loss=nets.language_loss, optimizer=ours), choice, store)
    for name, number in due.items():
        setattr(store, name, number)
    step.step(batch)
    step.gather()
    nets.plain_step(twin, nets.language_loss, plain, batch)
    assert all(getattr(store, name) < 0 for name in due)
    return nets.worst_difference(list(model.parameters()), list(twin.parameters()))


@pytest.mark.parametrize("due", [1, 2, 9])
def test_a_gradient_that_finds_no_room_on_its_way_back_is_not_lost(tmp_path, due):
    assert cramped_steps(tmp_path, Choice(gradients_away=True), begins=due) < 1e-6


@pytest.mark.parametrize("due", [1, 2, 9])
def test_state_that_finds_no_room_elsewhere_does_not_update_its_parameter_twice(tmp_path, due):
    assert cramped_steps(tmp_path, Choice(state_away=True), puts=due) < 1e-6


def test_a_projection_counts_activations_that_copies_still_read(monkeypatch):
    model, batch = nets.Language(blocks=4, width=128), nets.make_tokens(rows=64)
    work = Work(model=model, loss=nets.language_loss, optimizer=torch.optim.SGD(model.parameters(), 0.1), device="cuda")
    offload = Choice(offload=tuple(f"blocks.{number}" for number in range(4)))
    forward = []
    for room in (1, 8 * 2**20, 2**30):
        monkeypatch.setattr(stages, "IN_FLIGHT", room)
        forward.append(Stage(work, batch).project(offload).peaks["forward"])
    kept = sum(Stage(work, batch).project(Choice()).kept.values())
    assert forward[0] + 2 * 2**20 < forward[1] < forward[0] + 9 * 2**20 and forward[2] > forward[0] + kept // 3
