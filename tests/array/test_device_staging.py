"""Memory that the device does not reach: it crosses piece by piece through page-locked rings, in any order of streams, by so
many threads at once and no more, inside the plan."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from effort import examples
from fakes import TINY, Carded
from hypothesis import HealthCheck, given

import outsize
import outsize.array as xp
from outsize.array.device import passes as device_passes
from outsize.array.device.array_kernels import ArrayKernels
from outsize.array.device.fake import FakeDevice
from outsize.array.device.transfer import staging
from outsize.core.errors import BudgetError

torch_kernels = pytest.importorskip("outsize.array.device.torch_kernels", exc_type=ImportError)

QUICK = examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
DTYPES = st.sampled_from(["u1", "i4", "i8", "f4", "f8", ">f4", ">i8"])


@pytest.fixture(autouse=True)
def tiny_pieces(tune: Callable[..., None]) -> None:
    tune(**TINY)


@st.composite
def devices(draw: Any) -> FakeDevice:
    kernels = draw(st.sampled_from([torch_kernels.TorchKernels("cpu"), ArrayKernels(np)]))
    kind = draw(st.sampled_from([FakeDevice, Carded]))
    return kind(kernels, limit=draw(st.sampled_from([24 << 10, 64 << 10, 1 << 22])), seed=draw(st.integers(0, 999)))


LAYOUTS = {
    "as it lies": lambda a: a,
    "turned": lambda a: a.T,
    "backwards": lambda a: a[::-1, ::-1],
    "every second column": lambda a: a[:, ::2],
    "every third row": lambda a: a[::3],
    "a window": lambda a: a[a.shape[0] // 4 :, a.shape[1] // 3 :],
    "one row for all": lambda a: np.broadcast_to(a[:1], a.shape),
    "one column for all": lambda a: np.broadcast_to(a[:, :1], a.shape),
    "one number": lambda a: a[:1, :1],
    "nothing": lambda a: a[:0],
}


@QUICK
@given(
    st.integers(1, 90), st.integers(1, 90), DTYPES, st.sampled_from(sorted(LAYOUTS)), devices(),
    st.sampled_from([1 << 17, 1 << 20, 1 << 26]), st.integers(1, 4),
)  # fmt: skip
def test_staged_results_equal_the_processors(
    rows: int, columns: int, dtype: str, layout: str, device: FakeDevice, host: int, cores: int
) -> None:
    a = LAYOUTS[layout](np.random.default_rng(rows).integers(-50, 50, (rows, columns)).astype(dtype))
    b = np.random.default_rng(columns).integers(0, 9, a.shape).astype("i8")
    x, y = outsize.open(a), outsize.open(b)
    with pytest.MonkeyPatch.context() as patch, outsize.budget(device=device.size):
        patch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        for made in (
            x.sum(),
            (x.astype("i8") * y).sum(axis=0),
            (x.astype("i8") + y).max(axis=1) if a.size else x.sum(),
            x + y,
        ):
            plan = made.plan(host, device=device)
            assert plan.peak(device.pool) <= device.size and plan.peak() <= host
            np.testing.assert_array_equal(made.compute(host, device=device), made.compute(host))
    assert device.most <= device.size


@QUICK
@given(
    st.integers(1, 60), st.integers(1, 60), st.sampled_from(["u1", "f4", ">f4", "i8"]), st.sampled_from(sorted(LAYOUTS)),
    st.integers(0, 3), st.integers(0, 999), st.sampled_from([FakeDevice, Carded]),
)  # fmt: skip
def test_tiles_of_memory_that_the_device_does_not_reach_are_staged(
    rows: int, columns: int, dtype: str, layout: str, prefetch: int, seed: int, kind: Any
) -> None:
    a = LAYOUTS[layout](np.random.default_rng(rows).integers(0, 99, (rows, columns)).astype(dtype))
    device = kind(torch_kernels.TorchKernels("cpu"), limit=1 << 18, seed=seed)
    seen = np.zeros(a.shape, a.dtype.newbyteorder("="))
    with outsize.budget(device=device.size):
        tiles = outsize.open(a).tiles(device, prefetch, "1MiB", shape=(9, 13))
        assert tiles.host_bytes == 0 and tiles._staging.threads > 0
        for tile in tiles:
            (low, high), (left, right) = tiles.region
            seen[low:high, left:right] = tile.numpy()
            tile.zero_()
    np.testing.assert_array_equal(seen, a)
    assert not any(thread.name.startswith("outsize-staging") for thread in threading.enumerate())


def test_tiles_whose_staging_has_no_room_name_a_budget_that_works() -> None:
    a = np.ones((200, 200), np.float32)
    device = FakeDevice(torch_kernels.TorchKernels("cpu"), limit=1 << 18)
    with outsize.budget(device=device.size):
        with pytest.raises(BudgetError, match=r"give at least \d+ bytes") as found:
            outsize.open(a).tiles(device, 2, 100)
        tiles = outsize.open(a).tiles(device, 2, found.value.needed)
        assert sum(float(tile.sum()) for tile in tiles) == a.size


def test_a_loop_over_tiles_that_is_left_early_ends_the_staging_threads() -> None:
    a = np.arange(40000.0).reshape(200, 200)
    device = FakeDevice(torch_kernels.TorchKernels("cpu"), limit=1 << 18)
    with outsize.budget(device=device.size):
        for tile in outsize.open(a).tiles(device, 2, "1MiB", shape=(20, 200)):
            assert float(tile[0, 0]) == 0.0
            break
    gc.collect()
    assert not any(thread.name.startswith("outsize-staging") for thread in threading.enumerate())


@pytest.mark.parametrize("place", ["new", "given", "file"])
def test_products_of_plain_memory_are_staged_and_come_back_through_pieces(place: str, tmp_path: Any) -> None:
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(150, 90)), rng.normal(size=(90, 170))
    device = FakeDevice(ArrayKernels(np), limit=1 << 17)
    with outsize.budget(device=device.size):
        made = outsize.open(a) @ outsize.open(b.T.copy().T)
        step = made.plan("8MiB", device=device).steps[-1]
        shared = {part.name: part.bytes for part in step.parts}["what workers share"]
        if place == "file":
            got = made.save(tmp_path / "c.npy", "8MiB", device=device, progress=False).compute()
        elif place == "given":
            got = made.compute("8MiB", device=device, out=np.empty((150, 170)))
        else:
            got = made.compute("8MiB", device=device)
    assert shared > 2 * 512
    np.testing.assert_allclose(got, a @ b)
    assert not any(thread.name.startswith("outsize-") for thread in threading.enumerate())


class Partly(FakeDevice):
    """Reaches the arrays that were locked, and nothing else."""

    locked: tuple[np.ndarray[Any, Any], ...] = ()

    def reaches(self, block: Any) -> bool:
        low, high = np.lib.array_utils.byte_bounds(block)
        return any(a <= low and high <= b for a, b in map(np.lib.array_utils.byte_bounds, self.locked))


def test_a_single_number_in_locked_memory_needs_no_staging(tmp_path: Any) -> None:
    device, one = Partly(ArrayKernels(np), limit=1 << 18), np.full((), 7.0)
    device.locked = (one,)
    np.save(tmp_path / "x.npy", np.arange(5000.0))
    with outsize.budget(device=device.size):
        made = outsize.open(tmp_path / "x.npy") + outsize.open(one)
        np.testing.assert_array_equal(made.compute(device=device), np.arange(5000.0) + 7)


def test_memory_that_is_unlocked_after_the_plan_is_sent_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    device, a = Partly(ArrayKernels(np), limit=1 << 18), np.arange(20000.0)
    device.locked = (a,)
    opened = device_passes.OnDevice.opened

    def unlocked(self: Any, sized: Any) -> Any:
        device.locked = ()
        return opened(self, sized)

    monkeypatch.setattr(device_passes.OnDevice, "opened", unlocked)
    with outsize.budget(device=device.size):
        assert outsize.open(a).sum().compute(device=device) == a.sum()


def test_locked_memory_in_many_short_rows_is_staged(monkeypatch: pytest.MonkeyPatch, tune: Callable[..., None]) -> None:
    """Two of three in both inner axes: a copy for every pair of rows would be a call for sixteen bytes."""
    kernels = ArrayKernels(np)
    device, whole, calls = Partly(kernels, limit=1 << 20), np.arange(90000, dtype=np.int32).reshape(-1, 3, 3), [0]
    device.locked, upload = (whole,), kernels.upload

    def counted(*args: Any) -> None:
        calls[0] += 1
        upload(*args)

    monkeypatch.setattr(kernels, "upload", counted)
    tune(stage_piece=4096)
    for part in (outsize.open(whole[:, :2, :2]), outsize.open(whole)[:, :2, :2]):
        with outsize.budget(device=device.size):
            assert part.sum().compute("64MiB", device=device) == whole[:, :2, :2].sum()
    assert calls[0] < 1000


def test_locked_memory_in_long_rows_is_sent_from_where_it_lies(
    monkeypatch: pytest.MonkeyPatch, tune: Callable[..., None]
) -> None:
    tune(direct_part=256, direct_row=256)
    monkeypatch.setattr(staging, "fill", lambda *args: pytest.fail("a thread copied"))
    device, whole = Partly(ArrayKernels(np), limit=1 << 20), np.arange(64000, dtype=np.int32).reshape(10, 80, 80)
    device.locked = (whole,)
    part = whole[:, 5:70, 3:76]
    with outsize.budget(device=device.size):
        np.testing.assert_array_equal((outsize.open(part) + 1).compute("64MiB", device=device), part + 1)


@QUICK
@given(
    st.integers(2, 60), st.integers(2, 60), st.integers(2, 60), st.tuples(*[st.sampled_from(sorted(LAYOUTS))] * 2),
    st.tuples(st.booleans(), st.booleans()), st.sampled_from(["f4", "f8", ">f4"]), st.integers(0, 999),
    st.sampled_from([1 << 17, 1 << 20, 1 << 26]),
)  # fmt: skip
def test_products_of_matrices_of_any_layout_are_foreseen_and_equal_the_processors(
    m: int, n: int, k: int, layouts: tuple[str, str], locked: tuple[bool, bool], dtype: str, seed: int, host: int
) -> None:
    rng = np.random.default_rng(seed)
    a, b = (
        LAYOUTS[name](rng.integers(-9, 9, shape).astype(dtype))
        for name, shape in zip(layouts, ((m, k), (k, n)), strict=True)
    )
    deep = min(a.shape[1], b.shape[0])
    a, b = a[:, :deep], b[:deep]
    device = Partly(ArrayKernels(np), limit=1 << 17, seed=seed)
    device.locked = tuple(block for block, there in zip((a, b), locked, strict=True) if there and block.size)
    made = outsize.open(a) @ outsize.open(b)
    with outsize.budget(device=device.size):
        np.testing.assert_allclose(made.compute(host, device=device), made.compute(host), rtol=1e-5, atol=1e-3)


def test_locked_matrices_side_by_side_are_sent_without_staging_or_an_error() -> None:
    """Their batch is the fastest axis: no row of one lies in one stretch, and no part of it can be sent as it lies."""
    whole = np.random.default_rng(0).normal(size=(50, 400, 2))
    device = Partly(ArrayKernels(np), limit=24 << 10)
    device.locked = (whole,)
    x = outsize.open(whole.transpose(2, 0, 1))
    with outsize.budget(device=device.size):
        got = (x @ x.mT).compute("64MiB", device=device)
    a = whole.transpose(2, 0, 1)
    np.testing.assert_allclose(got, a @ a.swapaxes(1, 2))


@QUICK
@given(
    st.tuples(*[st.integers(1, 12)] * 4), st.tuples(*[st.sampled_from([1, -1, 2])] * 3), st.booleans(), st.booleans(),
    st.integers(0, 999),
)  # fmt: skip
def test_sums_over_several_axes_of_strided_memory_are_foreseen(
    lengths: tuple[int, ...], steps: tuple[int, ...], there: bool, on_device: bool, seed: int
) -> None:
    """Whether axes can be taken for one shows in the strides of what lies in memory: where not, a packed copy is counted."""
    m, j, k, n = lengths
    whole = np.random.default_rng(seed).integers(-9, 9, (2 * m, 2 * j, 2 * k)).astype("f8")
    a = whole[tuple(slice(None, None, step) for step in steps)][:m, :j, :k]
    b = np.random.default_rng(seed + 1).integers(-9, 9, (j, k, n)).astype("f8")
    device = Partly(ArrayKernels(np), limit=1 << 17, seed=seed)
    device.locked = (whole,) if there else ()
    with outsize.budget(device=device.size):
        made = xp.tensordot(outsize.open(a), outsize.open(b), axes=2)
        got = made.compute("1MiB", device=device if on_device else None)
    np.testing.assert_array_equal(got, np.tensordot(a, b, axes=2))


@pytest.mark.parametrize("inwards", [True, False])
def test_rows_that_lie_more_than_two_gib_apart_are_copied_one_by_one(
    inwards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA refuses longer steps from row to row."""
    calls: list[tuple[int, ...]] = []
    library = SimpleNamespace(cudaMemcpyAsync=lambda *args: calls.append(args) or 0)
    monkeypatch.setattr(torch_kernels, "cuda_runtime", lambda: library)
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch_kernels.torch.cuda, "current_stream", lambda device: stream)
    tensor = SimpleNamespace(is_contiguous=lambda: True, device="cuda:0", data_ptr=lambda: 1000)
    block = np.lib.stride_tricks.as_strided(np.zeros((), "f4"), (3, 5), (3 << 30, 4))
    torch_kernels.copy_rows(tensor, block, inwards=inwards)
    there, here = [1000 + row * 20 for row in range(3)], [block.ctypes.data + row * (3 << 30) for row in range(3)]
    ways = zip(there, here, strict=True) if inwards else zip(here, there, strict=True)
    assert calls == [(*way, 20, 1 if inwards else 2, 7) for way in ways]


def test_an_operand_is_on_its_way_while_the_one_before_it_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []
    begin = staging.Stager.begin

    def noted(self: staging.Stager, blocks: Any) -> Callable[[], None]:
        number = sum(word == "sent" for word, _ in seen)
        seen.append(("sent", number))
        wait = begin(self, blocks)
        return lambda: (wait(), seen.append(("wanted", number)))[0]

    monkeypatch.setattr(staging.Stager, "begin", noted)
    a, b = np.random.default_rng(0).standard_normal((2, 96, 96))
    device = FakeDevice(ArrayKernels(np), limit=48 << 10)
    with outsize.budget(device=device.size):
        found = (outsize.open(a) @ outsize.open(b)).compute("1MiB", device=device)
    np.testing.assert_allclose(found, a @ b, rtol=1e-10)
    places = {each: place for place, each in enumerate(seen)}
    count = sum(word == "sent" for word, _ in seen)
    early = [places["sent", n + 1] < places["wanted", n] for n in range(count - 1)]
    assert count > 4
    assert sum(early) >= count // 2, seen


def test_what_is_on_its_way_is_waited_for_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way: set[int] = set()
    numbers = itertools.count()
    begin = staging.Stager.begin

    def noted(self: staging.Stager, blocks: Any) -> Callable[[], None]:
        wait, number = begin(self, blocks), next(numbers)
        under_way.add(number)

        def waited() -> None:
            under_way.discard(number)
            wait()

        return waited

    class Stopped(Exception):
        pass

    def fail(*_: Any) -> None:
        raise Stopped

    monkeypatch.setattr(staging.Stager, "begin", noted)
    monkeypatch.setattr("outsize.array.device.blocked_product._Product._call", fail)
    a, b = np.random.default_rng(0).standard_normal((2, 96, 96))
    device = FakeDevice(ArrayKernels(np), limit=48 << 10)
    with outsize.budget(device=device.size), pytest.raises(Stopped):
        (outsize.open(a) @ outsize.open(b)).compute("1MiB", device=device)
    assert not under_way
