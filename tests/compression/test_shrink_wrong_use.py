"""Mistakes and impossible sizes: one sentence with what was given and the next move."""

import math

import pytest
import small_networks
import torch

import outsize
from outsize.compression.card import Goal
from outsize.core.errors import BudgetError, InputError


@pytest.fixture(scope="module")
def case():
    return small_networks.tokens(10)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": None}, "measures on your data"),
        ({"data": []}, "no batches"),
        ({"data": 7}, "data is int"),
        ({"loss": lambda model, batch: torch.tensor(math.nan)}, "not a finite number"),
        ({"loss": lambda model, batch: model(batch)}, "a tensor of shape"),
        ({"loss": None}, "give loss="),
        ({"loss": 3}, "loss is int"),
        ({"to": "half"}, "cannot read 'half'"),
        ({"to": 0.5}, "'50%'"),
        ({"to": "150%"}, "between 0 % and 100 %"),
        ({"to": 0}, "no bytes"),
        ({"to": "fits"}, "name the card"),
        ({"to": "fits abacus"}, "abacus"),
        ({"within": -1}, "within is -1"),
        ({"within": math.nan}, "within is nan"),
        ({"methods": ["magic"]}, "no method 'magic'"),
        ({"methods": []}, "methods is empty"),
        ({"heal": -3}, "heal is -3"),
        ({"heal": 3}, "give training="),
        ({"training": [1]}, "training= is for heal="),
        ({"model": "gpt"}, "model is str"),
        ({"model": torch.nn.ReLU()}, "no parameters"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_one_sentence(case, change, words):
    model, loss, data = case
    given = {"model": model, "data": data, "loss": loss, "to": "50%"} | change
    with pytest.raises(InputError, match=words.replace("(", r"\(")) as caught:
        outsize.shrink(given.pop("model"), given.pop("data"), **given)
    assert "\n" not in str(caught.value)


def _broken():
    yield torch.zeros(8, 8, dtype=torch.long)
    raise OSError("disk gone")


def _frozen():
    model = small_networks.Tokens()
    model.requires_grad_(False)
    return model


AdamW = torch.optim.AdamW


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"optimizer": "adamw", "to": "fits rtx3060"}, "optimizer is a function here"),
        ({"optimizer": AdamW}, "none of them is asked for"),
        ({"optimizer": lambda p: None, "of": "training"}, "gave NoneType"),
        ({"of": "memory"}, "of is 'memory'"),
        ({"of": "training", "model": _frozen()}, "no parameter of the model is trained"),
        ({"of": "training", "methods": ["int8"]}, "no step can train"),
        ({"methods": ["state8"]}, "of='training'"),
        ({"methods": 8}, "methods is 8"),
        ({"methods": "int8,magic"}, "no method 'magic'"),
        ({"heal": 2, "training": (one for one in [1])}, "only once"),
        ({"heal": 2, "training": []}, "training has no batches"),
        ({"budget": "1GiB"}, "budget= is the memory of a step of heal="),
        ({"to": 50}, "write '50%'"),
        ({"loss": lambda batch, model: model(batch)}, "failed with TypeError"),
        ({"loss": lambda model, batch: 1.0}, "does not call the model"),
        ({"loss": torch.nn.CrossEntropyLoss()}, "loss is the module CrossEntropyLoss"),
        ({"data": "data.csv"}, "data is str"),
        ({"data": _broken()}, "going through data failed with OSError: disk gone"),
        ({"model": small_networks.Tokens().to("meta")}, "meta device"),
        ({"model": torch.nn.LazyLinear(4)}, "call it once"),
        ({"model": torch.jit.script(torch.nn.Linear(4, 4))}, "TorchScript"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_mistake_is_one_sentence(case, change, words):
    model, loss, data = case
    given = {"model": model, "data": data, "loss": loss} | change
    with pytest.raises(InputError, match=words.replace("(", r"\(")) as caught:
        outsize.shrink(given.pop("model"), given.pop("data"), **given)
    assert "\n" not in str(caught.value)


def test_files_in_the_wrong_place_or_form_are_named(case, tmp_path):
    model, loss, data = case
    small = outsize.shrink(model, data, loss=loss, methods="bf16")
    with pytest.raises(InputError, match="there is no folder"):
        small.save(tmp_path / "none" / "small.pt")
    with pytest.raises(InputError, match=r"read it with torch\.load"):
        outsize.compression.load(model, tmp_path / "small.pt")
    with pytest.raises(InputError, match="model is str"):
        outsize.compression.load("gpt", tmp_path / "small.safetensors")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plan", "--of", "gradients"], "invalid choice"),
        (["--plan", "--heal", "2"], "give training="),
        (["--plan", "--methods", ","], "no method ''"),
        (["--plan", "--budget", "1GiB"], "heal="),
        (["small.gguf"], "must end in"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_sentence(tmp_path, monkeypatch, capsys, words, said):
    from outsize.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "train_wrongly.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Linear(8, 8), [torch.randn(2, 8)], lambda m, x: m(x).square().mean()\n"
    )
    try:
        status = main(["shrink", "train_wrongly:make", *words])
    except SystemExit as error:
        status = error.code
    found = capsys.readouterr()
    assert status == 2 and said in found.err + found.out and "Traceback" not in found.err


def test_a_loss_that_is_too_high_names_what_it_costs_and_the_nearest_size(case):
    model, loss, data = case
    with pytest.raises(BudgetError) as caught:
        outsize.shrink(model, data, loss=loss, to="20%", within=0.0001, methods=["bf16", "int4"])
    assert "the loss rises by" in str(caught.value) and "within=" in str(caught.value)
    assert "the nearest within the allowed loss is to=" in str(caught.value)
    plan = caught.value.plan
    assert plan.nearest.loss <= plan.allowed and plan.target < plan.nearest.bytes == caught.value.smallest
    taken = outsize.shrink(model, data, loss=loss, to=plan.nearest.bytes, within=0.0001, methods=["bf16", "int4"])
    assert taken.plan.chosen.bytes <= plan.nearest.bytes


def test_a_size_that_no_method_reaches_names_the_smallest(case):
    model, loss, data = case
    with pytest.raises(BudgetError, match=r"cannot be reached: the smallest is .* with a loss of"):
        outsize.shrink(model, data, loss=loss, to="40%", within=1.0, methods="bf16")
    plan = outsize.shrink(model, data, loss=loss, to="40%", within=1.0, methods="bf16", dry_run=True)
    assert not plan.fits and "cannot be reached" in str(plan)


def test_a_model_without_what_a_method_needs_says_what_is_missing(case):
    model, loss, data = case
    plan = outsize.shrink(model, data, loss=loss, to="50%", methods=["tucker"], dry_run=True)
    assert not plan.fits and plan.notes == (
        "tucker finds nothing in this model: it needs convolutions without groups, of at least 8 channels on either side",
    )
    with pytest.raises(BudgetError, match="nothing makes this model smaller"):
        outsize.shrink(model, data, loss=loss, to="50%", methods=["tucker"])


def test_a_model_that_fits_a_card_stays_as_it_is(case):
    model, loss, data = case
    small = outsize.shrink(model, data, loss=loss, to="fits rtx3060")
    assert small.plan.chosen.name == "as it is" and small.plan.card == "RTX 3060" and small.plan.peak > 0


def test_a_card_that_is_too_small_gets_a_model_whose_step_fits(case, monkeypatch):
    model, loss, data = case
    from outsize.compression import shrink as module

    projected = []

    def project(self, model, subject):  # a card of a few KiB: parameters and 10 KiB
        from outsize.compression.weights import count_bytes

        projected.append(count_bytes(model) + 10_000 + (2_000 if len(projected) == 1 else 0))
        return projected[-1]

    monkeypatch.setattr(Goal, "project", project)
    monkeypatch.setattr(module, "read_goal", lambda to, optimizer: Goal(card="toy", capacity=40_000, optimizer=None))
    small = outsize.shrink(model, data, loss=loss, to="fits toy", within=1.0)
    assert small.plan.peak <= 40_000 and len(projected) >= 2  # the first choice was over by what it made more
    monkeypatch.setattr(module, "read_goal", lambda to, optimizer: Goal(card="toy", capacity=9_000, optimizer=None))
    with pytest.raises(BudgetError, match="smaller parameters do not help"):
        outsize.shrink(model, data, loss=loss, to="fits toy", within=1.0)


def test_a_training_step_is_projected_with_its_optimizer():
    from outsize.compression.card import read_goal
    from outsize.compression.method import Subject

    model, size = torch.nn.Linear(2048, 2048), 2048 * 2048 * 4
    subject = Subject(model=model, batches=[torch.randn(2, 2048)], loss=lambda model, x: model(x).square().mean())
    inference = read_goal("fits t4", None).project(model, subject)
    training = read_goal("fits t4", torch.optim.AdamW).project(model, subject)
    assert training >= inference + 3 * size  # gradients and two moments
