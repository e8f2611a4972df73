"""What the array API standard asks of the namespace beside the values of functions."""

import inspect

import numpy as np
import pytest
from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import outsize
import outsize.array as xp


@examples(60)
@given(data=st.data())
def test_masks_over_any_number_of_leading_axes_choose_as_in_numpy(data):
    array = data.draw(hnp.arrays(np.int32, hnp.array_shapes(max_dims=4, max_side=5)))
    under = data.draw(st.integers(0, array.ndim))
    mask = data.draw(hnp.arrays(bool, array.shape[:under]))
    x = outsize.open(array)
    assert np.array_equal(np.asarray(x[mask]), array[mask])
    assert np.array_equal(np.asarray(x[outsize.open(mask)]), array[mask])


def test_a_mask_of_another_shape_is_an_index_error():
    with pytest.raises(IndexError, match=r"mask of shape \(3, 3\) does not match an array of shape \(2, 3\)"):
        outsize.open(np.zeros((2, 3)))[np.ones((3, 3), bool)]


def test_functions_take_their_operands_by_position_and_say_so():
    assert str(inspect.signature(xp.add)) == "(x1: 'Any', x2: 'Any', /) -> 'Array'"
    assert list(inspect.signature(xp.sqrt).parameters) == ["x"]
    assert {"axis", "dtype", "keepdims"} <= set(inspect.signature(xp.sum).parameters)
    with pytest.raises(TypeError):
        xp.add(1)


def test_limits_are_plain_numbers_and_the_namespace_tells_its_dtypes():
    assert type(xp.finfo(xp.float32).eps) is float and xp.finfo(xp.complex64).bits == 32
    assert xp.iinfo(xp.uint16).max == 65535
    info = xp.__array_namespace_info__()
    assert set(info.dtypes(kind="integral")) == {f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)}
    assert set(info.dtypes()) >= {"bool", "float32", "complex128"} and info.default_device() in info.devices()


@pytest.mark.parametrize(
    "call,said",
    [
        (lambda x: xp.topk(x, 2.5), "whole number of elements, not 2.5"),
        (lambda x: xp.repeat(x, np.array([1, 2])), "one for each of the 3 elements"),
        (lambda x: xp.repeat(x, np.array([1, -2, 0])), "repeated -2 times"),
        (lambda x: xp.repeat(x, -1), "repeated -1 times"),
        (lambda x: xp.repeat(x, 2.5), "whole number"),
        (lambda x: xp.from_dlpack([1, 2]), "list has no __dlpack__"),
        (lambda x: xp.finfo("int8"), "int8 is no floating-point dtype: iinfo"),
        (lambda x: xp.iinfo("float32"), "float32 is no integer dtype: finfo"),
        (lambda x: xp.__array_namespace_info__().dtypes(kind="odd"), "'odd' is no kind of dtype: one of bool"),
    ],
)
def test_mistakes_are_one_sentence(call, said):
    with pytest.raises(outsize.InputError, match=said):
        call(outsize.open(np.arange(3.0)))


@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=7))
def test_elements_are_repeated_as_often_as_their_own_number_says(counts):
    array = np.arange(len(counts) * 2).reshape(len(counts), 2)
    got = xp.repeat(outsize.open(array), np.array(counts), axis=0)
    assert np.array_equal(np.asarray(got), np.repeat(array, counts, axis=0))


def test_memory_is_shared_with_other_libraries_both_ways():
    array = np.arange(6.0)
    x = xp.from_dlpack(array)
    assert np.shares_memory(np.asarray(x), array) and np.shares_memory(np.from_dlpack(x), array)
