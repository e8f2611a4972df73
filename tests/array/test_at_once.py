"""Small work is done at once in NumPy: the same values as in passes, in microseconds, inside the budget."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
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
from outsize.array.run import results
from outsize.array.run.at_once import compute_at_once as compute_all_at_once
from outsize.array.tuning import current, use


@pytest.fixture(autouse=True)
def at_once(tune: Callable[..., None]) -> None:
    tune(at_once=64 << 20)


def compute_at_once(node: Any, budget: Any = None) -> Any:
    found = compute_all_at_once([node], budget)
    return None if found is None else found[0]


MADE: dict[str, Callable[[xp.Array, xp.Array], xp.Array]] = {
    "chain": lambda x, y: (x * y + 2) - x,
    "where": lambda x, y: xp.where(x > 1, x, y),
    "cast": lambda x, y: x.astype("int16").astype("float32") + y,
    "sum": lambda x, y: x.sum(axis=0),
    "sum of all": lambda x, y: (x * 2 + 1).sum(),
    "prod": lambda x, y: x.prod(axis=-1),
    "mean": lambda x, y: x.mean(axis=-1, keepdims=True) - x,
    "std": lambda x, y: x.std(axis=0) + x.var(),
    "largest": lambda x, y: x.max(axis=-1) + x.min(),
    "where it is": lambda x, y: x.argmax(axis=-1),
    "any": lambda x, y: (x > y).any(axis=0),
    "turned": lambda x, y: xp.permute_dims(x, tuple(reversed(range(x.ndim))))[::-1],
    "joined": lambda x, y: xp.concat([x, xp.roll(x, 1, axis=0), x[::-1]], axis=0),
    "reshaped": lambda x, y: (x + 1).reshape(-1)[1:] * 2,
    "sorted": lambda x, y: xp.sort(x, axis=0),
    "order": lambda x, y: xp.argsort(x, axis=-1),
    "running": lambda x, y: xp.cumulative_sum(x, axis=-1),
    "product": lambda x, y: xp.tensordot(x, x, axes=([0], [0])),
    "taken": lambda x, y: xp.take(x, xp.asarray(np.array([0, -1, 0])), axis=0),
    "median": lambda x, y: xp.median(x, axis=-1),
    "chosen": lambda x, y: x[x > 0],
    "itself": lambda x, y: x,
}


@examples(160, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=7),
    st.sampled_from(["?", "i1", "u8", "f2", "f4", "f8", "c16", ">f4"]), st.sampled_from(sorted(MADE)),
    st.integers(0, 99), st.booleans(),
)  # fmt: skip
def test_what_is_made_at_once_is_what_passes_make(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, name: str, seed: int, on_disk: bool
) -> None:
    rng = np.random.default_rng(seed)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        a = (rng.normal(size=shape) * 3).astype(dtype)
        if np.dtype(dtype).kind == "f":
            a.reshape(-1)[rng.integers(a.size)] = rng.choice([np.nan, np.inf, -0.0, 1.0])
        b = (rng.normal(size=shape[-1:]) * 3).astype(dtype)
        np.save(tmp_path / "a.npy", a)
        x = outsize.open(tmp_path / "a.npy" if on_disk else a)
        try:
            lazy = MADE[name](x, outsize.open(b))
        except (TypeError, outsize.InputError):  # NumPy has no such operation on these dtypes
            return
        got = lazy.compute()
        with use(replace(current(), at_once=0, small=0, chunk=1 << 12, slice=64)):
            want = lazy.compute()
    assert got.dtype == want.dtype and got.shape == want.shape
    wide = {"e": 1e-2, "f": 1e-5}.get(want.dtype.char, 1e-12)
    np.testing.assert_allclose(got, want, rtol=wide, atol=wide)
    assert got.flags.writeable and got.flags.c_contiguous and not np.may_share_memory(got, a)


def test_a_small_expression_costs_microseconds_not_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "prepare_all", lambda *args, **more: pytest.fail("it was planned"))
    a = np.random.default_rng(0).random(1000)
    x = outsize.open(a)
    best = min(_seconds(lambda: (x * 2 + 1).sum().compute()) for _ in range(300))
    assert best < 500e-6  # ten times what it takes on an idle core


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def test_a_budget_too_small_for_that_is_planned_and_kept() -> None:
    x = outsize.open(np.random.default_rng(0).random(4000))
    node = ((x * 2 + 1) - x).node
    assert compute_at_once(node, 1 << 20) is not None
    assert compute_at_once(node, 64_000) is None
    with outsize.budget(host=64_000):
        assert compute_at_once(node) is None
    with use(replace(current(), at_once=0)):
        assert compute_at_once(node) is None


def test_a_chain_of_thousands_is_built_and_made_in_time_that_grows_with_it() -> None:
    def chain(length: int) -> float:
        begin, v = time.process_time(), outsize.open(np.ones(100))
        for number in range(length):
            v = v + 1 if number % 2 else v * 0.5
        v.compute()
        return time.process_time() - begin

    chain(100)
    short = min(chain(500) for _ in range(3))
    assert min(chain(5000) for _ in range(3)) < 40 * short


def test_shared_values_are_made_once_however_often_they_are_used() -> None:
    v = outsize.open(np.full(10, 1e-12))
    for _ in range(60):
        v = v + v
    np.testing.assert_array_equal(v.compute(), np.full(10, 1e-12 * 2.0**60))
    assert len(v.plan().steps) <= 4


def test_a_chain_beyond_the_caches_goes_through_in_slices_and_is_never_whole() -> None:
    a = np.random.default_rng(1).random((100_000, 10))
    x = outsize.open(a)
    summed, written = (x * 2 + 1).sum().node, (xp.sqrt(x * 2 + 1) - x.mean(axis=0)).node
    assert compute_at_once((x * 2).node, "16MiB") is None  # 8 MB, four times
    got = compute_at_once(summed, "16MiB")  # what is added up is longer, and is only there in slices
    assert got is not None
    np.testing.assert_allclose(got, (a * 2 + 1).sum(), rtol=1e-13)
    got = compute_at_once(written)
    assert got is not None
    np.testing.assert_allclose(got, np.sqrt(a * 2 + 1) - a.mean(axis=0), rtol=1e-13)


def test_what_several_read_of_a_long_chain_is_made_once() -> None:
    a = np.random.default_rng(2).random((50_000, 10))
    x = outsize.open(a)
    shared = x * 3
    with use(replace(current(), slice=1 << 14)):
        got = compute_at_once((shared / shared.sum(axis=1, keepdims=True) + (shared - 1)).node)
    assert got is not None
    np.testing.assert_allclose(got, a * 3 / (a * 3).sum(axis=1, keepdims=True) + (a * 3 - 1), rtol=1e-12)


def test_work_that_one_core_takes_long_for_is_planned() -> None:
    node = (xp.exp(outsize.open(np.ones(1_000_000))) + 1).node
    with use(replace(current(), at_once=64 << 20, at_once_seconds=1e-3)):
        assert compute_at_once(node) is None
    with use(replace(current(), at_once=64 << 20, at_once_seconds=1.0)):
        assert compute_at_once(node) is not None


def test_a_product_whose_operands_are_made_wider_counts_the_copies() -> None:
    x = outsize.open(np.ones((200_000, 4), "float32"))
    assert compute_at_once((x.T @ x).node, "16MiB") is None  # 3.2 MB of float32 become twice 6.4 MB of float64
