"""`outsize decompose` as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from factor_forms import dense, make

import outsize
from outsize.cli import main
from outsize.factor import Factored


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A low-rank tensor with a little noise, a matrix, and random data."""
    path = tmp_path_factory.mktemp("command")
    rng = np.random.default_rng(0)
    low = dense(make("tucker", (60, 50, 40), (3, 4, 5), "float64"))
    noise = rng.standard_normal(low.shape) * 1e-3 * np.linalg.norm(low) / np.sqrt(low.size)
    np.save(path / "x.npy", (low + noise).astype("float32"))
    np.save(path / "m.npy", dense(make("svd", (80, 60), (4, 4), "float64")))
    return path


@pytest.mark.parametrize(
    ("source", "suffix"), [("x", "tucker"), ("x", "tt"), ("x", "train"), ("m", "svd"), ("m", "tucker")]
)
def test_it_writes_what_the_suffix_says_and_ends_with_what_was_made(folder, tmp_path, capsys, source, suffix):
    target = tmp_path / f"y.{suffix}"
    assert (
        main(
            ["decompose", str(folder / f"{source}.npy"), str(target), "--error", "0.01", "--budget", "64MiB", "--json"]
        )
        == 0
    )
    said = json.loads(capsys.readouterr().out)
    made, data = outsize.open(target), np.load(folder / f"{source}.npy")
    assert isinstance(made, Factored) and said["method"] == made.method == {"train": "tt"}.get(suffix, suffix)
    true = np.linalg.norm(made.compute() - data) / np.linalg.norm(data)
    assert true <= said["error"] == made.error <= said["asked"] == 0.01
    assert (
        said["ranks"] == list(made.ranks) and said["bytes_after"] == made.nbytes and said["bytes_before"] == data.nbytes
    )
    assert said["projected"] <= said["budget"] == 64 << 20 and said["seconds"] > 0 and said["rate"] > 0
    assert [row["kept"] for row in said["spectra"]] and said["target"] == str(target)


def test_the_text_has_ranks_ratio_error_time_and_peak(folder, tmp_path):
    words = ["decompose", str(folder / "x.npy"), str(tmp_path / "y.tucker"), "--budget", "32MiB"]
    done = subprocess.run([sys.executable, "-m", "outsize", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())  # long paths of a scratch folder wrap anywhere
    for piece in (
        "ranks 3 x 4 x 5",
        "times smaller",
        "0.01 asked",
        "GB/s of data",
        "measured",
        "projected, of a budget of 32.00 MiB",
    ):
        assert piece in words
    assert "mode 2: 5 of 40 kept" in done.stdout and "█" in done.stdout


def test_ranks_may_be_asked_for_instead_and_the_error_is_said(folder, tmp_path, capsys):
    assert main(["decompose", str(folder / "x.npy"), str(tmp_path / "y.tucker"), "--rank", "2,3,4", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    data = np.load(folder / "x.npy")
    true = np.linalg.norm(outsize.open(tmp_path / "y.tucker").compute() - data) / np.linalg.norm(data)
    assert said["ranks"] == [2, 3, 4] and true <= said["error"] < 1 and said["asked"] is None


def test_a_plan_needs_no_target_and_makes_nothing(folder, tmp_path, capsys):
    assert (
        main(["decompose", str(folder / "x.npy"), "--method", "tucker", "--budget", "64MiB", "--plan", "--json"]) == 0
    )
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] and plan["steps"] and plan["smallest"] <= 64 << 20
    assert main(["decompose", str(folder / "x.npy"), str(tmp_path / "y.tt"), "--budget", "64MiB", "--plan"]) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["x.npy"], 2, "say where to write"),
        (["x.npy", "y.npy"], 2, "must end in one of .tucker"),
        (["nowhere.npy", "y.tucker"], 2, "nowhere.npy: no such file"),
        (["x.npy", "y.tucker", "--error", "-1"], 2, "error"),
        (["x.npy", "y.tucker", "--error", "little"], 2, "error"),
        (["x.npy", "y.tucker", "--rank", "a"], 2, "--rank is 'a'"),
        (["x.npy", "y.tucker", "--rank", "2,3"], 2, "rank"),
        (["x.npy", "y.tucker", "--method", "tt"], 2, "y.tucker names tucker and --method tt"),
        (["x.npy", "y.safetensors", "--method", "magic"], 2, "magic"),
        (["x.npy", "no/y.tucker"], 2, "there is no folder"),
        (["x.npy", "y.svd"], 2, "svd is for matrices"),
        (["x.npy", "y.tucker", "--budget", "64KiB"], 1, "KiB, which supposes ranks of an eighth"),
        (["x.npy", "y.tucker", "--budget", "12XB"], 2, "unit"),
        (["x.tucker", "x.tucker"], 2, "is the input itself"),
    ],
)  # fmt: skip
def test_mistakes_and_small_budgets_are_one_sentence(folder, monkeypatch, capsys, words, status, told):
    monkeypatch.chdir(folder)
    Factored(make("tucker", (4, 4), (2, 2), "float32"), error=0.1).save("x.tucker")
    assert main(["decompose", *words]) == status
    found = capsys.readouterr()
    assert told in found.err and found.out == "" and found.err.count("\n") == 1 and "Traceback" not in found.err
    assert not (folder / "y.tucker").exists()


def test_other_verbs_read_what_was_written(folder, tmp_path, capsys):
    target = str(tmp_path / "y.tucker")
    assert main(["decompose", str(folder / "x.npy"), target, "--json"]) == 0
    capsys.readouterr()
    assert main(["convert", target, str(tmp_path / "z.npy"), "--budget", "8MiB"]) == 0
    assert "rebuilt from y.tucker: they are at most 0.00" in " ".join(capsys.readouterr().out.split())
    data = np.load(folder / "x.npy")
    assert np.linalg.norm(np.load(tmp_path / "z.npy") - data) <= 0.01 * np.linalg.norm(data)
    capsys.readouterr()
    assert main(["compute", "(x - y).std() / x.std()", "--in", f"x={folder / 'x.npy'}", "--in", f"y={target}"]) == 0
    assert float(capsys.readouterr().out) <= 0.01
