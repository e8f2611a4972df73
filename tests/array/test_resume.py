"""Outputs are safe: killed at any moment and taken up again, a full disk, an input that would be overwritten."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import forks
import numpy as np
import pytest
from effort import long

import outsize
import outsize.array as xp
from outsize.array.run import execute as runner
from outsize.array.run import results as work
from outsize.array.run.convert import convert
from outsize.array.run.journal import Journal
from outsize.array.store.formats.npy import describe
from outsize.array.store.io.partial import JOURNAL, partial_path
from outsize.engine.pool import make_buffer

CHILD = Path(__file__).with_name("child.py")
KILLS = 25 if long() else 8


@pytest.mark.parametrize("work,budget", [("slow", "4MiB"), ("slow-turned", "4MiB")])
def test_kills_at_random_moments_are_taken_up_without_doing_finished_tiles_again(
    tmp_path: Path, work: str, budget: str
) -> None:
    rng = random.Random(5)
    x = np.random.default_rng(5).random(((96 << 10) - 24, 128), dtype="float32")
    np.save(tmp_path / "x.npy", x)
    wanted = (x.T if work == "slow-turned" else x) * 2
    target = tmp_path / f"out-{work}.npy"
    started = tmp_path / "started"
    log = Path(partial_path(str(target)) + JOURNAL) / "log"
    kills = resumed = waited = 0
    while kills < KILLS:
        started.unlink(missing_ok=True)
        child = forks.start(CHILD, work, tmp_path, budget)
        began = time.monotonic()
        while not started.exists() and child.poll() is None and time.monotonic() - began < 20:
            time.sleep(0.005)
        time.sleep(rng.random() * 0.45)
        while (
            kills == KILLS - 1 and child.poll() is None and not has_tiles(log)
        ):  # the last kill leaves something to take up
            time.sleep(0.005)
        if child.poll() is None:
            child.kill()
            child.communicate()
            kills += 1
            waited += any(p.name.endswith(".edges") and p.stat().st_size for p in tmp_path.iterdir())
            continue
        resumed += check_finished(child, target, wanted)
    resumed += check_finished(forks.start(CHILD, work, tmp_path, budget), target, wanted)
    assert resumed >= 1
    assert waited or work == "slow"  # a transposition leaves halves of pages behind
    started.unlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.npy"]


def has_tiles(log: Path) -> bool:
    """True where a journal notes a finished tile."""
    try:
        return "\ntile " in log.read_text()
    except OSError:  # it is not there yet, or no more
        return False


def check_finished(child: forks.Child, target: Path, wanted: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> int:
    """The result is right, nothing is left beside it, and no finished tile was done again; 1 if it had been taken
    up."""
    out, err = child.communicate()
    assert child.returncode == 0, err[-2000:]
    report = json.loads(out)
    already = round(report["share"] * report["total"])
    assert report["tiles"] == report["total"] - already
    assert np.load(target).tobytes() == wanted.tobytes()
    assert not [p for p in target.parent.iterdir() if "outsize" in p.name]
    target.unlink()
    return int(already > 0)


@pytest.mark.parametrize("suffix", [".npy", ".h5", ".zarr"])
def test_a_kill_between_the_renaming_and_the_end_of_the_journal_does_not_leave_a_journal_for_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, tune: Callable[..., None]
) -> None:
    pytest.importorskip({".h5": "h5py", ".zarr": "zarr"}.get(suffix, "numpy"))
    tune(journaled=0)
    x = xp.asarray(np.random.default_rng(0).random((500, 64)))
    with monkeypatch.context() as patch:
        patch.setattr(work.Journal, "remove", lambda self: None)
        x.save(tmp_path / f"out{suffix}", budget="8MiB")
    assert [p for p in tmp_path.iterdir() if p.name.endswith(".journal")]
    saved = x.save(tmp_path / f"out{suffix}", budget="8MiB")
    assert np.array_equal(saved.compute(), x.compute())
    assert [p.name for p in tmp_path.iterdir()] == [f"out{suffix}"]


def test_a_reduction_that_was_finished_before_the_kill_is_not_read_again(
    tmp_path: Path, tune: Callable[..., None]
) -> None:
    tune(journaled=0)
    x = np.random.default_rng(1).random((3000, 64), dtype="float32")
    np.save(tmp_path / "x.npy", x)
    opened = outsize.open(tmp_path / "x.npy")
    z = (opened - opened.mean(axis=0)) / opened.std(axis=0)
    calls = []

    def interrupt(event: object) -> None:
        calls.append(event)
        if type(event).__name__ == "Advanced" and event.step.startswith("write"):  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        z.save(tmp_path / "z.npy", budget="300KiB", progress=interrupt)
    assert not (tmp_path / "z.npy").exists()
    assert (tmp_path / ".z.npy.outsize-partial.journal").exists()
    steps = []
    z.save(tmp_path / "z.npy", budget="300KiB", progress=lambda e: steps.append((type(e).__name__, e.step)))
    assert not [step for kind, step in steps if kind == "Started" and not step.startswith("write")]
    plain = (opened - opened.mean(axis=0)) / opened.std(axis=0)
    plain.save(tmp_path / "again.npy", budget="300KiB")
    assert (tmp_path / "z.npy").read_bytes() == (tmp_path / "again.npy").read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_a_budget_that_is_too_small_does_not_cost_what_an_earlier_run_has_finished(
    tmp_path: Path, tune: Callable[..., None]
) -> None:
    tune(journaled=0, sync_every=0.0)
    x = np.random.default_rng(1).random((3000, 64), dtype="float32")
    np.save(tmp_path / "x.npy", x)
    doubled = outsize.open(tmp_path / "x.npy") * 2
    moved = []

    def interrupt(event: object) -> None:
        moved.append(type(event).__name__)
        if moved.count("Advanced") == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        doubled.save(tmp_path / "z.npy", budget="300KiB", progress=interrupt)
    with pytest.raises(outsize.BudgetError):
        doubled.save(tmp_path / "z.npy", budget="1KiB")
    done = []
    doubled.save(tmp_path / "z.npy", budget="300KiB", progress=lambda e: done.append(getattr(e, "done", 0)))
    assert done[0] > 0
    assert np.array_equal(np.load(tmp_path / "z.npy"), x * 2)


def test_a_changed_input_is_not_taken_up(tmp_path: Path, tune: Callable[..., None]) -> None:
    tune(journaled=0)
    np.save(tmp_path / "x.npy", np.zeros((2000, 64), "float32"))

    def interrupt(event: object) -> None:
        if type(event).__name__ == "Advanced":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        (outsize.open(tmp_path / "x.npy") + 1).save(tmp_path / "y.npy", budget="100KiB", progress=interrupt)
    time.sleep(0.01)
    np.save(tmp_path / "x.npy", np.ones((2000, 64), "float32"))
    saved = (outsize.open(tmp_path / "x.npy") + 1).save(tmp_path / "y.npy", budget="100KiB")
    assert (np.asarray(saved) == 2).all()


def test_an_output_over_its_input_is_refused_and_the_input_untouched(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(10.0))
    before = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "link.npy").symlink_to(tmp_path / "x.npy")
    x = outsize.open(tmp_path / "x.npy")
    for name in ("x.npy", "link.npy"):
        with pytest.raises(outsize.InputError, match="also an input"):
            (x + 1).save(tmp_path / name)
    assert (tmp_path / "x.npy").read_bytes() == before


@pytest.mark.parametrize("journaled", [0, 1 << 40])
@pytest.mark.parametrize("suffix", [".npy", ".h5", ".zarr"])
def test_a_second_save_to_one_target_is_told_who_writes_it_and_the_first_ends_well(
    tmp_path: Path, suffix: str, journaled: int, tune: Callable[..., None]
) -> None:
    pytest.importorskip({".h5": "h5py", ".zarr": "zarr"}.get(suffix, "numpy"))
    tune(journaled=journaled)
    np.save(tmp_path / "x.npy", np.arange(20_000.0).reshape(200, 100))
    target = tmp_path / f"y{suffix}"
    x = outsize.open(tmp_path / "x.npy")
    seconds = [lambda: (x * 3).save(target), lambda: convert(tmp_path / "x.npy", target)]

    def another(event: object) -> None:
        while seconds:
            with pytest.raises(outsize.StoreError, match=f"y{suffix} is being written by process {os.getpid()}.*wait"):
                seconds.pop()()

    (x * 2).save(target, progress=another)
    assert not seconds
    assert np.array_equal(np.asarray(outsize.open(target)), np.asarray(x) * 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.npy", f"y{suffix}"]


def test_a_killed_save_does_not_hold_its_target_even_where_a_process_it_forked_lives_on(tmp_path: Path) -> None:
    holder = (
        "import os, signal, sys; from outsize.array.store.io.partial import hold\n"
        "with hold(sys.argv[1]):\n"
        "    if os.fork():\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    print('alive', flush=True)\n    sys.stdin.read()\n    os._exit(0)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path / "y.npy")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None and child.stdout.readline() == "alive\n"
    assert child.wait() == -9
    assert [p.name for p in tmp_path.iterdir()] == [".y.npy.outsize-partial.lock"]
    xp.asarray(np.arange(10.0)).save(tmp_path / "y.npy")
    assert [p.name for p in tmp_path.iterdir()] == ["y.npy"]
    child.communicate()


def test_an_output_into_a_key_of_its_input_is_refused(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["a"] = np.arange(10.0)
    with pytest.raises(outsize.InputError, match="also an input"):
        (outsize.open(tmp_path / "x.h5") + 1).save(f"{tmp_path / 'x.h5'}::b")


def test_a_failing_function_leaves_nothing_behind(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(1000.0))

    def fail(block: object) -> object:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        xp.map_blocks(fail, outsize.open(tmp_path / "x.npy"), memory=1).save(tmp_path / "y.npy")
    assert [p.name for p in tmp_path.iterdir()] == ["x.npy"]


def test_scratch_of_a_dead_process_is_removed_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    dead = tmp_path / f"outsize-scratch-{child.pid}-a"
    living = tmp_path / f"outsize-scratch-{os.getpid()}-b"
    dead.mkdir()
    living.mkdir()
    runner.clean_scratch(str(tmp_path))
    assert not dead.exists() and living.exists()


def test_results_too_large_to_keep_go_to_scratch_and_leave_none(tmp_path: Path) -> None:
    a = np.random.default_rng(2).random((300, 400))
    np.save(tmp_path / "a.npy", a)
    scratch = tmp_path / "scratch"
    x = outsize.open(tmp_path / "a.npy")
    twice = (x @ x.T) @ (x @ x.T)
    with outsize.budget(host="400KiB", scratch=str(scratch)):
        plan = twice.plan()
        saved = twice.save(tmp_path / "c.npy")
    assert any(peak.pool.kind == "disk" and peak.bytes for step in plan.steps for peak in step.peaks)
    np.testing.assert_allclose(np.asarray(saved), (a @ a.T) @ (a @ a.T))
    assert not list(scratch.iterdir())


def _leave_unfinished(path: Path, shape: tuple[int, ...], dtype: str) -> None:
    """What a kill leaves: half of every row written, the pages at the cut waiting, a journal that speaks of it."""
    sink = describe(str(path), shape, np.dtype(dtype))
    sink.create()
    region = ((0, shape[0]), (0, shape[1] // 2))
    block = sink.lay(region, make_buffer(sink.room(region)))
    block[...] = 3
    sink.write(region, block, make_buffer(sink.extent(region)))
    sink.sync()
    Journal(sink.partial + JOURNAL).begin("of other work", 1 << 30)
    sink.file.close()


@pytest.mark.parametrize("earlier", ["float32", "int32"])
def test_what_a_killed_save_of_other_work_left_does_not_come_into_this_one(
    tmp_path: Path, earlier: str, tune: Callable[..., None]
) -> None:
    tune(journaled=0)
    x = np.random.default_rng(3).random((6, 10_000), dtype="float32")
    _leave_unfinished(tmp_path / "y.npy", x.shape, earlier)
    (outsize.open(x) * 2).save(tmp_path / "y.npy")
    got = np.load(tmp_path / "y.npy")
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, x * 2)
    assert [p.name for p in tmp_path.iterdir()] == ["y.npy"]


def test_an_unfinished_file_without_a_journal_is_begun_anew(tmp_path: Path) -> None:
    x = np.random.default_rng(3).random((6, 10_000), dtype="float32")
    _leave_unfinished(tmp_path / "y.npy", x.shape, "int32")
    shutil.rmtree(partial_path(str(tmp_path / "y.npy")) + JOURNAL)
    (outsize.open(x) * 2).save(tmp_path / "y.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), x * 2)
