"""Mistakes in what is asked of arrays on a device, in one sentence each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import outsize
from outsize.array.api.expression import evaluate
from outsize.cli import main

X = outsize.open(np.ones((6, 4), "float32"))


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: X.sum().compute(device=3), "device='3' is none"),
        (lambda: X.sum().compute(device=torch.device("meta")), "device='meta' is none"),
        (lambda: X.tiles(device="fake", prefetch="2"), "prefetch is a number of tiles, not '2'"),
        (lambda: X.tiles(shape=(1.5, 2)), "does not cut"),
        (lambda: outsize.open(torch.ones(3, device="meta")), "lies on meta"),
        (lambda: X.save(None, device="fake"), "not NoneType"),
        (lambda: evaluate("x[10**9]", {"x": X}), "outside axis 0 of length 6"),
    ],
)
def test_a_mistake_is_one_sentence(ask: Callable[[], Any], said: str) -> None:
    with pytest.raises(outsize.InputError, match=said):
        ask()


def test_torchs_own_name_of_the_processor_is_the_processor() -> None:
    assert X.sum().compute(device=torch.device("cpu")) == 24


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    for write in (lambda path: (X * 2).save(path), lambda path: outsize.empty((2, 2), "float32", path)):
        with pytest.raises(outsize.StoreError, match=r"there is no folder .*nowhere: make it first"):
            write(tmp_path / "nowhere" / "y.npy")


def test_a_devices_budget_without_a_device_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", np.ones(3))
    assert main(["compute", "sum(x)", "--in", f"x={tmp_path / 'x.npy'}", "--device-budget", "1MiB"]) == 2
    assert "give --device with it" in capsys.readouterr().err
