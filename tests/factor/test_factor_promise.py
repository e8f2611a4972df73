"""Rebuilding keeps to its budget, measured in fresh processes and in a container smaller than the tensor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import cgroup
import numpy as np
import pytest
from effort import long
from factor_forms import make

from outsize.core.units import parse_bytes
from outsize.factor import Factored

CHILD = Path(__file__).with_name("factor_child.py")
SHAPE = (256, 512, 256) if long() else (128, 256, 256)
"""128 or 32 MiB."""
SLACK = 2 << 20
"""What Python itself may take beside our buffers."""


def save(folder: Path, method: str) -> Path:
    shape, ranks = ((SHAPE[0] * SHAPE[1], SHAPE[2]), (30, 30)) if method == "svd" else (SHAPE, (30, 20, 25))
    form = make(method, shape, ranks, "float32")
    path = folder / f"x{form.suffixes[0]}"
    Factored(form, error=0.01).save(path)
    return path


@pytest.mark.parametrize(
    ("method", "budget", "work"),
    [
        ("tucker", "4MiB", "plain"), ("tucker", "16MiB", "centred"), ("tt", "6MiB", "centred"), ("cp", "3MiB", "plain"),
        ("svd", "12MiB", "centred"),
    ],
)  # fmt: skip
def test_a_rebuild_takes_no_more_than_its_plan_said(tmp_path: Path, method: str, budget: str, work: str) -> None:
    path = save(tmp_path, method)
    done = subprocess.run(
        [sys.executable, str(CHILD), str(path), str(tmp_path / f"{work}.npy"), budget], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["projected"] <= parse_bytes(budget)
    assert report["grew"] <= report["projected"] + SLACK


def test_a_tensor_larger_than_its_container_is_rebuilt_in_it(tmp_path: Path) -> None:
    path = save(tmp_path, "tucker")
    size = 4 * int(np.prod(SHAPE))
    limit = max(30 << 20, size - (2 << 20))
    outcome = cgroup.run(
        [sys.executable, "-m", "outsize", "convert", str(path), str(tmp_path / "y.npy"), "--budget", "6MiB"], limit,
        env=dict(os.environ, OPENBLAS_NUM_THREADS="2"),
    )  # fmt: skip
    assert outcome.status == 0, (outcome.status, outcome.stderr[-2000:])
    assert outcome.anonymous <= limit
    found = np.load(tmp_path / "y.npy", mmap_mode="r")
    assert found.shape == SHAPE and found.nbytes == size
