"""Weights and state that have no room at home: saving works all the same, everything else says so and loses nothing."""

import contextlib
import copy
import functools
import io
import pickle
import re
import weakref

import networks as nets
import pytest
import streams as pretended
import torch
from effort import examples
from held_fits import hold
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st
from torch.nn import functional

import outsize
from outsize.core.units import format_bytes
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.learn.gradients_equal import compare
from outsize.model.fitting.move.evicted import EvictedStorage, EvictedTensor
from outsize.model.fitting.move.out_of_memory import clear_up
from outsize.model.fitting.move.stores import DiskStore, HostStore
from outsize.model.fitting.run.resident import open_resident
from outsize.model.fitting.run.runner import Work

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
STREAM = Choice(in_backward=True, state_away=True, stream=("embed", *BLOCKS, "head"))
CHOICES = (STREAM, Choice(state_away=True), Choice(state_away=True, gradients_away=True, stream=BLOCKS))


class Card:
    """Room for what comes home, in bytes; None: for all. Memory runs out before a storage has its memory, or (`late`) after."""

    def __init__(self, monkeypatch, late=False):
        self.room, coming = None, []
        fetch, empty, begins = (
            EvictedStorage.fetch,
            EvictedStorage._empty,
            {kind: kind.begin for kind in (DiskStore, HostStore)},
        )

        def take(size):
            if self.room is not None and size > self.room:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.\nand more")
            self.room = None if self.room is None else self.room - size

        def fetched(storage):
            coming.append(storage)
            try:
                if storage.away and storage._real and not late:
                    take(storage.bytes)
                fetch(storage)
            finally:
                coming.pop()

        def begun(store, slot, into):
            if late and coming:
                take(into.numel())
            return begins[type(store)](store, slot, into)

        def emptied(storage):
            if self.room is not None and storage._real and not coming:
                self.room += storage.bytes
            empty(storage)

        monkeypatch.setattr(EvictedStorage, "fetch", fetched)
        monkeypatch.setattr(EvictedStorage, "_empty", emptied)
        for kind in begins:
            monkeypatch.setattr(kind, "begin", begun)

    @contextlib.contextmanager
    def full(self, room):
        """So much room and no more for a while."""
        self.room = room
        yield
        self.room = None


@functools.cache
def plan_of_a_step():
    model = nets.Language()
    optimizer = torch.optim.AdamW(model.parameters())
    return outsize.fit(model, nets.language_loss, optimizer, nets.make_tokens(), budget="1GiB", dry_run=True).plan


class Pair:
    """A fitted model and its plain twin, after the same steps."""

    def __init__(self, folder, choice=STREAM, store=None, replan=None):
        torch.manual_seed(0)
        self.model, self.batch = nets.Language(), nets.make_tokens()
        self.twin = copy.deepcopy(self.model)
        self.ours, self.plain = (torch.optim.AdamW(m.parameters()) for m in (self.model, self.twin))
        work = Work(model=self.model, loss=nets.language_loss, optimizer=self.ours)
        plan = plan_of_a_step()
        self.store = store or DiskStore(str(folder))
        self.fitted = hold(plan, choice, open_resident(work, choice, self.store), replan, rows=len(self.batch))
        self.step()

    def step(self):
        got = self.fitted.step(self.batch)
        assert torch.equal(got, nets.plain_step(self.twin, nets.language_loss, self.plain, self.batch))

    @property
    def away(self):
        """Bytes that wait elsewhere."""
        return sum(storage.bytes for storage in self.fitted._now.weights.evicted._all.values() if storage.away)

    def check(self):
        """What waits elsewhere takes no memory here, and a step, undo and all values are those of the plain twin."""
        for storage in self.fitted._now.weights.evicted._all.values():
            assert storage.away
            assert not storage.tensor.untyped_storage().nbytes()
            assert all(isinstance(tensor, EvictedTensor) for tensor in storage.tensors.values())
        self.step()
        self.fitted.undo()
        assert not self.model._state_dict_hooks
        assert {type(p) for p in self.model.parameters()} == {torch.nn.Parameter}
        assert_same(self.model.state_dict(), self.twin.state_dict())
        assert_same(self.ours.state_dict(), self.plain.state_dict())
        assert self.store.held == 0


def assert_same(one, other):
    """The same names in the same order and nesting, and the same bits."""
    if isinstance(one, torch.Tensor):
        assert (one.shape, one.stride(), one.dtype, one.requires_grad) == (
            other.shape, other.stride(), other.dtype, other.requires_grad,
        )  # fmt: skip
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert type(one) is type(other)
        assert sorted(one) == sorted(other)
        for key in one:
            assert_same(one[key], other[key])
    else:
        assert one == other


SAVED = {
    "model": (lambda p: p.model, lambda p: p.twin),
    "part": (lambda p: p.model.blocks[1], lambda p: p.twin.blocks[1]),
    "optimizer": (lambda p: p.ours, lambda p: p.plain),
}


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture], phases=[Phase.generate])
@given(
    choice=st.sampled_from(CHOICES),
    names=st.lists(st.sampled_from(sorted(SAVED)), min_size=1, max_size=3),
    share=st.floats(0, 1.1),
    late=st.booleans(),
    host=st.booleans(),
)
def test_saving_gives_the_plain_values_wherever_memory_runs_out(
    tmp_path, monkeypatch, choice, names, share, late, host
):
    with monkeypatch.context() as patch, pretended.installed(monkeypatch, pretended.Streams(0, 0.1)):
        card = Card(patch, late)
        pair = Pair(tmp_path, choice, HostStore(torch.device("cpu")) if host else None)
        with card.full(int(share * pair.away)):
            for name in names:
                ours, plain = (pick(pair) for pick in SAVED[name])
                assert_same(ours.state_dict(), plain.state_dict())
                assert pair.fitted._now.weights.evicted.saving is None
        pair.step()
        pair.check()
        pair.store.close()


def test_a_saved_part_or_whole_has_the_order_the_ties_and_the_metadata_of_the_plain_one(tmp_path, monkeypatch):
    card, pair = Card(monkeypatch), Pair(tmp_path)
    own = {key: dict(value) for key, value in pair.ours.state.items()}
    with card.full(0):
        saved, state, plain = (
            pair.model.state_dict(prefix="a."),
            pair.ours.state_dict(),
            pair.twin.state_dict(prefix="a."),
        )
        assert list(saved) == list(plain)
        assert saved._metadata == plain._metadata
        assert {tensor.device.type for tensor in saved.values()} == {"cpu"}
        assert saved["a.head.weight"].data_ptr() == saved["a.embed.weight"].data_ptr()
        assert state["param_groups"] == pair.plain.state_dict()["param_groups"]
        assert not any(
            isinstance(value, EvictedTensor) for values in state["state"].values() for value in values.values()
        )
    for parameter, values in pair.ours.state.items():
        assert all(value is own[parameter][name] for name, value in values.items())
    assert sum(isinstance(value, EvictedTensor) for values in own.values() for value in values.values()) == 2 * len(own)
    kept = copy.deepcopy(saved)
    pair.check()
    assert_same(saved, kept)


def test_what_is_saved_without_room_loads_into_a_fresh_model_and_optimizer(tmp_path, monkeypatch):
    card, pair = Card(monkeypatch), Pair(tmp_path)
    file = io.BytesIO()
    with card.full(5000):
        torch.save((pair.model.state_dict(), pair.ours.state_dict()), file)
    assert file.tell() < 1.2 * pair.away
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    model = nets.Language()
    optimizer = torch.optim.AdamW(model.parameters())
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    nets.plain_step(model, nets.language_loss, optimizer, pair.batch)
    pair.check()
    assert_same(model.state_dict(), pair.model.state_dict())


def test_variables_that_are_kept_are_the_parameters_themselves(tmp_path, monkeypatch):
    card, pair = Card(monkeypatch), Pair(tmp_path)
    with card.full(0):
        saved = pair.model.state_dict(keep_vars=True)
        assert all(saved[name] is parameter for name, parameter in pair.model.named_parameters())
        with pytest.raises(outsize.OutOfMemory):
            torch.save(saved, io.BytesIO())
    pair.check()


def test_users_hooks_find_contents_and_one_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    card, pair = Card(monkeypatch), Pair(tmp_path)
    seen = []

    def fail(*given):
        raise ValueError("a hook of mine")

    pair.ours.register_state_dict_post_hook(lambda _, saved: seen.append(saved["state"][0]["exp_avg"].norm()))
    pair.model.register_state_dict_pre_hook(
        lambda *_: seen.append(pair.ours.state_dict()["state"][1]["exp_avg"].norm())
    )
    with card.full(0):
        pair.ours.state_dict()
        pair.model.state_dict()
        broken = pair.model.blocks[2]._register_state_dict_hook(fail)
        with pytest.raises(ValueError, match="of mine"):
            pair.model.state_dict()
        assert_same(pair.model.blocks[0].state_dict(), pair.twin.blocks[0].state_dict())
        broken.remove()
    assert len(seen) == 5
    pair.step()
    assert pair.fitted._now.weights.evicted.saving is None
    with card.full(0):
        assert_same(pair.model.state_dict(), pair.twin.state_dict())
    for hooks in (pair.ours._optimizer_state_dict_post_hooks, pair.model._state_dict_pre_hooks):
        hooks.popitem()
    pair.check()


@pytest.mark.parametrize(("share", "host"), [(0.0, False), (0.3, True), (0.95, False)])
@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ("undo()", lambda p: p.fitted.undo()),
        ("gather()", lambda p: p.fitted.gather()),
        ("deepcopy", lambda p: copy.deepcopy(p.model)),
        ("deepcopy", lambda p: copy.deepcopy(p.ours)),
        ("pickle", lambda p: pickle.dumps(p.model)),
        ("norm", lambda p: [q.norm() for q in p.model.parameters()]),
        ("data", lambda p: [q.data for q in p.model.parameters()]),
    ],
)
def test_without_room_at_home_an_error_says_so_and_nothing_is_lost(tmp_path, monkeypatch, asked, what, share, host):
    with pretended.installed(monkeypatch, pretended.Streams(0, 0.1)):
        card, pair = Card(monkeypatch), Pair(tmp_path, store=HostStore(torch.device("cpu")) if host else None)
        away = pair.away
        for _ in range(2):
            with card.full(int(share * away)), pytest.raises(outsize.OutOfMemory, match=re.escape(asked)) as error:
                what(pair)
            said = str(error.value)
            assert error.value.__context__ is None
            assert (
                "Nothing is lost" in said and "CUDA out of memory. Tried to allocate" in said and "and more" not in said
            )
            assert format_bytes(away) in said
            assert pair.away == away
            pair.step()
        pair.check()
        pair.store.close()


def test_a_streaming_plan_without_room_for_its_weights_at_home_is_made_tighter_all_the_same(monkeypatch):
    torch.manual_seed(0)
    model, batch, failures = nets.Language(), nets.make_tokens(), []
    twin = copy.deepcopy(model)
    ours, plain = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, twin))

    def loss(model, batch):
        if failures:
            raise failures.pop()
        return nets.language_loss(model, batch)

    with pytest.raises(outsize.BudgetError) as error:
        outsize.fit(model, loss, ours, batch, budget=1)
    fitted = outsize.fit(model, loss, ours, batch, budget=error.value.smallest * 13 // 10)
    before, card = fitted.choice, Card(monkeypatch)
    weights = sum(p.untyped_storage().nbytes() for p in model.parameters())
    fitted.step(batch)
    with card.full(weights * 6 // 10):
        failures.append(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
        with pytest.warns(UserWarning, match="nothing was lost"):
            fitted.step(batch)
        with pytest.raises(outsize.OutOfMemory, match="comparison with the plain step needs"):
            fitted._now.weights.bring_weights()
        fitted.step(batch)
    assert before.stream and fitted.choice.stream and fitted.choice != before
    for _ in range(3):
        nets.plain_step(twin, nets.language_loss, plain, batch)
    fitted.undo()
    assert nets.worst_difference(model.parameters(), twin.parameters()) < 1e-5


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_plan_that_finds_no_room_for_what_it_wants_at_home_is_not_taken(tmp_path, monkeypatch, share):
    card = Card(monkeypatch)
    pair = Pair(tmp_path, replan=lambda limit, batch: (plan_of_a_step(), Choice()))
    with (
        card.full(int(share * pair.away)),
        pytest.raises(outsize.OutOfMemory, match=r"no tighter plan .*another plan needs"),
    ):
        pair.fitted._tighten("it was too much")
    assert pair.fitted.choice is STREAM
    pair.step()
    pair.fitted._faster.left = plan_of_a_step(), Choice(), 0.0  # a plan that was left for a faster one
    with card.full(int(share * pair.away)), pytest.raises(outsize.OutOfMemory, match="no tighter plan"):
        pair.fitted._tighten("it was too much")
    pair.step()
    pair.fitted._faster.left, pair.fitted._faster.took = (plan_of_a_step(), Choice(), 0.0), 1.0
    with card.full(int(share * pair.away)):
        pair.fitted._faster.look(pair.fitted._used, pair.batch, whole=True, on_card=False)
    assert "this one stays" in pair.fitted.plan.notes[-1]
    pair.check()


def test_weights_that_a_failed_comparison_sent_away_come_home_when_its_frames_are_gone(tmp_path, monkeypatch):
    """The store of a comparison is closed after it: what were left there would be lost."""
    torch.manual_seed(0)
    model, tokens, calls = nets.Language(), nets.make_tokens(), []
    before = copy.deepcopy(model)
    card = Card(monkeypatch)

    class Held:
        """Memory of a frame that has failed."""

        def __del__(self):
            card.room = None

    def loss(model, batch):
        calls.append(batch)
        if len(calls) % 2 == 0:  # each time that the fitted step runs
            held = Held()
            card.room = 0
            model(batch)
            del held
        return nets.language_loss(model, batch)

    work = Work(model=model, loss=loss, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    store = DiskStore(str(tmp_path))
    with pytest.raises(RuntimeError, match="out of memory"):
        compare(work, STREAM, tokens, store)
    store.close()
    assert_same(model.state_dict(), before.state_dict())


@pytest.mark.parametrize("tied", [False, True])
def test_a_transformers_model_without_room_at_home_is_saved_as_it_is(tmp_path, monkeypatch, tied):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    model, batch = transformers.LlamaForCausalLM(config), torch.randint(0, 64, (2, 8))
    optimizer = torch.optim.AdamW(model.parameters())

    def loss(model, batch):
        return model(input_ids=batch, labels=batch).loss

    card = Card(monkeypatch)
    choice = Choice(state_away=True, stream=("model.layers.0", "model.layers.1"))
    store = DiskStore(str(tmp_path / "scratch"))
    work = Work(model=model, loss=loss, optimizer=optimizer)
    fitted = hold(plan_of_a_step(), choice, open_resident(work, choice, store), rows=2)
    fitted.step(batch)
    with card.full(1000):
        model.save_pretrained(tmp_path / "saved")
        assert isinstance(model.model.layers[0].mlp.up_proj.weight, EvictedTensor)
    fitted.undo()
    assert_same(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved").state_dict(), model.state_dict())


class Gate(torch.nn.Module):
    """Autograd saves what it gives, which is small, and something large."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)

    def forward(self, x):
        return x + functional.gelu(self.linear(x)) * self.linear(x[:1]).exp()


def test_a_failed_pass_with_activations_elsewhere_leaves_nothing_behind(tmp_path):
    model = torch.nn.Sequential(Gate(), Gate())
    store = DiskStore(str(tmp_path))
    work = Work(model=model, loss=lambda m, x: m(x).sum(), optimizer=torch.optim.SGD(model.parameters()))
    runner = open_resident(work, Choice(offload=("0", "1")), store)
    made = []
    model[0].linear.register_forward_hook(lambda module, given, out: made.append(weakref.ref(out)))
    model[1].register_forward_hook(lambda module, given, out: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        runner.step(torch.randn(256, 64))
    clear_up()
    runner.roll_back()
    assert store.peak > store.held == 0
    assert made
    assert not any(result() is not None for result in made)
