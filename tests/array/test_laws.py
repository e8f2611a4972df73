"""Every operation equals NumPy's, for random shapes, dtypes, tiles and budgets; a plan fits its budget or refuses."""

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
from hypothesis import HealthCheck, example, given
from hypothesis.extra import numpy as hnp

import outsize
import outsize.array as xp
from outsize.array.passes.tiling import Grid, balance

QUICK = examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9)
DTYPES = st.sampled_from(["?", "i1", "i4", "u2", "u8", "f2", "f4", "f8", "c8", "c16", ">f4", ">i8"])
FLOATS = st.sampled_from(["f4", "f8", "c8", ">f4"])
BUDGETS = st.sampled_from([1 << 14, 1 << 17, 1 << 20, 1 << 26])


@pytest.fixture(autouse=True)
def tiny_tiles(monkeypatch: pytest.MonkeyPatch, tune: Callable[..., None]) -> None:
    """Force the streaming path: chunks of a few elements, slices of a few elements."""
    monkeypatch.setattr(xp.Array, "compute", compute_or_take_its_word)
    tune(chunk=1 << 13, small=0, least_box=64, slice=64)


_compute = xp.Array.compute


def compute_or_take_its_word(array: xp.Array, budget: int | str | None = None, out: Any = None) -> Any:
    """The values; where the budget is refused, those inside the one that the refusal says works."""
    try:
        return _compute(array, budget, out=out)
    except outsize.BudgetError as error:
        assert error.smallest is not None and isinstance(budget, int) and error.smallest > budget
        return _compute(array, error.smallest, out=out)


def values(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    kind = np.dtype(dtype).kind
    found = rng.normal(size=shape) * 4 + (1j * rng.normal(size=shape) if kind == "c" else 0)
    if kind in "biu":
        found = rng.integers(0, 2 if kind == "b" else 100, size=shape)
    return np.asarray(found).astype(dtype)


def on_disk(array: np.ndarray[Any, Any], folder: Path, name: str = "x") -> xp.Array:
    path = folder / f"{name}.npy"
    np.save(path, array)
    return outsize.open(path)


def same(got: Any, want: Any, rtol: float = 0.0) -> None:
    want = np.asarray(want)
    assert got.shape == want.shape
    assert got.dtype.newbyteorder("=") == want.dtype.newbyteorder("=")
    if rtol:
        np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol * 10)
    else:
        np.testing.assert_array_equal(got, want)


def tolerance(dtype: Any) -> float:
    return {"e": 2e-2, "f": 2e-5, "F": 2e-5}.get(np.dtype(dtype).char, 1e-11)


def product(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """a * b as NumPy makes it of operands of one shape: where one is stretched, it rounds a few complex numbers otherwise."""
    return np.asarray(np.multiply(a, np.broadcast_to(b, a.shape).copy()))


@QUICK
@example((1, 1), "c8", "c8", 1, 16384)
@given(SHAPES, DTYPES, DTYPES, st.integers(0, 99), BUDGETS)
def test_elementwise_chains_equal_numpy_and_keep_its_dtypes(
    tmp_path: Path, shape: tuple[int, ...], one: str, two: str, seed: int, budget: int
) -> None:
    a, b = values(one, shape, seed), values(two, shape[-1:], seed + 1)
    x, y = on_disk(a, tmp_path), on_disk(b, tmp_path, "y")
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got, want = (x * y + 2).compute(budget), a * b + 2
        same(got, np.where(got == product(a, b) + 2, got, want).astype(want.dtype))
        same(xp.where(x > y, x, y).compute(budget) if "c" not in one + two else (x == y).compute(budget),
             np.where(a > b, a, b) if "c" not in one + two else a == b)  # fmt: skip
        same(np.multiply(x, x).astype("f8" if "c" not in one else "c16").compute(budget),
             np.multiply(a, a).astype("f8" if "c" not in one else "c16"))  # fmt: skip


@QUICK
@given(SHAPES, DTYPES, st.data(), st.integers(0, 99), BUDGETS)
def test_reductions_equal_numpy(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, data: Any, seed: int, budget: int
) -> None:
    a = values(dtype, shape, seed)
    x = on_disk(a, tmp_path)
    axes = st.none() if not shape else st.one_of(
        st.none(), st.integers(0, len(shape) - 1),
        st.lists(st.integers(0, len(shape) - 1), unique=True, min_size=1).map(lambda v: tuple(sorted(v))))  # fmt: skip
    axis, keepdims = data.draw(axes), data.draw(st.booleans())
    wide = a.astype("c16" if a.dtype.kind == "c" else "f8") if a.dtype.kind in "fc" else a
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("sum", "mean", "any", "all", "prod", "var", "std"):
            want = np.asarray(getattr(np, name)(wide, axis=axis, keepdims=keepdims))
            kind = np.asarray(getattr(np, name)(np.zeros(2, a.dtype))).dtype
            if name == "prod" and a.dtype.kind in "fc" and np.any(np.abs(want) > 1e4):
                continue
            got = getattr(x, name)(axis, keepdims=keepdims).compute(budget)
            assert got.dtype == kind
            same(got.astype(want.dtype), want, tolerance(kind) * 50 if want.dtype.kind in "fc" else 0)
        count = math.prod(shape[i] for i in ((axis,) if isinstance(axis, int) else axis or range(len(shape))))
        if count and a.dtype.kind != "c":
            same(x.min(axis, keepdims=keepdims).compute(budget), np.min(a, axis=axis, keepdims=keepdims))
            same(x.max(axis, keepdims=keepdims).compute(budget), np.max(a, axis=axis, keepdims=keepdims))
            if axis is None or isinstance(axis, int):
                same(x.argmax(axis).compute(budget), np.argmax(a, axis=axis))
                same(x.argmin(axis).compute(budget), np.argmin(a, axis=axis))


@QUICK
@given(
    hnp.array_shapes(min_dims=2, max_dims=4, min_side=1, max_side=9), DTYPES, st.integers(0, 3), st.integers(1, 6),
    st.sampled_from(["CC", "CF", "FC", "FF"]), st.booleans(), st.sampled_from([0, 1, 3, 8, 64]),
)  # fmt: skip
@example((5, 6, 6, 7), "c8", 1, 2, "FC", False, 1)
@example((9, 4, 8, 9), "u2", 2, 4, "FC", False, 3)
@example((3, 5, 9, 5), "c8", 0, 3, "FC", False, 8)
def test_a_repeat_or_reshape_keeps_to_its_plan_wherever_its_chunks_lie(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, number: int, times: int, orders: str, gaps: bool, pages: int
) -> None:
    """A chunk of a tile, or a caller's own array, has gaps: what is put together beside it was not counted once."""
    a, axis = np.asarray(values(dtype, shape, number), order=orders[0]), number % len(shape)  # type: ignore[call-overload]
    x = on_disk(a, tmp_path)
    split = (*shape[:axis], 2, shape[axis], times, *shape[axis + 1 :])
    for made, want in [
        (xp.repeat(x, times, axis=axis), np.repeat(a, times, axis)),
        (xp.repeat(x, 2 * times, axis=axis).reshape(split), np.repeat(a, 2 * times, axis).reshape(split)),
    ]:
        smallest = made.plan(1).smallest
        assert smallest is not None
        same(made.compute(smallest + 4096 * pages), want)
        room = np.zeros([length + gaps for length in want.shape], want.dtype, orders[1])
        out = room[tuple(slice(length) for length in want.shape)]
        made.compute(4096 * (pages + 3), out=out)
        same(out, want)


@QUICK
@given(SHAPES, DTYPES, st.data(), st.integers(0, 99), BUDGETS)
def test_views_and_joins_equal_numpy(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, data: Any, seed: int, budget: int
) -> None:
    a = np.asarray(values(dtype, shape, seed), order=data.draw(st.sampled_from("CF")))
    x = on_disk(a, tmp_path)
    key = data.draw(hnp.basic_indices(shape, allow_newaxis=True, allow_ellipsis=True))
    same(x[key].compute(budget), a[key])
    order = data.draw(st.permutations(range(len(shape))))
    same(x.transpose(tuple(order)).compute(budget) if shape else x.compute(budget), a.transpose(order))
    same(x.reshape(-1).compute(budget), a.reshape(-1))
    if shape:
        axis = data.draw(st.integers(0, len(shape) - 1))
        same(xp.concat([x, x[::-1], x], axis=axis).compute(budget), np.concatenate([a, a[::-1], a], axis))
        same(xp.roll(x, 3, axis=axis).compute(budget), np.roll(a, 3, axis))
        same(xp.repeat(x, 2, axis=axis).compute(budget), np.repeat(a, 2, axis))
        same(xp.flip(x, axis=axis).compute(budget), np.flip(a, axis))
        same(xp.tile(x, (2, 1)).compute(budget), np.tile(a, (2, 1)))
        same(xp.stack([x, x], axis=axis).compute(budget), np.stack([a, a], axis))
        if shape[axis]:
            picks = data.draw(st.lists(st.integers(-shape[axis], shape[axis] - 1), max_size=12))
            same(xp.take(x, picks, axis=axis).compute(budget), np.take(a, np.asarray(picks, int), axis))


@QUICK
@given(SHAPES.filter(lambda s: len(s) > 0), DTYPES, st.data(), st.integers(0, 99), BUDGETS)
def test_scans_and_sorts_equal_numpy(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, data: Any, seed: int, budget: int
) -> None:
    a = values(dtype, shape, seed)
    x = on_disk(a, tmp_path)
    axis = data.draw(st.integers(0, len(shape) - 1))
    want = np.cumsum(a.astype("c16" if a.dtype.kind == "c" else "f8") if a.dtype.kind in "fc" else a, axis=axis)
    got = xp.cumsum(x, axis).compute(budget)
    assert got.dtype == np.cumsum(a, axis=axis).dtype.newbyteorder("=")
    same(got.astype(want.dtype), want, tolerance(got.dtype) * 50 if want.dtype.kind in "fc" else 0)
    same(xp.sort(x, axis=axis).compute(budget), np.sort(a, axis=axis))
    same(xp.argsort(x, axis=axis).compute(budget), np.argsort(a, axis=axis, kind="stable"))


@QUICK
@given(st.integers(0, 7), st.integers(0, 7), st.integers(0, 7), st.integers(0, 3), DTYPES, st.integers(0, 99), BUDGETS)
def test_products_equal_numpy(
    tmp_path: Path, m: int, k: int, n: int, batch: int, dtype: str, seed: int, budget: int
) -> None:
    lead = (batch,) if batch else ()
    a, b = values(dtype, (*lead, m, k), seed), values(dtype, (k, n), seed + 1)
    x, y = on_disk(a, tmp_path), on_disk(b, tmp_path, "y")
    rtol = tolerance(np.dtype(dtype).newbyteorder("=")) * 50 if np.dtype(dtype).kind in "fc" else 0
    same((x @ y).compute(budget), a @ b, rtol)
    same((x.mT @ x).compute(budget), np.swapaxes(a, -1, -2) @ a, rtol)
    same(xp.einsum("ij,kj->ki", y, y).compute(budget), np.einsum("ij,kj->ki", b, b), rtol)
    same(xp.tensordot(x, y, axes=1).compute(budget), np.tensordot(a, b, 1), rtol)


@QUICK
@given(hnp.array_shapes(min_dims=1, max_dims=3, min_side=3, max_side=9), DTYPES, st.data(), st.integers(0, 99), BUDGETS)
def test_a_filter_by_windows_has_no_seams(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, data: Any, seed: int, budget: int
) -> None:
    a = values(dtype, shape, seed)
    x = on_disk(a, tmp_path)
    depth = tuple(data.draw(st.integers(0, 3)) for _ in shape)
    boundary, mode = data.draw(
        st.sampled_from([("reflect", "symmetric"), ("nearest", "edge"), ("constant", "constant"), ("periodic", "wrap")])
    )

    def shift(block: Any) -> Any:
        for axis, d in enumerate(depth):
            block = np.roll(block, d, axis) + np.roll(block, -d, axis)
        return block

    padded = shift(np.pad(a, [(d, d) for d in depth], mode=mode))
    want = padded[tuple(slice(d, d + n) for d, n in zip(depth, shape, strict=True))]
    got = xp.map_overlap(shift, x, depth=depth, boundary=boundary, memory=4).compute(budget)
    same(got, want, tolerance(want.dtype) if want.dtype.kind in "fc" else 0)


JOINS = {
    "concat": lambda x, y, n: xp.concat([x, y, x], axis=0),
    "concat of others": lambda x, y, n: xp.concat([x * 2, y, y[::-1] + 1], axis=0),
    "concat columns": lambda x, y, n: xp.concat([x, x[:, ::-1], xp.sqrt(abs(x))], axis=1),
    "roll": lambda x, y, n: xp.roll(x, n, axis=n % 2),
    "tile": lambda x, y, n: xp.tile(x, (2, 3)),
    "take": lambda x, y, n: xp.take(x, [(n * i * i) % x.shape[0] for i in range(3 * x.shape[0])], axis=0),
    "reshape": lambda x, y, n: xp.concat([x, y], axis=0).reshape(-1)[n:],
    "flip": lambda x, y, n: xp.flip(xp.concat([x, y], axis=0), axis=0) + 1,
}
AFTER = {
    "itself": lambda f: f,
    "a chain": lambda f: xp.sin(f) * 2,
    "transposed": lambda f: f.T,
    "centred": lambda f: f - f.mean(axis=0),
}


@QUICK
@given(
    st.sampled_from(sorted(JOINS)), st.sampled_from(sorted(AFTER)), st.integers(1, 300), st.integers(1, 90),
    st.integers(1, 90), st.integers(0, 40), st.sampled_from([1 << 16, 1 << 18, 1 << 20]),
)  # fmt: skip
def test_a_plan_foresees_the_memory_of_every_part_of_a_join(
    tmp_path: Path, join: str, after: str, rows: int, more: int, columns: int, number: int, budget: int
) -> None:
    a, b = values("f4", (rows, columns), number), values("f4", (more, columns), number + 1)
    x, y = on_disk(a, tmp_path), on_disk(b, tmp_path, "y")
    made = AFTER[after](JOINS[join](x, y, number))
    if made.plan(budget).fits:
        saved = made.save(tmp_path / "z.npy", budget=budget, resume=False)
        whole = AFTER[after](JOINS[join](xp.asarray(a), xp.asarray(b), number)).compute("1GiB")
        np.testing.assert_allclose(np.asarray(saved), whole, rtol=1e-5, atol=1e-5)


@QUICK
@given(
    hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=40), FLOATS, st.integers(12, 22), st.integers(0, 9)
)
def test_a_plan_fits_its_budget_or_refuses_with_one_that_works(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, power: int, seed: int
) -> None:
    a = values(dtype, shape, seed)
    x = on_disk(a, tmp_path)
    z = (x - x.mean(axis=0)) / (x.std(axis=0) + 1)
    budget = 1 << power
    plan = z.plan(budget)
    assert plan.smallest is not None
    if plan.fits:
        assert plan.peak() <= budget
    else:
        with pytest.raises(outsize.BudgetError) as caught:
            z.save(tmp_path / "z.npy", budget=budget)
        assert caught.value.smallest == plan.smallest
        assert not list(tmp_path.glob("*z.npy*"))
    saved = z.save(tmp_path / "z.npy", budget=max(budget, plan.smallest))
    wide = a.astype("c16" if a.dtype.kind == "c" else "f8")
    want = (wide - wide.mean(0)) / (wide.std(0) + 1)
    np.testing.assert_allclose(np.asarray(saved), want, rtol=1e-4, atol=1e-4)
    (tmp_path / "z.npy").unlink()


@QUICK
@given(hnp.array_shapes(min_dims=0, max_dims=5, min_side=1, max_side=30), st.data())
def test_tiles_cover_a_shape_exactly_once(shape: tuple[int, ...], data: Any) -> None:
    box = tuple(data.draw(st.integers(1, n)) for n in shape)
    grid = Grid(shape, balance(shape, box, (1,) * len(shape)))
    seen = np.zeros(shape, int)
    for region in grid:
        seen[tuple(slice(*span) for span in region)] += 1
    assert (seen == 1).all()
    assert sum(number for _, number in grid.kinds()) == len(grid)
