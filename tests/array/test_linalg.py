"""Linear algebra is NumPy's, for single matrices and for stacks."""

import functools
import math

import numpy as np
import pytest
from effort import examples, long
from hypothesis import given
from hypothesis import strategies as st
from test_fft import drawn as numbers

import outsize
from outsize.array import linalg as ours

DTYPES = ("f4", "f8", "c8", "c16", "i4")
STACKS = st.lists(st.integers(0, 4), max_size=2).map(tuple)


drawn = functools.partial(numbers, size=3)


def near(found, expected, dtype):
    expected = np.asarray(expected)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    precise = 2e-3 if np.dtype(dtype) in (np.float32, np.complex64) else 1e-9
    np.testing.assert_allclose(found, expected, rtol=precise, atol=precise * (1 + np.abs(expected).max(initial=0)))


@examples(60)
@given(stack=STACKS, rows=st.integers(1, 5), columns=st.integers(1, 5), dtype=st.sampled_from(DTYPES), data=st.data())
def test_what_streams(stack, rows, columns, dtype, data):
    x = drawn((*stack, rows, columns), dtype)
    lazy = outsize.open(x)
    offset = data.draw(st.integers(-6, 6))
    near(ours.diagonal(lazy, offset=offset).compute(), np.diagonal(x, offset, -2, -1), dtype)
    near(ours.trace(lazy, offset=offset).compute(), np.trace(x, offset, -2, -1), dtype)
    if dtype == "i4" or 0 in stack:
        return
    for order in ("fro", 1, -1, math.inf, -math.inf, 2, -2, "nuc"):
        keep = data.draw(st.booleans())
        near(
            ours.matrix_norm(lazy, ord=order, keepdims=keep).compute(),
            np.linalg.matrix_norm(x, ord=order, keepdims=keep),
            dtype,
        )
    for order in (0, 1, 2, 3, 0.5, math.inf, -math.inf):
        axis = data.draw(st.sampled_from((None, -1, -2)))
        near(
            ours.vector_norm(lazy, ord=order, axis=axis).compute(),
            np.linalg.vector_norm(x, ord=order, axis=axis),
            dtype,
        )


@examples(60)
@given(
    stack=STACKS,
    n=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
    power=st.integers(-2, 4),
    columns=st.integers(1, 3),
)
def test_square_matrices(stack, n, dtype, power, columns):
    x = drawn((*stack, n, n), dtype) + 12 * np.eye(n, dtype=dtype)
    sure = x @ np.conj(np.swapaxes(x, -1, -2))
    lazy, definite = outsize.open(x), outsize.open(sure)
    near(ours.det(lazy).compute(), np.linalg.det(x), dtype)
    near(ours.inv(lazy).compute(), np.linalg.inv(x), dtype)
    near(ours.cholesky(definite).compute(), np.linalg.cholesky(sure), dtype)
    near(ours.cholesky(definite, upper=True).compute(), np.conj(np.swapaxes(np.linalg.cholesky(sure), -1, -2)), dtype)
    near(ours.eigvalsh(definite).compute(), np.linalg.eigvalsh(sure), dtype)
    values, vectors = (part.compute() for part in ours.eigh(definite))
    near(values, np.linalg.eigvalsh(sure), dtype)
    near((vectors * values[..., None, :]) @ np.conj(np.swapaxes(vectors, -1, -2)), sure.astype(vectors.dtype), dtype)
    for found, expected in zip(ours.slogdet(lazy), np.linalg.slogdet(x), strict=True):
        near(found.compute(), expected, dtype)
    if dtype != "i4":
        near(ours.matrix_power(lazy, power).compute(), np.linalg.matrix_power(x, power), dtype)
    right, vector = drawn((*stack, n, columns), dtype, 1), drawn(n, dtype, 2)
    near(ours.solve(lazy, outsize.open(right)).compute(), np.linalg.solve(x, right), dtype)
    near(ours.solve(lazy, outsize.open(vector)).compute(), np.linalg.solve(x, vector), dtype)


@examples(40)
@given(
    stack=STACKS, rows=st.integers(1, 6), columns=st.integers(1, 6), dtype=st.sampled_from(DTYPES), whole=st.booleans()
)
def test_decompositions_give_the_matrix_back(stack, rows, columns, dtype, whole):
    x = drawn((*stack, rows, columns), dtype)
    lazy = outsize.open(x)
    q, r = (part.compute() for part in ours.qr(lazy, mode="complete" if whole else "reduced"))
    assert [q.shape, r.shape] == [part.shape for part in np.linalg.qr(x, "complete" if whole else "reduced")]
    near(q @ r, x.astype(q.dtype), dtype)
    u, s, vh = (part.compute() for part in ours.svd(lazy, full_matrices=whole))
    expected = np.linalg.svd(x, full_matrices=whole)
    assert [part.shape for part in (u, s, vh)] == [part.shape for part in expected]
    near(s, expected[1], dtype)
    inner = min(rows, columns)
    near((u[..., :inner] * s[..., None, :]) @ vh[..., :inner, :], x.astype(u.dtype), dtype)
    near(ours.svdvals(lazy).compute(), expected[1], dtype)
    near(ours.matrix_rank(lazy).compute(), np.linalg.matrix_rank(x), dtype)
    back = ours.pinv(lazy).compute()
    near(x.astype(back.dtype) @ back @ x.astype(back.dtype), x.astype(back.dtype), dtype)


@pytest.mark.parametrize("dtype", ["?", "i1", "u1", "i8", "u8", "f2", ">i2", ">f4"])
def test_norms_of_any_dtype_are_numpys(dtype):
    x = (np.arange(24).reshape(2, 3, 4) * 5 - (0 if dtype in "?u1u8" else 60)).astype(dtype)
    lazy = outsize.open(x)
    for order in (0, 1, 2, 3, 0.5, -1, math.inf, -math.inf):
        with np.errstate(divide="ignore", over="ignore"):
            expected = np.linalg.vector_norm(x, axis=-1, ord=order)
        found = ours.vector_norm(lazy, axis=-1, ord=order).compute()
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=1e-2 if dtype == "f2" else 1e-6)
    for order in ("fro", 1, -1, math.inf, -math.inf):
        found, expected = ours.matrix_norm(lazy, ord=order).compute(), np.linalg.matrix_norm(x, ord=order)
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=1e-2 if dtype == "f2" else 1e-6)


@pytest.mark.parametrize(("one", "other"), [("i1", "f4"), ("f4", "i2"), ("f4", "c16"), ("?", "c8")])
def test_solutions_have_the_dtype_of_numpys(one, other):
    a, b = np.eye(3).astype(one), np.ones((3, 2), other)
    found, expected = ours.solve(outsize.open(a), outsize.open(b)).compute(), np.linalg.solve(a, b)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected)


def test_numpys_functions_called_on_lazy_arrays_are_ours():
    x = drawn((2, 3, 3), "f8") + 9 * np.eye(3)
    lazy = outsize.open(x)
    for call in (
        lambda x: np.linalg.inv(x),
        lambda x: np.linalg.svd(x, False).S,
        lambda x: np.linalg.qr(x, "complete").R,
        lambda x: np.linalg.solve(x, x),
        lambda x: np.linalg.solve(np.eye(3), x),
        lambda x: np.linalg.matrix_power(x, -2),
        lambda x: np.linalg.norm(x, axis=-1),
        lambda x: np.linalg.vector_norm(x, ord=3),
        lambda x: np.linalg.slogdet(x).logabsdet,
        lambda x: np.linalg.pinv(x),
    ):
        found = call(lazy)
        assert isinstance(found, outsize.array.Array)
        near(found.compute(), call(x), "f8")
    with pytest.raises(outsize.InputError, match=r"svd of an array .* has no option compute_uv"):
        np.linalg.svd(lazy, compute_uv=False)
    with pytest.raises(outsize.InputError, match=r"np\.linalg\.cond has no out-of-core rule"):
        np.linalg.cond(lazy)


def test_vectors():
    a, b = drawn((4, 3), "f8"), drawn((4, 3), "f8", 1)
    np.testing.assert_allclose(ours.cross(outsize.open(a), outsize.open(b)).compute(), np.linalg.cross(a, b))
    np.testing.assert_allclose(
        ours.cross(outsize.open(a.T), outsize.open(b.T), axis=0).compute(), np.linalg.cross(a.T, b.T, axis=0)
    )
    np.testing.assert_allclose(ours.outer(outsize.open(a[:, 0]), outsize.open(b[0])).compute(), np.outer(a[:, 0], b[0]))
    ranks = ours.matrix_rank(outsize.open(np.stack([np.diag([3.0, 2.0, 1.0])] * 2)), rtol=np.array([0.5, 0.1]))
    assert ranks.compute().tolist() == [2, 3]


def test_a_stack_larger_than_the_budget_streams_and_parts_are_made_once(tmp_path):
    x = drawn((6000 if long() else 3000, 16, 16), "f8")  # 12 MiB, or half of that
    budget = 8 << 20 if long() else 4 << 20
    np.save(tmp_path / "x.npy", x)
    u, s, vh = ours.svd(outsize.open(tmp_path / "x.npy"), full_matrices=False)
    again = (u * s[:, None, :]) @ vh
    plan = again.plan(budget=budget)
    assert plan.peak() <= budget and sum("svd" in step.name for step in plan.steps) == 1
    np.testing.assert_allclose(again.save(tmp_path / "y.npy", budget=budget).compute(), x, atol=1e-10)


def test_results_of_matrices_without_elements_are_counted_too():
    q, r = ours.qr(outsize.open(np.empty((2, 500, 0))), mode="complete")
    assert q.plan(budget="1MiB").peak() > 3 * 500 * 500 * 8  # one of them, as it is made
    np.testing.assert_array_equal(q.compute(), np.stack([np.eye(500)] * 2))
    assert r.compute().shape == (2, 500, 0)
    for shape in ((3, 0, 0), (0, 2, 0), (2, 0, 3)):
        for found, expected in zip(
            ours.svd(outsize.open(np.empty(shape))), np.linalg.svd(np.empty(shape)), strict=True
        ):
            np.testing.assert_array_equal(found.compute(), expected)


def test_mistakes_are_named():
    square, singular = outsize.open(np.eye(3)), outsize.open(np.zeros((2, 3, 3)))
    for call, words in (
        (lambda: ours.inv(outsize.open(np.ones((2, 3)))), "not square"),
        (lambda: ours.det(outsize.open(np.ones(3))), "no matrices"),
        (lambda: ours.inv(singular).compute(), "inv of one of the matrices failed: Singular"),
        (lambda: ours.solve(square, outsize.open(np.ones(4))), "3 equations"),
        (lambda: ours.qr(square, mode="half"), "mode 'half'"),
        (lambda: ours.matrix_norm(square, ord=7), "no ord 7"),
        (lambda: ours.outer(square, square), "two vectors"),
        (lambda: ours.matrix_power(square, 1.5), "whole number, not 1.5"),
        (lambda: ours.inv([[1.0]]), "asarray"),
        (lambda: ours.det(outsize.open(np.array([["a"]]))), "numbers and not"),
        (lambda: ours.cross(outsize.open(np.ones(2)), outsize.open(np.ones(2))), "three numbers"),
    ):
        with pytest.raises(outsize.InputError, match=words):
            call()
