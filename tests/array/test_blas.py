"""What BLAS takes for itself: never more than plans count."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tracemalloc
import types

import numpy as np
import pytest
from effort import long

import outsize.array as xp

MEASURE = """
import sys
import numpy as np
from outsize.array.kernels.blas import NOTHING, blas_threads, multiply_add, packing

def held():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

dtype, threads, rows, counted = np.dtype(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), NOTHING
shapes = [(64, 64, 64), (300, 200, 100), (50, 2000, 200), (1, 900, 900), (900, 1, 900), (rows, 200, 400), (rows // 4, 500, 1100)]
work = [(np.ones((m, k), dtype), np.ones((k, n), dtype), np.ones((m, n), dtype)) for m, n, k in shapes]
with blas_threads(threads):
    multiply_add(*(np.ones((8, 8), dtype) for _ in range(3)))
    before = held()
    for strip in (256 << 10, 32 << 20):
        for (m, n, k), (a, b, c) in zip(shapes, work):
            multiply_add(a, b, c, strip)
            counted = counted.join(packing(m, n, k, dtype, strip))
            added = 0 if dtype.char in "fd" else 2 * strip  # NumPy's product, which is then added
            assert held() - before <= counted.total(1, threads) + added + (256 << 10), (m, n, k, held() - before, counted)
"""


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_blas_takes_no_more_than_is_counted(dtype: str, threads: int) -> None:
    words = [dtype, str(threads), "2000" if long() else "500"]
    done = subprocess.run([sys.executable, "-c", MEASURE, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_threads_of_another_blas_are_set_by_threadpoolctl(monkeypatch: pytest.MonkeyPatch) -> None:
    from outsize.array.kernels import blas

    asked: list[tuple[int, str]] = []

    class Controller:
        def limit(self, *, limits: int, user_api: str) -> contextlib.AbstractContextManager[None]:
            asked.append((limits, user_api))
            return contextlib.nullcontext()

    monkeypatch.setattr(blas, "find_symbol", lambda name: None)
    for package, expected in ((types.SimpleNamespace(ThreadpoolController=Controller), [(3, "blas")]), (None, [])):
        asked.clear()
        blas._controller.cache_clear()
        monkeypatch.setitem(sys.modules, "threadpoolctl", package)
        with blas.blas_threads(3):
            assert asked == expected
    blas._controller.cache_clear()


def test_a_product_in_strips_is_the_product() -> None:
    from outsize.array.kernels.blas import multiply_add

    rng = np.random.default_rng(5)
    for dtype in ("float32", "float64", "complex64", "int64"):
        a, b = (rng.integers(-9, 9, shape).astype(dtype) for shape in ((300, 40), (40, 70)))
        total = np.ones((300, 70), dtype)
        multiply_add(a, b, total, 4096)
        np.testing.assert_array_equal(total, 1 + a @ b)


def test_a_plan_says_what_blas_takes_and_keeps() -> None:
    x = xp.asarray(np.ones((4096, 512), np.float32)) + 1
    plan = xp.sort(x.T @ x, axis=1).plan("24MiB")
    taken = [{part.name: part.bytes for part in step.parts}.get("buffers of BLAS", 0) for step in plan.steps]
    assert 0 < taken[0] <= taken[-1]  # sorting holds what the product has left
    assert "buffers of BLAS" in " ".join(str(plan).split())


def test_the_smallest_budget_is_no_larger_than_one_that_fits_and_works() -> None:
    rng = np.random.default_rng(1)
    values = rng.random((64, 8, 16, 8))
    x = xp.asarray(values) * 1
    made = xp.tensordot(x, x, axes=([0, 1], [0, 1]))
    plan = made.plan("2MiB")
    assert plan.peak() <= 2 << 20 and plan.smallest <= plan.peak()
    both = xp.sort((made * 2).reshape((128, 128)), axis=0)
    smallest = both.plan("2MiB").smallest
    assert both.plan(smallest).peak() <= smallest
    expected = np.sort(np.tensordot(values, values, axes=([0, 1], [0, 1])).reshape(128, 128) * 2, axis=0)
    np.testing.assert_allclose(both.compute(budget=smallest + expected.nbytes), expected, rtol=1e-12)


def test_planning_a_product_takes_little() -> None:
    x = xp.zeros((16384, 512), dtype="float32") + 1
    (x.T @ x).plan("8MiB")
    tracemalloc.start()
    try:
        (x.T @ x).plan("8MiB")
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
