"""Several results in one walk over the data, and arrays that are kept between walks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from effort import examples
from hypothesis import HealthCheck, given
from hypothesis.extra import numpy as hnp
from stores import WRITTEN

import outsize
import outsize.array as xp
from outsize.array.api.together import plan_save
from outsize.cli import main

MiB = 1 << 20


@pytest.fixture(scope="module")
def tall(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """32 MiB."""
    path = tmp_path_factory.mktemp("tall") / "x.npy"
    np.save(path, np.random.default_rng(1).random((16_384, 512), dtype="float32"))
    return path


def test_results_of_one_file_read_it_once(tall: Path) -> None:
    x = outsize.open(tall)
    plan = plan_save({"y.npy": x * 2, "s.npy": x.sum(axis=0), "m.npy": x.max(axis=1), "w.npy": xp.sqrt(x)}, "6MiB")
    assert plan.fits
    assert len(plan.steps) == 1
    assert plan.read <= 1.05 * x.nbytes


def test_a_result_that_another_one_needs_is_made_once(tall: Path, tmp_path: Path) -> None:
    x = outsize.open(tall)
    mean, spread = x.mean(axis=0), x.std(axis=0)
    z = (x - mean) / spread
    targets = {str(tmp_path / name): node for name, node in (("z.npy", z), ("m.npy", mean), ("s.npy", spread))}
    assert plan_save(targets, "6MiB").read <= 2.05 * x.nbytes
    saved = outsize.save(targets, "6MiB")
    a = np.load(tall).astype("f8")
    for path, want in zip(targets, ((a - a.mean(0)) / a.std(0), a.mean(0), a.std(0)), strict=True):
        np.testing.assert_allclose(np.asarray(saved[path]), want, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(np.asarray(saved[path]), np.load(path))


MADE: dict[str, Callable[[Any, Any], Any]] = {
    "double": lambda m, v: v * 2,
    "root": lambda m, v: m.sqrt(abs(v)),
    "sum": lambda m, v: v.sum(axis=0),
    "largest": lambda m, v: v.max(axis=-1),
    "where": lambda m, v: v.argmin(axis=-1),
    "mean": lambda m, v: v.mean(),
    "turned": lambda m, v: m.permute_dims(v, tuple(reversed(range(v.ndim)))),
    "centred": lambda m, v: v - v.mean(axis=0),
    "unit": lambda m, v: v / (abs(v).sum(axis=-1, keepdims=True) + 1),
    "sorted": lambda m, v: m.sort(v, axis=-1),
    "itself": lambda m, v: v,
    "first": lambda m, v: v[:1],
}  # fmt: skip


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=12),
    st.lists(st.sampled_from(sorted(MADE)), min_size=1, max_size=5),
    st.integers(0, 99), st.sampled_from([1 << 14, 1 << 16, 1 << 20]), st.booleans(), st.sampled_from(WRITTEN),
)  # fmt: skip
def test_any_results_together_equal_numpys(
    tmp_path: Path, tune: Callable[..., None], shape: tuple[int, ...], names: list[str], seed: int, budget: int, saved: bool,
    kind: str,
) -> None:  # fmt: skip
    tune(chunk=1 << 12, small=0, least_box=64, slice=64)
    a = np.random.default_rng(seed).normal(size=shape)
    np.save(tmp_path / "x.npy", a)
    x = outsize.open(tmp_path / "x.npy")
    lazy = [MADE[name](xp, x) for name in names]

    def run(budget: int) -> list[Any]:
        if not saved:
            return list(outsize.compute(*lazy, budget=budget))
        made = outsize.save({tmp_path / f"{n}{kind}": array for n, array in enumerate(lazy)}, budget)
        return [np.asarray(array) for array in made.values()]

    try:
        got = run(budget)
    except outsize.BudgetError as error:
        assert error.smallest is not None and error.smallest > budget
        got = run(error.smallest)
    for value, name in zip(got, names, strict=True):
        np.testing.assert_allclose(value, MADE[name](np, a), rtol=1e-9, atol=1e-12)


def test_small_results_are_made_at_once(tune: Callable[..., None]) -> None:
    tune(at_once=1 << 20)
    a = np.arange(12.0).reshape(3, 4)
    x = outsize.open(a)
    total, doubled, same = outsize.compute(x.sum(), x * 2, x)
    assert total == 66
    np.testing.assert_array_equal(doubled, a * 2)
    same[0, 0] = 9  # it is the caller's own
    assert a[0, 0] == 0


def test_two_results_of_one_file_or_onto_their_input_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(9.0))
    x = outsize.open(tmp_path / "x.npy")
    with pytest.raises(outsize.InputError, match="two arrays"):
        outsize.save({tmp_path / "z.npy": x, f"{tmp_path}/./z.npy": x + 1})
    with pytest.raises(outsize.InputError, match="also an input"):
        outsize.save({tmp_path / "z.npy": x, tmp_path / "x.npy": x + 1})
    with pytest.raises(outsize.InputError, match="open it"):
        outsize.compute(np.arange(3))  # type: ignore[arg-type]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npy"]


def test_where_one_of_several_fails_none_appears(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(9.0))

    def fail(block: Any) -> Any:
        raise ZeroDivisionError

    x = outsize.open(tmp_path / "x.npy")
    with pytest.raises(ZeroDivisionError):
        outsize.save({tmp_path / "a.npy": x + 1, tmp_path / "b.npy": xp.map_blocks(fail, x, memory=1)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npy"]


def test_the_command_saves_named_results_in_one_walk(
    tall: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [
        "m = x.mean(axis=0)",
        "z = x - m",
        "--in",
        f"x={tall}",
        "--out",
        "z=z.npy",
        "--out",
        "m=m.npy",
        "--budget",
        "80MiB",
    ]
    assert main(["compute", *given, "--plan"]) == 0
    assert "reads 32.0" in capsys.readouterr().out
    assert main(["compute", *given]) == 0
    a = np.load(tall)
    np.testing.assert_allclose(np.load("m.npy"), a.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(np.load("z.npy"), a - a.mean(axis=0), atol=1e-5)
    assert main(["compute", "m = x.mean()", "x - m", "--in", f"x={tall}", "--out", "y.npy"]) == 0
    assert main(["compute", "x.mean()", "x * 2", "--in", f"x={tall}"]) == 2
    assert main(["compute", "x * 2", "--in", f"x={tall}", "--out", "y=a.npy", "--out", "b.npy"]) == 2


def test_a_cached_array_is_made_once_counts_against_budgets_and_goes(tall: Path, tmp_path: Path) -> None:
    x = outsize.open(tall)
    with outsize.budget(host="80MiB", scratch=str(tmp_path)):
        kept = (x * 2).cache()
        assert kept.plan().read == 0
        assert kept.plan().budgets[0].bytes == 48 * MiB
        np.testing.assert_array_equal(kept[:9].compute(), np.load(tall)[:9] * 2)
        del kept
        gc.collect()
        assert x.plan().budgets[0].bytes == 80 * MiB
    with outsize.budget(host="40MiB", scratch=str(tmp_path)):  # it does not fit in half of that
        kept = (x * 2).cache()
        files = list(tmp_path.glob("outsize-array-*"))
        assert len(files) == 1
        assert kept.plan().read >= x.nbytes
        np.testing.assert_array_equal(kept[:9].compute(), np.load(tall)[:9] * 2)
        del kept
        gc.collect()
        assert not files[0].exists()
