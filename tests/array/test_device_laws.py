"""On the pretended device: every result equals NumPy's, whatever the shapes, budgets and the order in which streams run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
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
from outsize.array.device.array_kernels import ArrayKernels
from outsize.array.device.fake import FakeDevice
from outsize.core.errors import BudgetError
from outsize.engine.pinned import lock_memory

torch_kernels = pytest.importorskip("outsize.array.device.torch_kernels", exc_type=ImportError)

QUICK = examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=12)
DTYPES = st.sampled_from(["?", "i1", "u1", "i4", "i8", "f2", "f4", "f8", ">f4", ">i4"])
SEEDS = st.integers(0, 999)
HOST = st.sampled_from([1 << 18, 1 << 20, 1 << 26])
DEVICE = st.sampled_from([24 << 10, 64 << 10, 1 << 22])


@pytest.fixture(autouse=True)
def tiny_pieces(tune: Callable[..., None]) -> None:
    """Many chunks, slices, strips and panels although arrays are small."""
    tune(
        device_chunk=1 << 12, device_slot=1 << 11, stage_piece=512, device_slice=40, small=0, device_strip=64, least_box=64
    )  # fmt: skip


@st.composite
def devices(draw: Any) -> FakeDevice:
    kernels = draw(st.sampled_from([torch_kernels.TorchKernels("cpu", few=2), ArrayKernels(np)]))
    return FakeDevice(kernels, limit=draw(DEVICE), seed=draw(SEEDS), in_place=draw(st.booleans()))


def values(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind in "biu":
        return rng.integers(0, 2 if dtype == "?" else 100, size=shape).astype(dtype)
    return np.asarray(rng.normal(size=shape) * 4).astype(dtype)


def place(array: np.ndarray[Any, Any], folder: Path, on_disk: bool, name: str = "x") -> xp.Array:
    if not on_disk:
        return outsize.open(array)
    np.save(folder / f"{name}.npy", array)
    return outsize.open(folder / f"{name}.npy")


def run(array: xp.Array, device: FakeDevice, budget: int) -> Any:
    with outsize.budget(device=device.size), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert array.plan(budget, device=device).peak(device.pool) <= device.size
        result = array.compute(budget, device=device)
    assert 0 < device.most <= device.size
    return result


def tolerance(dtype: Any) -> float:
    return {"e": 2e-2, "f": 3e-5}.get(np.dtype(dtype).char, 1e-11)


@QUICK
@given(SHAPES, DTYPES, DTYPES, SEEDS, devices(), HOST, st.booleans())
def test_elementwise_chains_equal_numpy(
    tmp_path: Path, shape: tuple[int, ...], one: str, two: str, seed: int, device: FakeDevice, host: int, disk: bool
) -> None:
    a, b = values(one, shape, seed), values(two, shape[-1:], seed + 1)
    x, y = place(a, tmp_path, disk), place(b, tmp_path, not disk, "y")
    with np.errstate(all="ignore"):
        for made, want in (
            (x * y + 2, a * b + 2),
            (xp.where(x > y, x, y), np.where(a > b, a, b)),
            ((x + y).astype("f8") / 7, (a + b).astype("f8") / 7),
            (xp.maximum(x, y) == y, np.maximum(a, b) == b),
            (xp.sqrt(abs(x.astype("f4"))) - 1, np.sqrt(abs(a.astype("f4"))) - 1),
        ):
            got = run(made, device, host)
            assert got.dtype.newbyteorder("=") == want.dtype.newbyteorder("=") and got.shape == want.shape
            if want.dtype.kind in "biu":
                np.testing.assert_array_equal(got, want)
            else:
                np.testing.assert_allclose(got, want, rtol=tolerance(want.dtype), atol=tolerance(want.dtype))


@QUICK
@given(SHAPES, DTYPES, st.data(), SEEDS, devices(), HOST, st.booleans())
def test_reductions_equal_numpy(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, data: Any, seed: int, device: FakeDevice, host: int, disk: bool
) -> None:
    a = values(dtype, shape, seed)
    x = place(a, tmp_path, disk)
    axis = data.draw(st.one_of(st.none(), st.integers(0, len(shape) - 1)))
    wide = a.astype("f8") if a.dtype.kind == "f" else a
    for name in ("sum", "mean", "var", "std", "min", "max", "any", "all", "prod"):
        want = np.asarray(getattr(np, name)(wide, axis=axis))
        if name == "prod" and np.any(np.abs(want.astype("f8")) > 1e4):
            continue
        got = run(getattr(x, name)(axis), device, host)
        if got.dtype.kind in "biu":
            np.testing.assert_array_equal(got, want.astype(got.dtype))
        else:
            limit = tolerance(got.dtype) * 50
            np.testing.assert_allclose(got.astype("f8"), want.astype("f8"), rtol=limit, atol=limit)
    along = data.draw(st.integers(0, len(shape) - 1))
    if a.dtype.kind == "f":
        a.reshape(-1)[:: data.draw(st.integers(2, 9))] = data.draw(st.sampled_from([np.nan, np.inf, 0.5]))
        x = place(a, tmp_path, disk, "ties")
    for name in ("argmin", "argmax"):
        np.testing.assert_array_equal(run(getattr(x, name)(along), device, host), getattr(np, name)(a, axis=along))


@QUICK
@given(st.data(), st.sampled_from(["f4", "f8", "f2", ">f4", "c8"]), SEEDS, devices(), HOST, st.booleans())
def test_products_equal_numpy(
    tmp_path: Path, data: Any, dtype: str, seed: int, device: FakeDevice, host: int, disk: bool
) -> None:
    m, n, k = (data.draw(st.integers(1, 70)) for _ in range(3))
    batch = data.draw(st.sampled_from([(), (2,)]))
    turned = data.draw(st.booleans())
    a = values("f8", (*batch, *((k, m) if turned else (m, k))), seed).astype(dtype)
    b = values("f8", (*batch, k, n), seed + 1).astype(dtype)
    x, y = place(a, tmp_path, disk), place(b, tmp_path, data.draw(st.booleans()), "y")
    a, x = (a.swapaxes(-1, -2), x.mT) if turned else (a, x)
    got = run(x @ y, device, host)
    want = a.astype("c16" if dtype == "c8" else "f8") @ b.astype("c16" if dtype == "c8" else "f8")
    limit = tolerance("f4" if dtype == "c8" else dtype) * 20
    np.testing.assert_allclose(got.astype(want.dtype), want, rtol=limit, atol=limit * max(1, math.sqrt(k)) * 16)


@QUICK
@given(SHAPES, SEEDS, devices(), st.sampled_from([1 << 18, 1 << 26]))
def test_a_saved_chain_of_passes_equals_numpy(
    tmp_path: Path, shape: tuple[int, ...], seed: int, device: FakeDevice, host: int
) -> None:
    a = values("f4", shape, seed)
    x = place(a, tmp_path, True)
    z = (x - x.mean(axis=0)) / (x.std(axis=0) + 1)
    with outsize.budget(device=device.size):
        saved = z.save(tmp_path / "z.npy", host, progress=False, device=device)
    want = (a - a.mean(axis=0)) / (a.std(axis=0) + 1)
    np.testing.assert_allclose(saved.compute(), want, rtol=1e-4, atol=1e-5)


@QUICK
@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 20), SEEDS, devices(), HOST)
def test_joins_of_memory_disk_and_numbers_equal_numpy(
    tmp_path: Path, rows: int, more: int, columns: int, seed: int, device: FakeDevice, host: int
) -> None:
    a, b = values("f4", (rows, columns), seed), values("f4", (more, columns), seed + 1)
    line = xp.broadcast_to(xp.arange(columns, dtype="f4"), (7, columns))
    x = xp.concat([place(a, tmp_path, False), place(b, tmp_path, True), line, place(b, tmp_path, True, "c") * 2])
    want = np.concatenate([a, b, np.broadcast_to(np.arange(columns, dtype="f4"), (7, columns)), b * 2])
    np.testing.assert_allclose(run(x.sum(axis=0), device, host), want.sum(axis=0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(run(x * 2 + 1, device, host), want * 2 + 1, rtol=1e-5, atol=1e-5)


@QUICK
@given(st.data(), SEEDS, devices(), st.sampled_from([1 << 18, 1 << 20, 1 << 26]), st.booleans())
def test_a_saved_product_equals_numpy(
    tmp_path: Path, data: Any, seed: int, device: FakeDevice, host: int, disk: bool
) -> None:
    m, n, k = (data.draw(st.integers(1, 150)) for _ in range(3))
    a, b = values("f4", (m, k), seed), values("f4", (k, n), seed + 1)
    x, y = place(a, tmp_path, disk), place(b, tmp_path, not disk, "y")
    with outsize.budget(device=device.size):
        saved = (x @ y).save(tmp_path / "c.npy", host, progress=False, device=device)
    want = a.astype("f8") @ b.astype("f8")
    np.testing.assert_allclose(saved.compute(), want, rtol=1e-3, atol=1e-2)


@QUICK
@given(st.integers(1, 5000), st.sampled_from(["chain", "fold", "product"]), SEEDS)
def test_a_plan_fits_the_device_or_names_the_smallest_budget_that_works(limit: int, kind: str, seed: int) -> None:
    a = values("f4", (40, 30), seed)
    x = outsize.open(a)
    made = {"chain": x * 2 + 1, "fold": x.sum(axis=0), "product": x @ x.T}[kind]
    want = {"chain": a * 2 + 1, "fold": a.sum(axis=0), "product": a @ a.T}[kind]
    device = FakeDevice(ArrayKernels(np), limit=1 << 20, seed=seed)
    with outsize.budget(device=limit * 16):
        try:
            got = made.compute(device=device)
        except BudgetError as error:
            assert error.smallest is not None and error.smallest > limit * 16
            with outsize.budget(device=error.smallest):
                got = made.compute(device=device)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@QUICK
@given(SHAPES, st.integers(1, 80), st.sampled_from(["chain", "fold", "product"]), SEEDS, devices(), HOST, st.booleans())
def test_no_more_is_locked_than_allowed_or_the_smallest_limit_that_works_is_named(
    tmp_path: Path, shape: tuple[int, ...], pages: int, kind: str, seed: int, device: FakeDevice, host: int, disk: bool
) -> None:
    a, limit = values("f4", shape, seed), pages * 1024
    x = place(a, tmp_path, disk)
    x2 = xp.reshape(x, (shape[0], -1))
    made = {"chain": x * 2 + 1, "fold": x.sum(axis=0), "product": x2 @ x2.mT}[kind]
    locked: list[int] = []

    def counted(size: int) -> Any:
        locked.append(size)
        return lock_memory(size)

    with pytest.MonkeyPatch.context() as patch, outsize.budget(device=device.size, pinned=limit):
        patch.setattr("outsize.engine.threads.lock_memory", counted)
        patch.setattr("outsize.array.device.transfer.staging.lock_memory", counted)
        try:
            got = made.compute(host, device=device)
        except BudgetError as error:
            assert "pinned" in str(error) and error.smallest is not None and error.smallest > limit
            limit = error.smallest
            with outsize.budget(pinned=limit):
                got = made.compute(host, device=device)
    assert sum(locked) <= limit
    np.testing.assert_allclose(got, made.compute(), rtol=1e-4, atol=1e-4)
