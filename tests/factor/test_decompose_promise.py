"""Measured <= projected <= budget, in fresh processes, for every method and for budgets from little to much."""

import json
from pathlib import Path

import forks
import numpy as np
import pytest
from test_decompose import low_rank

from outsize.core.units import parse_bytes

CHILD = Path(__file__).with_name("decompose_measured_child.py")
LITTLE = 2 << 20
"""Bytes of the interpreter's own growth (objects, the stacks of threads) that no plan counts."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    np.save(folder / "x.npy", low_rank((160, 150, 170), 6, 1e-4, "f4"))
    return folder


@pytest.mark.parametrize(
    ("method", "budget"),
    [
        ("tucker", "4MiB"),
        ("tucker", "12MiB"),
        ("tucker", "64MiB"),
        ("tt", "24MiB"),
        ("auto", "12MiB"),
        ("auto", "32MiB"),
    ],
)
def test_what_is_held_is_within_what_the_plan_said(data: Path, method: str, budget: str) -> None:
    child = forks.start(CHILD, data / "x.npy", method, 0.01, budget)
    out, error = child.communicate()
    assert child.returncode == 0, error
    told = json.loads(out.splitlines()[-1])
    assert told["held"] <= told["projected"] + LITTLE
    assert told["projected"] <= parse_bytes(budget)
