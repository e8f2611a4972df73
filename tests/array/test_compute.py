"""`outsize compute`: expressions on files, planned or run, and nothing but array expressions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import outsize
import outsize.array as xp
from outsize.array.api.expression import evaluate
from outsize.cli import main


@pytest.fixture
def x(tmp_path: Path) -> Path:
    path = tmp_path / "x.npy"
    np.save(path, np.random.default_rng(0).random((200, 30), dtype="float32"))
    return path


def test_an_expression_is_written_to_a_file(x: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "z.npy"
    words = ["compute", "(x - x.mean(axis=0)) / x.std(axis=0)", "--in", f"x={x}", "--out", str(out), "--budget", "1MiB"]
    assert main(words) == 0
    a = np.load(x)
    np.testing.assert_allclose(np.load(out), (a - a.mean(0)) / a.std(0), rtol=1e-4, atol=1e-5)
    assert "float32[200, 30]" in capsys.readouterr().out


def test_a_small_result_is_printed(x: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compute", "sum(x > 0.5)", "--in", f"x={x}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == int((np.load(x) > 0.5).sum())


def test_a_plan_is_shown_and_nothing_runs(x: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compute", "x.T", "--in", f"x={x}", "--out", str(tmp_path / "t.npy"), "--plan", "--json"]
    assert main(words) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] and plan["steps"][0]["written"] == 200 * 30 * 4
    assert not (tmp_path / "t.npy").exists()
    assert main([*words, "--budget", "100B"]) == 1


def test_work_that_cannot_fit_is_an_error_with_the_smallest_budget(
    x: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compute", "sort(x, axis=0)", "--in", f"x={x}", "--out", str(tmp_path / "s.npy"), "--budget", "1KiB"]
    assert main(words) == 1
    assert "the smallest budget that works is" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["x.npy"]


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')", "x.__class__", "x.node", "x.save('a.npy')", "open('x.npy')", "(lambda: 1)()", "[i for i in x]",
        "x if x else x", "9**9**9", "x.sum.__self__", "eval('1')", "map_blocks(x, x)", "f'{x}'", "x := 1", "'a' * 10**9",
        "not x", "sum(*x)", "1 << 10**9", "x.shape.__len__()", "", "x +",
    ],
)  # fmt: skip
def test_anything_but_an_array_expression_is_refused(text: str) -> None:
    with pytest.raises(outsize.InputError):
        evaluate(text, {"x": xp.asarray(np.ones(3))})


def test_names_operators_indices_and_functions_are_understood() -> None:
    a = np.arange(24.0).reshape(4, 6)
    x = xp.asarray(a)
    for text, want in {
        "x[1:3, ::2] @ x[:3, :2]": a[1:3, ::2] @ a[:3, :2],
        "where(x > 3, sqrt(x), -x) ** 2": np.where(a > 3, np.sqrt(a), -a) ** 2,
        "concat([x, x.T.reshape((4, 6))], axis=1)": np.concatenate([a, a.T.reshape(4, 6)], 1),
        "einsum('ij,kj->ik', x, x) / x.size": np.einsum("ij,kj->ik", a, a) / a.size,
        "astype(x, float32).max(axis=-1)": a.astype("float32").max(-1),
    }.items():
        np.testing.assert_allclose(np.asarray(evaluate(text, {"x": x})), want)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("zeros(10**30)", "64 bits"),
        ("zeros((0, 10**30))", "64 bits"),
        ("zeros(10**12)[:, None] * zeros(10**12)", "64 bits"),
        ("x[::0]", "step cannot be zero"),
        ("topk(x, 3)", r"2 arrays: pick one, such as \(topk\(x, 3\)\)\[0\]"),
        ("sum", "is a function: call it"),
        ("astype(x, int64) ** -1", "negative integer powers"),
        ("linalg.inv(zeros((3, 3)))", "Singular"),
        ("linalg.foo(x)", "linalg has cholesky"),
        ("(" * 300 + "x" + ")" * 300, r"\(\.\.\.' as an expression"),
    ],
)
def test_a_mistake_in_an_expression_is_one_short_sentence(
    x: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compute", text, "--in", f"x={x}"]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error) and error.count("\n") == 1 and len(error) < 400


def test_numbers_that_json_does_not_have_are_words(x: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compute", "stack([-x[0, 0] / 0, 0 * x[0, 0] / 0, x[0, 0] / 0])", "--in", f"x={x}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ["-Infinity", "NaN", "Infinity"]


def test_expressions_begin_with_a_minus_and_use_the_namespaces(x: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = np.load(x)
    assert main(["compute", "-x[0,0]", "--in", f"x={x}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == -a[0, 0]
    assert main(["compute", "linalg.norm(real(fft.rfft(x)), ord=1)", "--in", f"x={x}", "--json"]) == 0
    want = np.linalg.norm(np.fft.rfft(a).real, ord=1)
    assert json.loads(capsys.readouterr().out) == pytest.approx(want, rel=1e-5)


def test_a_name_given_twice_is_a_mistake(x: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compute", "x", "--in", f"x={x}", "--in", f"x={x}"]) == 2
    assert "a name of its own" in capsys.readouterr().err


def test_a_warning_is_one_line_without_ours(x: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main(["compute", "x.sum()", "--in", f"x={x}", "--device", "auto"]) == 0
    error = capsys.readouterr().err
    assert error == "" or (error.startswith("outsize: on the processor: ") and error.count("\n") == 1)
