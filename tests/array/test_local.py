"""Work that needs whole lanes rides in the pass that reads its result: one read, the same values, inside the budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from effort import examples
from hypothesis import HealthCheck, given
from hypothesis.extra import numpy as hnp

import outsize
import outsize.array as xp

MiB = 1 << 20
SLOWLY = examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def softmax(m: Any, v: Any, axis: int) -> Any:
    grown = m.exp(v - v.max(axis=axis, keepdims=True))
    return grown / grown.sum(axis=axis, keepdims=True)


STEPS: dict[str, Callable[[Any, Any, int], Any]] = {
    "centred": lambda m, v, a: v - v.mean(axis=a, keepdims=True),
    "softmax": softmax,
    "layer norm": lambda m, v, a: (v - v.mean(axis=a, keepdims=True)) / m.sqrt(v.var(axis=a, keepdims=True) + 1),
    "unit": lambda m, v, a: v / (m.sqrt((v * v).sum(axis=a, keepdims=True)) + 1),
    "range": lambda m, v, a: (v - v.min(axis=a, keepdims=True)) / (v.max(axis=a, keepdims=True) + 9),
    "sorted": lambda m, v, a: m.sort(v, axis=a) - v,
    "running": lambda m, v, a: m.cumulative_sum(v, axis=a) / (abs(v).sum(axis=a, keepdims=True) + 1),
    "turned": lambda m, v, a: m.permute_dims(v, tuple(reversed(range(v.ndim)))),
    "flipped": lambda m, v, a: v[::-1] * 0.5,
    "shorter": lambda m, v, a: v[1:] if v.shape[0] > 1 else v,
    "beside": lambda m, v, a: m.concat([v, v - v.mean(axis=a, keepdims=True)], axis=a),
    "rolled": lambda m, v, a: m.roll(v, 1, axis=a) - v.max(axis=a, keepdims=True),
    "counted": lambda m, v, a: v + (v > 0).any(axis=a, keepdims=True) * v.std(axis=a, keepdims=True),
}
ENDS: dict[str, Callable[[Any, Any, int], Any]] = {
    "itself": lambda m, v, a: v,
    "sum": lambda m, v, a: v.sum(axis=a),
    "mean of all": lambda m, v, a: v.mean(),
    "largest": lambda m, v, a: v.max(axis=-1) + v.min(axis=-1),
    "product": lambda m, v, a: v @ m.permute_dims(v, (*range(v.ndim - 2), v.ndim - 1, v.ndim - 2)) if v.ndim > 1 else v,
    "spread": lambda m, v, a: v.std(axis=a) * v.mean(axis=a),
}


@pytest.fixture
def tiny_tiles(tune: Callable[..., None]) -> None:
    tune(chunk=1 << 13, small=0, least_box=64, slice=64)


@SLOWLY
@given(
    hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=12), st.sampled_from(["f8", "f4", "i4"]),
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 2)), min_size=1, max_size=5),
    st.sampled_from(sorted(ENDS)), st.integers(0, 99), st.sampled_from([1 << 14, 1 << 16, 1 << 19, 1 << 26]),
)  # fmt: skip
def test_random_programs_of_lanes_equal_numpy_inside_any_budget_and_their_own_smallest(
    tmp_path: Path, tiny_tiles: None, shape: tuple[int, ...], dtype: str, steps: list[tuple[str, int]], end: str, seed: int,
    budget: int,
) -> None:  # fmt: skip
    a = (np.random.default_rng(seed).normal(size=shape) * 4).astype(dtype)
    np.save(tmp_path / "x.npy", a)

    def run(m: Any, v: Any) -> Any:
        for name, axis in steps:
            v = STEPS[name](m, v, axis % v.ndim)
        return ENDS[end](m, v, steps[0][1] % v.ndim)

    with np.errstate(all="ignore"):
        want = np.asarray(run(np, a.astype("f8")))
    lazy = run(xp, outsize.open(tmp_path / "x.npy"))
    try:
        got = lazy.compute(budget)
    except outsize.BudgetError as error:
        assert error.smallest is not None and error.smallest > budget
        got = lazy.compute(error.smallest)
    np.testing.assert_allclose(got, want, rtol=2e-3 if dtype == "f4" else 1e-9, atol=1e-3 if dtype == "f4" else 1e-9)


ROWS: dict[str, Callable[[xp.Array], xp.Array]] = {
    "softmax": lambda x: softmax(xp, x, 1),
    "layer norm": lambda x: STEPS["layer norm"](xp, x, 1) * xp.arange(x.shape[1], dtype=x.dtype),
    "softmax of softmax": lambda x: softmax(xp, softmax(xp, softmax(xp, x, 1), 1), 1),
    "ranks": lambda x: xp.argsort(xp.argsort(x, axis=1), axis=1),
    "trimmed mean": lambda x: xp.sort(x, axis=1)[:, 8:-8].mean(axis=1),
    "largest share": lambda x: xp.cumulative_sum(x, axis=1) / x.sum(axis=1, keepdims=True),
    "product of unit rows": lambda x: (x / xp.sqrt((x * x).sum(axis=1, keepdims=True))) @ x[:64].T,
    "entropy": lambda x: (-softmax(xp, x, 1) * xp.log(softmax(xp, x, 1))).sum(axis=1),
    "columns of softmax": lambda x: softmax(xp, x, 1).mean(axis=0),
    "of columns": lambda x: softmax(xp, x.T, 0).T,
}


@pytest.fixture(scope="module")
def tall(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tall") / "x.npy"
    np.save(path, np.random.default_rng(1).random((16_384, 256), dtype="float32"))
    return path


@pytest.mark.parametrize("work", sorted(ROWS))
def test_a_tall_file_is_read_once_and_its_result_written_once(tall: Path, work: str) -> None:
    x = outsize.open(tall)
    plan = ROWS[work](x).plan("4MiB")
    assert plan.fits
    assert len(plan.steps) == 1
    assert plan.read <= 1.15 * x.nbytes  # a product reads its other operand more than once
    assert plan.written <= ROWS[work](x).nbytes


def test_lanes_too_long_for_the_budget_still_get_passes_of_their_own(tmp_path: Path) -> None:
    a = np.random.default_rng(2).random((4, 300_000))
    np.save(tmp_path / "x.npy", a)
    lazy = softmax(xp, outsize.open(tmp_path / "x.npy"), 1)
    assert len(lazy.plan("1MiB").steps) == 3
    saved = lazy.save(tmp_path / "z.npy", budget="1MiB")
    np.testing.assert_allclose(np.asarray(saved), softmax(np, a, 1), rtol=1e-9)


def test_equal_reductions_that_were_written_twice_are_made_once(tall: Path) -> None:
    x = outsize.open(tall)
    twice = (x - x.mean(axis=0)) / (x - x.mean(axis=0)).std(axis=0) + x.mean(axis=0)
    once = x - x.mean(axis=0)
    once = once / once.std(axis=0) + x.mean(axis=0)
    assert [step.name for step in twice.plan("4MiB").steps] == [step.name for step in once.plan("4MiB").steps]


def test_rows_of_a_slice_are_as_wide_as_rows_of_the_whole_file(tune):
    from outsize.array.graph.local import Rows, cut_rows, make_local, unify
    from outsize.array.graph.node import walk

    x = outsize.open(np.ones((4096, 16), "f4"))

    def widths(v):
        unit = v / xp.sqrt((v * v).sum(axis=1, keepdims=True))
        graph = cut_rows(make_local(unify((unit @ unit.T).node), 1 << 20))
        return {node.width for node in walk(graph) if isinstance(node, Rows)}

    assert widths(x[:8]) == widths(x) == {64}
