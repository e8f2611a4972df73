import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import outsize
from outsize.core.units import GiB, MiB
from outsize.machine.fake import FakeMachine


def reserved(sizing, allocator):
    return next(take.reserved for take in sizing.takes if take.allocator == allocator)


def test_what_allocators_take_is_more_than_what_was_asked_for():
    one = outsize.size((1, 256, 1024, 1021), "float32")
    assert one.bytes == 1_070_596_096
    assert reserved(one, "pinned") == 2**30
    assert reserved(one, "cuda") == 1_070_596_096 // (2 * MiB) * 2 * MiB + 2 * MiB
    assert reserved(outsize.size((1,)), "cuda") == 2 * MiB


def test_a_tensor_of_nothing_takes_nothing_and_fits():
    nothing = outsize.size((0, 7))
    assert nothing.bytes == 0
    assert nothing.fits
    assert reserved(nothing, "cuda") == 0


@given(
    st.lists(st.lists(st.integers(1, 2000), min_size=0, max_size=2).map(tuple), min_size=1, max_size=6),
    st.integers(1, 3),
)
def test_no_allocator_takes_less_than_the_bytes(shapes, count):
    sizing = outsize.size(shapes, "float32", count=count)
    assert sizing.bytes == count * sum(4 * int(np.prod(shape, dtype=object)) for shape in shapes)
    for take in sizing.takes:
        assert take.reserved >= take.allocated >= take.requested == sizing.bytes


def test_small_tensors_share_segments():
    assert reserved(outsize.size((100,), count=1000), "cuda") == 2 * MiB


def test_many_tensors_are_bounded_without_replaying_each():
    many = outsize.size((100,), count=10**6)
    assert many.bytes == 4 * 10**8
    assert reserved(many, "cuda") >= many.bytes
    assert many.takes[1].known == "bound"


def test_the_verdict_is_about_this_machine_unless_something_else_was_asked():
    with FakeMachine(total="16GiB", available="4GiB", gpus=[("RTX 4090", "24GiB", "20GiB")]):
        assert outsize.size((2, GiB), "float32").fits  # 8 GiB: on the card
        assert not outsize.size((6, GiB), "float32").fits
        assert not outsize.size((2, GiB), "float32", budget="1GiB").fits
        assert outsize.size((2, GiB), "float32", card="rtx4090").fits
        assert not outsize.size((2, GiB), "float32", card="rtx 4060").fits


def test_a_container_decides_whether_it_fits():
    with FakeMachine(total="64GiB", container="700MiB"):
        sizing = outsize.size((1, 256, 1024, 1021), "float32")
    assert sizing.fits is False
    assert "container of 700.00 MiB" in str(sizing)
    assert any("float16" in sentence for sentence in sizing.advice)
    assert any("outsize compute" in sentence for sentence in sizing.advice)


def test_what_may_be_low_rank_is_told_of_its_factors():
    with FakeMachine(total="64GiB", container="700MiB"):
        assert "outsize decompose x.npy x.tucker --error 0.01" in " ".join(
            outsize.size((256, 1024, 1021), "float32").advice
        )
        for shape, dtype in (((2**28,), "float32"), ((2**25, 8), "float32"), ((256, 1024, 1021), "int32")):
            sizing = outsize.size(shape, dtype)
            assert sizing.advice and "decompose" not in " ".join(sizing.advice)


def test_halving_and_dtypes_say_what_they_save():
    sizing = outsize.size((1, 256, 1024, 1021), "float32")
    assert {row.name: row.saves for row in sizing.halved}["axis 1: 256 -> 128"] == sizing.bytes // 2
    assert {row.name: row.bytes for row in sizing.dtypes}["float16"] == sizing.bytes // 2
    assert {row.name: row.saves for row in sizing.dtypes}["float64"] == -sizing.bytes


def test_a_tensor_too_small_to_be_the_cause_is_said_to_be():
    assert "too small to exhaust memory by itself" in outsize.size((384, 192)).advice[0]


def test_arrays_and_mixed_lists_are_sized_as_they_are():
    assert outsize.size(np.empty((3, 5), "int16")).bytes == 30
    assert outsize.size([np.empty(3), (4, 4)], None).bytes == 24 + 64
    torch = pytest.importorskip("torch")
    assert outsize.size(torch.empty(3, 5, dtype=torch.bfloat16)).bytes == 30


def test_numbers_of_numpy_are_lengths_and_not_tensors():
    assert outsize.size(list(np.array([1024, 512]))).bytes == 4 * 1024 * 512
    assert outsize.size(np.int64(6)).bytes == outsize.size([np.int64(2), 3]).bytes == 24
    assert outsize.size([5, (2, 3)]).bytes == 44
    assert outsize.size(6, budget=np.int64(10)).fits is False


def test_text_html_and_json_come_from_the_same_numbers():
    sizing = outsize.size((384, 192))
    assert "294,912 bytes" in str(sizing)
    assert "294,912 bytes" in sizing._repr_html_()
    assert sizing.to_dict()["bytes"] == 294_912
