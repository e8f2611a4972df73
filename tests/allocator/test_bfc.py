"""The BFC allocator of TensorFlow and JAX: regions that double, chunks cut and joined."""

import pytest

from outsize.allocator import BfcSettings, replay, take
from outsize.core.allocation import AllocationEvent
from outsize.core.errors import InputError
from outsize.core.units import MiB


def run(*steps, **options):
    """Steps are (id, bytes) to allocate or a bare id to free."""
    events = [
        AllocationEvent(0, True, step[0], int(step[1]))
        if isinstance(step, tuple)
        else AllocationEvent(0, False, step, 0)
        for step in steps
    ]
    return replay(events, "bfc", samples=True, **options)


def reserved(result):
    return [sample.reserved / MiB for sample in result.samples]


def test_chunks_are_multiples_of_256_bytes_out_of_a_first_region_of_2_mib():
    result = run((0, 1), (1, 257))
    assert [sample.allocated for sample in result.samples] == [256, 768]
    assert reserved(result) == [2, 2]


def test_a_region_doubles_until_the_request_fits_and_the_next_one_doubles_again():
    # 3 MiB: the first region becomes 4 MiB; the next is 4 MiB as well, since it had already grown; the one after, 8 MiB.
    assert reserved(run((0, 3 * MiB), (1, 3 * MiB), (2, 3 * MiB))) == [4, 8, 16]
    # 1 MiB: regions of 2, then 4 MiB.
    assert reserved(run((0, 2 * MiB), (1, 2 * MiB))) == [2, 6]


def test_a_chunk_is_cut_where_it_is_twice_the_request():
    assert run((0, 3 * MiB)).samples[-1].allocated == 4 * MiB
    assert run((0, 2 * MiB), 0, (1, MiB)).samples[-1].allocated == MiB
    assert run((0, 2 * MiB), 0, (1, MiB + 1)).samples[-1].allocated == 2 * MiB


def test_a_chunk_is_cut_where_128_mib_are_left_over():
    big = 512 * MiB
    assert run((0, big), 0, (1, big - 127 * MiB)).samples[-1].allocated == big
    assert run((0, big), 0, (1, big - 128 * MiB)).samples[-1].allocated == big - 128 * MiB
    tight = BfcSettings(fragmentation_fraction=0.01, limit=1000 * MiB)
    assert run((0, big), 0, (1, big - 10 * MiB), settings=tight).samples[-1].allocated == big - 10 * MiB


def test_free_neighbours_join_and_are_used_again():
    assert reserved(run((0, MiB), (1, MiB), 0, 1, (2, 2 * MiB))) == [2] * 5


def test_without_growth_the_whole_limit_is_taken_at_once():
    result = run((0, 1000), settings=BfcSettings(growth=False), capacity=1000 * MiB)
    assert result.peak.reserved == 1000 * MiB
    with pytest.raises(InputError, match="whole limit at once"):
        run((0, 1000), settings=BfcSettings(growth=False))


def test_the_last_region_is_what_is_left_of_the_limit():
    result = run((0, 3 * MiB), (1, 3 * MiB), settings=BfcSettings(limit=7 * MiB))
    assert reserved(result) == [4, 7]
    assert run((0, 3 * MiB), (1, 4 * MiB), settings=BfcSettings(limit=7 * MiB)).out_of_memory is not None


def test_a_system_that_refuses_is_asked_for_nine_tenths():
    result = run((0, 60 * MiB), settings=BfcSettings(limit=100 * MiB), capacity=62 * MiB)
    # 64, then 57.6 MiB, which is too small: 64 * 0.9 < 60.
    assert result.out_of_memory is not None
    result = run((0, 50 * MiB), settings=BfcSettings(limit=100 * MiB), capacity=60 * MiB)
    assert result.peak.reserved == -(-int(64 * MiB * 0.9) // 256) * 256


def test_unused_regions_are_given_back_before_failing_unless_that_is_off():
    steps = [(0, 2 * MiB), (1, 4 * MiB), 0, 1, (2, 9 * MiB)]
    assert run(*steps, settings=BfcSettings(limit=10 * MiB)).out_of_memory is None
    assert run(*steps, settings=BfcSettings(limit=10 * MiB, garbage_collection=False)).out_of_memory is not None


def test_one_tensor_in_tensorflow_takes_the_next_doubled_region():
    one = take(1_070_596_096, "tensorflow")
    assert (one.allocated, one.reserved) == (2**30, 2**30)
