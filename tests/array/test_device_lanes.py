"""Short lanes on the pretended device: they are made beside what is read, in one visit, and equal NumPy's."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from effort import examples
from hypothesis import HealthCheck, given
from test_device_laws import DEVICE, SEEDS, place, run, tolerance, values

import outsize
import outsize.array as xp
from outsize.array.device.array_kernels import ArrayKernels
from outsize.array.device.fake import FakeDevice

torch_kernels = pytest.importorskip("outsize.array.device.torch_kernels", exc_type=ImportError)

QUICK = examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
HOST = st.sampled_from([1 << 19, 1 << 26])


@pytest.fixture(autouse=True)
def tiny_pieces(tune: Callable[..., None]) -> None:
    tune(
        device_chunk=1 << 12, device_slot=1 << 12, stage_piece=512, device_slice=40, small=0, device_strip=64, least_box=64
    )  # fmt: skip


@st.composite
def devices(draw: Any) -> FakeDevice:
    kernels = draw(st.sampled_from([torch_kernels.TorchKernels("cpu", few=2), ArrayKernels(np)]))
    return FakeDevice(kernels, limit=draw(DEVICE) * 4, seed=draw(SEEDS), in_place=draw(st.booleans()))


def softmax(m: Any, x: Any, axis: int) -> Any:
    e = m.exp(x - m.max(x, axis=axis, keepdims=True))
    return e / m.sum(e, axis=axis, keepdims=True)


def layer_norm(m: Any, x: Any, axis: int) -> Any:
    centred = x - m.mean(x, axis=axis, keepdims=True)
    return centred / m.sqrt(m.var(x, axis=axis, keepdims=True) + 1e-3)


def unit(m: Any, x: Any, axis: int) -> Any:
    return x / m.expand_dims(m.sqrt(m.sum(x * x, axis=axis)) + 1, axis=axis)


def entropy(m: Any, x: Any, axis: int) -> Any:
    return -m.sum(softmax(m, x, axis) * m.log(softmax(m, x, axis)), axis=axis)


def spread(m: Any, x: Any, axis: int) -> Any:
    return m.where(m.any(x > 3, axis=axis, keepdims=True), x - m.min(x, axis=axis, keepdims=True), x * 0 + 1)


def far(m: Any, x: Any, axis: int) -> Any:
    return m.sum(m.abs(layer_norm(m, x, axis)) > 1, axis=0)


def best(m: Any, x: Any, axis: int) -> Any:
    return m.argmax(unit(m, x, axis), axis=axis)


WORKS = (softmax, layer_norm, unit, entropy, spread, far, best)


@QUICK
@given(
    st.sampled_from(WORKS), st.data(), st.sampled_from(["f4", "f8", "i4", ">f4"]), SEEDS, devices(), HOST, st.booleans()
)
def test_work_on_short_lanes_equals_numpy(
    tmp_path: Path, work: Any, data: Any, dtype: str, seed: int, device: FakeDevice, host: int, disk: bool
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 14), min_size=1, max_size=3)))
    axis = data.draw(st.integers(0, len(shape) - 1))
    a = values(dtype, shape, seed)
    want = np.asarray(work(np, a.astype("f8"), axis))
    got = run(work(xp, place(a, tmp_path, disk), axis), device, host)
    assert got.shape == want.shape
    if want.dtype.kind in "bi" or work is far:
        np.testing.assert_array_equal(got, want)
    else:
        limit = 50 * (tolerance("f4") if got.dtype.itemsize == 4 else tolerance(got.dtype))
        np.testing.assert_allclose(got, want, rtol=limit, atol=limit)


@pytest.mark.parametrize("work", [softmax, layer_norm, unit])
def test_what_rows_come_to_crosses_no_link(work: Any, tmp_path: Path) -> None:
    """The file is read once and sent once."""
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(40_000, 32)).astype("f4"))
    device = FakeDevice(torch_kernels.TorchKernels("cpu"), limit=4 << 20)
    with outsize.budget(device=4 << 20):
        plan = work(xp, outsize.open(tmp_path / "x.npy"), 1).plan("8MiB", device=device)
    (step,) = plan.steps
    (link,) = (level for level in step.levels if level.name == "link in")
    assert plan.read == link.amount == 40_000 * 32 * 4


def test_lanes_too_long_for_the_device_have_a_pass_of_their_own() -> None:
    device = FakeDevice(torch_kernels.TorchKernels("cpu"), limit=64 << 10)
    x = np.random.default_rng(0).normal(size=(8, 20_000)).astype("f4")
    with outsize.budget(device=64 << 10):
        made = softmax(xp, outsize.open(x), 1)
        assert len(made.plan("8MiB", device=device).steps) > 1
        np.testing.assert_allclose(made.compute("8MiB", device=device), softmax(np, x.astype("f8"), 1), rtol=1e-4)


def test_lanes_in_lanes_of_any_depth_are_planned() -> None:
    device = FakeDevice(torch_kernels.TorchKernels("cpu"), limit=1 << 22)
    x = y = np.random.default_rng(0).normal(size=(50, 8))
    lazy = outsize.open(x)
    for _ in range(40):
        y, lazy = layer_norm(np, y, 1), layer_norm(xp, lazy, 1)
    with outsize.budget(device=1 << 22):
        np.testing.assert_allclose(lazy.compute("8MiB", device=device), y, rtol=1e-8)
    assert math.isfinite(float(y.sum()))


def gram(m: Any, x: Any, y: Any) -> Any:
    return x.T @ x


def outer_gram(m: Any, x: Any, y: Any) -> Any:
    return x @ x.T


def cosines(m: Any, x: Any, y: Any) -> Any:
    return unit(m, x, 1) @ unit(m, y, 0)


def unit_gram(m: Any, x: Any, y: Any) -> Any:
    u = unit(m, x, 1)
    return u.T @ u


def covariance(m: Any, x: Any, y: Any) -> Any:
    centred = x - m.mean(x, axis=0)
    return centred.T @ centred / x.shape[0]


def one_sided(m: Any, x: Any, y: Any) -> Any:
    return (x * 2 - 1) @ y


def turned(m: Any, x: Any, y: Any) -> Any:
    return (y * 3).T @ (x + 1).T


def rows_and_columns(m: Any, x: Any, y: Any) -> Any:
    return (x * m.sum(y, axis=1) + m.sum(x, axis=1, keepdims=True)) @ m.exp(y / 9)


@QUICK
@given(
    st.sampled_from([gram, outer_gram, cosines, unit_gram, covariance, one_sided, turned, rows_and_columns]),
    st.tuples(*[st.integers(1, 40)] * 3), st.sampled_from(["f4", "f8", ">f4"]), SEEDS, devices(), HOST, st.booleans(),
)  # fmt: skip
def test_products_of_what_the_device_computes_equal_numpy(
    tmp_path: Path, work: Any, lengths: tuple[int, int, int], dtype: str, seed: int, device: FakeDevice, host: int, disk: bool
) -> None:  # fmt: skip
    a, b = values(dtype, lengths[:2], seed), values(dtype, lengths[1:], seed + 1)
    want = np.asarray(work(np, a.astype("f8"), b.astype("f8")))
    got = run(work(xp, place(a, tmp_path, disk), place(b, tmp_path, not disk, "y")), device, host)
    scale = np.abs(want).max() or 1.0
    np.testing.assert_allclose(
        got / scale, want / scale, atol=200 * tolerance("f4" if got.dtype.itemsize == 4 else "f8")
    )


@pytest.mark.parametrize("work", [gram, unit_gram, covariance])
def test_what_is_multiplied_with_itself_crosses_the_link_once(work: Any, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(20_000, 24)).astype("f4")
    device = FakeDevice(torch_kernels.TorchKernels("cpu"), limit=4 << 20)
    with outsize.budget(device=4 << 20):
        made = work(xp, outsize.open(x), None)
        product = next(step for step in made.plan("8MiB", device=device).steps if "product" in step.name)
        np.testing.assert_allclose(
            made.compute("8MiB", device=device), work(np, x.astype("f8"), None), rtol=2e-4, atol=2e-3
        )
    (link,) = (level for level in product.levels if level.name == "link in")
    assert x.nbytes <= link.amount < 1.02 * x.nbytes


def test_products_of_unit_rows_are_one_visit() -> None:
    x = np.random.default_rng(0).normal(size=(5_000, 24)).astype("f4")
    device = FakeDevice(torch_kernels.TorchKernels("cpu"), limit=4 << 20)
    with outsize.budget(device=4 << 20):
        assert len(unit_gram(xp, outsize.open(x), None).plan("8MiB", device=device).steps) == 1
        assert len(cosines(xp, outsize.open(x), outsize.open(x.T[:, :40])).plan("8MiB", device=device).steps) <= 2
