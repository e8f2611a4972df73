"""Appending along a growing axis: the past data are not needed, and the error of the whole stays a bound."""

from __future__ import annotations

import numpy as np
import pytest
from effort import examples
from factor_forms import DTYPES, dense, draw_array, make
from hypothesis import given
from hypothesis import strategies as st

from outsize import InputError
from outsize.factor import Factored

LENGTHS = {"tucker": (12, 9, 8), "tt": (12, 9, 8), "svd": (20, 15)}


def noisy(
    method: str, shape: tuple[int, ...], dtype: str, seed: int, size: float = 0.004
) -> tuple[Factored, np.ndarray]:
    """Factors, and data that they are a known distance from."""
    form = make(method, shape, tuple([2] * len(shape)), dtype, 7)  # the same subspaces every time, up to their length
    rng = np.random.default_rng(seed)
    x = dense(form) * (1 + rng.random())
    noise = draw_array(rng, shape, dtype).astype(x.dtype)
    noise *= size * np.linalg.norm(x) / np.linalg.norm(noise)
    form = make(method, shape, tuple([2] * len(shape)), dtype, 7).scaled(
        float(np.linalg.norm(x) / np.linalg.norm(dense(form)))
    )
    truth = x + noise
    error = float(np.linalg.norm(truth - dense(form)) / np.linalg.norm(truth))
    return Factored(form, error=error * (1 + 1e-9), asked=0.01, norm=float(np.linalg.norm(truth))), truth


@given(st.sampled_from(sorted(LENGTHS)), st.sampled_from(DTYPES), st.integers(1, 3), st.data())
@examples(60)
def test_after_many_appends_the_said_error_is_still_a_bound(method, dtype, times, data):
    shape = LENGTHS[method]
    axis = data.draw(st.integers(0, len(shape) - 1))
    f, truth = noisy(method, shape, dtype, 0)
    for number in range(1, times + 1):
        longer = tuple(
            data.draw(st.integers(1, 6)) + 2 if mode == axis else length for mode, length in enumerate(shape)
        )
        g, more = noisy(method, longer, dtype, number)
        f = f.append(g, axis)
        truth = np.concatenate([truth, more], axis)
        assert f.shape == truth.shape and f.method == method
        said, true = f.error, np.linalg.norm(dense(f.form) - truth) / np.linalg.norm(truth)
        assert true <= said <= f.asked == 0.01
        assert [row.kept for row in f.spectra] == list(f.ranks)


def test_what_lies_in_the_same_space_does_not_grow_the_ranks():
    rng = np.random.default_rng(0)
    bases = [np.linalg.qr(rng.standard_normal((n, 3)))[0] for n in (50, 40)]
    f = None
    for _ in range(6):
        block = np.einsum("tab,ia,jb->tij", rng.standard_normal((10, 3, 3)), *bases)
        left, core = np.linalg.qr(np.einsum("tij,ia,jb->tab", block, *bases).reshape(10, 9))
        from outsize.factor import Tucker

        g = Factored(
            Tucker(core.reshape(-1, 3, 3), (left, *bases)), error=0.0, asked=0.01, norm=float(np.linalg.norm(block))
        )
        f = g if f is None else f.append(g)
    assert f.shape == (60, 50, 40) and f.ranks[1:] == (3, 3) and f.ranks[0] <= 9 and f.error <= 0.01


def test_what_cannot_be_appended_is_refused_in_one_sentence():
    f, _ = noisy("tucker", (5, 6, 7), "float64", 0)
    cp = Factored(make("cp", (5, 6), (2, 2), "float64"), error=0.01)
    unknown = Factored(make("svd", (5, 6), (2, 2), "float64"), error=None)
    for call, words in (
        (lambda: cp.append(cp), "cannot append to CP: no theorem"),
        (lambda: unknown.append(unknown), "nothing is known of the error"),
        (lambda: f.append(np.ones((2, 6, 8))), r"behind \(5, 6, 7\) along axis 0 has its other lengths"),
        (lambda: f.append(np.ones((2, 6))), "other lengths"),
        (lambda: f.append(f, axis=3), "axis 3 is not one of the 3 axes"),
        (lambda: f.append(f, error=2), "0 < error < 1"),
        (lambda: f.append(f, error=1e-9), "cannot be kept: both parts have lost"),
    ):
        with pytest.raises(InputError, match=words) as told:
            call()
        assert "\n" not in str(told.value)


@pytest.mark.parametrize("method", ["tucker", "tt", "svd"])
def test_new_data_are_decomposed_and_appended(method):
    rng = np.random.default_rng(3)
    shape = (40, 30) if method == "svd" else (24, 20, 16)
    low = dense(make(method, shape, tuple([3] * len(shape)), "float64", 5))
    x = low + 1e-3 * np.linalg.norm(low) / np.sqrt(low.size) * rng.standard_normal(shape)
    from outsize import decompose

    f = decompose(x[:16], method, error=0.01, budget="64MiB")
    for start in range(16, shape[0], 4):
        f = f.append(x[start : start + 4], budget="64MiB")
    assert f.shape == shape
    assert np.linalg.norm(f.compute() - x) / np.linalg.norm(x) <= f.error <= 0.01
