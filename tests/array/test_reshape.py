"""Reshapes of what is not in the order of memory: every part is the right one, and a plan does not count elements one by one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import outsize
import outsize.array as xp
from outsize.array.graph import rearrange
from outsize.array.graph.frame import Frame
from outsize.array.passes.base import traffic

SHAPES = [(24, 10), (4, 6, 10), (24, 2, 5), (2, 12, 2, 5), (240,), (6, 4, 10), (8, 3, 10, 1), (24, 5, 2)]


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(SHAPES),
    st.sampled_from(SHAPES),
    st.sampled_from(SHAPES),
    st.randoms(),
    st.sampled_from([1 << 17, 1 << 20]),
)
def test_reshapes_around_transposes_equal_numpy(
    tmp_path: Path, one: tuple[int, ...], two: tuple[int, ...], three: tuple[int, ...], random: Any, budget: int
) -> None:
    a = np.arange(240.0).reshape(one)
    np.save(tmp_path / "x.npy", a)
    order = random.sample(range(len(two)), len(two))
    x = outsize.open(tmp_path / "x.npy").reshape(two).transpose(order)
    want = a.reshape(two).transpose(order).reshape(three)
    key = tuple(slice(random.randrange(n), None) for n in three)
    np.testing.assert_array_equal(x.reshape(three)[key].save(tmp_path / "y.npy", budget=budget).compute(), want[key])


@pytest.mark.parametrize(("split", "order"), [((1000, 400, 1000), (2, 0, 1)), ((400_000, 10, 100), (2, 0, 1))])
def test_a_split_axis_that_is_turned_is_planned_in_boxes(
    split: tuple[int, ...], order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, evaluate = itertools.count(), Frame.evaluate

    def counted(frame: Frame, *args: Any) -> Any:
        assert next(calls) < 200_000, "a step for every element"
        return evaluate(frame, *args)

    monkeypatch.setattr(Frame, "evaluate", counted)
    x = xp.zeros((400_000, 1000), dtype="float32") + xp.zeros((400_000, 1), dtype="float32")
    assert x.reshape(split).transpose(order).reshape(-1).plan("256MiB").fits


def test_a_column_of_short_rows_is_taken_from_whole_rows_and_not_in_crumbs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = np.arange(1 << 15, dtype="float32")
    np.save(tmp_path / "a.npy", a)
    asked = []
    boxes = rearrange._boxes
    monkeypatch.setattr(rearrange, "_boxes", lambda *given: asked.append(given) or boxes(*given))
    x = outsize.open(tmp_path / "a.npy")
    for shape in ((1 << 14, 2), (1 << 10, 8, 4), (1 << 11, 16)):
        column = x.reshape(shape)[..., 1:2]
        np.testing.assert_array_equal(column.compute("256KiB"), a.reshape(shape)[..., 1:2])
        np.testing.assert_array_equal(column.sum(axis=0).compute("256KiB"), a.reshape(shape)[..., 1:2].sum(axis=0))
    assert len(asked) < 1000


def test_a_plan_looks_at_a_few_of_many_short_runs_and_counts_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3000, 1400), np.float32))
    node = outsize.open(tmp_path / "x.npy").reshape(2100, 2000).node
    region = ((0, 2100), (100, 1483))

    def look() -> Frame:
        frame = Frame(None, {})
        frame.evaluate(node, region)
        return frame

    few = look()
    monkeypatch.setattr(rearrange, "_LOOKED_AT", 2100)
    every = look()
    assert len(few.reads) < 400 < len(every.reads)
    assert traffic(few) == pytest.approx(traffic(every), rel=0.05)
    assert few.peak >= every.peak
