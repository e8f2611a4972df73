"""What a cast, a wrap or a rounding does to a value is part of the result, whoever takes it and however wide they work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import outsize
import outsize.array as xp


@pytest.mark.parametrize("budget", ["256KiB", "16MiB"])
def test_a_running_sum_takes_what_the_cast_before_it_made(tmp_path: Path, budget: str) -> None:
    a = np.random.default_rng(0).integers(-9, 9, (500, 40))
    np.save(tmp_path / "x.npy", a)
    x = outsize.open(tmp_path / "x.npy")
    for dtype in ("u2", "i1", "?", "f2"):
        got, want = xp.cumulative_sum(x.astype(dtype), axis=1), np.cumulative_sum(a.astype(dtype), axis=1)
        np.testing.assert_array_equal(got.compute(budget=budget), want)
    narrow = a.astype("i1")
    y = outsize.open(narrow)
    got = xp.cumulative_sum((y * 20 + 7) * y, axis=0)  # wraps twice on its way
    np.testing.assert_array_equal(got.compute(budget=budget), np.cumulative_sum((narrow * 20 + 7) * narrow, axis=0))
    steps = xp.arange(0.0, 50.0, 0.1, dtype="float32")
    want = np.cumsum(steps.compute(), dtype="f8").astype("f4")
    np.testing.assert_array_equal(xp.cumulative_sum(steps).compute(budget=budget), want)


def test_sums_in_a_dtype_that_was_asked_for_cast_elements_first() -> None:
    a = np.array([1.1, 2.2, 70000.0, -2.75])
    for given, asked in (("f4", "f8"), ("f8", "f4"), ("f8", "i8"), ("i8", "f8"), ("f4", "c16"), ("i8", "u1")):
        b = a.astype(given)
        x = outsize.open(b)
        same = np.testing.assert_array_equal
        same(xp.sum(x, dtype=asked).compute(), np.sum(b, dtype=asked))
        same(xp.cumulative_sum(x, dtype=asked).compute(), np.cumulative_sum(b, dtype=asked))


@pytest.mark.parametrize("name", ["sum", "prod", "mean", "std", "min", "argmax", "any"])
def test_a_reduction_of_a_single_value_can_be_given_axes(name: str, tmp_path: Path) -> None:
    x = outsize.open(np.asarray(3.0))
    assert getattr(x, name)().reshape((1, 1)).compute().tolist() == [[getattr(np.asarray(3.0), name)()]]
    assert getattr(x, name)()[None].save(tmp_path / "x.npy").compute().shape == (1,)
