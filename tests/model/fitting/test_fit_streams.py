"""Copies beside kernels: whatever order the streams run in, a fitted step is the plain one, also after a failure."""

import copy
import pickle

import networks as nets
import pytest
import streams as pretended
import torch
from effort import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from storages import Storages
from torch.utils._python_dispatch import TorchDispatchMode

import outsize
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.stores import DiskStore, HostStore, NoStore
from outsize.model.fitting.plan import dry_run as stages
from outsize.model.fitting.plan.dry_run import Stage
from outsize.model.fitting.run import offload as activations
from outsize.model.fitting.run import resident
from outsize.model.fitting.run import streamed as weights
from outsize.model.fitting.run.resident import open_resident
from outsize.model.fitting.run.runner import Work
from outsize.model.fitting.update import resident_update as update
from outsize.model.fitting.update.optimizer_subset import room_of, sizeof, state_of
from outsize.model.fitting.update.undo_log import Snapshot

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
        state_away=draw(st.sampled_from((0.0, 0.3, 0.7, 1.0))),
        stream=BLOCKS if draw(st.booleans()) else (),
        checkpoint=tuple(n for n in BLOCKS if draw(st.booleans())),
        offload=tuple(n for n in BLOCKS if draw(st.booleans())),
    )


def as_on_a_card(monkeypatch, seed):
    """What is needed next is fetched ahead; some tensors are too large to be copied on the card."""
    streamer = weights.Streamer
    monkeypatch.setattr(update, "CLONED", 3000 if seed % 2 else 2**26)
    monkeypatch.setattr(activations, "SMALL", 64)
    monkeypatch.setattr(resident, "Offload", lambda store, ahead, device: activations.Offload(store, True, "cpu"))
    monkeypatch.setattr(resident, "Streamer", lambda units, evicted, ahead: streamer(units, evicted, True))


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    choice=choices(),
    seed=st.integers(0, 99),
    eager=st.sampled_from((0.0, 0.1, 0.6)),
    room=st.sampled_from((1, 5000, 2**30)),
    due=st.integers(1, 500),
)
def test_a_step_with_copies_beside_kernels_is_the_plain_one_in_any_order(monkeypatch, choice, seed, eager, room, due):
    torch.manual_seed(seed)
    as_on_a_card(monkeypatch, seed)
    model, batch = nets.Language(shared=seed % 3 == 0 and not choice.stream), nets.make_tokens(rows=5)
    twin = copy.deepcopy(model)
    ours, plain = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, twin))
    queue = pretended.Streams(seed, eager)
    with pretended.installed(monkeypatch, queue):
        store = HostStore(torch.device("cpu"))
        store.mover.leaving.size = room
        work = Work(model=model, loss=nets.language_loss, optimizer=ours)
        step = open_resident(work, choice, store)
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
            self.mover.leaving._on_way -= self.mover.leaving._rows.pop()[-1]
            data.record_stream(self.mover._out)
            land()
        return slot


def held_and_projected(monkeypatch, kind, choice, seed, eager, room):
    """The most bytes of three steps whose memory could not be used for something else, and what was projected."""
    torch.manual_seed(seed)
    as_on_a_card(monkeypatch, seed)
    model = nets.Language(width=16 * (1 + seed % 3), shared=seed % 2 == 0 and not choice.stream)
    batch = nets.make_tokens(rows=max(choice.slices, seed % 6), length=4 + seed % 20)
    work = Work(model=model, loss=nets.language_loss, optimizer=torch.optim.AdamW(model.parameters()))
    monkeypatch.setattr(stages, "NoStore", lambda _: NoStore(room))
    projected = Stage(work, batch).project(choice).peak
    queue = pretended.Streams(seed, eager)

    def measure(step):
        recorder = Storages()
        queue.ledger = recorder.ledger
        state = [value for value in state_of(work.optimizer) if isinstance(value, torch.Tensor)]
        recorder.hold([*model.parameters(), *model.buffers(), *state, batch])
        step.phase = recorder.phase
        with recorder.counting():
            step.step(batch)
        return max(recorder.peaks().values())

    with pretended.installed(monkeypatch, queue):
        store = kind(torch.device("cpu"))
        store.mover.leaving.size = room
        step = open_resident(work, choice, store)
        held = [measure(step) for _ in range(3)]
        step.gather()
        store.close()
    monkeypatch.undo()
    return max(held), projected


@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    acts=st.lists(
        st.tuples(st.sampled_from(("put", "begin", "finish", "land", "drop")), st.integers(0, 9)), max_size=40
    ),
    eager=st.sampled_from((0.0, 0.4)),
)
def test_a_store_gives_back_what_was_put_whatever_is_still_on_its_way(monkeypatch, acts, eager):
    slots, coming, landed = [], [], []
    with pretended.installed(monkeypatch, pretended.Streams(0, eager)):
        store = HostStore(torch.device("cpu"))
        for number, (act, which) in enumerate([*acts, ("finish", 0), ("land", 0)]):
            if act == "put":
                slots.append(
                    (number, store.put(torch.full((8,), number, dtype=torch.uint8), lambda n=number: landed.append(n)))
                )
            elif act == "begin" and slots:
                value, slot = slots[which % len(slots)]
                coming.append((value, torch.empty(8, dtype=torch.uint8)))
                store.begin(slot, coming[-1][1])
            elif act == "drop" and slots:
                store.drop(slots.pop(which % len(slots))[1])
            elif act == "finish":
                store.finish()
                assert all((into == value).all() for value, into in coming)
            elif act == "land":
                store.land()
        assert landed == [number for number, (act, _) in enumerate(acts) if act == "put"]
        assert store.held == 8 * len(slots)
        store.close()


@pytest.mark.parametrize("name", ["blocks.0", "blocks.0.self_attn"])
def test_attention_on_one_tensor_is_computed_again_as_such_where_its_input_was_elsewhere(tmp_path, monkeypatch, name):
    monkeypatch.setattr(activations, "SMALL", 64)
    model, batch = nets.Patches(), nets.make_images()
    twin = copy.deepcopy(model)
    ours, plain = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, twin))
    work = Work(model=model, loss=nets.vision_loss, optimizer=ours)
    choice = Choice(checkpoint=(name,), offload=("blocks.0",))
    assert Stage(work, batch).project(choice).peak
    open_resident(work, choice, DiskStore(str(tmp_path))).step(batch)
    nets.plain_step(twin, nets.vision_loss, plain, batch)
    assert nets.worst_difference(list(model.parameters()), list(twin.parameters())) < 1e-6


class Cramped:
    """A store that has no room once: for what is put (`due` puts from now), or for what comes back."""

    puts = begins = 0

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


class CrampedDisk(Cramped, DiskStore):
    pass


class CrampedHost(Cramped, HostStore):
    pass


def cramped_steps(monkeypatch, place, choice, **due):
    """Weights after two steps, the second of which ran out of memory once, and those of plain steps."""
    model, batch = nets.Language(), nets.make_tokens()
    twin = copy.deepcopy(model)
    ours, plain = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, twin))
    with pretended.installed(monkeypatch, pretended.Streams(0, 0.1)):
        store = CrampedHost(place) if isinstance(place, torch.device) else CrampedDisk(str(place))
        step = open_resident(Work(model=model, loss=nets.language_loss, optimizer=ours), choice, store)
        for number in range(2):
            for name, left in due.items() if number else ():
                setattr(store, name, left)
            step.step(batch)
            nets.plain_step(twin, nets.language_loss, plain, batch)
        step.gather()
        store.close()
    assert all(getattr(store, name) < 0 for name in due)
    return nets.worst_difference(list(model.parameters()), list(twin.parameters()))


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("due", [1, 2, 9])
def test_a_gradient_that_finds_no_room_on_its_way_back_is_not_lost(tmp_path, monkeypatch, due, host):
    place = torch.device("cpu") if host else tmp_path
    assert cramped_steps(monkeypatch, place, Choice(gradients_away=True), begins=due) < 1e-6


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("due", [{"puts": 1}, {"puts": 2}, {"puts": 9}, {"begins": 1}, {"begins": 9}, {"begins": 15}])
def test_state_that_finds_no_room_does_not_update_its_parameter_twice(tmp_path, monkeypatch, due, host):
    place = torch.device("cpu") if host else tmp_path
    assert cramped_steps(monkeypatch, place, Choice(state_away=True), **due) < 1e-6


@pytest.mark.parametrize(
    "choice", [Choice(state_away=True), Choice(state_away=True, gradients_away=True, stream=BLOCKS)]
)
def test_state_comes_while_other_state_leaves_and_gives_way_where_an_update_finds_no_room(monkeypatch, choice):
    model, batch = nets.Language(), nets.make_tokens()
    twin = copy.deepcopy(model)
    ours, plain = (torch.optim.AdamW(m.parameters()) for m in (model, twin))
    real, here = ours.step, []

    def step():
        state = [value for p in model.parameters() for value in ours.state.get(p, {}).values() if value.dim()]
        here.append(sum(value.untyped_storage().nbytes() for value in state))
        if len(here) in failing:
            raise RuntimeError("CUDA out of memory. (planted)")
        real()

    ours.step, failing = step, ()
    queue = pretended.Streams(0, 0.0)
    with pretended.installed(monkeypatch, queue):
        store = HostStore(torch.device("cpu"))
        fit_step = open_resident(Work(model=model, loss=nets.language_loss, optimizer=ours), choice, store)
        for number in range(4):
            here.clear()
            failing = (number, number + 1) if number > 1 else ()
            fit_step.step(batch)
            nets.plain_step(twin, nets.language_loss, plain, batch)
            if failing:  # what came ahead is here at the first try and away at the next
                assert here[number - 1] > here[number] == here[number + 1]
            assert not fit_step.half_updated
            sizes = [sizeof(p) for p in model.parameters()]
            assert max(here) <= 2 * 2 * room_of(max(sizes), sum(sizes))  # two groups of two values each
        assert queue.both
        fit_step.gather()
        store.close()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


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
    step = open_resident(
        Work(model=model, loss=nets.language_loss, optimizer=optimizer), choice, DiskStore(str(tmp_path))
    )
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
