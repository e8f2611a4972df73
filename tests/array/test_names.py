"""Every name of the namespace against NumPy, with tiles of a few elements: NaN, infinities, -0.0, ties, nothing, 0-d."""

import pathlib
import warnings
import zlib
from dataclasses import replace

import names
import numpy as np
import pytest
from effort import long
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import outsize
import outsize.array as xp
from outsize.array.tuning import Tuning, use

TINY = replace(
    Tuning(), small=0, chunk=4096, slice=512, made_now=64, sorted_lane=64, ranked_lane=64, rank_piece=16, search_piece=16,
    filter_block=16, sort_grain=64, turned=64, whole_product=0, edge=2,
)  # fmt: skip
VALUES = st.sampled_from([np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0, 1.0, 2.0, 2.0, -2.5, 0.3, 1e-30, 7.0])
SHAPES = st.one_of(
    st.sampled_from([(), (0,), (1,), (4, 0), (3, 3), (2, 3, 3), (4, 4)]), hnp.array_shapes(max_dims=3, max_side=6)
)
ALL = [(space, name) for space in names.SPACES for name in names.public(space)]
THEIRS = {"": np, "linalg": np.linalg, "fft": np.fft}


def parts(value):
    if isinstance(value, tuple | list):
        return [part for one in value for part in parts(one)]
    return [np.asarray(value)]


def numpys(space, name):
    """NumPy's answer, with the standard's names."""
    module, call = THEIRS[space], names.CASES[space][name]

    class Namespace:
        def __getattr__(self, wanted):
            return getattr(module, wanted, None) or getattr(module, names.RENAMED.get(wanted, wanted))

    reference = names.REFERENCE.get(f"{space}.{name}" if space else name)
    given = module if space == "linalg" else Namespace()
    return lambda *arrays: (reference or call)(given, *arrays)


def test_every_name_is_in_the_list():
    for space in names.SPACES:
        assert sorted(names.public(space)) == sorted(names.CASES[space]), space
    assert set(names.OTHERS) <= set(xp.__all__)


def test_the_page_of_all_names_is_as_it_would_be_made():
    assert (pathlib.Path(__file__).parents[2] / "docs" / "support.md").read_text() == names.page()


@pytest.mark.parametrize("space,name", ALL, ids=lambda text: text or "main")
def test_it_answers_as_numpy_does(space, name):
    call, reference = names.CASES[space][name], numpys(space, name)

    def compare(shape, dtype, data):
        pool = VALUES if dtype[0] == "f" else st.integers(-3, 3)
        one, other = (data.draw(hnp.arrays(np.float64, shape, elements=pool)).astype(dtype) for _ in range(2))
        few = data.draw(hnp.arrays(np.int64, shape, elements=st.integers(0, 5)))
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            try:
                want = parts(reference(one, other, few))
            except Exception:
                return  # what NumPy refuses, we may answer
            try:
                with use(TINY):
                    got = parts(call(names.SPACES[space], *(outsize.open(array) for array in (one, other, few))))
            except (IndexError, outsize.InputError):
                assert shape == ()  # NumPy lets an array without axes have one, the standard does not
                return
        assert len(got) == len(want)
        for mine, theirs in zip(got, want, strict=True):
            assert mine.shape == theirs.shape and mine.dtype == theirs.dtype, (mine, theirs)
            if space or name in names.LOOSE[""]:
                single = theirs.dtype.char in "fF"
                np.testing.assert_allclose(mine, theirs, rtol=3e-5 if single else 1e-9, atol=1e-5 if single else 1e-9)
            else:
                np.testing.assert_array_equal(mine, theirs)

    tried = given(shape=SHAPES, dtype=st.sampled_from(["f8", "f4", "i4", "?"]), data=st.data())(compare)
    if not long():  # the same examples each time, but not the same for every name
        tried = seed(zlib.crc32(f"{space}.{name}".encode()))(tried)
    settings(max_examples=40 if long() else 3, deadline=None)(tried)()
