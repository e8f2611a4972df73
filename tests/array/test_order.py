"""Order statistics and sets equal NumPy's, for random shapes, axes, dtypes, tiles and budgets."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from effort import examples, long
from hypothesis import HealthCheck, given
from hypothesis.extra import numpy as hnp
from test_laws import BUDGETS, DTYPES, on_disk, same, tiny_tiles  # noqa: F401

import outsize
import outsize.array as xp
from outsize.array.graph.external_sort import Merged
from outsize.array.graph.node import Source, walk
from outsize.array.passes import reduction
from outsize.array.passes.map import MapPass

QUICK = examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
SHAPES = st.one_of(
    hnp.array_shapes(min_dims=1, max_dims=2, min_side=1, max_side=40),
    hnp.array_shapes(min_dims=3, max_dims=3, min_side=1, max_side=40 if long() else 16),
)


@pytest.fixture(autouse=True)
def long_lanes(tune: Callable[..., None]) -> None:
    """Lanes of a few elements are already long, and large arrays are small."""
    tune(ranked_lane=64, turned=512, rank_piece=7, sorted_lane=64, search_piece=32, made_now=64)
    tune(sort_grain=64, filter_block=16)


def values(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    """Values with ties, both zeros, the dtype's ends, infinities and sometimes NaN."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(dtype).kind
    if kind == "b":
        return rng.integers(0, 2, size=shape).astype(dtype)
    if kind in "iu":
        ends = np.iinfo(np.dtype(dtype).newbyteorder("="))
        found = rng.integers(ends.min, ends.max, size=shape, dtype=np.dtype(dtype).newbyteorder("="), endpoint=True)
        return np.where(rng.random(shape) < 0.5, found, found % 5).astype(dtype)
    pick = [0.0, -0.0, 1.5, -np.inf, np.inf, *([np.nan] if seed % 3 == 0 else [])]
    found = np.where(rng.random(shape) < 0.5, rng.normal(size=shape) * 100, rng.choice(pick, size=shape))
    if kind == "c":
        found = found + 1j * rng.integers(0, 3, size=shape)
    return found.astype(dtype)


def draw_axis(data: Any, ndim: int) -> Any:
    """None, one axis, or several."""
    some = st.lists(st.integers(0, ndim - 1), unique=True, min_size=1).map(lambda v: tuple(sorted(v)))
    return data.draw(st.one_of(st.none(), st.integers(-ndim, ndim - 1), some))


@pytest.mark.parametrize("short", [0, 1 << 20])
def test_quantiles_of_one_array_are_told_apart(short: int, tune: Callable[..., None]) -> None:
    tune(ranked_lane=short)
    a = np.random.default_rng(0).normal(size=(20, 31))
    x = outsize.open(a)
    for low, high in (
        (0.1, 0.9),
        (0.5, 0.501),
        ([0.1, 0.2], [0.1, 0.3]),
    ):  # of other elements, and between the same two
        made = xp.quantile(x, high, axis=1) - xp.quantile(x, low, axis=1)
        np.testing.assert_array_equal(made.compute(), np.quantile(a, high, axis=1) - np.quantile(a, low, axis=1))


@QUICK
@given(SHAPES, DTYPES, st.data(), st.integers(0, 99), BUDGETS)
def test_medians_and_quantiles_equal_numpy(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, data: Any, seed: int, budget: int
) -> None:
    a = values(dtype, shape, seed)
    x = on_disk(a, tmp_path)
    axis, keepdims = draw_axis(data, len(shape)), data.draw(st.booleans())
    q = data.draw(st.one_of(st.floats(0, 1), st.lists(st.floats(0, 1), min_size=1, max_size=12), st.integers(0, 1)))
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same(xp.median(x, axis, keepdims=keepdims).compute(budget), np.median(a, axis=axis, keepdims=keepdims))
        if a.dtype.kind in "bc":
            with pytest.raises(outsize.InputError, match="cast it"):
                xp.quantile(x, q)
            return
        same(np.quantile(x, q, axis=axis, keepdims=keepdims).compute(budget),
             np.quantile(a, q, axis=axis, keepdims=keepdims))  # fmt: skip
        hundreds = np.atleast_1d(q) * 100.0  # a scalar of NumPy changes its dtype where there is a NaN
        same(xp.percentile(x, hundreds, axis).compute(budget), np.percentile(a, hundreds, axis=axis))


@QUICK
@given(SHAPES, DTYPES, st.data(), st.integers(0, 99), BUDGETS)
def test_the_first_k_equal_a_stable_sort(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, data: Any, seed: int, budget: int
) -> None:
    a = values(dtype, shape, seed)
    x = on_disk(a, tmp_path)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    k, largest = data.draw(st.integers(0, shape[axis])), data.draw(st.booleans())
    order = np.argsort(a, axis=axis, kind="stable")
    if largest:
        order = a.shape[axis] - 1 - np.flip(np.argsort(np.flip(a, axis), axis=axis, kind="stable"), axis)
    order = np.take(order, range(k), axis)
    found, places = xp.topk(x, k, axis, largest=largest)
    same(places.compute(budget), order)
    same(found.compute(budget), np.take_along_axis(a, order, axis))


@QUICK
@given(hnp.array_shapes(max_dims=3, max_side=4), DTYPES, st.data(), st.integers(0, 99), BUDGETS)
def test_lanes_sorted_in_runs_equal_numpy(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, data: Any, seed: int, budget: int
) -> None:
    a = values(dtype, (*shape[:-1], shape[-1] * 60), seed)
    x = on_disk(a, tmp_path)
    axis, descending = data.draw(st.integers(-len(shape), len(shape) - 1)), data.draw(st.booleans())
    want = np.argsort(a, axis=axis, kind="stable")
    if descending:
        want = a.shape[axis] - 1 - np.flip(np.argsort(np.flip(a, axis), axis=axis, kind="stable"), axis)
    same(xp.argsort(x, axis=axis, descending=descending).compute(budget), want)
    same(xp.sort(x, axis=axis, descending=descending).compute(budget), np.take_along_axis(a, want, axis))


@examples(12, suppress_health_check=QUICK.suppress_health_check)
@given(hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=9), DTYPES, st.integers(0, 99), BUDGETS)
def test_sets_equal_numpy(tmp_path: Path, shape: tuple[int, ...], dtype: str, seed: int, budget: int) -> None:
    a = values(dtype, shape, seed)
    x = on_disk(a, tmp_path)
    same(xp.unique_values(x).compute(budget), np.unique(a, equal_nan=False))
    same(xp.unique_counts(x).counts.compute(budget), np.unique_counts(a).counts)
    kinds, which = xp.unique_inverse(x)
    same(kinds.compute()[which.compute(budget)], a)
    for got, want in zip(xp.unique_all(x), np.unique_all(a), strict=True):
        same(got.compute(budget), want)
    for got, want in zip(np.unique(x, True, True, True), np.unique(a, True, True, True), strict=True):
        same(got.compute(budget), want)


@QUICK
@given(hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=30), DTYPES, st.integers(0, 99), BUDGETS)
def test_places_equal_numpy(tmp_path: Path, shape: tuple[int, ...], dtype: str, seed: int, budget: int) -> None:
    a = values(dtype, shape, seed)
    x = on_disk(a, tmp_path)
    for got, want in zip(np.nonzero(x), np.nonzero(a), strict=True):
        same(got.compute(budget), want)
    same(np.argwhere(x).compute(budget), np.argwhere(a))
    same(x[x != 0].compute(budget), a[a != 0])


@QUICK
@given(SHAPES, st.integers(0, 300), DTYPES, DTYPES, st.sampled_from(["left", "right"]), st.integers(0, 99), BUDGETS)
def test_searches_equal_numpy(
    tmp_path: Path, shape: tuple[int, ...], length: int, one: str, two: str, side: Any, seed: int, budget: int
) -> None:
    a, b = np.sort(values(one, (length,), seed)), values(two, shape, seed + 1)
    got = xp.searchsorted(on_disk(a, tmp_path), on_disk(b, tmp_path, "b"), side)
    same(got.compute(budget), np.searchsorted(a, b, side))


def test_an_interrupted_sort_goes_on_with_the_ranges_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tune: Callable[..., None]
) -> None:
    tune(journaled=1)
    a = values("f8", (60_000,), 1)
    x, budget = on_disk(a, tmp_path), 1 << 20
    merged: list[Any] = []
    close, stop_at = MapPass.close, 4

    def closed(self: Any, job: Any, tile: Any, state: Any) -> None:
        close(self, job, tile, state)
        if isinstance(self.node, Merged):
            merged.append(tile)
            if len(merged) == stop_at:
                raise KeyboardInterrupt

    monkeypatch.setattr(MapPass, "close", closed)
    total = xp.sort(x).plan(budget).steps[-1].tiles
    with pytest.raises(KeyboardInterrupt):
        xp.sort(x).save(tmp_path / "s.npy", budget=budget)
    done = len(merged)
    stop_at = 0
    merged.clear()
    saved = xp.sort(x).save(tmp_path / "s.npy", budget=budget)
    assert len(merged) < total and len(merged) + done >= total
    np.testing.assert_array_equal(np.asarray(saved), np.sort(a))


def test_what_cannot_be_done_says_the_next_move(tmp_path: Path) -> None:
    x = on_disk(values("f4", (6, 5), 1), tmp_path)
    for call, words in (
        (lambda: xp.quantile(x, 2.0), "from 0 to 1"),
        (lambda: xp.percentile(x, 101), "from 0 to 100"),
        (lambda: xp.quantile(x, 0.5, method="nearest"), "sort the array"),
        (lambda: xp.topk(x, 6), "no first 6"),
        (lambda: xp.unique(x, axis=0), "one column at a time"),
        (lambda: xp.searchsorted(x, x), "one dimension"),
        (lambda: xp.nonzero(x.sum()), "at least one dimension"),
        (lambda: xp.median(x, axis=2), "axis 2 does not exist"),
    ):
        with pytest.raises(outsize.InputError, match=words):
            call()


def test_counting_many_ranks_takes_chunks_of_a_page_at_the_smallest_budget(tmp_path: Path) -> None:
    a = values("u8", (39, 39, 39 if long() else 9), 98)
    asked = xp.quantile(on_disk(a, tmp_path), np.linspace(0.01, 0.99, 12), axis=1, keepdims=True)
    smallest = asked.plan(16384).smallest
    assert smallest is not None
    began: list[int] = []
    before = reduction.ReducePass.load

    def load(self: Any, *args: Any) -> Any:
        began.append(1)
        return before(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction.ReducePass, "load", load)
        found = asked.compute(smallest)
    np.testing.assert_array_equal(found, np.quantile(a, np.linspace(0.01, 0.99, 12), axis=1, keepdims=True))
    assert len(began) < a.size // 4


@pytest.mark.parametrize("shape", [(4000,), (300, 7), (5, 400, 3)])
@pytest.mark.parametrize("sorted_", [True, False])
def test_chosen_indices_are_numpys_in_any_order_and_inside_a_small_budget(
    tmp_path: Path, shape: tuple[int, ...], sorted_: bool
) -> None:
    rng = np.random.default_rng(8)
    x = rng.random(shape)
    np.save(tmp_path / "x.npy", x)
    lazy = outsize.open(tmp_path / "x.npy")
    for axis in range(x.ndim):
        picks = rng.integers(-x.shape[axis], x.shape[axis], 900)
        picks = np.sort(picks) if sorted_ else picks
        taken = xp.take(lazy, picks, axis=axis)
        np.testing.assert_array_equal(taken.save(tmp_path / "out.npy", budget="256KiB").compute(), x.take(picks, axis))
        key = (slice(None),) * axis
        np.testing.assert_array_equal(lazy[(*key, picks.astype("int16"))].compute(), x[(*key, picks)])
        mask = rng.random(x.shape[axis]) < 0.3
        np.testing.assert_array_equal(lazy[(*key, mask)].compute(), x[(*key, mask)])


def test_large_index_arrays_lie_in_a_scratch_file_and_are_a_snapshot(tune: Callable[..., None]) -> None:
    tune(made_now=64)
    x = np.random.default_rng(1).random((50, 3))
    picks, mask = np.random.default_rng(2).integers(-50, 50, 200), x[:, 0] < 0.5
    lazy, wide = outsize.open(x), np.repeat(mask, 2)
    found, several = lazy[picks], xp.take(lazy, outsize.open(picks).reshape(20, 10), axis=0)
    twice = xp.concat([lazy, lazy])[wide]
    expected, chosen = x[picks], np.concatenate([x, x])[wide]
    assert not any(node.store.resident for node in walk(found.node)[1:] if isinstance(node, Source))
    np.testing.assert_array_equal(several.compute(), x.take(picks.reshape(20, 10), 0))
    picks[...] = 0
    np.testing.assert_array_equal(found.compute(), expected)
    np.testing.assert_array_equal(twice.compute(), chosen)


def test_an_index_outside_is_the_one_that_is_named() -> None:
    with pytest.raises(IndexError, match="index -30 is outside axis 0 of length 10"):
        outsize.open(np.zeros(10))[[1, -30, 3]]
    with pytest.raises(IndexError, match="index 12 is outside axis 0 of length 10"):
        xp.take(outsize.open(np.zeros(10)), [1, 12, 3])


@pytest.mark.parametrize("function", [xp.unique_inverse, xp.unique_all])
def test_the_smallest_budget_that_an_error_names_is_enough(function: Any) -> None:
    values = np.random.default_rng(0).integers(0, 50, 20_000)
    with outsize.budget(host="64KiB"), pytest.raises(outsize.BudgetError) as caught:
        function(outsize.open(values))
    with outsize.budget(host=caught.value.smallest):
        found = function(outsize.open(values))
    np.testing.assert_array_equal(found.inverse_indices.compute(), np.unique_inverse(values).inverse_indices)


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "i4", "u4", "i8", "u8", ">i4"])
def test_whole_numbers_near_each_other_are_marked_and_not_sorted(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outsize.array.functions import sets

    kind = np.dtype(dtype)
    info = np.iinfo(kind)
    rng = np.random.default_rng(0)
    for low in (info.min, info.max - min(100, info.max - info.min), 5):
        values = (rng.integers(0, 100, (300, 70)).astype(kind) + np.asarray(low, kind)).astype(kind)
        np.save(tmp_path / "x.npy", values)
        x = outsize.open(tmp_path / "x.npy")
        with monkeypatch.context() as patch:
            patch.setattr(sets, "sort", None)
            found = xp.unique_values(x)
        same(found.compute("1MiB"), np.unique(values))
        far = np.concatenate([values.reshape(-1), np.asarray([info.min, info.max], kind)])
        same(xp.unique_values(xp.asarray(far)).compute("1MiB"), np.unique(far))


def test_the_sorted_file_is_read_twice_for_what_is_unique(tmp_path: Path, tune: Callable[..., None]) -> None:
    from outsize.array.graph.filter import first_of_equal, keep
    from outsize.array.run.now import count

    tune(filter_block=1 << 16)
    values = np.random.default_rng(0).integers(0, 1 << 18, 1 << 20).astype("f8")
    np.save(tmp_path / "x.npy", np.sort(values))
    x = outsize.open(tmp_path / "x.npy")
    first = first_of_equal(x.node, True)
    ends = count(first)
    plan = xp.Array(keep(x.node, first, ends)).plan("4MiB")
    assert plan.read <= 1.25 * values.nbytes  # and once for the count
