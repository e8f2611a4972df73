"""What users see of the device level: names of devices, plans, tiles, errors. The pretended device stands in for a card."""

from __future__ import annotations

import warnings
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
from outsize.array.device import find as choose
from outsize.array.device.array_kernels import ArrayKernels
from outsize.array.device.base import Kernels, Rates, rows_of
from outsize.array.device.blocked_product import choose_blocks
from outsize.array.device.fake import FakeDevice
from outsize.cli import main
from outsize.core.errors import BudgetError, InputError, OutOfMemory
from outsize.core.memory import PINNED, Pool

torch = pytest.importorskip("torch")
torch_kernels = pytest.importorskip("outsize.array.device.torch_kernels", exc_type=ImportError)
A = np.random.default_rng(0).normal(size=(300, 200)).astype(np.float32)
NO_CARD = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a card")


@NO_CARD
def test_a_named_device_that_is_not_there_is_an_error() -> None:
    with pytest.raises(InputError, match=r"torch sees no CUDA device \(.*\); leave device= out"):
        (outsize.open(A) * 2).compute(device="cuda")
    with pytest.raises(InputError, match="needs cupy"):
        (outsize.open(A) * 2).compute(device="cupy")


def test_a_name_that_is_no_device_is_an_error() -> None:
    for name in ("tpu", "cuda:x", "cuda:-1"):
        with pytest.raises(InputError, match="say 'cuda'"):
            (outsize.open(A) * 2).plan(device=name)


def test_a_device_out_of_range_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="'cuda:5' does not exist: there are 2, cuda:0 to cuda:1"):
        outsize.open(A).sum().compute(device="cuda:5")


def test_a_fold_that_a_device_does_not_have_stays_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kernels, "folds", frozenset({"add"}))
    with pytest.raises(InputError, match="it has no rule for a device"):
        outsize.open(A).max(axis=0).compute(device="fake")
    np.testing.assert_allclose(
        outsize.open(A).sum(axis=0).compute(device="fake"), A.sum(axis=0, dtype=np.float64), rtol=1e-5
    )


@NO_CARD
def test_auto_without_a_card_runs_on_the_processor_and_says_why(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="on the processor: .*no CUDA device"):
        got = (outsize.open(A) * 2).compute(device="auto")
    np.testing.assert_array_equal(got, A * 2)
    with pytest.warns(UserWarning):
        plan = (outsize.open(A) * 2).plan(device="auto")
    assert "no CUDA device" in plan.notes[0] and "no CUDA device" in str(plan)


def test_a_budget_below_the_smallest_names_the_smallest() -> None:
    device = FakeDevice(ArrayKernels(np), limit=1 << 20)
    with (
        outsize.budget(device=100),
        pytest.raises(BudgetError, match=r"of device 0, the budget is 100 B .*smallest") as told,
    ):
        (outsize.open(A) @ outsize.open(A.T)).compute(device=device)
    assert told.value.smallest is not None and told.value.smallest > 100
    assert told.value.plan.smallest_device == told.value.smallest


def test_a_card_that_others_fill_gives_less_and_says_who(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(ArrayKernels(np), limit=1 << 16)
    monkeypatch.setattr(device, "available", lambda: (1 << 15, "7 GiB of 8 GiB are held by others: train.py (42)"))
    with outsize.budget(device="8GiB"):
        plan = (outsize.open(A) * 2).plan(device=device)
        assert plan.peak(device.pool) <= 1 << 15
        assert any("train.py (42)" in allowance.reason for allowance in plan.budgets)
        monkeypatch.setattr(device, "available", lambda: (0, "all of it is held by others: train.py (42)"))
        with pytest.raises(BudgetError, match=r"train.py \(42\)"):
            (outsize.open(A) * 2).compute(device=device)


def test_auto_comes_back_to_the_processor_where_the_card_is_full(
    monkeypatch: pytest.MonkeyPatch, tune: Callable[..., None]
) -> None:
    device = FakeDevice(ArrayKernels(np), limit=1 << 20)
    monkeypatch.setattr(choose, "_find", lambda name: device)
    tune(device_moment=0, device_margin=0)

    def full(size: int, tf32: bool) -> None:
        raise OutOfMemory("the card is full")

    monkeypatch.setattr(device, "open", full)
    with pytest.warns(UserWarning, match="on the processor: the card is full"):
        got = (outsize.open(A) * 2).compute(device="auto")
    np.testing.assert_array_equal(got, A * 2)


def test_auto_uses_the_device_where_it_pays_and_says_why_not_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(ArrayKernels(np), limit=1 << 30)
    monkeypatch.setattr(choose, "_find", lambda name: device)
    large = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (1 << 16, 1 << 16), (1 << 18, 4))
    x = outsize.open(large)
    with outsize.budget(host="1GiB", device="512MiB"):
        product, small = (x @ x).plan(device="auto"), (outsize.open(A) * 2).plan(device="auto")
    assert product.steps[-1].binds is not None and product.peak(device.pool) > 0
    assert small.peak(device.pool) == 0 and "the processor needs about" in small.notes[0]
    slow = Rates(link_in=1e6, link_out=1e6, memory=1e9, flops={"f": 1e9, "d": 1e9}, source="slow")
    monkeypatch.setattr(device, "rates", lambda: slow)
    with outsize.budget(host="1GiB", device="512MiB"):
        notes = x.sum().plan(device="auto").notes
    assert "the link alone takes" in notes[0]


def test_what_the_device_has_no_rule_for_is_an_error_or_stays_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    device = choose.make_fake(1 << 20)
    x = outsize.open(A)
    for made, why in ((xp.sort(x), "no rule"), (x.astype("u4") + 1, "uint32"), (x.argmax(), "indices of extremes")):
        with pytest.raises(InputError, match=f"cannot run on fake: .*{why}.*device='auto'"):
            made.compute(device=device)
    monkeypatch.setattr(choose, "_find", lambda name: device)
    plan = xp.sort(x).plan(device="auto")
    assert "sort stays on the processor" in plan.notes[0]


def test_a_plan_shows_every_level_and_which_one_binds() -> None:
    device = FakeDevice(ArrayKernels(np), limit=1 << 20)
    x = outsize.open(A)
    with outsize.budget(device="256KiB"):
        plan = (x @ x.T).plan(device=device)
    step = plan.steps[-1]
    assert [level.name for level in step.levels] == ["disk", "link in", "link out", "device memory", "arithmetic"]
    assert step.binds in {level.name for level in step.levels}
    assert all(level.floor is None or level.floor <= max(level.amount, 1) for level in step.levels[1:])
    text = str(plan)
    assert "link in" in text and "binds" in text and "of the device" in text
    assert plan.to_dict()["steps"][-1]["binds"] == step.binds


def test_tf32_is_only_for_devices() -> None:
    with pytest.raises(InputError, match="tf32=True is for products on a device"):
        (outsize.open(A) @ outsize.open(A.T)).compute(tf32=True)
    with outsize.budget(device="1MiB"):
        plan = (outsize.open(A) @ outsize.open(A.T)).plan(device="fake", tf32=True)
    assert any("TF32 at 400 TFLOP/s" in note for note in plan.steps[-1].notes)


def test_results_go_into_an_array_of_the_callers() -> None:
    x, out = outsize.open(A), np.empty_like(A)
    for device in (None, FakeDevice(ArrayKernels(np), limit=1 << 20)):
        assert (x * 2).compute(device=device, out=out) is out
        np.testing.assert_array_equal(out, A * 2)
    with pytest.raises(InputError, match="the result float32"):
        (x * 2).compute(out=np.empty((3, 3), np.float32))
    mine = A.copy()
    with pytest.raises(InputError, match="shares memory"):
        (outsize.open(mine) * 2).compute(out=mine)


def test_dlpack_shares_memory_both_ways() -> None:
    mine = A.copy()
    tensor = torch.from_dlpack(outsize.open(mine))
    assert tensor.data_ptr() == mine.ctypes.data
    back = outsize.open(tensor)
    assert np.asarray(back).ctypes.data == mine.ctypes.data
    np.testing.assert_array_equal(np.from_dlpack(outsize.open(mine) * 2), mine * 2)


TILES = examples(25, suppress_health_check=list(HealthCheck))


@TILES
@given(st.integers(1, 40), st.integers(1, 30), st.integers(0, 4), st.integers(0, 99), st.sampled_from([None, "fake"]))
def test_tiles_cover_an_array_once_in_order(rows: int, columns: int, prefetch: int, seed: int, kind: Any) -> None:
    a = np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)
    device = "cpu" if kind is None else choose.make_fake(1 << 16, seed=seed)
    seen = np.full_like(a, np.nan)
    with outsize.budget(device="64KiB"):
        tiles = (outsize.open(a) + 1).tiles(device, prefetch, shape=(7, 11))
        count = 0
        for tile in tiles:
            count += 1
            assert isinstance(tile, torch.Tensor)
            (low, high), (left, right) = tiles.region
            assert np.isnan(seen[low:high, left:right]).all()
            seen[low:high, left:right] = tile.numpy()
    assert count == len(tiles)
    np.testing.assert_array_equal(seen, a + 1)


@TILES
@given(
    st.integers(0, 3),
    st.integers(0, 99),
    st.sampled_from([None, "fake"]),
    st.sampled_from(["memory", "file", "scratch"]),
)
def test_tiles_are_written_back(tmp_path_factory: Any, prefetch: int, seed: int, kind: Any, place: str) -> None:
    folder = tmp_path_factory.mktemp("tiles")
    device = "cpu" if kind is None else choose.make_fake(1 << 16, seed=seed)
    with outsize.budget(host="64KiB" if place == "scratch" else "8MiB", device="64KiB", scratch=str(folder)):
        x = outsize.empty((500, 20), "float32", folder / "x.npy" if place == "file" else None)
        for number, tile in enumerate(x.tiles(device, prefetch, "8MiB", write=True, shape=(70, 20))):
            tile.copy_(torch.full(tile.shape, float(number)))
        want = np.repeat(np.arange(8), 70)[:500, None] * np.ones((1, 20))
        np.testing.assert_array_equal(x.compute("8MiB"), want)
    scratch = [name for name in folder.iterdir() if name.name.startswith("outsize-array")]
    assert bool(scratch) == (place == "scratch")
    del x
    assert not [name for name in folder.iterdir() if name.name.startswith("outsize-array")]


def test_tiles_refuse_what_cannot_be() -> None:
    x = outsize.open(A)
    with pytest.raises(InputError, match="takes tiles back"):
        (x * 2).tiles(write=True)
    with pytest.raises(InputError, match="torch has no uint32"):
        x.astype("u4").tiles(device="cpu")
    with pytest.raises(InputError, match="does not cut"):
        x.tiles(shape=(5,))
    with outsize.budget(device="4KiB"), pytest.raises(BudgetError, match="ask for smaller tiles"):
        x.tiles("fake", shape=(100, 100))


def test_tiles_written_back_are_synced_and_a_loop_left_early_leaves_the_present_tile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "x.npy", np.zeros((40, 8), "float32"))
    x = outsize.open(tmp_path / "x.npy", mode="r+")
    synced = []
    monkeypatch.setattr(type(x.node.store.file), "sync", lambda self: synced.append(self.path))  # type: ignore[attr-defined]
    for number, tile in enumerate(x.tiles(prefetch=0, write=True, shape=(10, 8))):
        tile += 1
        if number == 1:
            break
    assert synced == [str(tmp_path / "x.npy")]
    assert np.load(tmp_path / "x.npy").sum() == 80


def test_a_tile_is_never_the_users_own_memory() -> None:
    mine = A.copy()
    for tile in outsize.open(mine).tiles(shape=(100, 200)):
        assert type(tile) is np.ndarray  # torch tensors only where a device is named
        tile[...] = 0
    np.testing.assert_array_equal(mine, A)


def test_trivial_work_runs_on_the_processor_also_where_a_device_is_named() -> None:
    device = choose.make_fake(1 << 20)
    x = outsize.open(A)
    for made, want in (
        (outsize.open(np.float32(3)) * 2, np.float32(6)), (outsize.open(np.float32(3)).sum(), np.float32(3)),
        (x.T, A.T), (xp.full((3, 4), 2.0) + 1, np.full((3, 4), 3.0)), (x[:0].sum(axis=0), A[:0].sum(axis=0)),
        (x[:0] * 2, A[:0]), (xp.concat([x, x]), np.concatenate([A, A])), (x[:, :0] @ x[:0, :], A[:, :0] @ A[:0, :]),
    ):  # fmt: skip
        np.testing.assert_array_equal(made.compute(device=device), want)


def test_numbers_are_reduced_beside_what_is_read() -> None:
    x, twos = outsize.open(A), xp.full(A.shape, 2.0)
    for made, want in ((x.max() + twos.sum(), A.max() + 2.0 * A.size), ((twos - x).max() + twos.var(), 2.0 - A.min())):
        np.testing.assert_allclose(made.compute(device=choose.make_fake(1 << 20)), want, rtol=1e-6)


def test_tiles_choose_a_shape_inside_the_budget() -> None:
    device = choose.make_fake(1 << 16)
    with outsize.budget(device="64KiB"):
        tiles = outsize.open(A).tiles(device, prefetch=2)
        assert tiles.device_bytes * 3 <= 1 << 16 and sum(tile.numel() for tile in tiles) == A.size
    assert device.most <= 1 << 16


def test_a_break_in_the_middle_of_tiles_leaves_nothing_behind() -> None:
    device = choose.make_fake(1 << 16)
    with outsize.budget(device="64KiB"):
        for _ in outsize.open(A).tiles(device, shape=(10, 200)):
            break
    assert device.slab is None


def test_the_command_takes_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", A)
    source, target = f"x={tmp_path / 'x.npy'}", str(tmp_path / "y.npy")
    assert (
        main(["compute", "x * 2", "--in", source, "--out", target, "--device", "fake", "--device-budget", "64KiB"]) == 0
    )
    np.testing.assert_array_equal(np.load(target), A * 2)
    assert main(["compute", "x @ x.T", "--in", source, "--device", "fake", "--device-budget", "1MiB", "--plan"]) == 0
    assert "device memory" in capsys.readouterr().out
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["compute", "x.sum()", "--in", source, "--device", "auto"]) == 0


def test_rows_at_a_pitch_are_told_from_other_layouts() -> None:
    block = np.zeros((6, 8, 4), np.float32)
    assert rows_of(block) == (768, 1, 768)
    assert rows_of(block[:, :, :2]) == (8, 48, 16)
    assert rows_of(block[:, :5]) == (80, 6, 128)
    assert rows_of(block[::2, :5]) == (80, 3, 256)
    assert rows_of(block[:, :5, :2]) is None
    assert rows_of(block.T) is None


def test_blocks_of_a_large_product_hide_the_link_under_the_arithmetic() -> None:
    rates = (55e9, 55e9, 3e12)
    for flops, edge in ((51e12, 8192), (400e12, 32768)):
        blocks = choose_blocks(65536, 65536, 65536, 4, 4, 8 << 30, 1 << 40, (*rates, flops))
        assert blocks is not None and blocks.held <= 8 << 30
        assert min(blocks.rows, blocks.columns) >= edge
        assert blocks.sent(65536, 65536, 65536, False) / 55e9 < 2 * 65536**3 / flops


def test_blocks_that_come_out_even_are_chosen_where_they_cost_no_more() -> None:
    for link, flops in ((52e9, 50.6e12), (55e9, 51e12), (55e9, 54e12)):
        blocks = choose_blocks(65536, 65536, 65536, 4, 4, (8 << 30) - (96 << 20), 1 << 40, (link, link, 3.2e12, flops))
        assert blocks is not None
        assert (blocks.rows, blocks.columns, blocks.panel, blocks.strip) == (32768, 16384, 8192, 4096)


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1), (2,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("kind", ["add", "minimum", "maximum"])
def test_what_is_left_to_torchs_reductions_takes_no_memory_of_their_own(
    monkeypatch: pytest.MonkeyPatch, axes: tuple[int, ...], kind: str
) -> None:
    kernels = torch_kernels.TorchKernels("cpu")
    value = np.random.default_rng(0).normal(size=(37, 50, 21))
    seen: list[int] = []
    for name in ("sum", "amin", "amax"):
        inner = getattr(torch, name)

        def recorded(given: Any, *, dim: Any, inner: Any = inner, **options: Any) -> Any:
            seen.append(int(np.prod([given.shape[axis] for axis in dim])))
            return inner(given, dim=dim, **options)

        monkeypatch.setattr(torch, name, recorded)
        if name != "sum":
            monkeypatch.setitem(torch_kernels._REDUCE, {"amin": "minimum", "amax": "maximum"}[name], recorded)
    kept = tuple(1 if axis in axes else n for axis, n in enumerate(value.shape))
    out = torch.zeros(kept, dtype=torch.float64)
    kernels.reduce(kind, out, torch.from_numpy(value.copy()), axes)
    want = {"add": np.sum, "minimum": np.min, "maximum": np.max}[kind](value, axis=axes, keepdims=True)  # type: ignore[operator]
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-12, atol=1e-12)
    if 2 not in axes:  # the axis that stays is the fast one
        assert max(seen) <= 15


def test_tiles_of_memory_that_the_device_reaches_are_sent_from_where_they_lie() -> None:
    for shape, host in (((100, 200), 0), ((100, 50), 0)):
        device = choose.make_fake(1 << 20, in_place=True)
        with outsize.budget(device="1MiB"):
            tiles = outsize.open(A).tiles(device, prefetch=2, shape=shape)
            assert tiles.host_bytes == host
            seen = np.zeros_like(A)
            for tile in tiles:
                (low, high), (left, right) = tiles.region
                seen[low:high, left:right] = tile.numpy()
                tile.zero_()
        np.testing.assert_array_equal(seen, A)
    backwards = A[::-1]
    with outsize.budget(device="1MiB"):
        tiles = outsize.open(backwards).tiles(choose.make_fake(1 << 20, in_place=True), shape=(100, 200))
        assert tiles.host_bytes > 0
        np.testing.assert_array_equal(np.concatenate([tile.numpy().copy() for tile in tiles]), backwards)


def test_a_card_that_cannot_be_started_is_an_error_or_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(ArrayKernels(np), limit=1 << 20)

    def full() -> tuple[int, str]:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(device, "available", full)
    with pytest.raises(OutOfMemory, match="cannot be started, others may hold all of it"):
        (outsize.open(A) * 2).compute(device=device)
    monkeypatch.setattr(choose, "_find", lambda name: device)
    with pytest.warns(UserWarning, match="on the processor: fake cannot be started"):
        np.testing.assert_array_equal((outsize.open(A) * 2).compute(device="auto"), A * 2)


def test_the_budget_of_page_locked_memory_is_kept() -> None:
    device = FakeDevice(ArrayKernels(np), limit=1 << 20)
    with outsize.budget(device="1MiB", pinned="128KiB"):
        plan = (outsize.open(A) * 2).plan("64MiB", device=device)
    assert plan.fits and plan.peak() <= 128 << 10


def test_device_pools_are_told_apart() -> None:
    assert str(Pool(kind="device", index=1)) == "device 1"


def test_tiles_are_planned_and_keep_to_the_budget_of_page_locked_memory() -> None:
    device = choose.make_fake(1 << 20)
    with outsize.budget(device="1MiB", pinned="128KiB"):
        tiles = (outsize.open(A) + 1).tiles(device, prefetch=2, budget="8MiB")
        assert tiles.plan.fits and tiles.plan.peak(device.pool) == 3 * tiles.device_bytes
        assert 0 < 3 * tiles.host_bytes == tiles.plan.peak(PINNED) <= 128 << 10
        assert tiles.plan.steps[0].tiles == len(tiles) > 1
        np.testing.assert_allclose(sum(float(tile.sum()) for tile in tiles), (A + 1).sum(dtype="f8"), rtol=1e-5)
        with pytest.raises(BudgetError, match="smallest budget that works") as found:
            (outsize.open(A) + 1).tiles(device, prefetch=2, budget=1)
        (outsize.open(A) + 1).tiles(device, prefetch=2, budget=found.value.smallest)
