"""Copies beside kernels: whatever order the streams run in, a fitted step is the plain one, also after a failure."""

import copy
import pickle

import networks as nets
import pytest
import streams as pretended
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import outsize
from outsize.model.fitting import activations, fitted, runner, weights
from outsize.model.fitting import stage as stages
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.guarded import Snapshot
from outsize.model.fitting.recorder import Recorder
from outsize.model.fitting.runner import Runner, Work
from outsize.model.fitting.stage import Stage
from outsize.model.fitting.stores import DiskStore, HostStore, NoStore

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


def as_on_a_card(monkeypatch):
    """What is needed next is fetched ahead."""
    streamer = weights.Streamer
    monkeypatch.setattr(activations, "SMALL", 64)
    monkeypatch.setattr(runner, "Offload", lambda store, ahead, device: activations.Offload(store, True, "cpu"))
    monkeypatch.setattr(runner, "Streamer", lambda units, parcels, ahead: streamer(units, parcels, True))


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
    as_on_a_card(monkeypatch)
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


class Recorded(HostStore):
    """Leaves it to torch when the memory of an emptied storage is used again."""

    def put(self, data, land=None):
        slot = super().put(data)
        if land is not None:
            self._on_way -= self._flying.pop()[0]
            data.record_stream(self._out)
            land()
        return slot


def held_and_projected(monkeypatch, kind, choice, seed, eager, room):
    """The most bytes of three steps whose memory could not be used for something else, and what was projected."""
    torch.manual_seed(seed)
    as_on_a_card(monkeypatch)
    model = nets.Language(width=16 * (1 + seed % 3), shared=seed % 2 == 0 and not choice.stream)
    batch = nets.make_tokens(rows=max(choice.slices, seed % 6), length=4 + seed % 20)
    work = Work(model=model, loss=nets.language_loss, optimizer=torch.optim.AdamW(model.parameters()))
    monkeypatch.setattr(stages, "NoStore", lambda _: NoStore(room))
    projected = Stage(work, batch).project(choice).peak
    queue = pretended.Streams(seed, eager)

    def recorded(device):
        recorder = Recorder(device)
        queue.ledger = recorder.ledger
        return recorder

    monkeypatch.setattr(fitted, "Recorder", recorded)
    with pretended.installed(monkeypatch, queue):
        store = kind(torch.device("cpu"))
        store._in_flight = room
        step = Runner(work, choice, store)
        held = [max(fitted.measure(step, batch)[1].peaks().values()) for _ in range(3)]
        step.gather()
        store.close()
    monkeypatch.undo()
    return max(held), projected


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    choice=choices(),
    seed=st.integers(0, 99),
    eager=st.sampled_from((0.0, 0.3)),
    room=st.sampled_from((1, 5000, 2**30)),
)
def test_memory_that_cannot_be_used_again_yet_is_in_the_projection_however_late_copies_are(
    monkeypatch, choice, seed, eager, room
):
    held, projected = held_and_projected(monkeypatch, HostStore, choice, seed, eager, room)
    assert held <= projected


@pytest.mark.parametrize("choice", [Choice(state_away=True), Choice(state_away=True, stream=BLOCKS)])
def test_memory_that_torch_frees_when_it_finds_a_copy_ended_would_not_be(monkeypatch, choice):
    held, projected = held_and_projected(monkeypatch, Recorded, choice, 1, 0.0, 1)
    assert held > 1.2 * projected


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

    def put(self, data, land=None):
        self.puts -= 1
        if self.puts == 0:
            raise RuntimeError("CUDA error: out of memory (planted)")
        return super().put(data, land)

    def begin(self, slot, into):
        self.begins -= 1
        if self.begins == 0:
            raise RuntimeError("CUDA out of memory. (planted)")
        return super().begin(slot, into)


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


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_model_whose_weights_are_away_can_be_copied_and_pickled_between_steps(tmp_path, copied):
    model, batch = nets.Language(), nets.make_tokens()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    choice = Choice(stream=BLOCKS, state_away=True, gradients_away=True)
    step = Runner(Work(model=model, loss=nets.language_loss, optimizer=optimizer), choice, DiskStore(str(tmp_path)))
    for _ in range(2):
        step.step(batch)
        assert not model.blocks[0].up.weight.untyped_storage().nbytes()
        twin = copied(model)
        assert twin.head.weight is twin.embed.weight
    step.gather()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert not any(vars(tensor) for tensor in (*model.parameters(), *twin.parameters()))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_fitted_model_is_on_its_own(copied):
    model, batch = nets.Language(), nets.make_tokens()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    done = outsize.fit(model, nets.language_loss, optimizer, batch, budget="1GiB")
    twin = copied(model)
    done.undo()
    assert torch.equal(twin.state_dict()["head.weight"], model.state_dict()["head.weight"])
