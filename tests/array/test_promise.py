"""The promise, measured in fresh processes: what a work really takes is inside its plan, and its plan inside the
budget."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cgroup
import forks
import numpy as np
import pytest
from effort import long

from outsize.core.units import parse_bytes

CHILD = Path(__file__).with_name("child.py")
ROWS = 65_536 if long() else 32_768
"""Of the tensor that is larger than the container."""
FEWER = ROWS if long() else ROWS // 2
PLENTY, LITTLE, CONTAINER = ("40MiB", "24MiB", 112 << 20) if long() else ("18MiB", "12MiB", 56 << 20)
"""Budgets that the tensor is several times as large as; with `SLACK` it is larger than `PLENTY`, too."""
WORKS = (
    "sum", "moments", "rows", "expression", "zscore", "transpose", "gram", "product", "cumsum", "filter", "reshape",
    "concat", "sort", "argmax", "strided", "median", "median of columns", "percentiles", "topk", "sort of all",
    "argsort of all", "unique", "nonzero", "mask", "searchsorted", "fft", "fft of columns", "fft of all", "random", "svd",
    "sort of columns", "take", "take sorted", "chosen rows", "rows under a mask", "softmax", "layer norm", "unit rows", "ranks",
)  # fmt: skip
COUNTED = ("unique", "nonzero", "mask", "take", "take sorted", "rows under a mask")
"""Works of which a part runs when they are asked for, before there is a plan of the rest."""
LARGER_RESULTS = ("argsort of all", "ranks", "searchsorted")
"""Works whose results have twice the bytes of the tensor."""
SLACK = 12 << 20
"""What Python itself may take beside our buffers: threads' stacks and arenas, the garbage between two collections."""


def make(path: Path, rows: int) -> Path:
    """A tensor with rows of 2 KiB, and smaller ones of the same width to warm up on."""
    x = np.random.default_rng(3).random((rows, 512), dtype="float32")
    np.save(path / "x.npy", x)
    np.save(path / "small.npy", x[:4096])
    np.save(path / "tiny.npy", x[:64, :64])
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tensor of 64 MiB; of 128 MiB in the long run."""
    return make(tmp_path_factory.mktemp("promise"), ROWS)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tensor of 32 MiB; of 128 MiB in the long run."""
    return make(tmp_path_factory.mktemp("half"), FEWER)


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tensor of 16 MiB, several times the smallest budgets; of 128 MiB in the long run."""
    return make(tmp_path_factory.mktemp("smaller"), ROWS if long() else ROWS // 4)


def command(work: str, folder: Path, budget: str, warm: str) -> list[str]:
    return [sys.executable, str(CHILD), work, str(folder), budget, warm]


def told(status: int | None, out: str, err: str) -> dict[str, float]:
    """The child's report."""
    assert status == 0, err[-2000:]
    found: dict[str, float] = json.loads(out)
    return found


def expected(
    work: str, x: np.ndarray[tuple[int, int], np.dtype[np.float32]]
) -> Iterator[tuple[Any, np.ndarray[tuple[int, ...], np.dtype[np.float64]]]]:
    """(key, what the result has there), a few rows of the tensor at a time."""
    if work in ("sum", "moments", "gram"):
        wide = x.astype("float64")
        yield (
            ...,
            {"sum": wide.sum, "moments": lambda: wide.var(0) + wide.mean(0), "gram": lambda: wide.T @ wide}[work](),
        )
        return
    mean, std = x.mean(0, dtype="float64"), x.std(0, dtype="float64")
    for low in range(0, len(x), 1024):
        rows = slice(low, low + 1024)
        wide = x[rows].astype("float64")
        if work == "zscore":
            yield rows, (wide - mean) / std
        elif work == "transpose":
            yield (slice(None), rows), wide.T
        else:
            assert work == "softmax"
            grown = np.exp(wide - wide.max(1, keepdims=True))
            yield rows, grown / grown.sum(1, keepdims=True)


@pytest.mark.parametrize("work", WORKS)
def test_a_fresh_process_takes_no_more_than_the_plan_said(half: Path, smaller: Path, work: str) -> None:
    budget = (
        ("40MiB" if long() else "20MiB") if work == "fft of all" else PLENTY
    )  # its passes over one lane are many on less
    folder = smaller if work in LARGER_RESULTS else half
    child = forks.start(CHILD, work, folder, budget, "small.npy")
    out, err = child.communicate()
    report = told(child.returncode, out, err)
    assert report["projected"] <= parse_bytes(budget)
    allowed = parse_bytes(budget) if work in COUNTED else report["projected"]
    assert report["grew"] <= allowed + SLACK
    (folder / f"out-{work}.npy").unlink()


@pytest.mark.parametrize(
    ("work", "budget"),
    [
        ("gram", "8MiB"), ("gram", "2MiB"), ("strided product", "8MiB"), ("complex product", "12MiB"),
        ("blocks of products", "4MiB"), ("product of axes", "4MiB"), ("product, sorted", "6MiB"), ("svd of one", "48MiB"),
        ("inverse of one", "48MiB"), ("percentiles", "4MiB"),
    ],
)  # fmt: skip
def test_a_small_budget_holds_also_what_libraries_and_the_planning_take(smaller: Path, work: str, budget: str) -> None:
    # A process of its own, warmed so little that BLAS has taken nothing yet.
    done = subprocess.run(command(work, smaller, budget, "tiny.npy"), capture_output=True, text=True)
    report = told(done.returncode, done.stdout, done.stderr)
    assert report["projected"] <= parse_bytes(budget)
    assert report["grew"] <= report["projected"] + (2 << 20)
    (smaller / f"out-{work}.npy").unlink()


def test_what_stays_in_memory_between_passes_is_in_the_plan_too(folder: Path) -> None:
    for budget in ("48MiB", "110MiB"):  # a part of the tensor, and all of it
        child = forks.start(CHILD, "zscore", folder, budget, "small.npy")
        out, err = child.communicate()
        report = told(child.returncode, out, err)
        assert report["projected"] <= parse_bytes(budget)
        assert report["grew"] <= report["projected"] + SLACK
        (folder / "out-zscore.npy").unlink()


@pytest.mark.parametrize("work", ["sum", "moments", "zscore", "transpose", "gram", "softmax"])
def test_work_of_five_times_its_budget_ends_well_in_a_small_container(folder: Path, work: str) -> None:
    outcome = cgroup.run(command(work, folder, LITTLE, "tiny.npy"), CONTAINER)
    told(outcome.status, outcome.stdout, outcome.stderr)
    got, x = np.load(folder / f"out-{work}.npy"), np.load(folder / "x.npy")
    lengths = {"sum": (), "moments": x.shape[1:], "gram": 2 * x.shape[1:], "transpose": x.shape[::-1]}
    assert got.shape == lengths.get(work, x.shape)
    for key, want in expected(work, x):
        assert got[key].shape == want.shape
        assert (np.abs(got[key] - want) <= 2e-4 + 2e-5 * np.abs(want)).all()
    (folder / f"out-{work}.npy").unlink()
