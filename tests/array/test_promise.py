"""The promise, measured in fresh processes: what a work really takes is inside its plan, and its plan inside the
budget."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest

from outsize.core.units import parse_bytes

CHILD = Path(__file__).with_name("child.py")
ROWS = 65_537
CGROUP = Path("/sys/fs/cgroup/memory")
WORKS = (
    "sum", "moments", "rows", "expression", "zscore", "transpose", "gram", "product", "cumsum", "filter", "reshape",
    "concat", "sort", "argmax", "strided", "median", "median of columns", "percentiles", "topk", "sort of all",
    "argsort of all", "unique", "nonzero", "mask", "searchsorted", "fft", "fft of columns", "fft of all", "random", "svd",
    "sort of columns", "take", "take sorted", "chosen rows", "rows under a mask",
)  # fmt: skip
COUNTED = ("unique", "nonzero", "mask", "take", "take sorted", "rows under a mask")
"""Works of which a part runs when they are asked for, before there is a plan of the rest."""
SLACK = 12 << 20
"""What Python itself may take beside our buffers: threads' stacks and arenas, the garbage between two collections."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tensor of 128 MiB and a small one of the same width."""
    path = tmp_path_factory.mktemp("promise")
    rng = np.random.default_rng(3)
    x = rng.random((ROWS - 1, 512), dtype="float32")
    np.save(path / "x.npy", x)
    np.save(path / "small.npy", x[:4096])
    np.save(path / "tiny.npy", x[:64, :64])
    return path


def run(work: str, folder: Path, budget: str, limit: int | None = None, warm: str = "small.npy") -> dict[str, float]:
    """The child's report, run in a cgroup where a limit is given."""
    group = CGROUP / f"outsize-test-{uuid.uuid4().hex[:8]}" if limit else None
    if group is not None:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit))
    try:
        done = subprocess.run(
            [sys.executable, str(CHILD), work, str(folder), budget, warm], capture_output=True, text=True,
            preexec_fn=(lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None) if group else None,
        )  # fmt: skip
    finally:
        if group is not None:
            group.rmdir()
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, float] = json.loads(done.stdout)
    return found


def expected(
    work: str, x: np.ndarray[tuple[int, int], np.dtype[np.float32]]
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    wide = x.astype("float64")
    if work == "zscore":
        return (wide - wide.mean(0)) / wide.std(0)
    if work == "transpose":
        return wide.T
    if work == "gram":
        return wide.T @ wide
    if work == "moments":
        return wide.var(0) + wide.mean(0)
    return wide.sum()


@pytest.mark.parametrize("work", WORKS)
def test_a_fresh_process_takes_no_more_than_the_plan_said(folder: Path, work: str) -> None:
    report = run(work, folder, "40MiB")
    assert report["projected"] <= parse_bytes("40MiB")
    allowed = parse_bytes("40MiB") if work in COUNTED else report["projected"]
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
def test_a_small_budget_holds_also_what_libraries_and_the_planning_take(folder: Path, work: str, budget: str) -> None:
    report = run(work, folder, budget, warm="tiny.npy")  # so small that BLAS has taken nothing yet
    assert report["projected"] <= parse_bytes(budget)
    assert report["grew"] <= report["projected"] + (2 << 20)
    (folder / f"out-{work}.npy").unlink()


@pytest.mark.skipif(
    not os.access(CGROUP / "memory.limit_in_bytes", os.W_OK), reason="no memory cgroup (v1) can be made here"
)
@pytest.mark.parametrize("work", ["sum", "moments", "zscore", "transpose", "gram"])
def test_work_of_five_times_its_budget_ends_well_in_a_small_container(folder: Path, work: str) -> None:
    run(work, folder, "24MiB", limit=112 << 20)
    x = np.load(folder / "x.npy")
    got = np.load(folder / f"out-{work}.npy")
    np.testing.assert_allclose(got, expected(work, x), rtol=2e-5, atol=2e-4)
    (folder / f"out-{work}.npy").unlink()
