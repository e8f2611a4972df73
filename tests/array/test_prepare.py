"""The plan that is shown is the plan that is run: for every format and budget, and without making a file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stores import WRITTEN

import outsize
import outsize.array as xp
from outsize.array.device.find import make_fake
from outsize.array.plan.prepare import prepare
from outsize.array.run.execute import run_schedule
from outsize.array.run.results import plan_compute
from outsize.array.store.formats.memory import MemorySink
from outsize.cli import main
from outsize.core.events import Started

FORMATS = {
    "npy": ("x.npy", {}),
    "raw": ("x.bin", {}),
    "safetensors": ("x.safetensors", {}),
    "zarr": ("x.zarr", {}),
    "chunked zarr": ("x.zarr", {"chunks": (100, 100)}),
    "hdf5": ("x.h5", {}),
    "chunked hdf5": ("x.h5", {"chunks": (100, 100)}),
}
EXPRESSIONS = {
    "chain": lambda x: x * 2 + 1,
    "zscore": lambda x: (x - x.mean(axis=0)) / x.std(axis=0),
    "turned": lambda x: x.T,
    "product": lambda x: x @ x.T,
    "sum": lambda x: x.sum(axis=1),
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("what", EXPRESSIONS)
def test_a_plan_for_a_target_fits_where_its_run_does_and_has_its_steps(form: str, what: str, tmp_path: Path) -> None:
    name, options = FORMATS[form]
    if "chunks" in options and what == "sum":
        options = {"chunks": (100,)}
    np.save(tmp_path / "in.npy", np.random.default_rng(0).normal(size=(300, 200)))
    z = EXPRESSIONS[what](outsize.open(tmp_path / "in.npy"))
    target = tmp_path / name
    smallest = z.plan(1, target, **options).smallest
    assert smallest is not None
    for budget in (smallest // 2, smallest - 1, smallest, smallest + 4096, 3 * smallest, 24 << 20):
        plan = z.plan(budget, target, **options)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.npy"]
        seen: list[Started] = []
        try:
            saved = z.save(target, budget=budget, progress=_noting(seen), **options)
        except outsize.BudgetError as error:
            assert not plan.fits and error.smallest == smallest
            assert sorted(path.name for path in tmp_path.iterdir()) == ["in.npy"]
            continue
        assert plan.fits
        assert [(e.step, e.bytes) for e in seen] == [(step.name, step.read + step.written) for step in plan.steps]
        np.testing.assert_allclose(np.asarray(saved), EXPRESSIONS[what](np.load(tmp_path / "in.npy")), rtol=1e-9)
        _remove(target)


def _noting(seen: list[Started]) -> Any:
    return lambda event: seen.append(event) if isinstance(event, Started) else None


def _remove(path: Path) -> None:
    import shutil

    shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("budget", ["24MiB", "40MiB", "64MiB"])
def test_the_command_shows_the_plan_of_the_target_it_writes(budget: str, tmp_path: Path, capsys: Any) -> None:
    np.save(tmp_path / "x.npy", np.ones((2048, 2048)))
    words = [
        "compute",
        "x * 2",
        "--in",
        f"x={tmp_path / 'x.npy'}",
        "--out",
        str(tmp_path / "z.zarr"),
        "--budget",
        budget,
    ]
    shown = main([*words, "--plan"])
    assert not (tmp_path / "z.zarr").exists()
    assert (main(words) == 0) == (shown == 0)


def test_a_plan_of_compute_holds_the_result() -> None:
    x = outsize.open(np.ones((512, 512)))
    plan = plan_compute((x + 1).node, "64MiB")
    assert any(part.name == "the result" and part.bytes == 512 * 512 * 8 for step in plan.steps for part in step.parts)
    assert xp.sum(x).plan().fits


@pytest.mark.parametrize("on_device", [False, True])
def test_a_schedule_runs_again_and_nothing_of_it_changes(on_device: bool, tmp_path: Path) -> None:
    a = np.random.default_rng(0).normal(size=(300, 200))
    np.save(tmp_path / "in.npy", a)
    x = outsize.open(tmp_path / "in.npy")
    out = np.empty((300, 300))
    z = ((x - x.mean(axis=0)) / x.std(axis=0)) @ x.T
    prepared = prepare(z.node, MemorySink(out, counted=False), "2MiB", make_fake(1 << 20) if on_device else None)
    assert any(one.sized.device_bytes for one in prepared.schedule.passes) == on_device
    fields = [dict(vars(one.sized.work)) for one in prepared.schedule.passes]
    for _ in range(2):
        out[...] = 0
        run_schedule(prepared)
        np.testing.assert_allclose(out, ((a - a.mean(axis=0)) / a.std(axis=0)) @ a.T, rtol=1e-9)
    for one, before in zip(prepared.schedule.passes, fields, strict=True):
        after = vars(one.sized.work)
        assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)
        with pytest.raises(dataclasses.FrozenInstanceError):
            one.sized.workers = 7  # type: ignore[misc]


def test_every_format_that_is_written_is_planned_here():
    tried = {Path(name).suffix for name, _ in FORMATS.values()}
    assert tried >= set(WRITTEN)
