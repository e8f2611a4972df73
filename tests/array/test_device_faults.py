"""Odd values and failing devices: results stay NumPy's, errors are told, nobody waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import outsize
import outsize.array as xp
from outsize.array.device.array_kernels import ArrayKernels
from outsize.array.device.fake import FakeDevice
from outsize.core.errors import InputError

torch_kernels = pytest.importorskip("outsize.array.device.torch_kernels", exc_type=ImportError)
KERNELS = [torch_kernels.TorchKernels("cpu"), ArrayKernels(np)]


def outcome(work: Callable[[], Any]) -> BaseException | None:
    """The error of some work, in a thread of its own: that it ends at all is what is tested."""
    found: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
            found.append(None)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert found, "it still waits"
    return found[0]


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("number", [300, -1, 255, -(1 << 40)])
def test_integers_are_compared_with_numbers_that_their_dtype_does_not_hold(kernels: Any, number: int) -> None:
    x = np.arange(256).astype(np.uint8)
    for compare in (np.less, np.equal, np.not_equal, np.greater_equal):
        got = compare(outsize.open(x), number).compute(device=FakeDevice(kernels, limit=1 << 20))
        np.testing.assert_array_equal(got, compare(x, number))


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda k: k.name)
def test_signs_of_nan_of_zeros_and_of_the_smallest_numbers_are_numpys(kernels: Any) -> None:
    ends = [[np.finfo(d).smallest_subnormal, np.finfo(d).tiny, np.finfo(d).max, 0, np.inf, np.nan] for d in "fd"]
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)  # all of them
    for x in (halves, *(np.array(row, d) for row, d in zip(ends, "fd", strict=True)), np.array([-3, 0, 7])):
        for values in (x, -x):
            got = xp.sign(outsize.open(values)).compute(device=FakeDevice(kernels, limit=1 << 20))
            np.testing.assert_array_equal(got, np.sign(values))
            np.testing.assert_array_equal(np.signbit(got[got == 0]), False)


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda k: k.name)
def test_a_single_number_goes_through_a_device(kernels: Any) -> None:
    got = (outsize.open(np.array(3.0)) * 2 + 1).compute(device=FakeDevice(kernels, limit=1 << 20))
    assert got.shape == () and got == 7


def test_extremes_that_a_device_cannot_order_are_refused_in_words() -> None:
    for x, kernels in ((np.ones(9, np.complex64), KERNELS[0]), (np.array([1 << 63, 3], np.uint64), KERNELS[1])):
        with pytest.raises(InputError, match="found by the processor"):
            xp.max(outsize.open(x)).compute(device=FakeDevice(kernels, limit=1 << 20))


def test_results_for_a_callers_columns_stay_inside_the_plan() -> None:
    x = np.random.default_rng(0).normal(size=(300, 40)).astype(">f8")
    out = np.empty(x.shape, order="F")
    (outsize.open(x) * 2).compute(device=FakeDevice(KERNELS[0], limit=1 << 20, in_place=True), out=out)
    np.testing.assert_array_equal(out, x * 2)


def test_a_copy_back_that_fails_ends_a_product() -> None:
    class Failing(torch_kernels.TorchKernels):  # type: ignore[misc, name-defined]
        def download(self, block: Any, source: Any) -> None:
            if threading.current_thread().name.startswith("outsize-return"):
                raise RuntimeError("the link is gone")
            super().download(block, source)

    a = np.ones((600, 500), np.float32)
    device = FakeDevice(Failing("cpu"), limit=1 << 18)
    error = outcome(lambda: xp.matmul(outsize.open(a), outsize.open(a.T)).compute(device=device, budget="4MiB"))
    assert isinstance(error, RuntimeError) and "the link is gone" in str(error)


def test_waiting_for_a_card_that_has_failed_is_an_error() -> None:
    from outsize.array.device.cuda import _QuickCopier

    class Runtime:
        def __getattr__(self, name: str) -> Callable[..., int]:
            return lambda *args: 700 if name == "cudaEventQuery" else 0

    error = outcome(_QuickCopier(Runtime(), 0, 0).wait)
    assert isinstance(error, RuntimeError) and "700" in str(error)
