"""What is read twice stays in memory while the budget has room: all of it, or the part that fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from effort import examples
from hypothesis import HealthCheck, given

import outsize
import outsize.array as xp

MiB = 1 << 20


def zscore(x: Any) -> Any:
    return (x - x.mean(axis=0)) / (x.std(axis=0) + 1)


@pytest.fixture(scope="module")
def tall(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 MiB."""
    path = tmp_path_factory.mktemp("tall") / "x.npy"
    np.save(path, np.random.default_rng(1).random((32_768, 512), dtype="float32"))
    return path


def test_a_file_that_fits_the_budget_is_read_once(tall: Path) -> None:
    plan = zscore(outsize.open(tall)).plan("160MiB")
    assert plan.read <= 65 * MiB
    assert plan.peak() <= 160 * MiB


def test_the_part_that_fits_stays(tall: Path) -> None:
    reads = [zscore(outsize.open(tall)).plan(budget).read for budget in ("16MiB", "72MiB", "90MiB", "160MiB")]
    assert reads == sorted(reads, reverse=True)
    assert reads[0] >= 110 * MiB
    assert 66 * MiB < reads[2] < reads[1] < reads[0]


def test_what_stays_is_read_from_disk_only_once_and_gives_the_same_values(tall: Path, tmp_path: Path) -> None:
    reads = read_bytes()
    saved = zscore(outsize.open(tall)).save(tmp_path / "z.npy", budget="90MiB")
    moved, plan = read_bytes() - reads, zscore(outsize.open(tall)).plan("90MiB")
    assert moved <= plan.read + 4 * MiB
    a = np.load(tall).astype("f8")
    np.testing.assert_allclose(np.asarray(saved), zscore(a), rtol=1e-4, atol=1e-5)


def read_bytes() -> int:
    """Bytes that this process has asked of files so far."""
    with open("/proc/self/io") as told:
        return int(next(line.split()[1] for line in told if line.startswith("rchar")))


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.tuples(st.integers(1, 90), st.integers(1, 30)), st.sampled_from("CF"), st.sampled_from(["f4", ">f8", "i4"]),
    st.integers(0, 9), st.integers(14, 19),
)  # fmt: skip
def test_any_part_of_any_file_may_stay(
    tmp_path: Path, tune: Callable[..., None], shape: tuple[int, int], order: Any, dtype: str, seed: int, power: int
) -> None:
    tune(chunk=1 << 10, small=0, least_box=64, slice=64, modest=0, local_lane=0)
    a = np.asarray((np.random.default_rng(seed).normal(size=shape) * 9).astype(dtype), order=order)
    b = (np.random.default_rng(seed + 1).normal(size=shape[::-1]) * 9).astype(dtype)
    np.save(tmp_path / "a.npy", a)
    np.save(tmp_path / "b.npy", b)

    def work(x: Any, y: Any) -> Any:
        return zscore(x) * (y.T - y.mean()) + x.max()

    lazy = work(outsize.open(tmp_path / "a.npy"), outsize.open(tmp_path / "b.npy"))
    got = lazy.compute(max(1 << power, lazy.plan().smallest or 0, lazy.nbytes + (1 << 15)))
    np.testing.assert_allclose(got, work(a.astype("f8"), b.astype("f8")), rtol=1e-3, atol=1e-3)


def test_a_loop_of_steps_over_one_file_keeps_it_between_them(tall: Path) -> None:
    x = outsize.open(tall)
    scale = xp.asarray(np.float32(1))
    for _ in range(4):
        scale = abs(x * scale).max() + 1
    plan = scale.plan("160MiB")
    assert len(plan.steps) >= 4
    assert plan.read <= 65 * MiB


WORKS: dict[str, Callable[[Any], Any]] = {
    "z-score": zscore,
    "sum": lambda x: x.sum(),
    "chain": lambda x: xp.sqrt(x) * 2,
    "twice centred": lambda x: (x - x.mean(axis=0)) / abs(x - x.mean(axis=0)).max(axis=0),
    "part": lambda x: x[:1000] * 2,
    "rows": lambda x: x / x.sum(axis=1, keepdims=True),
    "gram": lambda x: x.T @ x,
    "sorted": lambda x: xp.sort(x.reshape(-1)),
}


@pytest.mark.parametrize("work", sorted(WORKS))
def test_no_budget_moves_less_than_the_floor_and_more_budget_never_raises_it(tall: Path, work: str) -> None:
    floors = []
    for budget in (20 * MiB, 48 * MiB, 90 * MiB, 400 * MiB):
        plan = WORKS[work](outsize.open(tall)).plan(budget)
        assert plan.floor is not None and plan.distance is not None
        assert plan.read + plan.written >= plan.floor
        floors.append(plan.floor)
    assert floors == sorted(floors, reverse=True)
    assert plan.distance <= 1.05 or work == "sorted"  # a large budget reaches it


def test_a_plan_far_from_what_more_memory_could_do_names_a_budget_that_does_it(tall: Path) -> None:
    x = outsize.open(tall)
    plan = zscore(x).plan("48MiB")
    assert plan.distance is not None and plan.distance < 1.2
    (note,) = [note for note in plan.notes if "a budget of about" in note]
    named = note.partition("a budget of about ")[2].split(" would")[0]
    larger = zscore(x).plan(named.replace(" ", ""))
    assert larger.read + larger.written <= 1.01 * 2 * x.nbytes
    assert "x the floor of" in str(plan)
    assert plan.to_dict()["distance"] == plan.distance


def test_a_plan_of_nothing_has_no_bytes_to_move(tmp_path: Path) -> None:
    for shape in ((0, 5), (5, 0), (3, 0, 2)):
        x = outsize.open(np.zeros(shape))
        plan = (x - x.sum(axis=0)).plan("1MiB")
        assert plan.floor == 0 and plan.distance is None
