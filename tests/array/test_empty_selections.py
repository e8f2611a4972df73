"""Selections of nothing, and small differences from NumPy that were found from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import outsize
import outsize.array as xp


@pytest.mark.parametrize(
    "work",
    [
        lambda x: np.sum(x[x > 1][::-1]), lambda x: np.prod(np.flip(x[x > 1])), lambda x: np.any(x[x > 1][::-1]),
        lambda x: np.flip(np.nonzero(x)[0]) + 1, lambda x: np.concatenate([x[x > 1][::-1], x]) * 2,
        lambda x: np.sort(x[x > 1])[::-1] - 1,
    ],
)  # fmt: skip
def test_a_selection_of_nothing_is_worked_on_like_any_other(work: Callable[[Any], Any]) -> None:
    x = np.zeros(5)
    np.testing.assert_array_equal(work(outsize.open(x)).compute(), work(x))


def test_products_of_empty_axes_are_turned_and_computed_with() -> None:
    given = np.zeros((31, 0, 3))
    lazy = xp.reshape(outsize.open(given), (3, 31, 0))
    made = xp.einsum("xij,xkj->xik", lazy, lazy)
    np.testing.assert_array_equal((made + 1).compute(), np.ones((3, 31, 31)))


def test_a_python_number_beside_unsigned_ones_wraps_as_in_numpy() -> None:
    x = np.arange(6, dtype="u2")
    np.testing.assert_array_equal(xp.where(outsize.open(x) > 3, outsize.open(x), -1).compute(), np.where(x > 3, x, -1))


def test_triangles_of_a_vector_are_numpys_and_of_a_number_are_refused() -> None:
    x = np.arange(4.0)
    for name in ("tril", "triu"):
        np.testing.assert_array_equal(getattr(xp, name)(outsize.open(x)).compute(), getattr(np, name)(x))
        with pytest.raises(outsize.InputError, match="take matrices"):
            getattr(xp, name)(outsize.open(np.array(1.0)))


def test_ufuncs_over_whole_axes_are_ours_or_refused_with_the_reason() -> None:
    x = np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(np.vecdot(outsize.open(x), x).compute(), np.vecdot(x, x))
    np.testing.assert_array_equal(np.matmul(outsize.open(x), x.T).compute(), x @ x.T)
    with pytest.raises(outsize.InputError, match="it returns 2 arrays"):
        np.frexp(outsize.open(x))


def test_an_array_is_iterable_so_that_no_library_takes_it_for_one_value() -> None:
    x = outsize.open(np.arange(6.0).reshape(3, 2))
    assert isinstance(x, Iterable)
    assert [row.compute().tolist() for row in x] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(TypeError, match="0-d"):
        iter(x.sum())
    pandas = pytest.importorskip("pandas")
    np.testing.assert_array_equal(pandas.Series(x[:, 0]), [0, 2, 4])
    np.testing.assert_array_equal(pandas.DataFrame(x), np.arange(6.0).reshape(3, 2))
