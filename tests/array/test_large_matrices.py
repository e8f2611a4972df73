"""Matrices larger than the budget: factors, solutions, determinants; tall ones by blocks of rows."""

import os
import sys

import cgroup
import numpy as np
import pytest

import outsize
import outsize.array as xp

N = 130
RNG = np.random.default_rng(0)
A = RNG.normal(size=(N, N))
TALL = RNG.normal(size=(3001, 9))
TALL[:, 3] = TALL[:, 2] * (1 + 1e-12)


@pytest.fixture
def small_budget(tune):
    tune(made_now=1 << 10)
    with outsize.budget(host="512KiB"):
        yield


def residual(product, want):
    return np.abs(product - want).max() / np.abs(want).max()


@pytest.mark.parametrize("dtype", ["f8", "f4", "c16"])
def test_a_matrix_larger_than_the_budget_is_factored_and_solved_to_numpys_accuracy(small_budget, dtype):
    a = (A + 1j * A.T).astype(dtype) if dtype == "c16" else A.astype(dtype)
    positive = a @ a.conj().T + N * np.eye(N, dtype=dtype)
    eps = np.finfo(dtype).eps
    lower = xp.linalg.cholesky(outsize.open(positive))
    assert lower.dtype == positive.dtype
    found = lower.compute("64MiB")
    assert residual(found @ found.conj().T, positive) < 40 * eps
    assert not np.triu(found, 1).any()
    upper = xp.linalg.cholesky(outsize.open(positive), upper=True).compute("64MiB")
    assert residual(upper.conj().T @ upper, positive) < 40 * eps
    right = a[:, :5].copy()
    solution = xp.linalg.solve(outsize.open(a), outsize.open(right)).compute("64MiB")
    theirs = np.linalg.solve(a, right)
    assert residual(a @ solution, right) < 10 * residual(a @ theirs, right) + 100 * eps
    assert xp.linalg.solve(outsize.open(a), outsize.open(right[:, 0])).shape == (N,)


def test_inverses_and_determinants_past_the_budget(small_budget):
    inverse = xp.linalg.inv(outsize.open(A)).compute("64MiB")
    assert residual(A @ inverse, np.eye(N)) < 10 * residual(A @ np.linalg.inv(A), np.eye(N))
    sign, size = xp.linalg.slogdet(outsize.open(A))
    want = np.linalg.slogdet(A)
    assert float(sign) == want.sign and np.isclose(float(size), want.logabsdet, rtol=1e-13)
    small = A / np.exp(want.logabsdet / N)
    assert np.isclose(float(xp.linalg.det(outsize.open(small))), np.linalg.det(small), rtol=1e-10)


def test_what_has_no_factors_says_why(small_budget):
    with pytest.raises(outsize.InputError, match="not positive definite"):
        xp.linalg.cholesky(outsize.open(A - 50 * np.eye(N)))
    with pytest.raises(outsize.InputError, match="singular"):
        xp.linalg.solve(outsize.open(np.ones((N, N))), outsize.open(np.ones(N)))
    with outsize.budget(host="32KiB"), pytest.raises(outsize.BudgetError, match="panels of 16 columns") as caught:
        xp.linalg.cholesky(outsize.open(A))
    with outsize.budget(host=caught.value.smallest):
        xp.linalg.cholesky(outsize.open(A @ A.T + np.eye(N)))


@pytest.mark.parametrize("dtype", ["f8", "c8"])
def test_a_tall_matrix_is_factored_by_blocks_of_its_rows(tune, dtype):
    tune(tall_matrix=1 << 14)
    x, eps = outsize.open(TALL.astype(dtype)), np.finfo(dtype).eps
    q, r = (part.compute() for part in xp.linalg.qr(x))
    assert q.dtype == r.dtype == np.dtype(dtype)
    assert residual(q @ r, TALL) < 100 * eps and np.abs(q.conj().T @ q - np.eye(9)).max() < 100 * eps
    assert not np.tril(r, -1).any()
    for given in (x, x.T):
        u, s, vh = (part.compute() for part in xp.linalg.svd(given, full_matrices=False))
        assert residual((u * s) @ vh, np.asarray(given)) < 100 * eps
        np.testing.assert_allclose(xp.linalg.svdvals(given).compute(), s, rtol=1e-3, atol=1e3 * eps)
    right = RNG.normal(size=(3001, 2))
    found, want = (
        xp.linalg.lstsq(x, right),
        np.linalg.lstsq(TALL.astype(dtype), right, rcond=1e-5 if dtype == "c8" else None),
    )
    if dtype == "f8":
        np.testing.assert_allclose(found[0].compute(), want[0], rtol=1e-6)
        assert int(found[2]) == want[2] == 8


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_a_tall_matrix_is_factored_in_a_budget_of_a_part_of_it(tune, dtype):
    tune(made_now=1 << 10)
    x = RNG.normal(size=(40_000, 10)).astype(dtype)
    eps = np.finfo(dtype).eps
    for given in (x, x * np.where(np.arange(10) == 3, 1e-9, 1).astype(dtype), x[:, [0, 1, 2, 3, 0, 5, 6, 7, 8, 9]]):
        with outsize.budget(host=x.nbytes // 2):
            q, r = xp.linalg.qr(outsize.open(given))
            assert q.plan().peak() <= x.nbytes // 2
            assert xp.linalg.svd_lowrank(outsize.open(given), 3).U.plan().peak() <= x.nbytes // 2
        q, r = q.compute(), r.compute()
        assert q.dtype == dtype and residual(q @ r, given) < 20 * eps
        assert np.abs(q.T @ q - np.eye(10)).max() < 20 * eps  # also where two columns are equal


def test_factors_are_the_same_without_the_routines_of_lapack(small_budget, monkeypatch):
    from outsize.array.api import large_matrices as large

    right, positive = RNG.normal(size=(N, 3)), A @ A.T + N * np.eye(N)
    with_them = [xp.linalg.solve(outsize.open(A), outsize.open(right)).compute("64MiB"),
                 xp.linalg.cholesky(outsize.open(positive)).compute("64MiB")]  # fmt: skip
    monkeypatch.setattr(large, "factor_columns", lambda columns: None)
    monkeypatch.setattr(large, "solve_triangle", lambda *args, **options: False)
    np.testing.assert_allclose(
        xp.linalg.solve(outsize.open(A), outsize.open(right)).compute("64MiB"), with_them[0], rtol=1e-9
    )
    np.testing.assert_allclose(xp.linalg.cholesky(outsize.open(positive)).compute("64MiB"), with_them[1], atol=1e-12)


def test_a_narrow_product_has_one_thread_of_blas():
    x = outsize.open(np.zeros((1 << 16, 256), "f4"))
    for right, cores in (
        (np.zeros((256, 20), "f4"), "BLAS on 1 cores"),
        (np.zeros((256, 2000), "f4"), f"{os.cpu_count()} cores"),
    ):
        (step,) = (x @ outsize.open(right)).plan(budget="64MiB").steps
        assert any(cores in note for note in step.notes) or os.cpu_count() == 1


def test_the_first_singular_values_are_found_by_projection_within_the_stated_error(tune):
    tune(tall_matrix=1 << 14)
    low = RNG.normal(size=(2000, 6)) @ RNG.normal(size=(6, 50)) + 1e-6 * RNG.normal(size=(2000, 50))
    u, s, vh = (part.compute() for part in xp.linalg.svd_lowrank(outsize.open(low), 6))
    values = np.linalg.svd(low, compute_uv=False)
    np.testing.assert_allclose(s, values[:6], rtol=1e-9)
    bound = (1 + 4 * np.sqrt(2 * 50 / 5)) ** (1 / 5) * values[6]
    assert np.linalg.norm(low - (u * s) @ vh, 2) <= bound
    with pytest.raises(outsize.InputError, match="no first 51"):
        xp.linalg.svd_lowrank(outsize.open(low), 51)


CHILD = """
import sys, numpy as np, outsize, outsize.array as xp
def high(reset=False):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
warm = np.eye(300) * 3
for a in (np.linalg.cholesky(warm), np.linalg.inv(warm), warm @ warm): pass
(outsize.open(warm) @ warm).compute()
np.save(sys.argv[1] + ".warm.npy", warm)
(outsize.open(sys.argv[1] + ".warm.npy") @ warm).save(sys.argv[1] + ".product.npy", budget="4MiB")  # planned and streamed
some = outsize.open(np.eye(800) * 3)
with outsize.budget(host="2MiB"):  # BLAS keeps what its triangles take
    xp.linalg.cholesky(some)
x, budget = outsize.open(sys.argv[1]), int(sys.argv[2])
before = high()
with outsize.budget(host=budget):
    lower = xp.linalg.cholesky(x)
    found = xp.linalg.solve(x, outsize.open(np.ones(x.shape[0])))
    v = np.ones(x.shape[0])
    left = (x @ v).compute() - (lower @ (lower.T @ v)).compute()
    print(high() - before, np.abs(left).max() / np.abs(np.asarray((x @ v).compute())).max(),
          np.abs((x @ found).compute() - 1).max())
"""


def test_the_panels_of_a_matrix_keep_the_budget_in_a_container(tmp_path):
    n, budget = 1400, 12 << 20  # 15 MiB
    a = RNG.normal(size=(n, n)) / 10
    np.save(tmp_path / "x.npy", a + a.T + 12 * np.eye(n))
    outcome = cgroup.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "x.npy"), str(budget)],
        256 << 20,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert outcome.fine, outcome.stderr
    grown, left, wrong = map(float, outcome.stdout.split())
    assert grown <= budget + (2 << 20)
    assert left < 1e-13 and wrong < 1e-11
