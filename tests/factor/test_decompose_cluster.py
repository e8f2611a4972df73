"""`decompose` on the workers of a cluster: passes over much data are shared, and the promise is the same."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_decompose import low_rank, true_error

import outsize
from outsize.array.plan.prepare import resolve_budget
from outsize.array.run import cluster as joining
from outsize.array.tuning import Tuning, use
from outsize.core.errors import ClusterError
from outsize.engine.cluster import use_cluster
from outsize.engine.local_engine import LocalEngine

TILES = replace(Tuning(), small=0, chunk=1 << 14, largest=1 << 14, least_box=1 << 11, shared_stream=1 << 18)
"""Small data in as many chunks and tasks as large data."""


class Counting(LocalEngine):
    """This process in place of workers; gone after so many tasks."""

    def __init__(self, left: int = -1) -> None:
        super().__init__()
        self.left, self.ran = left, []

    def wait(self, seconds: float) -> Any:
        if self.left == 0:
            raise ClusterError("the scheduler is gone")
        self.left -= 1
        self.ran += [self._next] if self._next is not None else []
        return super().wait(seconds)


@contextlib.contextmanager
def workers(
    made: Counting, folder: Path, tiles: Tuning = TILES, scratch: str | None = None
) -> Iterator[Counting]:  # fmt: skip
    joined = joining.local_cluster(3, 1)
    (folder / "scratch").mkdir(exist_ok=True)
    with use(tiles), use_cluster(replace(joined, executor=made, scratch=scratch or str(folder / "scratch"))):
        yield made
    assert made.left == 0 or not [name for name in os.listdir(folder / "scratch") if "decompose" in name]


@pytest.mark.parametrize(
    ("method", "asked"), [("tucker", {"error": 1e-3}), ("tt", {"error": 1e-3}), ("tucker", {"rank": (3, 3, 3)}), ("auto", {})]
)  # fmt: skip
@pytest.mark.parametrize("tiles", [TILES, replace(TILES, fan=2)])
def test_passes_over_the_data_are_tasks_and_the_promise_holds(
    method: str, asked: Any, tiles: Tuning, tmp_path: Path
) -> None:
    x = low_rank((90, 60, 50), 3, 1e-5, "f4")
    np.save(tmp_path / "x.npy", x)
    with workers(Counting(), tmp_path, tiles) as engine:
        made = outsize.decompose(tmp_path / "x.npy", method, budget="24MiB", **asked)
    folds = [task for task in engine.ran if task.function.__name__ == "fold_part"]
    assert len(folds) >= 12 and made.plan.workers == 3 and made.plan.useful_workers == 12
    assert any(task.function.__name__ == "join_parts" for task in engine.ran) == (tiles.fan == 2)
    assert true_error(made, x) <= made.error <= max(asked.get("error", 0.01), 1e-3)
    assert all(step.peak("host") <= 24 << 20 for step in made.plan.steps)


def test_a_basis_that_parts_find_too_small_is_found_again_from_all_data(tmp_path: Path) -> None:
    x = low_rank((400, 40, 60), 3, 0.0, "f8")
    x[203] = low_rank((40, 60), 4, 0.0, "f8", seed=5)
    np.save(tmp_path / "x.npy", x)
    with workers(Counting(), tmp_path):
        made = outsize.decompose(tmp_path / "x.npy", "tucker", 1e-3, budget="48MiB")
    assert any("Gram" in step.name for step in made.plan.steps)
    assert true_error(made, x) <= made.error <= 1e-3


def test_a_lost_scheduler_costs_no_part_that_was_finished(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", low_rank((90, 60, 50), 3, 1e-5, "f4"))

    def work(left: int) -> tuple[Counting, Any]:
        with workers(Counting(left), tmp_path) as engine:
            if left > 0:
                with pytest.raises(ClusterError):
                    outsize.decompose(tmp_path / "x.npy", "tucker", 1e-3, budget="24MiB")
                return engine, None
            return engine, outsize.decompose(tmp_path / "x.npy", "tucker", 1e-3, budget="24MiB")

    whole, expected = work(-1)
    assert len(whole.ran) >= 12
    for lost in (5, len(whole.ran) - 1):
        first, _ = work(lost)
        second, made = work(-1)
        assert len(first.ran) == lost and len(second.ran) == len(whole.ran) - lost
        np.testing.assert_array_equal(made.compute(), expected.compute())


def test_an_array_in_the_memory_of_this_process_is_decomposed_here(tmp_path: Path) -> None:
    x = low_rank((90, 60, 50), 3, 1e-5, "f8")
    with workers(Counting(), tmp_path, replace(TILES, shared_stream=(1 << 20) + 1)) as engine:
        made = outsize.decompose(x, "tucker", 1e-3, budget="24MiB")
    assert not engine.ran and true_error(made, x) <= made.error


def test_no_process_plans_more_than_the_one_that_asks_may_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "x.npy", low_rank((90, 60, 50), 3, 1e-5, "f4"))
    here = resolve_budget("20MiB")
    real = resolve_budget
    monkeypatch.setattr(
        importlib.import_module("outsize.factor.decompose"),
        "resolve_budget",
        lambda given: real(given) if given else here,
    )
    with workers(Counting(), tmp_path):
        plan = outsize.decompose(tmp_path / "x.npy", "tucker", 1e-3, budget="64MiB", dry_run=True)
    assert plan.budgets[0].bytes == 20 << 20


def test_with_scratch_in_an_object_store_one_worker_does_all(tmp_path: Path) -> None:
    x = low_rank((90, 60, 50), 3, 1e-5, "f4")
    np.save(tmp_path / "x.npy", x)
    with workers(Counting(), tmp_path, scratch="s3://bucket/scratch") as engine:
        made = outsize.decompose(tmp_path / "x.npy", "tucker", 1e-3, budget="24MiB")
    assert [task.function.__name__ for task in engine.ran] == ["call"] and true_error(made, x) <= made.error
