"""Keys of every kind, read and written, against NumPy's own answer."""

import numpy as np
import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st

import outsize
import outsize.array as xp

SHAPE = (4, 5, 6)


@st.composite
def keys(draw):
    """Parts for some of the axes of an array of `SHAPE`, arrays as NumPy's."""
    key, axis = [], 0
    picked = draw(st.sampled_from([(3,), (2, 3)]))
    while axis < 3:
        length = SHAPE[axis]
        kind = draw(st.sampled_from(["number", "slice", "indices", "mask", "mask of two", "new", "end"]))
        if kind == "end":
            break
        if kind == "new":
            key.append(None)
            continue
        if kind == "number":
            key.append(draw(st.integers(-length, length - 1)))
        elif kind == "slice":
            key.append(draw(st.slices(length)))
        elif kind == "indices":
            shape = draw(st.sampled_from([picked, picked[-1:], (1,)]))
            key.append(
                np.array(draw(st.lists(st.integers(-length, length - 1), min_size=6, max_size=6)))[: np.prod(shape)]
            )
            key[-1] = key[-1].reshape(shape)
        else:
            over = SHAPE[axis : axis + 2] if kind == "mask of two" and axis < 2 else (length,)
            mask = np.zeros(over, bool)
            mask.reshape(-1)[draw(st.permutations(range(mask.size)))[: picked[-1]]] = True
            key.append(mask)
            axis += mask.ndim - 1
        axis += 1
    if draw(st.booleans()) and len(key) < 3:
        key.insert(draw(st.integers(0, len(key))), ...)
    return tuple(key)


def ours(key, lazy):
    return tuple(outsize.open(part) if lazy and isinstance(part, np.ndarray) else part for part in key)


def fits(array, key):
    """What NumPy makes of the key, or None."""
    try:
        return array[key]
    except IndexError:
        return None


@examples(160)
@given(key=keys(), lazy=st.booleans(), one=st.booleans())
def test_any_key_reads_and_replaces_what_it_does_in_numpy(key, lazy, one):
    array = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    want = fits(array, key)
    if want is None:
        return
    x = outsize.open(array)
    found = np.asarray(x[ours(key, lazy)])
    assert found.shape == want.shape and np.array_equal(found, want)
    value = np.float32(-1) if one else -1 - np.arange(want.size, dtype=np.float32).reshape(want.shape)
    after = array.copy()
    after[key] = value
    x[ours(key, lazy)] = float(value) if one else value
    assert np.array_equal(np.asarray(x), after)
    assert array.min() == 0  # the memory that was opened is as it was


@pytest.mark.parametrize("value", [7, "row"])
def test_index_arrays_larger_than_what_is_held_are_written_through_scratch(tune, value):
    tune(made_now=64, search_piece=16, sorted_lane=64, sort_grain=64, filter_block=16, small=0)
    rng = np.random.default_rng(0)
    array, chosen = rng.random((50, 3)), rng.integers(-50, 50, 40)
    new = 7.0 if value == 7 else rng.random((40, 3))
    x, after = outsize.open(array), array.copy()
    after[chosen] = new
    x[outsize.open(chosen)] = new
    np.testing.assert_array_equal(x.compute(), after)
    mask = rng.random((50, 3)) > 0.5
    after[mask] = rng.random(int(mask.sum())) if value == "row" else new
    x[outsize.open(mask)] = after[mask] if value == "row" else new
    np.testing.assert_array_equal(x.compute(), after)


@given(data=st.data())
def test_elements_are_taken_along_an_axis_as_in_numpy(data):
    array = np.arange(24.0).reshape(2, 3, 4)
    axis = data.draw(st.integers(-3, 2))
    shape = [data.draw(st.sampled_from([1, n])) for n in array.shape]
    shape[axis] = data.draw(st.integers(0, 5))
    length = array.shape[axis]
    chosen = np.random.default_rng(data.draw(st.integers(0, 99))).integers(-length, length, shape)
    got = xp.take_along_axis(outsize.open(array), outsize.open(chosen), axis=axis)
    np.testing.assert_array_equal(got.compute(), np.take_along_axis(array, chosen, axis))


def test_what_is_outside_is_blamed_by_its_number():
    x = outsize.open(np.zeros((10, 3)))
    for key, said in (
        ([1, -30, 3], "-30 is outside axis 0"),
        ((slice(None), [0], [9]), "3 indices"),
        (([0], [9]), "9 is outside axis 1"),
    ):
        with pytest.raises(IndexError, match=said):
            x[key]
    with pytest.raises(IndexError, match="5 is outside axis"):
        xp.take_along_axis(x, np.full((1, 3), 5), axis=1)
    with pytest.raises(outsize.InputError, match="broadcast"):
        x[[1, 2]] = np.zeros((3, 3))


def test_versions_devices_and_copies_are_honoured_or_refused():
    x = outsize.open(np.arange(3))
    assert x.__array_namespace__(api_version="2025.12") is xp and xp.__array_api_version__ == "2025.12"
    with pytest.raises(outsize.InputError, match=r"no version '3000.01'"):
        x.__array_namespace__(api_version="3000.01")
    for call in (
        lambda: xp.zeros(3, device="cuda"),
        lambda: x.to_device("cuda"),
        lambda: xp.asarray([1], device="tpu"),
    ):
        with pytest.raises(outsize.InputError, match="live on 'cpu'"):
            call()
    with pytest.raises(ValueError, match="copy=False"):
        xp.asarray([1, 2], copy=False)
    array = np.arange(3)
    copied, shared = xp.asarray(array, copy=True), xp.asarray(array, copy=False)
    array[0] = 9
    assert int(copied[0]) == 0 and int(shared[0]) == 9
    assert np.array_equal(np.asarray(xp.eye(3, k=2**63)), np.zeros((3, 3)))
