"""Work on the workers of a cluster: the same results as in one process, whoever is lost on the way."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outsize
import outsize.array as xp
from outsize.array.run import cluster as joining
from outsize.array.run import task as tasks
from outsize.array.tuning import Tuning, use
from outsize.core.errors import ClusterError
from outsize.engine.cluster import current_cluster, use_cluster
from outsize.engine.local_engine import LocalEngine

distributed = pytest.importorskip("distributed")

SMALL = replace(
    Tuning(), chunk=1 << 18, small=1 << 12, least_box=1 << 16, at_once=0, journaled=0, sorted_lane=1 << 16, local_lane=1 << 14,
    ranked_lane=1 << 12, turned=1 << 16, sort_grain=1 << 14, small_result=1 << 18, whole_product=1 << 12,
)  # fmt: skip
"""Small data in as many tiles and passes as large data."""

WORKS: dict[str, Callable[[Any], Any]] = {
    "elementwise": lambda x: xp.exp(-x * x) + 1,
    "z-score": lambda x: (x - x.mean(axis=0)) / x.std(axis=0),
    "rows": lambda x: x.sum(axis=1) / x.max(axis=1),
    "one number": lambda x: x.var(),
    "extremes": lambda x: x.argmin(axis=0),
    "transpose": lambda x: x.T,
    "product": lambda x: x @ x[:300].T,
    "gram": lambda x: x.T @ x,
    "sort": lambda x: xp.sort(x.reshape(-1)),
    "argsort": lambda x: xp.argsort(x.reshape(-1)),
    "median": lambda x: xp.median(x),
    "running sum": lambda x: xp.cumulative_sum(x, axis=0),
    "window": lambda x: xp.map_overlap(np.negative, x, depth=1, memory=1),
    "parts": lambda x: xp.concat([x[::2], x[1::2]], axis=0),
}


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, memory_limit="800MiB", dashboard_address=":0"
        ) as made,
        distributed.Client(made, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture
def x(tmp_path: Path) -> Any:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(3, 2, (5000, 60)).astype(np.float32))
    return outsize.open(tmp_path / "x.npy")


@contextlib.contextmanager
def joined(where: Any, **options: Any) -> Iterator[Any]:
    with use(SMALL), outsize.cluster(where, **options) as made:
        yield made


@contextlib.contextmanager
def engine(made: LocalEngine, spread: int = 3) -> Iterator[Any]:
    """This process in place of workers with a processor each."""
    with use(SMALL), use_cluster(replace(joining.local_cluster(spread, 1), executor=made)):
        yield made


def make(name: str, x: Any) -> Any:
    """A work; what is small decides how lanes are sorted and ranked."""
    with use(SMALL):
        return WORKS[name](x)


def left_over(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(".") or "outsize" in name]


@pytest.mark.parametrize("name", WORKS)
def test_workers_make_what_one_process_makes(name: str, x: Any, client: Any, tmp_path: Path) -> None:
    made = make(name, x)
    expected = made.compute()
    with joined(client):
        plan = made.plan("32MiB", tmp_path / "there.npy")
        made.save(tmp_path / "there.npy", budget="32MiB")
        made.save(tmp_path / "there.zarr", budget="32MiB")
    assert plan.workers == 2 and plan.peak() <= 32 << 20
    for file in ("there.npy", "there.zarr"):
        np.testing.assert_allclose(outsize.open(tmp_path / file).compute(), expected, rtol=2e-4, atol=1e-5)
    assert not left_over(tmp_path)


def test_the_bytes_do_not_depend_on_who_runs_the_tasks(x: Any, client: Any, tmp_path: Path) -> None:
    work = x.T @ x / x.std(axis=0)
    with joined(client):
        work.save(tmp_path / "a.npy", budget="32MiB")
    with engine(LocalEngine(), spread=2):
        work.save(tmp_path / "b.npy", budget="32MiB")
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()


def test_another_work_under_the_same_name_is_another(x: Any, client: Any, tmp_path: Path) -> None:
    with joined(client):
        for number in range(3):
            (x * number).save(tmp_path / "z.npy", budget="32MiB")
            np.testing.assert_array_equal(np.load(tmp_path / "z.npy"), x.compute() * number)


def test_a_function_of_a_script_goes_to_the_workers(x: Any, client: Any, tmp_path: Path) -> None:
    with joined(client):
        xp.map_blocks(lambda block: block + 5, x, memory=1).save(tmp_path / "z.npy", budget="32MiB")
    np.testing.assert_array_equal(np.load(tmp_path / "z.npy"), x.compute() + 5)


def test_a_result_comes_back_to_this_process(x: Any, client: Any) -> None:
    expected = [x.mean(axis=0).compute(), (x * 2).compute()]
    with joined(client):
        found = outsize.compute(x.mean(axis=0), x * 2, budget="32MiB")
        alone = (x * 2).compute(budget="32MiB")
    for one, other in zip((*found, alone), (*expected, expected[1]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_several_files_are_written_in_one_walk(x: Any, client: Any, tmp_path: Path) -> None:
    with joined(client):
        outsize.save({str(tmp_path / "m.npy"): x.mean(axis=0), str(tmp_path / "d.npy"): x + x}, budget="32MiB")
    np.testing.assert_allclose(np.load(tmp_path / "m.npy"), x.mean(axis=0).compute(), rtol=1e-5)
    np.testing.assert_array_equal(np.load(tmp_path / "d.npy"), (x + x).compute())


def test_a_format_of_one_writer_is_written_by_one_worker(x: Any, client: Any, tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    with joined(client):
        plan = (x + 1).plan("32MiB", tmp_path / "y.h5", chunks=(100, 60))
        (x + 1).save(tmp_path / "y.h5", budget="64MiB", chunks=(100, 60))
    assert plan.workers == 1 and "on one worker" in plan.notes[-1]
    np.testing.assert_array_equal(outsize.open(tmp_path / "y.h5").compute(), (x + 1).compute())


@pytest.mark.parametrize("target", ["y.npy", "y.zarr", None])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_workers_convert_as_one_process_does(
    target: str | None, dtype: str, x: Any, client: Any, tmp_path: Path
) -> None:
    values = np.load(tmp_path / "x.npy")
    values[::7] *= 1e6
    values[::11] *= 1e-9
    np.save(tmp_path / "x.npy", values)
    if dtype == "bfloat16" and target is not None:
        target = "y.safetensors"
    here, there = (None if target is None else tmp_path / f"{side}-{target}" for side in ("here", "there"))
    expected = outsize.convert(tmp_path / "x.npy", here, dtype)
    with joined(client, scratch=str(tmp_path)):
        chunks = (500, 60) if target == "y.zarr" else None
        made = outsize.convert(tmp_path / "x.npy", there, dtype, budget="32MiB", chunks=chunks)
    assert made.plan.workers == 2 and made.plan.useful_workers > 2
    assert made.precision.rms == pytest.approx(expected.precision.rms, rel=1e-12)
    assert replace(made.precision, rms=0) == replace(expected.precision, rms=0)
    if target is not None:
        np.testing.assert_array_equal(outsize.open(there).compute(), outsize.open(here).compute())
    assert not left_over(tmp_path)


def test_a_task_that_is_repeated_is_measured_once(x: Any, tmp_path: Path) -> None:
    class Failing(LocalEngine):
        fails = 2

        def wait(self, seconds: float) -> Any:
            ended = super().wait(seconds)
            self.fails -= 1
            return [replace(one, value=None, error=TimeoutError()) for one in ended] if self.fails >= 0 else ended

    expected = outsize.convert(tmp_path / "x.npy", None, "float16").precision
    with engine(Failing()), pytest.warns(UserWarning, match="TimeoutError"):
        made = outsize.convert(tmp_path / "x.npy", tmp_path / "y.npy", "float16", budget="32MiB").precision
    assert (made.elements, made.changed, made.flushed) == (expected.elements, expected.changed, expected.flushed)


def test_a_tensor_is_decomposed_by_all_workers(client: Any, tmp_path: Path) -> None:
    sides = [np.random.default_rng(side).random((90 + side, 3)) for side in range(3)]
    np.save(tmp_path / "t.npy", np.einsum("ia,ja,ka->ijk", *sides))
    with joined(client, scratch=str(tmp_path)), use(replace(SMALL, shared_stream=1 << 20, largest=1 << 18)):
        made = outsize.decompose(tmp_path / "t.npy", "tucker", error=1e-6, budget="64MiB")
    assert made.plan.workers == 2 and made.plan.useful_workers == 8
    np.testing.assert_allclose(made.compute(), np.load(tmp_path / "t.npy"), rtol=1e-4)
    assert not left_over(tmp_path)


# Faults


def kill_soon(client: Any, folder: Path, stop: threading.Event, times: int) -> Callable[[], None]:
    """Kills a worker as often as tiles appear."""

    def kill() -> None:
        seen = 0
        while not stop.wait(0.05) and seen < times:
            if any(name.endswith("scratch") for name in os.listdir(folder)):
                worker = next(iter(client.scheduler_info(n_workers=-1)["workers"]), None)
                with contextlib.suppress(Exception):
                    pid = client.run(os.getpid, workers=[worker])[worker]
                    os.kill(pid, 9)
                    seen += 1
                stop.wait(0.4)

    return kill


def test_tasks_of_killed_workers_run_again(x: Any, tmp_path: Path) -> None:
    slow = xp.map_blocks(_slow, x, memory=1)
    work = slow / x.std(axis=0)
    expected = (x / x.std(axis=0)).compute()
    stop = threading.Event()
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, memory_limit="800MiB", dashboard_address=":0"
        ) as made,
        distributed.Client(made, set_as_default=False) as client,
        joined(client),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        killer = threading.Thread(target=kill_soon(client, tmp_path, stop, 1))
        killer.start()
        work.save(tmp_path / "z.npy", budget="32MiB")
        stop.set()
        killer.join()
    np.testing.assert_allclose(np.load(tmp_path / "z.npy"), expected, rtol=1e-5)
    assert any("tasks of lost workers ran again" in str(one.message) for one in told)
    assert not left_over(tmp_path)


def _slow(block: Any) -> Any:
    time.sleep(0.06)
    return block


class Lossy(LocalEngine):
    """An engine that is gone after so many tasks."""

    def __init__(self, tasks: int) -> None:
        super().__init__()
        self.left, self.ran = tasks, []

    def wait(self, seconds: float) -> Any:
        if self.left == 0:
            raise ClusterError("the scheduler is gone")
        self.left -= 1
        if self._next is not None:
            self.ran.append(self._next.key)
        return super().wait(seconds)


@pytest.mark.parametrize("name", ["z-score", "sort", "gram", "median", "transpose"])
@pytest.mark.parametrize("where", ["cluster", "one process"])
def test_a_lost_scheduler_costs_nothing_that_was_finished(name: str, where: str, x: Any, tmp_path: Path) -> None:
    work, target = make(name, x), tmp_path / "z.npy"
    with engine(Lossy(-1)) as whole:
        work.save(tmp_path / "whole.npy", budget="32MiB")
    lost = len(whole.ran) // 2
    with engine(Lossy(lost)) as first, pytest.raises(ClusterError):
        work.save(target, budget="32MiB")
    assert not target.exists()
    if where == "cluster":
        with engine(Lossy(-1), spread=2) as second:
            work.save(target, budget="32MiB")
        assert not set(_names(first.ran)) & set(_names(second.ran)) and len(second.ran) == len(whole.ran) - lost
    else:
        with use(SMALL):
            work.save(target, budget="32MiB")
    assert target.read_bytes() == (tmp_path / "whole.npy").read_bytes()
    assert not left_over(tmp_path)


def _names(keys: list[str]) -> list[str]:
    return [key.partition("scratch-")[2] for key in keys]


def test_an_error_of_a_worker_is_told_and_leaves_nothing(x: Any, client: Any, tmp_path: Path) -> None:
    with joined(client), pytest.raises(ZeroDivisionError):
        xp.map_blocks(_fail, x, memory=1).save(tmp_path / "z.npy", budget="32MiB")
    assert os.listdir(tmp_path) == ["x.npy"]


def _fail(block: Any) -> Any:
    raise ZeroDivisionError("a mistake of the user's")


# What cannot be


def test_a_wrong_address_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from outsize.engine import dask_engine

    monkeypatch.setattr(dask_engine, "_CONNECT", 1)
    with pytest.raises(
        outsize.InputError, match=r"no scheduler of Dask answers at tcp://127\.0\.0\.1:9 .*: check the address"
    ):
        outsize.cluster("tcp://127.0.0.1:9")
    with pytest.raises(outsize.InputError, match="'host' is no address of a cluster: use tcp://"):
        outsize.cluster("host")
    with pytest.raises(outsize.InputError, match="a int is no cluster"):
        outsize.cluster(3)
    assert current_cluster() is None


@pytest.mark.parametrize(
    ("address", "package", "extra"), [("tcp://h:1", "distributed", "dask"), ("ray://h:1", "ray", "ray")]
)
def test_a_missing_engine_is_one_sentence(
    address: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        outsize.InputError, match=rf"{package}, which is not installed: pip install 'outsize\[{extra}\]'"
    ):
        outsize.cluster(address)


def test_a_worker_with_less_memory_than_the_budget_is_named(x: Any, client: Any, tmp_path: Path) -> None:
    with (
        joined(client),
        pytest.raises(outsize.BudgetError, match=r"tcp://.* has room for .* of its limit of 800.00 MiB"),
    ):
        (x + 1).save(tmp_path / "y.npy", budget="700MiB")


def test_a_version_that_differs_is_named(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outsize, "__version__", "9.9")
    with pytest.raises(
        outsize.InputError, match=r"worker tcp://.* has outsize .* and this process 9\.9: install the same"
    ):
        outsize.cluster(client)


def test_an_array_in_memory_is_refused_where_it_is_large(client: Any, tmp_path: Path) -> None:
    with (
        joined(client),
        pytest.raises(outsize.InputError, match="lies in the memory of this process, which no worker reaches"),
    ):
        (xp.asarray(np.zeros((3000, 100))) + 1).save(tmp_path / "y.npy", budget="32MiB")
    small = xp.asarray(np.arange(60.0))
    np.save(tmp_path / "m.npy", np.ones((4000, 60)))
    with joined(client):
        (outsize.open(tmp_path / "m.npy") * small).save(tmp_path / "y.npy", budget="32MiB")
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy")[7], np.arange(60.0))


def test_a_device_is_refused_on_a_cluster(x: Any, client: Any, tmp_path: Path) -> None:
    with joined(client), pytest.raises(outsize.InputError, match="device='cuda' is for work in this process"):
        (x + 1).save(tmp_path / "y.npy", budget="32MiB", device="cuda")


def test_a_plan_says_what_a_worker_holds_and_how_many_help(x: Any, client: Any, tmp_path: Path) -> None:
    with joined(client):
        text = " ".join(str((x + 1).plan("32MiB", tmp_path / "y.npy")).split())
    assert "on 2 workers: each holds at most" in text and "go through storage; up to" in text


def test_the_budget_of_a_worker_is_read_off_the_scheduler(client: Any) -> None:
    with outsize.cluster(client) as made:
        room = made.joined.tightest.room
    assert 200 << 20 < room < int(0.8 * (800 << 20))
    assert tasks.call(max, (1, 2), {}) == 2
