"""`outsize report`, and baselines of `outsize estimate`."""

import io
import json
import os
import pickle
import sys

import pytest
from answers import footprint, recording
from snapshots import make_snapshot

from outsize.cli import main
from outsize.core.outcomes.watch_stream import encode, encode_head


def write_recording(path):
    made = recording()
    items = (*made.samples, *made.findings, *made.marks)
    path.write_text(encode_head(made.head) + "".join(map(encode, items)))


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step.json").write_text(json.dumps(footprint().to_dict()))
    write_recording(tmp_path / "run.watch")
    (tmp_path / "oom.pickle").write_bytes(pickle.dumps(make_snapshot()))
    return tmp_path


@pytest.mark.parametrize(
    "name, said", [("step.json", "a step"), ("run.watch", "losses"), ("oom.pickle", "cause: fragmentation")]
)
def test_answers_recordings_and_snapshots_become_pages(name, said, files, capsys):
    assert main(["report", name]) == 0
    page = files / f"{name.partition('.')[0]}.html"
    assert page.name in capsys.readouterr().out
    assert said in page.read_text() and page.read_text().startswith("<!doctype html>")
    assert main(["report", name, "-o", "-"]) == 0
    assert capsys.readouterr().out == page.read_text()


def test_the_same_file_gives_a_trace_and_json(files, capsys):
    assert main(["report", "run.watch", "-o", "other.html", "--trace", "trace.json"]) == 0
    assert json.loads((files / "trace.json").read_text())["traceEvents"] and (files / "other.html").exists()
    capsys.readouterr()
    assert main(["report", "step.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "Footprint"
    assert not (files / "step.html").exists()


def test_an_answer_can_come_from_a_pipe(files, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO((files / "step.json").read_text()))
    assert main(["report", "-"]) == 0
    assert "a step" in (files / "report.html").read_text()


class Wicked:
    def __reduce__(self):
        return os.mkdir, ("made-by-the-pickle",)


WRONG = {
    "missing.json": (None, 2, "cannot read missing.json"),
    "text.json": (b"hello", 1, "is not JSON: line 1"),
    "list.json": (b"[1]", 1, "its `kind` is None"),
    "other.json": (b'{"kind": "Elephant"}', 1, "its `kind` is 'Elephant'"),
    "empty.json": (b'{"kind": "Footprint"}', 1, "is damaged"),
    "types.json": (b'{"kind": "Plan", "name": 3, "steps": [], "budgets": []}', 1, "name is str, not 3"),
    "nan.json": (b'{"kind": "Plan", "smallest": NaN}', 1, "is not JSON"),
    "deep.json": (b"[" * 200_000, 1, "is not JSON"),
    "wicked.pickle": (pickle.dumps(Wicked()), 1, "is not a plain memory snapshot"),
    "cut.watch": (b'{"watch":1,"he', 1, "is no recording"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_answer_is_one_sentence(name, files, capsys):
    content, status, said = WRONG[name]
    if content is not None:
        (files / name).write_bytes(content)
    assert main(["report", name]) == status
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not (files / "made-by-the-pickle").exists()


def test_only_recordings_go_to_tensorboard(files, capsys):
    assert main(["report", "step.json", "--tensorboard", "logs"]) == 2
    assert "for recordings" in capsys.readouterr().err


MODULE = """
import torch
from torch import nn

def build(width):
    def make():
        model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 8)).to("cuda")
        x = torch.zeros(4096, 64, device="cuda")
        def step():
            model(x).sum().backward()
        return step
    return make

narrow, wide = build(512), build(1024)
"""


@pytest.fixture
def steps(tmp_path, monkeypatch):
    (tmp_path / "steps_with_baseline.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("steps_with_baseline", None)


def test_a_peak_that_grew_since_the_baseline_fails_and_names_the_part(steps, capsys):
    narrow, wide = "steps_with_baseline:narrow", "steps_with_baseline:wide"
    assert main(["estimate", narrow, "--save", "base.json"]) == 0
    capsys.readouterr()
    assert main(["estimate", narrow, "--against", "base.json"]) == 0
    assert "no peak has changed" in capsys.readouterr().out
    assert main(["estimate", wide, "--against", "base.json", "--json"]) == 1
    change = json.loads(capsys.readouterr().out)
    assert change["grew"] and change["peaks"][0]["bytes"] > 8 * 2**20
    assert change["parts"][0]["name"] in change["culprit"] and "steps_with_baseline.py" in change["culprit"]
    assert main(["estimate", wide, "--against", "base.json", "--tolerance", "100%", "--save", "next.json"]) == 0
    assert "which is allowed" in capsys.readouterr().out
    assert main(["estimate", narrow, "--against", "next.json"]) == 0
    assert "shrank by" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, said",
    [
        (["--against", "nothing.json"], "there is no baseline nothing.json"),
        (["--tolerance", "1%"], "--tolerance is for --against"),
        (["--against", "steps.json", "--tolerance", "x"], "no share such as 1%"),
        (["--against", "plan.json"], "not a baseline"),
        (["--against", "steps.json"], "another number of steps (3, now 2)"),
    ],
)
def test_a_baseline_that_cannot_be_used_is_said(words, said, steps, capsys):
    main(["estimate", "steps_with_baseline:narrow", "--save", "steps.json"])
    (steps / "plan.json").write_text('{"kind": "Plan", "name": "x", "steps": [], "budgets": [], "smallest": null}')
    capsys.readouterr()
    assert main(["estimate", "steps_with_baseline:narrow", "--steps", "2", *words]) == 2
    assert said in capsys.readouterr().err
