import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from outsize.core.dtypes import DTYPES, parse_dtype
from outsize.core.errors import InputError
from outsize.core.spec import Spec, parse_shape


@given(hnp.array_shapes(min_dims=0, max_dims=6, min_side=0, max_side=7), hnp.scalar_dtypes())
def test_bytes_equal_numpys_for_any_shape_and_dtype(shape, dtype):
    assert Spec.of(shape, dtype).bytes == np.empty(shape, dtype).nbytes
    assert Spec.of(shape, dtype.str).bytes == np.empty(shape, dtype).nbytes


@given(st.lists(st.integers(0, 10**9), max_size=8))
def test_sizes_beyond_every_machine_are_exact(shape):
    product = 1
    for length in shape:
        product *= length
    assert Spec.of(shape, "float64").bytes == 8 * product


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("torch.float32", "float32"), ("float", "float32"), ("half", "float16"), ("torch.bfloat16", "bfloat16"),
        ("BF16", "bfloat16"), ("F32", "float32"), ("np.float64", "float64"), ("<f4", "float32"), (">i8", "int64"),
        ("tf.float32", "float32"), ("DT_HALF", "float16"), ("DT_BFLOAT16", "bfloat16"), ("DT_INT32", "int32"),
        ("tf.qint8", "qint8"), ("jnp.float8_e4m3fn", "float8_e4m3fn"), ("float8_e5m2", "float8_e5m2"), ("bf16", "bfloat16"),
        ("f32", "float32"), ("s32", "int32"), ("pred", "bool"), ("bool_", "bool"), ("u1", "uint8"), ("uint4", "uint4"),
        ("int4", "int4"), ("complex64", "complex64"), ("cfloat", "complex64"), ("long", "int64"), ("c16", "complex128"),
        ("<class 'numpy.float32'>", "float32"), ("<dtype: 'float16'>", "float16"), ("torch.quint4x2", "quint4x2"),
        ("i4", "int32"), ("u8", "uint64"), ("f8", "float64"), ("b1", "bool"), ("?", "bool"), ("FloatTensor", "float32"),
    ],
)  # fmt: skip
def test_every_framework_s_spelling_is_understood(spelled, name):
    assert parse_dtype(spelled) == DTYPES[name]


def test_clashing_spellings_follow_the_dialect():
    assert parse_dtype("u8") == DTYPES["uint64"]
    assert parse_dtype("u8", dialect="xla") == DTYPES["uint8"]
    assert parse_dtype("U8").bits == 8 * 32
    assert parse_dtype("U8", dialect="safetensors") == DTYPES["uint8"]
    assert parse_dtype("I64", dialect="safetensors") == DTYPES["int64"]


def test_dtype_objects_are_understood_without_importing_their_framework():
    torch = pytest.importorskip("torch")
    for name in ("float32", "bfloat16", "float8_e4m3fn", "int8", "bool", "complex64"):
        assert parse_dtype(getattr(torch, name)).name == name
    assert parse_dtype(np.float32) == parse_dtype(np.dtype("float32")) == DTYPES["float32"]
    assert parse_dtype(float) == DTYPES["float64"]


@pytest.mark.parametrize(
    ("dtype", "bytes_"), [("int4", 5), ("uint4", 5), ("int2", 3), ("bool", 9), ("float8_e5m2", 9), ("complex128", 144)]
)
def test_packed_types_round_up_to_a_whole_byte(dtype, bytes_):
    assert Spec.of((3, 3), dtype).bytes == bytes_


def test_strings_and_structures_have_their_numpy_size():
    record = np.dtype([("name", "U10"), ("position", "f8", (3,)), ("flags", "u1")])
    assert Spec.of((7,), record).bytes == np.empty(7, record).nbytes
    assert Spec.of((7,), "<U5095").bytes == np.empty(7, "<U5095").nbytes
    assert Spec.of((7,), "S5").bytes == 35
    assert Spec.of((7,), "f4,i8,(2,3)f8").bytes == np.empty(7, "f4,i8,(2,3)f8").nbytes
    assert Spec.of((7,), "datetime64[ns]").bytes == 56


@pytest.mark.parametrize("dtype", ["flot32", "float17", "string", "object", np.dtype("O"), "", "x", "12", object()])
def test_an_unknown_dtype_is_refused_in_one_sentence(dtype):
    with pytest.raises(InputError) as caught:
        parse_dtype(dtype)
    assert "\n" not in str(caught.value)


def test_a_near_miss_is_suggested():
    with pytest.raises(InputError, match="float32"):
        parse_dtype("flaot32")


@pytest.mark.parametrize("shape", [(3, -1), (3, 1.5), ("3",), (None,)])
def test_a_bad_axis_is_named(shape):
    with pytest.raises(InputError, match="axis"):
        parse_shape(shape)
