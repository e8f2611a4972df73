"""`outsize estimate`: verdict first, exit status by the verdict, mistakes named."""

import json

import pytest

torch = pytest.importorskip("torch")

from outsize.cli import main  # noqa: E402

STEP = """
import torch

def make(batch=None):
    model = torch.nn.Linear(1024, 1024).cuda()
    data = torch.rand((batch or 4) * 64, 1024, device="cuda")
    def step():
        model(data).sum().backward()
    return step

def plain():
    return make()

def broken():
    return make().missing

def number():
    return 3

value = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "steps_of_this_test.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_a_function_is_estimated_and_the_verdict_comes_first(capsys):
    assert main(["estimate", "steps_of_this_test:plain", "--card", "rtx4090"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("steps_of_this_test:plain: fits")


def test_what_does_not_fit_exits_with_one(capsys):
    assert main(["estimate", "steps_of_this_test:plain", "--budget", "20MiB"]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_json_has_the_same_numbers(capsys):
    assert main(["estimate", "steps_of_this_test:make", "--batch", "8", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["peak_allocated"]["bytes"] >= 4 * 1024 * 1024
    assert data["growth"][0]["size"] == "batch"
    assert {row["place"] for row in data["largest"]} >= {"RTX 4090", "H200"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["estimate"], "either MODULE:FUNCTION or --hf"),
        (["estimate", "steps_of_this_test"], "is not MODULE:FUNCTION"),
        (["estimate", "no_such_module_here:make"], "no module 'no_such_module_here'"),
        (["estimate", "steps_of_this_test:wrong"], "has no 'wrong': it has make, plain, broken, number"),
        (["estimate", "steps_of_this_test:value"], "is int, not a function"),
        (["estimate", "steps_of_this_test:broken"], "steps_of_this_test.py:15"),
        (["estimate", "steps_of_this_test.py:number"], "number returned int, not the step to run"),
        (["estimate", "cut_short_in_this_test:make"], "importing cut_short_in_this_test raised SyntaxError"),
        (
            ["estimate", "fails_in_this_test:make"],
            "raised ZeroDivisionError at fails_in_this_test.py:2: division by zero",
        ),
        (["estimate", "steps_of_this_test:plain", "--batch", "4"], "takes no argument"),
        (["estimate", "steps_of_this_test:plain", "--card", "rtx9999"], "unknown card 'rtx9999'"),
        (["estimate", "--hf", "nowhere.json"], "no configuration at nowhere.json"),
        (["estimate", "--hf", "empty.json"], "names no model_type"),
        (["estimate", "--hf", "sizes.json"], "says nothing about sizes"),
        (["estimate", "--hf", "text.json"], "is not JSON: line 1"),
    ],
)
def test_a_mistake_is_named_and_exits_with_two(words, said, folder, capsys):
    (folder / "cut_short_in_this_test.py").write_text("make = (")
    (folder / "fails_in_this_test.py").write_text("x = 0\n1 / x")
    (folder / "empty.json").write_text("{}")
    (folder / "sizes.json").write_text('{"model_type": "gpt2"}')
    (folder / "text.json").write_text("hello")
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_a_transformers_config_is_enough(folder, capsys):
    pytest.importorskip("transformers")
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 500, "n_positions": 128}
    (folder / "config.json").write_text(json.dumps(config))
    words = [
        "estimate",
        "--hf",
        "config.json",
        "--batch",
        "2",
        "--seq",
        "64",
        "--precision",
        "bf16-amp",
        "--card",
        "t4",
        "--json",
    ]
    assert main(words) == 0
    data = json.loads(capsys.readouterr().out)
    weights = next(part["bytes"] for part in data["parts"] if part["name"] == "weights")
    assert weights == 4 * (500 * 64 + 128 * 64 + 2 * (12 * 64 * 64 + 13 * 64) + 2 * 64)
