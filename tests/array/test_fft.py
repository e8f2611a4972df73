"""Fourier transforms are NumPy's, whatever the length, axis, norm and budget."""

import json
from dataclasses import replace

import forks
import numpy as np
import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

import outsize
from outsize.array import fft as ours
from outsize.array.tuning import Tuning, use

NAMES = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
DTYPES = ("f4", "f8", "c8", "c16", "i4", ">f8")


def drawn(shape, dtype, seed=0, size=10):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * size
    if np.dtype(dtype).kind == "c":
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(dtype)


def check(found, expected):
    assert found.shape == expected.shape and found.dtype == expected.dtype
    precise = 1e-4 if expected.dtype in (np.float32, np.complex64) else 1e-11
    size = float(np.abs(expected).max()) if expected.size else 1.0
    np.testing.assert_allclose(found, expected, rtol=0, atol=precise * max(size, 1e-12))


@examples(80)
@given(
    name=st.sampled_from(NAMES),
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple),
    norm=st.sampled_from(("backward", "ortho", "forward")),
    long=st.booleans(),
    data=st.data(),
)
def test_one_axis_as_numpy_has_it_also_where_lanes_are_cut(name, dtype, shape, norm, long, data):
    real_only = name in ("rfft", "ihfft")
    dtype = "f8" if real_only and np.dtype(dtype).kind == "c" else dtype
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    n = data.draw(st.one_of(st.none(), st.integers(1, 60)))
    if n is None and name in ("irfft", "hfft") and shape[axis] < 2:
        n = 3
    x = drawn(shape, dtype)
    # lanes of more than twelve points are cut, where they can be
    with use(replace(Tuning(), transformed_lane=16 * 12 if long else 1 << 24)):
        found = getattr(ours, name)(outsize.open(x), n=n, axis=axis, norm=norm).compute()
    check(found, getattr(np.fft, name)(x, n, axis, norm))


@examples(30)
@given(
    name=st.sampled_from(("fftn", "ifftn", "rfftn", "irfftn")),
    shape=st.lists(st.integers(2, 12), min_size=2, max_size=3).map(tuple),
    data=st.data(),
)
def test_several_axes(name, shape, data):
    axes = data.draw(st.permutations(range(len(shape))))[: data.draw(st.integers(1, len(shape)))]
    s = data.draw(st.one_of(st.none(), st.tuples(*(st.integers(2, 14) for _ in axes))))
    x = drawn(shape, "f8" if name == "rfftn" else "c16")
    found = getattr(ours, name)(outsize.open(x), s=s, axes=axes).compute()
    check(found, getattr(np.fft, name)(x, s, axes))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3)])
def test_lanes_without_points_are_filled_up_with_zeros(name, shape):
    dtype = "f8" if name in ("rfft", "ihfft") else "c8"
    found = getattr(ours, name)(outsize.open(np.empty(shape, dtype)), n=6, axis=shape.index(0)).compute()
    assert found.shape[shape.index(0)] == (4 if name in ("rfft", "ihfft") else 6)
    np.testing.assert_array_equal(found, 0)


def test_a_length_of_minus_one_is_that_of_the_axis():
    x = drawn((4, 6), "c16")
    for name in ("fftn", "irfftn"):
        check(
            getattr(ours, name)(outsize.open(x), s=(3, -1), axes=(0, 1)).compute(),
            getattr(np.fft, name)(x, (3, -1), (0, 1)),
        )


def test_numpys_functions_called_on_a_lazy_array_are_ours():
    x = drawn((4, 6), "f8")
    lazy = outsize.open(x)
    for call in (
        lambda x: np.fft.fft(x),
        lambda x: np.fft.rfft(x, 8, 0, "ortho"),
        lambda x: np.fft.ifft(x, norm=None, axis=0),
        lambda x: np.fft.fftn(x, (3, 5), axes=(0, 1)),
        lambda x: np.fft.fftshift(x, 0),
    ):
        found = call(lazy)
        assert isinstance(found, outsize.array.Array)
        check(found.compute(), call(x))
    with pytest.raises(outsize.InputError, match="no option out"):
        np.fft.fft(lazy, out=np.empty((4, 6), complex))
    with pytest.raises(outsize.InputError, match=r"np\.fft\.fft2 has no out-of-core rule"):
        np.fft.fft2(lazy)


def test_frequencies_and_shifts():
    for n in (1, 2, 7, 8):
        np.testing.assert_allclose(ours.fftfreq(n, d=0.5).compute(), np.fft.fftfreq(n, 0.5))
        np.testing.assert_allclose(ours.rfftfreq(n, d=0.5).compute(), np.fft.rfftfreq(n, 0.5))
    x = drawn((5, 6), "f8")
    for axes in (None, 0, (0, 1), -1):
        np.testing.assert_array_equal(ours.fftshift(outsize.open(x), axes=axes).compute(), np.fft.fftshift(x, axes))
        np.testing.assert_array_equal(ours.ifftshift(outsize.open(x), axes=axes).compute(), np.fft.ifftshift(x, axes))


def test_a_lane_larger_than_the_budget_is_transformed_inside_it(tmp_path, tune):
    tune(transformed_lane=1 << 18)
    x = drawn(1 << 18, "f8")  # 4 MiB as complex numbers
    np.save(tmp_path / "x.npy", x)
    y = outsize.array.fft.fft(outsize.open(tmp_path / "x.npy"))
    assert y.plan(budget="3MiB").peak() <= 3 << 20 < y.nbytes
    saved = y.save(tmp_path / "y.npy", budget="3MiB")
    check(saved.compute(budget="100MiB"), np.fft.fft(x))
    back = ours.ifft(saved).save(tmp_path / "z.npy", budget="3MiB")
    np.testing.assert_allclose(back.compute(budget="100MiB"), x, atol=1e-9)


ALONE = """
import json, sys
import numpy as np, outsize
from outsize.array import fft

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

folder, name = sys.argv[1:]
made = getattr(fft, name)(outsize.open(folder + "/x.npy"))
fft.fft(outsize.open(np.ones(64))).save(folder + "/warm.npy", budget="8MiB")
before = status("VmRSS")
plan = made.plan("1GiB")
made.save(folder + "/y.npy", budget="1GiB")
print(json.dumps([plan.peak(), status("VmHWM") - before]))
"""


@pytest.mark.parametrize(("name", "dtype"), [("fft", "c16"), ("fft", "c8"), ("rfft", "f4"), ("irfft", "c8")])
@pytest.mark.parametrize("length", [1 << 20, 1_048_573, 2 * 524_287])
def test_a_lane_takes_no_more_than_its_plan_says_whatever_its_length(tmp_path, name, dtype, length):
    np.save(tmp_path / "x.npy", np.ones(length // 2 + 1 if name == "irfft" else length, dtype))
    child = forks.start(ALONE, tmp_path, name)
    out, err = child.communicate()
    assert child.returncode == 0, err
    projected, grew = json.loads(out)
    assert grew <= projected + (4 << 20)  # threads' stacks and arenas


def test_mistakes_are_named():
    x = outsize.open(np.arange(8.0))
    with pytest.raises(outsize.InputError, match="norm 'twice'"):
        ours.fft(x, norm="twice")
    with pytest.raises(outsize.InputError, match="at least one"):
        ours.fft(x, n=0)
    with pytest.raises(outsize.InputError, match="real ones"):
        ours.rfft(outsize.open(np.ones(4, complex)))
    for n in ("a", 2.5):
        with pytest.raises(outsize.InputError, match="n is a whole number"):
            ours.fft(x, n=n)
    with pytest.raises(outsize.InputError, match="axis 3"):
        ours.fft(x, axis=3)
