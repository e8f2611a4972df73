"""The array as users meet it: what it says, what it refuses, odd shapes, in-place writing, NumPy's own functions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outsize
import outsize.array as xp
from outsize.array.kernels import blas
from outsize.array.kernels import copies as copy

ODD = [(), (0,), (0, 5), (1,), (1, 7919), (7919, 1), (97, 89), (2, 1, 3, 1, 2, 3, 2), (1, 1, 1)]


@pytest.mark.parametrize("shape", ODD)
@pytest.mark.parametrize("dtype", ["float32", ">f8", "int16"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_odd_shapes_byte_orders_and_fortran_order_go_through(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, order: str
) -> None:
    a = np.asarray(np.random.default_rng(0).random(shape) * 90, order=order).astype(dtype, order=order)  # type: ignore[call-overload]
    np.save(tmp_path / "a.npy", a)
    x = outsize.open(tmp_path / "a.npy")
    for budget in ("128KiB", "128MiB"):
        np.testing.assert_array_equal(np.load(_saved(x + 1, tmp_path, budget)), a + 1)
        np.testing.assert_array_equal(np.load(_saved(x.T, tmp_path, budget)), a.T)
        np.testing.assert_allclose(x.sum().compute(budget), a.sum(dtype="float64"), rtol=1e-6)
        np.testing.assert_allclose(x.mean(axis=tuple(range(a.ndim))[:1]).compute(budget) if shape and shape[0] else 0,
                                   a.mean(axis=tuple(range(a.ndim))[:1]) if shape and shape[0] else 0, rtol=1e-6)  # fmt: skip


def _saved(array: xp.Array, folder: Path, budget: str, device: str | None = None) -> Path:
    array.save(folder / "out.npy", budget=budget, device=device)
    return folder / "out.npy"


def test_its_text_says_shape_dtype_bytes_and_where_it_lies(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 4), "float32"))
    x = outsize.open(tmp_path / "a.npy")
    assert repr(x) == f"<outsize.Array float32[3, 4] 48 B '{tmp_path / 'a.npy'}'>"
    assert "svg" in x._repr_html_() and "3, 4" in x._repr_html_()
    assert "write add" in str((x + 1).plan("1MiB"))


def test_numpys_own_functions_come_here(tmp_path: Path) -> None:
    a = np.random.default_rng(0).random((6, 5))
    np.save(tmp_path / "a.npy", a)
    x = outsize.open(tmp_path / "a.npy")
    for lazy, want in [
        (np.sin(x), np.sin(a)), (np.mean(x, axis=0), a.mean(0)), (np.concatenate([x, a]), np.concatenate([a, a])),
        (np.add(a, x), a + a), (a @ x.T, a @ a.T), (np.where(x > 0.5, x, 0), np.where(a > 0.5, a, 0)),
        (np.transpose(x), a.T), (np.clip(x, 0.2, 0.4), np.clip(a, 0.2, 0.4)), (np.einsum("ij->j", x), a.sum(0)),
    ]:  # fmt: skip
        assert isinstance(lazy, xp.Array)
        np.testing.assert_allclose(lazy.compute(), want)
    with pytest.raises(outsize.InputError, match="no out-of-core rule"):
        np.linalg.cond(x)


def test_writing_in_place_changes_that_region_and_nothing_else(tmp_path: Path) -> None:
    a = np.arange(3000.0).reshape(50, 60)
    for order in "CF":
        path = tmp_path / f"{order}.npy"
        np.save(path, np.asarray(a, order=order))  # type: ignore[call-overload]
        x = outsize.open(path, mode="r+")
        x[10:20, 5:7] = -1
        x[3] = np.arange(60)
        x[40:, :] = xp.sqrt(xp.asarray(a[40:]))
        want = a.copy()
        want[10:20, 5:7] = -1
        want[3] = np.arange(60)
        want[40:, :] = np.sqrt(a[40:])
        np.testing.assert_array_equal(np.load(path), want)
        with pytest.raises(outsize.InputError, match="both read and written"):
            x[:10] = x[10:20]
    y = outsize.open(path)
    y[0] = 1
    assert float(y.sum()) != float(outsize.open(path).sum())
    np.testing.assert_array_equal(np.load(path), want)  # what is open for reading is not written


def test_a_user_function_without_a_memory_rule_is_refused() -> None:
    with pytest.raises(outsize.InputError, match="needs memory="):
        xp.map_blocks(np.sin, xp.zeros(10))
    with pytest.raises(outsize.InputError, match="needs memory="):
        xp.map_overlap(np.sin, xp.zeros(10), depth=1)


def test_a_result_too_large_for_memory_says_to_save_it() -> None:
    with pytest.raises(outsize.BudgetError, match=r"\.save\(path\)") as caught:
        xp.zeros((1 << 20, 1 << 10)).compute(budget="1MiB")
    assert caught.value.culprit == "the result"


def test_a_shape_that_no_memory_holds_is_planned_all_the_same() -> None:
    plan = (xp.zeros((10**9, 10**9)) + 1).plan("1GiB")
    assert plan.fits and plan.written == 8 * 10**18


def test_sums_of_many_float32_do_not_drift(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.full((1 << 21, 4), 0.1, "float32"))
    x = outsize.open(tmp_path / "a.npy")
    exact = float(np.float32(0.1)) * (1 << 21)
    np.testing.assert_allclose(x.sum(axis=0).compute(), exact, rtol=1e-7)
    np.testing.assert_allclose(float(x.sum()), 4 * exact, rtol=3e-7)
    assert float((x + 1000).var()) < 1e-6


def test_variance_of_a_far_shifted_step_is_right(tmp_path: Path) -> None:
    a = np.concatenate([np.zeros(40_000), 1e6 + np.random.default_rng(0).random(400_000)]).astype("float32")
    np.save(tmp_path / "a.npy", a)
    np.testing.assert_allclose(float(outsize.open(tmp_path / "a.npy").var()), a.astype("f8").var(), rtol=1e-6)


def test_means_and_moments_of_one_array_ride_on_one_read(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((4000, 1000), "float32"))
    x = outsize.open(tmp_path / "a.npy")
    plan = ((x - x.mean(axis=0)) / x.std(axis=0) + x.max()).plan("4MiB")
    assert len(plan.steps) == 2
    assert plan.steps[0].read < 1.1 * x.nbytes
    kept = ((x - x.mean(axis=0)) / x.std(axis=0)).plan("100MiB")
    assert kept.read < 1.1 * x.nbytes


@pytest.mark.parametrize("budget", ["256KiB", "64MiB"])
@pytest.mark.parametrize("device", [None, "fake"])
def test_the_same_result_written_twice_is_made_once_and_read_by_both(
    budget: str, device: str | None, tmp_path: Path
) -> None:
    a = np.random.default_rng(0).random((200, 250))
    x = outsize.open(a)
    with outsize.budget(scratch=str(tmp_path)):  # the product stays in memory, or lies in a file
        for made, want in (
            (x.sum() + x.sum(), 2 * a.sum()),
            ((x - x.mean()) / (x.std() + x.mean()), (a - a.mean()) / (a.std() + a.mean())),
            (x.sum(axis=0) * (x.max() - x.sum(axis=0)), a.sum(0) * (a.max() - a.sum(0))),
            (((x @ x.T) * 2 - x @ x.T).sum(), (a @ a.T).sum()),
        ):
            np.testing.assert_allclose(np.load(_saved(made, tmp_path, budget, device)), want)


def test_functions_that_differ_in_what_they_were_given_are_not_taken_for_one_another() -> None:
    a = np.random.default_rng(0).random((20, 30))
    x = outsize.open(a)

    def again(k: float) -> Callable[[np.ndarray], np.ndarray]:
        def function(b: np.ndarray, rest: int = 1) -> np.ndarray:
            return function(b, 0) if rest else b * k

        return function

    weights = [np.full(5, 2.0), np.full(5, 3.0)]
    for one, two in (
        (again(2), again(3)),
        (partial(np.multiply, 2), partial(np.multiply, 3)),
        (np.float64(2).__mul__, np.float64(3).__mul__),
        (lambda b, w=weights[0]: b * w[0], lambda b, w=weights[1]: b * w[0]),
        (lambda b: np.stack([row * 2 for row in b]), lambda b: np.stack([row * 3 for row in b])),
        (lambda b: np.add(b, b), lambda b: np.exp(b) * 0 + 3 * b),
    ):
        made = [xp.map_blocks(function, x, memory=4).sum() for function in (one, two)]
        np.testing.assert_allclose((made[0] - 10 * made[1]).compute(), -28 * a.sum())
    made = [xp.map_blocks(function, x, memory=4).sum() for function in (lambda b: np.sin(b), lambda b: np.cos(b))]
    np.testing.assert_allclose((made[0] - made[1]).compute(), np.sin(a).sum() - np.cos(a).sum())
    ones, more = (xp.full(a.shape, np.array(value)) for value in (1.0, 1 + 1e-9))
    np.testing.assert_allclose(((x * more).max() - (x * ones).max()).compute(), 1e-9 * a.max(), rtol=1e-5)


@pytest.mark.parametrize("hide", [False, True])
def test_products_and_transposes_do_without_the_blas_symbols(monkeypatch: pytest.MonkeyPatch, hide: bool) -> None:
    if hide:
        monkeypatch.setattr(blas, "find_symbol", lambda name: None)
        monkeypatch.setattr(copy, "_routine", lambda char: None)
    rng = np.random.default_rng(0)
    a = rng.random((300, 200)).astype("float32")
    total = np.ones((300, 300), "float32")
    blas.multiply_add(a, a.T, total)
    np.testing.assert_allclose(total, a @ a.T + 1, rtol=1e-5)
    turned = np.empty((200, 300), "float32")
    copy.copy_block(turned, a.T)
    np.testing.assert_array_equal(turned, a.T)


@pytest.mark.parametrize(
    "name", ["sort", "argsort", "median", "rfft", "repeat", "quantile of two axes"]
)  # each reads the whole array once for every few columns, where it is not turned
def test_a_small_array_is_turned_where_the_budget_is_smaller(
    tmp_path: Path, name: str, tune: Callable[..., None]
) -> None:
    tune(at_once=0)
    a = np.random.default_rng(3).random((2000, 700)).astype("float32")
    np.save(tmp_path / "x.npy", a)
    x = outsize.open(tmp_path / "x.npy")
    make: Any = {
        "sort": lambda m, v: m.sort(v, axis=0),
        "argsort": lambda m, v: m.argsort(v, axis=0, stable=True),
        "median": lambda m, v: m.median(v, axis=0),
        "rfft": lambda m, v: m.fft.rfft(v, axis=0),
        "repeat": lambda m, v: m.repeat(m.sort(v, axis=0), 2, axis=0),
        "quantile of two axes": lambda m, v: m.quantile(v.reshape((1000, 2, 700)), 0.25, axis=(0, 1)),
    }[name]
    lazy, budget = make(xp, x), 700 << 10
    plan = lazy.plan(budget=budget)
    assert sum(step.read for step in plan.steps) < 60 * x.nbytes
    assert plan.peak() <= budget
    lazy.save(tmp_path / "y.npy", budget=budget)
    wanted = make(np, a)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), wanted, rtol=1e-4, atol=1e-2 if name == "rfft" else 1e-6)
    ample = lazy.plan(budget="1GiB")
    assert sum(step.read for step in ample.steps) <= 3 * x.nbytes


def test_lanes_across_rows_are_turned_in_passes_of_their_own(tmp_path: Path, tune: Callable[..., None]) -> None:
    tune(turned=0)
    a = np.random.default_rng(0).random((300, 40, 5))
    np.save(tmp_path / "a.npy", a)
    x = outsize.open(tmp_path / "a.npy")
    with outsize.budget(host="150KiB", scratch=str(tmp_path / "scratch")):
        ordered = xp.sort(x, axis=0, descending=True)
        assert len(ordered.plan().steps) == 3
        np.testing.assert_array_equal(np.load(_saved(ordered, tmp_path, "150KiB")), np.sort(a, 0)[::-1])
        np.testing.assert_array_equal(np.load(_saved(xp.argsort(x, axis=1), tmp_path, "150KiB")), np.argsort(a, 1))


def test_single_values_become_python_numbers() -> None:
    x = xp.asarray(np.arange(5))
    assert int(x.sum()) == 10 and bool(x.any()) and list(range(5))[x.argmax()] == 4
    with pytest.raises(TypeError, match="not a single value"):
        float(x)


def test_functions_with_a_variable_that_has_no_value_yet_are_called_and_told_apart() -> None:
    def later(k: float) -> Callable[[np.ndarray], np.ndarray]:
        def function(b: np.ndarray) -> np.ndarray:
            return b * k if k else other(b)

        if not k:
            other = function
        return function

    x = outsize.open(np.arange(6.0))
    made = [xp.map_blocks(later(k), x, memory=4).sum() for k in (2, 3)]
    assert (made[1] - made[0]).compute() == 15


def _interrupt(event: object) -> None:
    if type(event).__name__ == "Advanced":
        raise KeyboardInterrupt


def test_arrays_past_what_an_address_counts_are_reduced_in_chunks_and_never_made_whole(tmp_path: Path) -> None:
    endless = xp.zeros(2**62)
    for small in (
        endless.sum(),
        endless.any(),
        (xp.zeros(2**62, dtype="int8") + 1j).mean(),
        endless[5::-1],
        endless[:: 2**60],
    ):
        small.plan().check()
    assert endless[2**61 :: 2**60].compute().tolist() == [0, 0]
    with pytest.raises(KeyboardInterrupt):  # it runs chunk by chunk, and nobody waits for the last one
        endless.sum().compute(progress=_interrupt)
    product = xp.zeros((2**31, 4)) @ xp.zeros((4, 2**31))
    with pytest.raises(outsize.BudgetError, match="disk"):
        product[:2, :2].compute()
    for make in (endless.compute, endless.plan, product.compute, lambda: endless.save(tmp_path / "x.npy")):
        with pytest.raises(outsize.InputError, match=r"would be 32,768\.00 PiB.*reduce it, or take a part"):
            make()
    assert not list(tmp_path.iterdir())


def test_one_element_of_a_result_that_is_kept_in_memory_is_planned_without_looking_at_it() -> None:
    plan = "print(xp.cumulative_sum(xp.zeros(2**36))[-1].plan(budget='8TiB').peak())"  # a look ends the process
    done = subprocess.run([sys.executable, "-c", f"import outsize.array as xp; {plan}"], capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout) > 2**39, done.stderr


@pytest.mark.parametrize("values", [[np.inf + 5j], [-np.inf - 3j, -np.inf - 2j], [complex(np.inf, -np.inf), 1j]])
def test_extremes_of_complex_numbers_start_at_their_own_ends(values):
    a = np.array(values)
    x = outsize.open(a)
    assert complex(x.min().compute()) == a.min()
    assert complex(x.max().compute()) == a.max()
