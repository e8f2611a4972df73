"""A `Factored` is an array: its parts, sums and products are those of the tensor it stands for."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from effort import examples
from factor_forms import close, dense, draw_array, factors, make
from hypothesis import given
from hypothesis import strategies as st

import outsize
import outsize.array as xp
from outsize import InputError
from outsize.array import Array
from outsize.core.noun import Known
from outsize.factor import Factored, from_factors
from outsize.factor.formats import Tucker


def exactly(form):
    return Factored(form, error=0.0)


@st.composite
def keys(draw, shape):
    parts = []
    for length in shape[: draw(st.integers(0, len(shape)))]:
        kind = draw(st.sampled_from(["int", "slice", "slice", "all"]))
        if kind == "int":
            parts.append(draw(st.integers(-length, length - 1)))
        elif kind == "slice":
            bound = st.none() | st.integers(-length - 1, length + 1)
            parts.append(slice(draw(bound), draw(bound), draw(st.sampled_from([None, 1, 2, -1, -3]))))
        else:
            parts.append(slice(None))
    if draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))) if len(parts) == len(shape) else len(parts), Ellipsis)
    lists = [place for place, part in enumerate(parts) if part == slice(None)]
    if lists and Ellipsis not in parts and not any(isinstance(part, int) for part in parts) and draw(st.booleans()):
        place = draw(st.sampled_from(lists))
        parts[place] = draw(st.lists(st.integers(-shape[place], shape[place] - 1), max_size=5))
    return tuple(parts)


@given(st.data(), factors())
@examples(200)
def test_slices_of_the_factored_are_slices_of_the_rebuilt(data, form):
    key = data.draw(keys(form.shape))
    wanted = dense(form)[key]
    found = exactly(form)[key]
    assert isinstance(found, Factored)
    assert found.dtype == form.dtype
    close(found.compute(), wanted, form.dtype, scale=float(np.abs(dense(form)).max()) * 20)


def test_what_cannot_stay_in_factors_is_a_lazy_array():
    form = make("tucker", (6, 7, 8), (2, 3, 2), "float64")
    f, x = exactly(form), dense(form)
    for key in (None, (slice(None), None), ([1, 2], 3), x > 0):
        found = f[key]
        assert isinstance(found, Array) and not isinstance(found, Factored)
        close(found.compute(), x[key], "float64")
    with pytest.raises(IndexError, match="index 9 is outside axis 1 of length 7"):
        f[0, 9]
    with pytest.raises(IndexError, match="outside"):
        f[[0, 6]]


def test_a_mask_along_one_axis_and_a_list_keep_the_factors():
    form = make("tt", (6, 7, 8), (2, 3, 2), "float32")
    f, x = exactly(form), dense(form)
    mask = np.array([True, False, True, True, False, False])
    for key in (mask, [5, 0, 0, -1], (slice(None), range(3)), (Ellipsis, np.array([7, 1]))):
        found = f[key]
        assert isinstance(found, Factored)
        close(found.compute(), x[list(key) if isinstance(key, range) else key], "float32")


@given(st.data(), factors())
@examples(100)
def test_sums_means_and_products_in_factors_are_numpys_on_the_rebuilt(data, form):
    f, x = exactly(form), dense(form)
    size = float(np.abs(x).sum()) + 1
    axis = data.draw(st.none() | st.integers(-x.ndim, x.ndim - 1))
    keepdims = data.draw(st.booleans())
    for name in ("sum", "mean"):
        found = getattr(f, name)(axis, keepdims=keepdims)
        assert isinstance(found, Factored)
        close(found.compute(), getattr(x, name)(axis, keepdims=keepdims), form.dtype, scale=size)
    one = data.draw(st.integers(0, x.ndim - 1))
    rng = np.random.default_rng(1)
    rows = data.draw(st.integers(1, 5))
    matrix, vector = draw_array(rng, (rows, x.shape[one]), "float64"), draw_array(rng, (x.shape[one],), "float32")
    by_matrix, by_vector = f.contract(matrix, one), f.contract(vector, one)
    close(by_matrix.compute(), np.moveaxis(np.tensordot(matrix, x, axes=(1, one)), 0, one), form.dtype, scale=10 * size)
    close(by_vector.compute(), np.tensordot(x, vector, axes=(one, 0)), form.dtype, scale=10 * size)
    assert by_matrix.dtype == np.result_type(form.dtype, "float64") and by_vector.dtype == form.dtype


@given(factors(), st.integers(0, 5))
@examples(100)
def test_arithmetic_of_two_is_numpys_on_the_rebuilt(form, seed):
    other = make(form.method, form.shape, tuple([2] * len(form.shape)), form.dtype.name, seed)
    f, g, x, y = exactly(form), exactly(other), dense(form), dense(other)
    size = float(np.abs(x).max() + np.abs(y).max()) * 20
    for found, wanted in ((f + g, x + y), (f - g, x - y), (2.5 * f, 2.5 * x), (f / 4, x / 4), (-f, -x)):
        assert isinstance(found, Factored) and found.dtype == form.dtype
        close(found.compute(), wanted, form.dtype, scale=size)
    norms = np.linalg.norm(x) * np.linalg.norm(y)
    assert abs(f.inner(g) - np.vdot(x, y)) <= 1e-12 * max(norms, 1e-300) + 1e-300
    assert f.norm() == pytest.approx(np.linalg.norm(x), rel=1e-7)
    assert f.distance(g) == pytest.approx(np.linalg.norm(x - y), rel=1e-6, abs=1e-6 * float(f.norm() + g.norm()))
    assert f.distance(y) == pytest.approx(np.linalg.norm(x - y), rel=1e-3, abs=1e-5 * float(f.norm() + g.norm()))


def test_formats_that_differ_and_everything_else_are_lazy_arrays():
    a, b = make("tucker", (5, 6), (2, 2), "float64"), make("svd", (5, 6), (2, 2), "float64")
    f, g, x, y = exactly(a), exactly(b), dense(a), dense(b)
    for found, wanted in ((f + g, x + y), (f * g, x * y), (f + 1, x + 1), (np.sin(f), np.sin(x)), (1 - f, 1 - x)):
        assert isinstance(found, Array) and not isinstance(found, Factored)
        close(found.compute(), wanted, "float64")
    assert f.inner(g) == pytest.approx(np.vdot(x, y))
    assert f.distance(g) == pytest.approx(np.linalg.norm(x - y))
    close(xp.matmul(f, g.T).compute(), x @ y.T, "float64")
    close((f.var(axis=0) + f.max()).compute(), x.var(0) + x.max(), "float64")


def test_matmul_with_what_is_in_memory_stays_in_factors():
    form = make("tucker", (4, 5, 6), (2, 2, 2), "float64")
    f, x, rng = exactly(form), dense(form), np.random.default_rng(0)
    right, vector, left = rng.random((6, 3)), rng.random(6), rng.random((7, 5))
    pairs = (
        (f @ right, x @ right),
        (f @ vector, x @ vector),
        (left @ f, left @ x),
        (np.float64(3) * f, 3 * x),
        (np.add(f, f), 2 * x),
    )
    for found, wanted in pairs:
        assert isinstance(found, Factored)
        close(found.compute(), wanted, "float64")
    for found, wanted in (
        (x + f, 2 * x),
        (np.multiply(x, f), x * x),
        (np.subtract(f, 1), x - 1),
        (np.exp(f), np.exp(x)),
    ):
        assert not isinstance(found, Factored)
        close(found.compute(), wanted, "float64")
    with pytest.raises(InputError, match="axis 2 has length 6"):
        f.contract(np.ones(5))


@given(factors("tucker", "tt", "svd"), st.sampled_from([0.0, 1e-3, 0.1, 0.7]))
@examples(100)
def test_rounding_says_what_it_lost(form, error):
    f, x = exactly(form), dense(form)
    doubled = f + f
    made = doubled.truncate(error)
    lost = np.linalg.norm(2 * x - dense(made.form))
    assert lost <= made.lost <= error * np.linalg.norm(2 * x) * (1 + 1e-9) + 4 * doubled.form.rounding()
    assert all(a <= b for a, b in zip(made.ranks, doubled.ranks, strict=True))
    if error:  # the doubled columns are found to be the same
        assert all(a <= b for a, b in zip(made.ranks, f.ranks, strict=True))
    assert [spectrum.kept for spectrum in made.spectra] == list(made.ranks)


@given(st.data(), factors("tucker", "tt", "svd"))
@examples(60)
def test_the_error_of_a_part_is_a_bound_for_the_part(data, form):
    x = dense(form)
    rng = np.random.default_rng(2)
    noise = draw_array(rng, form.shape, form.dtype.name).astype(x.dtype)
    noise *= 0.05 * np.linalg.norm(x) / max(np.linalg.norm(noise), 1e-300)
    truth = x + noise
    f = Factored(
        form, error=float(np.linalg.norm(noise) / np.linalg.norm(truth)) * (1 + 1e-5), norm=float(np.linalg.norm(truth))
    )
    axis = data.draw(st.integers(0, x.ndim - 1))
    vector = draw_array(rng, (x.shape[axis],), "float64")
    pairs = [(f[key], truth[key]) for key in [data.draw(keys(form.shape))]]
    pairs += [(f.sum(axis), truth.sum(axis)), (f.contract(vector, axis), np.tensordot(truth, vector, axes=(axis, 0)))]
    pairs += [(3.3 * f, 3.3 * truth), (f + f[...], 2 * truth), (f.mean(), truth.mean()), (f.truncate(0.02), truth)]
    for part, wanted in pairs:
        apart = np.linalg.norm(dense(part.form) - wanted)
        assert apart <= part.lost
        if np.linalg.norm(wanted):
            assert apart / np.linalg.norm(wanted) <= part.error


def test_what_is_lost_of_an_element_counts_as_often_as_it_is_taken():
    f = Factored(make("tucker", (3, 4), (2, 2), "float64"), error=0.01, norm=2.0)
    assert f.lost == pytest.approx(0.02)
    assert f[[0, 0, -3, 1]].lost == pytest.approx(0.02 * 3**0.5)
    assert f[[2, 0]].lost == f[:, [1, 3]].lost == f[[]].lost == f.lost


@given(factors())
@examples(30)
def test_what_is_empty_stays_an_array(form):
    empty = exactly(form)[..., :0]
    assert empty.compute().shape == (*form.shape[:-1], 0)
    assert empty.norm() == 0 and complex(empty.sum()) == 0 and empty.inner(empty) == 0
    assert (empty + empty).compute().size == 0
    if form.method != "cp":
        assert empty.truncate(0.1).compute().shape == empty.shape


def test_it_says_what_it_is():
    f = Factored(make("tucker", (50, 40, 30), (3, 4, 5), "float32"), error=0.01, asked=0.01, original="float64")
    assert f.shape == (50, 40, 30) and f.ndim == 3 and f.size == 60_000 and len(f) == 50
    assert f.nbytes == 4 * (60 + 150 + 160 + 150) and f.ratio == 60_000 * 8 / f.nbytes
    assert (
        f.ranks == (3, 4, 5) and f.method == "tucker" and f.error == 0.01 and f.known is Known.BOUND and f.plan is None
    )
    assert repr(f).startswith("<outsize.Factored float32[50, 40, 30] tucker ranks 3x4x5: 2.03 KiB, 231 times smaller")
    assert f.to_dict()["ratio"] == f.ratio
    unknown = Factored(make("cp", (5, 4), (3, 3), "float32"), error=None)
    assert unknown.error is None and unknown[1:].error is None and "error unknown" in repr(unknown)
    assert (unknown + unknown).lost is None


def test_it_pickles_copies_and_iterates():
    f = Factored(make("svd", (5, 6), (2, 2), "float64"), error=0.1, notes=("one",))
    for same in (pickle.loads(pickle.dumps(f)), copy.copy(f), copy.deepcopy(f)):
        assert isinstance(same, Factored) and same.error == 0.1 and same.notes == ("one",)
        assert np.array_equal(same.compute(), f.compute())
    lazy = pickle.loads(pickle.dumps(f + 1))
    assert np.array_equal(lazy.compute(), f.compute() + 1)
    close(np.stack([np.asarray(row) for row in f]), np.asarray(f), "float64")


def test_wrong_arguments_are_one_sentence():
    f = exactly(make("tucker", (5, 6), (2, 2), "float64"))
    for call, words in (
        (lambda: f.truncate(1.5), "0 <= error < 1"),
        (lambda: f.__setitem__(0, 1.0), "factors cannot be replaced"),
        (lambda: f.sum(axis=4), "axis 4 is not one of the 2 axes"),
        (lambda: f.sum(axis=(0, 0)), "names an axis twice"),
        (lambda: f.inner(np.ones((5, 5))), "equal shapes"),
        (lambda: exactly(make("cp", (5, 6), (2, 2), "float64")).truncate(0.1), "CP cannot be truncated"),
        (lambda: Tucker(np.ones((2, 2)), (np.ones((5, 2)),)), r"a core of \(2, 2\) needs factors"),
        (lambda: Tucker(np.ones((2,), "int64"), (np.ones((5, 2), "int64"),)), "factors are of float32"),
    ):
        with pytest.raises(InputError, match=words) as told:
            call()
        assert "\n" not in str(told.value)


def test_tiles_and_rows_are_rebuilt_as_they_are_asked_for():
    form = make("tt", (40, 30, 20), (3, 3, 3), "float32")
    f, x = exactly(form), dense(form)
    tiles = f.tiles(shape=(16, 30, 20))
    for tile in tiles:
        close(tile, x[tuple(slice(*span) for span in tiles.region)], "float32")
    assert f.array.plan("1MiB").peak() <= 1 << 20


def test_factors_come_from_other_libraries_and_go_back():
    torch = pytest.importorskip("torch")
    for method, hand_over in (
        ("tucker", lambda form: (form.core, list(form.factors))),
        ("cp", lambda form: (form.weights, list(form.factors))),
        ("tt", lambda form: [torch.from_numpy(core) for core in form.cores]),
        ("svd", lambda form: (form.u, form.s, form.vh)),
    ):
        form = make(
            method, (5, 6, 7)[: 2 if method == "svd" else 3], (2, 3, 2)[: 2 if method == "svd" else 3], "float32"
        )
        f = from_factors(hand_over(form))
        assert f.method == method and f.error is None
        close(f.compute(), dense(form), "float32")
        there = f.to_torch()
        assert all(np.array_equal(there[name].numpy(), array) for name, array in f.to_numpy().items())
        assert np.array_equal(torch.from_dlpack(f).numpy(), f.compute())
    with pytest.raises(InputError, match="cannot read factors from str"):
        from_factors("x")


def test_tensorly_reads_and_gives_factors():
    tl = pytest.importorskip("tensorly")
    for method, rebuild in (("tucker", tl.tucker_to_tensor), ("cp", tl.cp_to_tensor), ("tt", tl.tt_to_tensor)):
        form = make(method, (5, 6, 7), (2, 3, 2), "float64")
        there = exactly(form).to_tensorly()
        close(rebuild(there), dense(form), "float64")
        close(from_factors(there).compute(), dense(form), "float64")


def test_a_factored_works_inside_expressions_with_files(tmp_path):
    form = make("tucker", (30, 20, 10), (3, 4, 5), "float32")
    f, x = exactly(form), dense(form)
    np.save(tmp_path / "x.npy", x.astype("float32"))
    there = outsize.open(str(tmp_path / "x.npy"))
    assert float(xp.linalg.vector_norm(there - f)) <= 1e-5 * f.norm()
    saved = (there + 2 * f.array).save(tmp_path / "z.npy", budget="2MiB")
    close(saved.compute(), 3 * x, "float32")


def test_elements_of_factors_are_not_replaced_and_those_of_its_array_are():
    f = exactly(make("tucker", (5, 6), (2, 2), "float64"))
    with pytest.raises(InputError, match=r"take x = f\.array"):
        f[0] = 1.0
    x = f.array
    x[0] = 1.0
    assert (x.compute()[0] == 1.0).all() and np.allclose(x.compute()[1:], f.compute()[1:])
