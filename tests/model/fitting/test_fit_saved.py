"""A plan is saved, found again by another process, and refused where it was made for something else."""

import dataclasses
import json
import os
import sys
import typing

import forks
import networks as nets
import pytest
from effort import examples, long
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import outsize  # noqa: E402
from outsize.core.errors import InputError, StoreError  # noqa: E402
from outsize.core.fitting import FitPlan, digest_of  # noqa: E402
from outsize.core.memory import HOST  # noqa: E402
from outsize.core.plan import Peak, Step  # noqa: E402
from outsize.model.fitting import arguments  # noqa: E402
from outsize.model.fitting.arguments import read_request  # noqa: E402
from outsize.model.fitting.choice import PLAIN, Choice  # noqa: E402
from outsize.model.fitting.plan.dry_run import Stage  # noqa: E402
from outsize.model.fitting.plan.hosted_search import HostedSearch  # noqa: E402
from outsize.model.fitting.saved import decisions  # noqa: E402
from outsize.model.fitting.saved.basis import basis_of, find_difference  # noqa: E402
from outsize.model.fitting.saved.file import SavedPlan, read_saved  # noqa: E402
from outsize.model.fitting.training import TrainingPlanner  # noqa: E402

ROOMY = "1GiB"
MIB = 2**20


def momentum(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def make(width=16, dropout=0.0, optimizer=momentum, rows=6):
    torch.manual_seed(0)
    model = nets.Language(blocks=2, width=width, words=53, dropout=dropout)
    return model, nets.language_loss, optimizer(model.parameters()), nets.make_tokens(rows=rows, length=12, words=53)


@pytest.fixture(scope="module")
def plain():
    """The plan of a step that fits as it is."""
    return outsize.fit(*make(), budget=ROOMY, dry_run=True).plan


@pytest.fixture
def unlearned(monkeypatch):
    """Nobody looks at a step, and nobody searches."""

    def fail(*args, **more):
        raise AssertionError("looked")

    monkeypatch.setattr(TrainingPlanner, "look_once", fail)


def with_choice(plan, choice, **asked):
    """The same plan as if the search had found another choice."""
    model, loss, optimizer, batch = make()
    request = read_request(model, loss, optimizer, batch, budget=ROOMY, **asked)
    work = SavedPlan.read_work(read_saved(plan), request)
    projection = Stage(work, batch).project(choice)
    origin = {
        **plan.origin,
        "choice": decisions.to_data(choice),
        "peaks": dict(projection.peaks),
        "basis": basis_of(request),
    }
    known = plan.steps[0].peaks[0].known
    steps = tuple(
        Step(name=name, peaks=(Peak(pool=plan.pool, bytes=size, known=known),))
        for name, size in projection.peaks.items()
    )
    return dataclasses.replace(plan, steps=steps, origin=origin)


CHOICES = {
    "slices": Choice(slices=3),
    "a larger first slice": Choice(slices=3, first=4),
    "modules again": Choice(checkpoint=("blocks.0", "blocks.1.down")),
    "recipes": Choice(recipes=("blocks.0:gelu:0", "blocks.1.up:addmm:0")),
    "modules away": Choice(offload=("blocks.0",)),
    "tensors away": Choice(tensors_away=("blocks.0:gelu:0",)),
    "updates in the backward pass": Choice(in_backward=True),
    "state and gradients away": Choice(state_away=1.0, gradients_away=True),
    "visiting weights": Choice(stream=("blocks.0", "blocks.1")),
    "loss in pieces": Choice(chunks=4, slices=2),
    "few bits": Choice(state_bits=8, kept_bits=8),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_every_kind_of_plan_serves_another_fit_and_trains_as_the_plain_step(plain, unlearned, tmp_path, name):
    choice = CHOICES[name]
    asked = {"allow": "approximate"} if name == "few bits" else {}
    saved = with_choice(plain, choice, **asked)
    saved.save(tmp_path / "plan.json")
    model, loss, optimizer, batch = make()
    fitted = outsize.fit(model, loss, optimizer, batch, plan=tmp_path / "plan.json", **asked)
    assert fitted.choice == choice
    assert fitted.plan.steps == saved.steps
    fitted.step(batch)
    fitted.step(batch)
    assert fitted.measured <= fitted.plan.peak() <= fitted.plan.budgets[0].bytes
    fitted.undo()
    twin, loss, other, batch = make()
    for _ in range(2):
        nets.plain_step(twin, loss, other, batch)
    close = {"rtol": 0.3, "atol": 0.01} if asked else {"rtol": 1e-3, "atol": 1e-4}
    for got, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got, expected, **close)


# every field of a choice

KNOWN = decisions.Known(frozenset(("", "a", "a.0", "a.1")), frozenset(("a.0.weight", "a.1.bias")), 8)
TEXTS = st.sampled_from(("a", "a.0", "a.0:1", "a:mm:0", "*", "a.0.weight", "nobody", ""))
NUMBERS = st.sampled_from((0, 1, 2, 4, 7, 8, 9, 2**20, 2**50, 2**51, -1))
OF_TYPE = {
    int: NUMBERS, bool: st.booleans(), float: st.floats(0, 1) | st.sampled_from((-0.5, 1.5)),
    tuple[str, ...]: st.lists(TEXTS, max_size=3).map(tuple),
    dict[str, tuple[str, ...]]: st.dictionaries(
        st.sampled_from(("state", "weights", "elsewhere")), st.lists(TEXTS, max_size=2).map(tuple)
    ),
}  # fmt: skip
"""Type of a field -> values, some of which no plan may hold."""
HINTS = typing.get_type_hints(Choice)
FIELDS = {field.name: OF_TYPE[HINTS[field.name]] for field in dataclasses.fields(Choice)}


def test_each_field_of_a_choice_says_what_it_may_be():
    assert set(decisions.CHECKS) == set(FIELDS)


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_each_field_survives_alone(name):
    """The first value of its type that differs from the plain step's and that its check takes."""
    values = {
        int: (1, 4, 8), bool: (True, False), float: (0.25,), tuple[str, ...]: (("a.0",), ("a:mm:0",)),
        dict[str, tuple[str, ...]]: ({"state": ("a.0.weight",)},),
    }[HINTS[name]]  # fmt: skip
    value = next(v for v in values if v != getattr(PLAIN, name) and decisions.CHECKS[name](v, KNOWN))
    choice = Choice(**{name: value})
    data = json.loads(json.dumps(decisions.to_data(choice)))
    assert list(data) == [name]
    assert decisions.from_data(data, KNOWN) == choice


@examples(100)
@given(st.fixed_dictionaries({}, optional=FIELDS))
def test_a_choice_comes_back_as_it_was_or_is_refused(values):
    choice = Choice(**values)
    allowed = all(decisions.CHECKS[name](value, KNOWN) for name, value in values.items())
    data = json.loads(json.dumps(decisions.to_data(choice)))
    if allowed:
        found = decisions.from_data(data, KNOWN)
        assert found == choice
        assert found.disk == choice.disk
    else:
        with pytest.raises(decisions.Unfit):
            decisions.from_data(data, KNOWN)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@examples(100)
@given(st.dictionaries(st.sampled_from((*sorted(FIELDS), "frobnicate")), ANYTHING, max_size=3))
def test_whatever_a_file_says_makes_a_choice_or_one_error(data):
    try:
        choice = decisions.from_data(data, KNOWN)
    except decisions.Unfit:
        return
    assert all(check(getattr(choice, name), KNOWN) for name, check in decisions.CHECKS.items())


# other work than the plan's

OTHERS = {
    "a wider model": (lambda: make(width=32), {}, r"model: module embed was Embedding\(53, 16\) in training and"),
    "another batch": (lambda: make(rows=7), {}, r"batch: batch was \(6, 12\) int64 and is \(7, 12\) int64"),
    "another optimizer": (lambda: make(optimizer=torch.optim.AdamW), {}, "optimizer: kind was SGD and is AdamW"),
    "another budget": (make, {"budget": "2GiB"}, "budget: of the device was 1073741824 and is 2147483648"),
    "one's own steps": (make, {"own_step": True}, "step: own_step was False and is True"),
    "clipping": (make, {"clip": 1.0}, "step: clip was False and is True"),
    "a remedy less": (make, {"without": ("slices",)}, "step: without was nothing and is slices"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_plan_for_something_else_is_refused_with_what_differs_and_the_way_out(plain, name):
    other, asked, words = OTHERS[name]
    with pytest.raises(InputError, match=words) as failure:
        outsize.fit(*other(), plan=plain, **asked)
    assert "make it anew: fit without plan=" in str(failure.value)


def test_a_plan_for_another_torch_is_refused(plain):
    basis = {**plain.origin["basis"], "machine": {**plain.origin["basis"]["machine"], "torch": "1.0"}}
    with pytest.raises(InputError, match=f"machine: torch was 1.0 and is {torch.__version__}".replace("+", r"\+")):
        outsize.fit(*make(), plan=dataclasses.replace(plain, origin={**plain.origin, "basis": basis}))


def test_weights_that_are_tied_no_longer_are_named(plain):
    model, loss, _, batch = make()
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
    with pytest.raises(InputError, match=r"head\.weight was tied to embed\.weight and is"):
        outsize.fit(model, loss, momentum(model.parameters()), batch, plan=plain)


def test_another_loss_is_refused_and_a_learning_rate_is_not(plain, unlearned):
    model, loss, optimizer, batch = make()
    with pytest.raises(InputError, match="code: loss was"):
        outsize.fit(model, lambda model, batch: 2 * nets.language_loss(model, batch), optimizer, batch, plan=plain)
    optimizer.param_groups[0]["lr"] = 0.5
    assert outsize.fit(model, loss, optimizer, batch, plan=plain, dry_run=True).plan.steps == plain.steps


def test_a_class_of_the_model_with_other_code_is_refused(plain, monkeypatch):
    before = nets.Block.forward

    def forward(self, x):
        return before(self, x) * 2

    monkeypatch.setattr(nets.Block, "forward", forward)
    with pytest.raises(InputError, match="code: class Block was"):
        outsize.fit(*make(), plan=plain)


class Biased(torch.nn.Module):
    """A model whose loss depends on a number that no plan knows."""

    ignored = -100

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 5)


def masked(model, batch):
    x, y = batch
    return torch.nn.functional.cross_entropy(model.layer(x), y, ignore_index=model.ignored)


def test_slices_are_refused_where_the_loss_adds_up_otherwise_than_it_did():
    def given_work():
        torch.manual_seed(0)
        model = Biased()
        batch = torch.randn(512, 8), torch.randint(0, 5, (512,))
        return model, masked, torch.optim.SGD(model.parameters(), 0.1), batch

    first = outsize.fit(*given_work(), budget=ROOMY, dry_run=True).plan
    few = outsize.fit(
        *given_work(), budget=first.plain * 8 // 10, without=("recipes", "offload", "tensors_away"), dry_run=True
    )
    assert few.choice.slices > 1
    asked = {"without": ("recipes", "offload", "tensors_away"), "dry_run": True}
    assert outsize.fit(*given_work(), plan=few.plan, **asked).choice == few.choice
    model, loss, optimizer, batch = given_work()
    model.ignored = 4
    with pytest.raises(StoreError, match="the loss"):
        outsize.fit(model, loss, optimizer, batch, plan=few.plan, **asked)


def test_differences_are_found_in_every_line():
    basis = {"model": {"a": "1", "b": "2"}, "batch": {"x": "3"}}
    assert find_difference(basis, basis) == ""
    assert find_difference(basis, {**basis, "batch": {}}) == "batch: x was 3 and is not there"
    assert find_difference({**basis, "batch": {}}, basis) == "batch: x was not there and is 3"


# replanning


def test_a_step_that_holds_more_than_its_saved_plan_is_planned_anew(plain):
    saved = with_choice(plain, PLAIN)
    model, loss, optimizer, batch = make()
    fitted = outsize.fit(model, loss, optimizer, batch, plan=saved)
    with pytest.warns(UserWarning, match="a step passed its memory"):
        fitted._tighten("a kernel took more")
    assert fitted.choice != PLAIN
    assert any("tightened" in note for note in fitted.plan.notes)
    fitted.step(batch)
    assert fitted.measured <= fitted.plan.peak() < saved.peak()


# files


@pytest.fixture
def saved_file(plain, tmp_path):
    path = tmp_path / "plan.json"
    plain.save(path)
    return path


def resealed(path, change):
    """A file that somebody changed and signed anew."""
    data = json.loads(path.read_text())
    del data["digest"]
    change(data)
    path.write_text(json.dumps(data | {"digest": digest_of(data)}))
    return path


@examples(60)
@given(at=st.floats(0, 1), byte=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_file_is_one_error(tmp_path_factory, plain, at, byte, cut):
    path = tmp_path_factory.mktemp("damaged") / "plan.json"
    plain.save(path)
    whole = path.read_bytes()
    place = min(int(at * len(whole)), len(whole) - 1)
    path.write_bytes(whole[:place] if cut else whole[:place] + bytes([byte]) + whole[place + 1 :])
    try:
        read_saved(path)
    except StoreError:
        return
    assert path.read_bytes() == whole


HOSTILE = {
    "an unknown remedy": (lambda d: d["origin"]["choice"].update(frobnicate=1), "'frobnicate', a remedy that this version"),
    "too many slices": (lambda d: d["origin"]["choice"].update(slices=10**9), "its slices cannot be 1000000000"),
    "no number": (lambda d: d["origin"]["choice"].update(chunks="many"), "chunks is int"),
    "a module that is not there": (lambda d: d["origin"]["choice"].update(offload=["../../etc"]), "its offload cannot be"),
    "fewer bits than were allowed": (lambda d: d["origin"]["choice"].update(state_bits=4), "allow='exact' does not permit it"),
    "a hosted model": (lambda d: d["origin"]["choice"].update(unit_bytes=4), "its weights live elsewhere"),
    "less than its trace": (lambda d: d["steps"][0]["peaks"][0].update(bytes=5), "say less than the trace"),
    "smaller peaks": (lambda d: d["origin"]["peaks"].update(forward=5), "a trace of the step as it is now says"),
    "another version": (lambda d: d["origin"].update(version=99), "has version 99 and this Outsize reads 1"),
    "no parts": (lambda d: d["origin"].update(work=[]), "a part of it is missing"),
    "labels that are not there": (lambda d: d["origin"]["work"]["normaliser"].update(path="batch['y']"), "which is not there"),
    "axes that are not there": (lambda d: d["origin"]["work"]["axes"].update(at={"batch": 7}), "has no axis 7"),
    "a deep table": (lambda d: d["origin"]["work"].update(heads={"a": [[[]]]}), "damaged"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused(saved_file, unlearned, name):
    change, words = HOSTILE[name]
    with pytest.raises((StoreError, InputError), match=words):
        outsize.fit(*make(), plan=resealed(saved_file, change))


def test_what_is_no_plan_is_one_error(tmp_path, plain):
    notes = tmp_path / "notes.txt"
    notes.write_text("nothing")
    read = tmp_path / "read.json"
    read.write_text(json.dumps(plain.to_dict()))
    for plan, words in (
        (tmp_path / "none.json", "cannot read"), (notes, "is not JSON"), (read, "a plan to be read"), (7, "plan=7 is no plan"),
        (dataclasses.replace(plain, origin=None), "cannot be taken again"),
    ):  # fmt: skip
        with pytest.raises((StoreError, InputError), match=words):
            read_saved(plan)
    with pytest.raises(InputError, match="only plans of torch steps"):
        dataclasses.replace(plain, origin=None).save(tmp_path / "none.json")


def test_a_plan_is_written_whole_or_not_at_all(plain, saved_file, monkeypatch):
    before = saved_file.read_bytes()
    monkeypatch.setattr("os.replace", lambda *names: (_ for _ in ()).throw(OSError(28, "no space left")))
    with pytest.raises(StoreError, match="no space left"):
        plain.save(saved_file)
    assert saved_file.read_bytes() == before
    assert [path.name for path in saved_file.parent.iterdir()] == [saved_file.name]


def test_report_shows_a_saved_plan_and_says_the_same_numbers(saved_file, plain):
    from outsize.core.answers import read_answer

    shown = read_answer(saved_file)
    assert isinstance(shown, FitPlan)
    assert shown == plain
    assert "origin" not in shown.to_dict()


# other kinds of fits


def test_an_inference_takes_its_plan(tmp_path):
    model, _, _, batch = make()
    first = outsize.fit(model.eval(), None, None, batch, budget=ROOMY, dry_run=True).plan
    found = outsize.fit(model, None, None, batch, budget=first.plain * 8 // 10, dry_run=True)
    assert found.choice != PLAIN
    found.plan.save(tmp_path / "plan.json")
    model, _, _, batch = make()
    fitted = outsize.fit(model.eval(), None, None, batch, plan=tmp_path / "plan.json")
    assert (fitted.choice, fitted.plan.steps) == (found.choice, found.plan.steps)
    torch.testing.assert_close(fitted.infer(batch), model(batch))
    assert fitted.measured <= fitted.plan.peak()


def test_a_loop_of_ones_own_takes_its_plan(tmp_path, monkeypatch):
    first = outsize.fit(*make(), budget=ROOMY, own_step=True, dry_run=True).plan
    found = outsize.fit(*make(), budget=first.plain * 9 // 10, own_step=True, dry_run=True)
    found.plan.save(tmp_path / "plan.json")
    monkeypatch.setattr(TrainingPlanner, "look_once", None)
    model, loss, optimizer, batch = make()
    fitted = outsize.fit(model, loss, optimizer, batch, plan=tmp_path / "plan.json", own_step=True)
    assert (fitted.choice, fitted.plan.steps) == (found.choice, found.plan.steps)
    assert found.choice != PLAIN
    fitted.backward(batch)
    optimizer.step()
    assert fitted.measured <= fitted.plan.peak()


def test_a_model_on_the_host_takes_its_plan_and_is_rehearsed(tmp_path, monkeypatch):
    given = make(dropout=0.1)
    held = 40 * 2**10
    first = outsize.fit(*given, device="cpu", budget=held * 4, host="8GiB")
    first.plan.save(tmp_path / "plan.json")
    expected = [float(first.step(given[3])) for _ in range(2)]
    monkeypatch.setattr(HostedSearch, "run", None)
    model, loss, optimizer, batch = make(dropout=0.1)
    fitted = outsize.fit(model, loss, optimizer, batch, device="cpu", plan=tmp_path / "plan.json")
    assert (fitted.choice, fitted.plan.peak()) == (first.choice, first.plan.peak())
    assert fitted.seconds is not None
    assert len([float(fitted.step(batch)) for _ in expected]) == 2
    fitted.undo()
    first.undo()
    for got, same in zip(model.parameters(), given[0].parameters(), strict=True):
        assert got.isfinite().all() and got.shape == same.shape


@pytest.mark.skipif(not long(), reason="a model that a host is too small for: the long run")
def test_a_plan_with_a_scratch_file_fits_a_process_that_holds_more(tmp_path, monkeypatch):
    def given():
        torch.manual_seed(0)
        model = nets.Language(width=256, blocks=6)
        return model, nets.language_loss, torch.optim.AdamW(model.parameters()), nets.make_tokens(rows=8)

    def holding(size):
        monkeypatch.setattr(arguments, "read_rss", lambda system: size)

    where = {"device": "cpu", "budget": "28MiB"}
    holding(300 * MIB)
    whole = outsize.fit(*given(), **where, host="8GiB", dry_run=True).plan.peak(HOST)
    first = outsize.fit(*given(), **where, host=whole - 8 * MIB, dry_run=True).plan
    first.save(tmp_path / "plan.json")
    holding(303 * MIB)
    fitted = outsize.fit(*given(), device="cpu", plan=tmp_path / "plan.json", dry_run=True)
    assert fitted.plan.fits
    assert fitted.plan.peak() == first.peak()
    assert "more is on disk than then" in fitted.plan.notes[-1]
    assert sum(map(len, fitted.choice.disk.values())) > sum(map(len, first.origin["choice"]["disk"].values()))


FRESH = """
import json, sys
sys.path[:0] = {paths!r}
import test_fit_saved as here, torch, outsize
torch.set_num_threads(1)
traces = []
project = here.Stage._project
here.Stage._project = lambda *args, **more: traces.append(1) or project(*args, **more)
here.TrainingPlanner.look_once = None  # nobody looks at the step, or searches
model, loss, optimizer, batch = here.make(dropout=0.1)
fitted = outsize.fit(model, loss, optimizer, batch, plan=sys.argv[1])
losses = [float(fitted.step(batch)) for _ in range(2)]
print(json.dumps([len(traces), fitted.plan.peak(), fitted.measured, losses, str(fitted.choice)]))
"""


def test_a_fresh_process_takes_a_plan_after_one_trace(tmp_path):
    given = make(dropout=0.1)
    first = outsize.fit(*given, budget=ROOMY, dry_run=True).plan
    fitted = outsize.fit(*given, budget=first.plain * 6 // 10)
    fitted.plan.save(tmp_path / "plan.json")
    code = FRESH.format(paths=[entry for entry in sys.path if "tests" in entry])
    other = os.environ | {"PYTHONHASHSEED": "5"}
    child = forks.start(code, tmp_path / "plan.json", imported=forks.TORCH, environment=other)
    out, err = child.communicate()
    assert child.returncode == 0, err
    traces, peak, measured, losses, choice = json.loads(out.splitlines()[-1])
    assert traces == 1
    assert choice == str(fitted.choice)
    assert measured <= peak == fitted.plan.peak()
    assert losses == pytest.approx([float(fitted.step(given[3])) for _ in range(2)], rel=0.2)
