"""Blocks of zfp: an error that is measured, parts that are decoded alone, damaged bytes that do no harm."""

from __future__ import annotations

import numpy as np
import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

import outsize
from outsize import InputError, StoreError
from outsize.factor import Factored
from outsize.factor.formats import Coded

pytest.importorskip("zfpy")


def smooth(shape: tuple[int, ...], dtype: str, noise: float = 1e-3) -> np.ndarray:
    """A field that is smooth, not low-rank, with a little noise."""
    grid = np.meshgrid(*[np.linspace(0, 3, length) for length in shape], indexing="ij")
    values = np.sin(9 * np.sqrt(1 + sum((axis - 1) ** 2 * (place + 1) for place, axis in enumerate(grid))))
    return (values + noise * np.random.default_rng(0).standard_normal(shape)).astype(dtype)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.sampled_from(["float32", "float64"]),
    st.sampled_from([0.1, 1e-3]),
)
@examples(40)
def test_true_is_said_is_asked_and_parts_are_parts_of_the_whole(shape, dtype, error):
    shape = tuple(shape) if np.prod(shape) < 200_000 else (17, 23, 31)
    x = smooth(shape, dtype)
    try:
        f = outsize.decompose(x, "zfp", error=error, budget="64MiB")
    except InputError as told:  # so few numbers that zfp takes more bytes than they do
        assert "zfp cannot take" in str(told) and x.nbytes < 20_000
        return
    whole = f.compute()
    wide = x.astype("float64")
    assert np.linalg.norm(whole - wide) <= f.error * np.linalg.norm(wide) and f.error <= error
    part = tuple(slice(length // 3, length - length // 4) for length in shape)
    assert np.array_equal(f[part].compute(), whole[part])
    assert f.method == "zfp" and f.ranks == () and f.nbytes < x.nbytes


def test_auto_takes_it_for_what_is_smooth_and_not_low_rank(tmp_path):
    x = smooth((70, 66, 62), "float32", noise=0.005)
    rough = np.random.default_rng(1).permutation(x.reshape(-1)).reshape(x.shape)
    f = outsize.decompose(x, error=0.02, budget="64MiB")
    others = outsize.decompose(x, "tucker", error=0.02, budget="64MiB").nbytes
    assert f.nbytes <= others
    coded = outsize.decompose(rough, error=0.02, budget="64MiB")
    assert coded.method == "zfp" and "no decomposition saves more than" in coded.facts.notes[0]
    made = outsize.decompose(x, "zfp", error=0.02, budget="64MiB")
    made.save(tmp_path / "x.zfp")
    again = outsize.open(tmp_path / "x.zfp")
    assert isinstance(again, Factored) and isinstance(again.form, Coded) and again.error == made.error
    assert np.array_equal(again.compute(budget="16MiB"), made.compute())
    assert (again + 1).plan("16MiB").peak() <= 16 << 20
    with pytest.raises(InputError, match="which has no factors"):
        again.truncate(0.1)


@given(st.integers(0, 10**6), st.integers(0, 255))
@examples(60)
def test_damaged_bytes_give_wrong_numbers_or_a_sentence(tmp_path_factory, place, value):
    path = tmp_path_factory.mktemp("coded") / "x.zfp"
    outsize.decompose(smooth((30, 20, 10), "float32"), "zfp", error=0.01, budget="64MiB").save(path)
    data = bytearray(path.read_bytes())
    for step in range(0, 4096, 512):
        data[(place + step) % (len(data) - 4096) + 4096] = value  # behind the header
    path.write_bytes(data)
    try:
        assert outsize.open(path).compute().shape == (30, 20, 10)
    except StoreError as told:
        assert "\n" not in str(told)


def test_layouts_that_do_not_fit_are_refused():
    form = outsize.decompose(smooth((30, 20, 10), "float32"), "zfp", error=0.01, budget="64MiB").form
    good = form.arrays()
    for name, array in (
        ("layout", -good["layout"]), ("layout", good["layout"][1:]),
        ("layout", np.array([30, 20, 10, 2**40, 20, 10, 4])), ("offsets", good["offsets"][:-1]), ("offsets", good["offsets"] + 1),
        ("data", good["data"][:-9]), ("tolerance", np.array([-1.0])), ("tolerance", np.array([np.nan])), ("data", np.ones(3)),
    ):  # fmt: skip
        with pytest.raises(InputError) as told:
            Coded.assemble(good | {name: array})
        assert "\n" not in str(told.value)
