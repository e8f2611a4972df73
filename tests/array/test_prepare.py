"""The plan that is shown is the plan that is run: for every format and budget, and without making a file."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from effort import long
from stores import WRITTEN

import outsize
import outsize.array as xp
from outsize.array.device.find import make_fake
from outsize.array.plan.prepare import prepare
from outsize.array.run.execute import run_schedule
from outsize.array.run.results import plan_compute
from outsize.array.store.formats.memory import MemorySink
from outsize.array.store.registry import describe_sink
from outsize.cli import main
from outsize.core.events import Started

SHAPE, CHUNK = ((300, 200), 100) if long() else ((120, 80), 40)
FORMATS = {
    "npy": ("x.npy", {}),
    "raw": ("x.bin", {}),
    "safetensors": ("x.safetensors", {}),
    "zarr": ("x.zarr", {}),
    "chunked zarr": ("x.zarr", {"chunks": (CHUNK, CHUNK)}),
    "hdf5": ("x.h5", {}),
    "chunked hdf5": ("x.h5", {"chunks": (CHUNK, CHUNK)}),
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
        options = {"chunks": (CHUNK,)}
    np.save(tmp_path / "in.npy", np.random.default_rng(0).normal(size=SHAPE))
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


def test_a_product_in_little_memory_reads_in_blocks_and_the_plan_says_how_often(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((2000, 300), np.float32))
    x = outsize.open(tmp_path / "x.npy")
    product = x.T @ x
    smallest = product.plan("1GiB").smallest
    assert smallest is not None
    plans = [product.plan(int(smallest * share)) for share in (1, 1.05, 1.5, 2, 4, 100)]
    for tighter, wider in itertools.pairwise(plans):
        assert wider.read <= tighter.read
    step, wide = plans[1].steps[0], plans[-1].steps[0]
    assert min(step.tile) >= 32
    assert any(f"reads x.npy {step.read / (2000 * 300 * 4):,.1f} times" in note for note in step.notes)
    assert not any("times" in note for note in wide.notes)


@pytest.mark.parametrize("budget", ["8MiB", "16MiB", "32MiB"])
def test_an_array_in_fortran_order_is_read_in_long_runs(budget: str, tmp_path: Path) -> None:
    """Whole rows of the output would be a short piece of each column of the input."""
    path, shape = tmp_path / "x.npy", (100_000, 200)
    np.lib.format.open_memmap(path, "w+", np.float32, shape, fortran_order=True).flush()
    x = outsize.open(path)
    sink = describe_sink(tmp_path / "z.npy", shape, np.dtype(np.float32))
    sized = prepare(((x - x.mean(axis=0)) / x.std(axis=0)).node, sink, budget).schedule.passes[-1].sized
    reads = [(store.seeks(region) * number * times, store.traffic(region) * number * times)
             for region, number in sized.work.kinds(sized.grid, sized.chunk)
             for (store, region), times in sized.work.probe(region).reads.items()]  # fmt: skip
    rows = sized.grid.box[0]
    assert sum(seeks for seeks, _ in reads) <= 1.1 * len(sized.grid) * shape[1]
    assert rows * 4 >= 4096 and sum(traffic for _, traffic in reads) <= 1.5 * 100_000 * 200 * 4


def test_layouts_of_one_plan_share_passes_places_and_sizes(tmp_path: Path) -> None:
    from outsize.array.graph.local import Together
    from outsize.array.passes.base import Room
    from outsize.array.plan.layout import Drafts, lay_out
    from outsize.array.tuning import current

    np.save(tmp_path / "x.npy", np.ones((4000, 16)))
    x = outsize.open(tmp_path / "x.npy")
    node = ((x - x.mean(axis=0)) / x.std(axis=0)).node
    sinks, drafts = [describe_sink(tmp_path / "z.npy", node.shape, node.dtype)], Drafts(current(), None)
    layouts = [lay_out(Together.of([node]), sinks, keep, None, drafts) for keep in (1 << 16, 1 << 24)]
    first, second = ([one.work for one in layout.passes] for layout in layouts)
    assert len(first) == 2 and all(one is other for one, other in zip(first, second, strict=True))
    assert drafts.size(first[1], Room(1 << 24)) is drafts.size(second[1], Room(1 << 24))


def test_a_reduction_across_an_array_in_memory_is_not_made_again_for_every_tile() -> None:
    x = outsize.open(np.ones((200_000, 8)))  # the mean of a column is made of all of it
    assert len((x - x.mean(axis=0)).plan(budget="64MiB").steps) == 2
    rows = outsize.open(np.ones((20_000, 80)))
    assert len((rows - rows.mean(axis=1, keepdims=True)).plan(budget="64MiB").steps) == 1
