"""Resuming where the state, or the weights, have no room at home: everything goes where it lives, and a failure loses nothing."""

import copy
import gc
import io
import weakref

import networks as nets
import pytest
import streams as pretended
import torch
from held_fits import hold
from storages import Storages
from test_fit_home import BLOCKS, STREAM, Card, Pair, assert_same, plan_of_a_step

import outsize
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.evicted import EvictedTensor
from outsize.model.fitting.move.stores import DiskStore, HostStore
from outsize.model.fitting.run.resident import open_resident
from outsize.model.fitting.run.runner import Work

OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, 1e-3, amsgrad=True),
    "SGD": lambda ps: torch.optim.SGD(ps, 0.05, momentum=0.9),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, 0.01),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, 0.01),
}
CHOICES = {
    "all": Choice(state_away=1.0),
    "half": Choice(state_away=0.5),
    "in backward": Choice(state_away=0.5, in_backward=True),
    "streamed": Choice(state_away=1.0, gradients_away=True, stream=BLOCKS),
}


def reloaded(value):
    """Through a file: memory that torch cannot let go of."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, map_location="cpu")


def trained(make, dtype, steps=2):
    """A plain model and its optimizer after some steps."""
    torch.manual_seed(1)
    model = nets.Language().to(dtype)
    optimizer = make(model.parameters())
    for _ in range(steps):
        nets.plain_step(model, nets.language_loss, optimizer, nets.make_tokens())
    return model, optimizer


class Resumed:
    """A fitted and a plain optimizer, into which the same checkpoint is loaded."""

    def __init__(self, store, make, choice, dtype=torch.float32, before=1):
        self.store, self.batch = store, nets.make_tokens()
        self.twin, self.plain = trained(make, dtype, before)
        self.model, self.ours = trained(make, dtype, 0)
        self.model.load_state_dict(self.twin.state_dict())
        self.ours.load_state_dict(copy.deepcopy(self.plain.state_dict()))
        work = Work(model=self.model, loss=nets.language_loss, optimizer=self.ours)
        self.fitted = hold(plan_of_a_step(), choice, open_resident(work, choice, store), rows=len(self.batch))

    def step(self):
        expected = nets.plain_step(self.twin, nets.language_loss, self.plain, self.batch)
        assert torch.equal(self.fitted.step(self.batch), expected)

    def state(self):
        return [(k, v) for values in self.ours.state.values() for k, v in values.items() if isinstance(v, torch.Tensor)]

    def load(self, saved):
        """Into both; the peak of what the fitted one held of it at once, in bytes."""
        recorder = Storages()
        recorder.phase("load")
        with recorder.counting():
            self.ours.load_state_dict(copy.copy(saved))
        self.plain.load_state_dict(copy.deepcopy(saved))
        return recorder.peaks()["load"]

    def check(self):
        """Steps, values and classes are the plain ones, and the store is left empty."""
        for _ in range(2):
            self.step()
        assert_same(self.ours.state_dict(), self.plain.state_dict())
        self.fitted.undo()
        assert_same(self.model.state_dict(), self.twin.state_dict())
        assert_same(self.ours.state_dict(), self.plain.state_dict())
        assert {type(value) for _, value in self.state()} == {torch.Tensor}
        assert self.store.held == 0


def opened(kind, folder):
    return HostStore(torch.device("cpu")) if kind == "host" else DiskStore(str(folder))


@pytest.mark.parametrize("kind", ["disk", "host"])
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_loaded_tensor_by_tensor_and_training_goes_on_bitwise(
    tmp_path, monkeypatch, name, choice, before, kind
):
    make = OPTIMIZERS[name]
    _, other = trained(make, torch.float32)
    saved = reloaded(other.state_dict())
    kept = copy.deepcopy(saved)
    with pretended.installed(monkeypatch, pretended.Streams(0, 0.1)):
        resumed = Resumed(opened(kind, tmp_path), make, CHOICES[choice], before=before)
        if before:
            resumed.step()
        sizes = [v.nbytes for values in saved["state"].values() for v in values.values()]
        card = Card(monkeypatch)
        with card.full(0):
            held = resumed.load(saved)
            card.room = 0  # what came and went has made none
            assert held <= max(sizes) + 64 < sum(sizes)
            large = [value for key, value in resumed.state() if value.numel() > 1]
            assert large and all(
                isinstance(value, EvictedTensor) and not value.untyped_storage().nbytes() for value in large
            )
            assert not CHOICES[choice].stream or isinstance(
                resumed.model.blocks[0].up.weight, EvictedTensor
            )  # to make room
            assert_same(resumed.ours.state_dict(), saved)
        assert resumed.store.held <= sum(sizes) + sum(p.nbytes for p in resumed.model.parameters())
        resumed.check()
        for key, values in kept["state"].items():  # torch takes the counters themselves
            assert all(torch.equal(saved["state"][key][n], v) for n, v in values.items() if n != "step")
        resumed.store.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_state_of_another_type_becomes_what_torch_makes_of_it(tmp_path, dtype):
    _, other = trained(OPTIMIZERS["AdamW"], dtype)
    resumed = Resumed(DiskStore(str(tmp_path)), OPTIMIZERS["AdamW"], CHOICES["half"])
    saved = other.state_dict()
    assert resumed.load(saved) < sum(v.nbytes for values in saved["state"].values() for v in values.values()) // 2
    resumed.check()


def test_a_checkpoint_that_is_there_already_is_taken_as_it_is(tmp_path):
    """As torch does: no second copy of it is made, and the next step sends it away."""
    _, other = trained(OPTIMIZERS["AdamW"], torch.float32)
    resumed = Resumed(DiskStore(str(tmp_path)), OPTIMIZERS["AdamW"], CHOICES["all"])
    saved = other.state_dict()
    resumed.load(saved)
    assert resumed.ours.state[resumed.model.head.weight]["exp_avg"] is saved["state"][0]["exp_avg"]
    resumed.check()


def test_state_that_the_user_still_holds_is_kept_and_can_be_loaded_again(tmp_path, monkeypatch):
    make = OPTIMIZERS["AdamW"]
    _, other = trained(make, torch.float32)
    resumed = Resumed(DiskStore(str(tmp_path)), make, CHOICES["all"])
    mine, plain = resumed.ours.state_dict(), resumed.plain.state_dict()
    resumed.step()
    resumed.load(reloaded(other.state_dict()))
    plain = copy.deepcopy(plain)
    card = Card(monkeypatch)
    with card.full(0):
        resumed.ours.load_state_dict(mine)
        resumed.plain.load_state_dict(plain)
    resumed.step()
    with card.full(0):
        old = weakref.ref(resumed.ours.state[resumed.model.head.weight]["exp_avg"])
        del mine
        resumed.load(reloaded(other.state_dict()))
        assert old() is None
    resumed.check()


class Planted(DiskStore):
    """Memory, or the disk, fails at the given put."""

    failure, due = None, 0

    def put(self, data, land=None):
        self.due -= 1
        if self.failure is not None and self.due == 0:
            raise self.failure
        return super().put(data, land)


@pytest.mark.parametrize("due", [1, 5])
@pytest.mark.parametrize(
    ("failure", "raised", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), outsize.OutOfMemory, "Nothing is lost.*that it had"),
        (outsize.StoreError("the scratch folder is full", path="."), outsize.StoreError, "is full"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
    ids=["memory", "disk", "interrupt"],
)  # fmt: skip
def test_a_load_that_fails_half_way_changes_nothing(tmp_path, due, failure, raised, said):
    make = OPTIMIZERS["AdamW"]
    _, other = trained(make, torch.float32)
    saved = reloaded(other.state_dict())
    resumed = Resumed(Planted(str(tmp_path)), make, CHOICES["half"])
    resumed.step()
    own, held = {p: dict(values) for p, values in resumed.ours.state.items()}, resumed.store.held
    resumed.store.failure, resumed.store.due = failure, due
    with pytest.raises(raised, match=said):
        resumed.ours.load_state_dict(saved)
    failure.__traceback__, resumed.store.failure = None, None
    assert all(value is own[p][name] for p, values in resumed.ours.state.items() for name, value in values.items())
    gc.collect()
    resumed.step()
    assert resumed.store.held == held
    resumed.load(saved)
    del own
    resumed.check()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda saved: saved.pop("state"),
        lambda saved: saved.pop("param_groups"),
        lambda saved: saved["param_groups"].append({"params": []}),
        lambda saved: saved["param_groups"][0]["params"].pop(),
    ],
)
def test_a_wrong_checkpoint_says_what_torch_says_and_changes_nothing(tmp_path, spoil):
    _, other = trained(OPTIMIZERS["AdamW"], torch.float32)
    saved = reloaded(other.state_dict())
    spoil(saved)
    resumed = Resumed(DiskStore(str(tmp_path)), OPTIMIZERS["AdamW"], CHOICES["half"])
    resumed.step()
    said = []
    for optimizer in (resumed.ours, resumed.plain):
        with pytest.raises((KeyError, ValueError)) as error:
            optimizer.load_state_dict(saved)
        said.append((type(error.value), str(error.value)))
    assert said[0] == said[1]
    resumed.check()


def test_users_hooks_see_the_checkpoint_and_may_change_it(tmp_path):
    make = OPTIMIZERS["AdamW"]
    _, other = trained(make, torch.float32)
    saved = reloaded(other.state_dict())
    resumed = Resumed(DiskStore(str(tmp_path)), make, CHOICES["half"])
    seen = []

    def halve(optimizer, given):
        given = copy.deepcopy(given)
        seen.append(given["state"][0]["exp_avg"].norm())
        for values in given["state"].values():
            values["exp_avg_sq"].mul_(0.5)
            values["exp_avg"] = values["exp_avg"] * 2
        given["param_groups"][0]["lr"] = 0.125
        return given

    for optimizer in (resumed.ours, resumed.plain):
        optimizer.register_load_state_dict_pre_hook(halve)
        optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.param_groups[0]["lr"]))
    resumed.load(saved)
    assert seen[:2] == seen[2:] and seen[1] == 0.125
    resumed.check()


@pytest.mark.parametrize("kind", ["disk", "host"])
@pytest.mark.parametrize("choice", [STREAM, CHOICES["streamed"]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_that_live_elsewhere_are_loaded_there(tmp_path, monkeypatch, choice, kind, dtype):
    other, optimizer = trained(lambda ps: torch.optim.AdamW(ps), dtype)
    saved, state = reloaded(other.state_dict()), reloaded(optimizer.state_dict())
    with pretended.installed(monkeypatch, pretended.Streams(0, 0.1)):
        card, pair = Card(monkeypatch), Pair(tmp_path, choice, opened(kind, tmp_path))
        away = pair.away
        with card.full(0):
            for model in (pair.model, pair.twin):
                assert not any(model.load_state_dict(saved))
            pair.ours.load_state_dict(state)
            pair.plain.load_state_dict(copy.deepcopy(state))
            card.room = 0  # what came and went has made none
            assert_same(pair.model.state_dict(), pair.twin.state_dict())
            with torch.no_grad():
                pair.model.blocks[1].up.weight.copy_(torch.tensor(0.5))
                pair.twin.blocks[1].up.weight.fill_(0.5)
            assert pair.away == away
        pair.step()
        pair.check()
        pair.store.close()


def test_weights_of_wrong_shapes_or_names_fail_as_in_torch(tmp_path, monkeypatch):
    card, pair = Card(monkeypatch), Pair(tmp_path)
    saved = reloaded(pair.twin.state_dict())
    saved["blocks.0.up.weight"], saved["another"] = torch.ones(3, 3), saved.pop("blocks.1.up.weight") * 2
    saved["blocks.2.up.weight"] *= 2
    said = []
    with card.full(0):
        for model in (pair.model, pair.twin):
            with pytest.raises(RuntimeError, match="size mismatch") as error:
                model.load_state_dict(saved)
            said.append(str(error.value))
            with pytest.raises(RuntimeError, match=r"leaf Variable|in-place") if model is pair.twin else card_is_full():
                model.blocks[0].up.weight.copy_(torch.zeros(1))
    assert said[0] == said[1]
    pair.step()
    pair.check()


def card_is_full():
    return pytest.raises(outsize.OutOfMemory, match="copy_")
