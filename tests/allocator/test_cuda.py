"""The rules of torch's CUDA caching allocator, one by one."""

import random
import sys

import pytest

from outsize.allocator import CudaSettings, replay, take
from outsize.core.allocation import EMPTY_CACHE, AllocationEvent
from outsize.core.errors import InputError
from outsize.core.noun import Known
from outsize.core.units import MiB

VECTORS = [
    # request, allocated, reserved, expandable: allocated, mapped
    (1, 512, 2 * MiB, 512, 2 * MiB),
    (513, 1024, 2 * MiB, 1024, 2 * MiB),
    (1048576, 1048576, 2 * MiB, 1048576, 2 * MiB),
    (1048577, 1049088, 20 * MiB, 1049088, 20 * MiB),
    (8519680, 8519680, 20 * MiB, 8519680, 20 * MiB),
    (10485760, 10485760, 10 * MiB, 10485760, 20 * MiB),
    (10485761, 10486272, 12 * MiB, 10486272, 20 * MiB),
    (19922944, 20971520, 20 * MiB, 19922944, 20 * MiB),
    (22020095, 23068672, 22 * MiB, 22020096, 40 * MiB),
    (104857601, 104858112, 102 * MiB, 104858112, 120 * MiB),
    (123456789, 123731968, 118 * MiB, 123457024, 120 * MiB),
]


def run(*steps, allocator="cuda", **options):
    """Steps are (id, MiB or bytes) to allocate, a bare id to free, `empty` to empty the cache."""
    events = []
    for step in steps:
        if step == "empty":
            events.append(AllocationEvent(0, False, EMPTY_CACHE, 0))
        elif isinstance(step, tuple):
            events.append(AllocationEvent(0, True, step[0], int(step[1]), *step[2:]))
        else:
            events.append(AllocationEvent(0, False, step, 0))
    return replay(events, allocator, samples=True, **options)


def reserved(result):
    return [sample.reserved / MiB for sample in result.samples]


@pytest.mark.parametrize(("request_bytes", "allocated", "held", "expandable", "mapped"), VECTORS)
def test_one_request_on_an_empty_cache_takes_what_it_takes_on_an_h200(
    request_bytes, allocated, held, expandable, mapped
):
    native, grown = run((0, request_bytes)).peak, run((0, request_bytes), allocator="cuda-expandable").peak
    assert (native.allocated, native.reserved) == (allocated, held)
    assert (grown.allocated, grown.reserved) == (expandable, mapped)
    for name, peak in (("cuda", native), ("cuda expandable", grown)):
        one = take(request_bytes, name)
        assert (one.allocated, one.reserved, one.known) == (peak.allocated, peak.reserved, Known.EXACT)


def test_an_empty_request_takes_nothing():
    assert run((0, 0), 0).peak == (0, 0, 0, 0)
    assert take(0, "cuda").reserved == 0


def test_a_freed_block_is_reused_by_the_next_that_fits():
    assert reserved(run((0, 30 * MiB), 0, (1, 29.5 * MiB))) == [30, 30, 30]
    assert reserved(run((0, 30 * MiB), 0, (1, 31 * MiB))) == [30, 30, 62]


def test_small_and_large_requests_do_not_share_segments():
    assert reserved(run((0, 30 * MiB), 0, (1, 1000))) == [30, 30, 32]


def test_streams_do_not_share_blocks():
    assert reserved(run((0, 30 * MiB, 1), 0, (1, 30 * MiB, 2), (2, 30 * MiB, 1))) == [30, 30, 60, 60]


def test_the_smallest_block_that_fits_is_taken():
    result = run((0, 40 * MiB), (1, 30 * MiB), 0, 1, (2, 29.5 * MiB), (3, 40 * MiB))
    assert result.peak.reserved == 70 * MiB


def test_what_is_left_over_is_split_off_only_above_1_mib_in_the_large_pool():
    assert run((0, 30 * MiB), 0, (1, 29 * MiB)).samples[-1].allocated == 30 * MiB
    assert run((0, 30 * MiB), 0, (1, 29 * MiB - 512)).samples[-1].allocated == 29 * MiB - 512


def test_freed_neighbours_join():
    assert reserved(run((0, 2 * MiB), (1, 2 * MiB), (2, 16 * MiB), 0, 2, 1, (3, 19.5 * MiB))) == [20] * 7


def test_a_block_that_another_stream_uses_is_active_but_not_allocated():
    events = [
        AllocationEvent(0, True, 0, 30 * MiB),
        AllocationEvent(1, False, 0, 0, waits=True),
        AllocationEvent(2, True, 1, 30 * MiB),
        AllocationEvent(3, False, 0, 0),
        AllocationEvent(4, True, 2, 30 * MiB),
    ]
    samples = replay(events, samples=True).samples
    assert [sample.allocated // MiB for sample in samples] == [30, 0, 30, 30, 60]
    assert [sample.active // MiB for sample in samples] == [30, 30, 60, 30, 60]
    assert [sample.requested // MiB for sample in samples] == [30, 30, 60, 30, 60]
    assert [sample.reserved // MiB for sample in samples] == [30, 30, 60, 60, 60]


def test_a_full_device_gets_its_unused_segments_back_and_is_asked_again():
    result = run((0, 30 * MiB), (1, 30 * MiB), 0, (2, 50 * MiB), capacity=80 * MiB)
    assert reserved(result) == [30, 60, 60, 80]
    assert (result.retries, result.out_of_memory) == (1, None)


def test_a_segment_in_use_cannot_be_returned_and_the_replay_says_how_much_was_stuck():
    result = run((0, 2 * MiB), (1, 18 * MiB), 1, (2, 70 * MiB), capacity=80 * MiB)
    assert result.retries == 1
    failed = result.out_of_memory
    assert (failed.event, failed.requested, failed.free) == (3, 70 * MiB, 60 * MiB)
    assert failed.reserved_unallocated == 18 * MiB
    assert result.events == 4


def test_empty_cache_returns_whole_segments_only():
    result = run((0, 30 * MiB), (1, 2 * MiB), (2, 2 * MiB), 0, 1, "empty")
    assert reserved(result)[-1] == 20


def test_max_split_size_keeps_large_blocks_whole_and_for_large_requests():
    chosen = CudaSettings(max_split_size=40 * MiB)
    assert reserved(run((0, 60 * MiB), 0, (1, 30 * MiB), settings=chosen)) == [60, 60, 90]
    assert reserved(run((0, 60 * MiB), 0, (1, 45 * MiB), settings=chosen)) == [60, 60, 60]
    assert reserved(run((0, 60 * MiB), 0, (1, 40 * MiB), settings=chosen)) == [60, 60, 100]
    wider = CudaSettings(max_split_size=40 * MiB, max_non_split_rounding=30 * MiB)
    assert reserved(run((0, 60 * MiB), 0, (1, 40 * MiB), settings=wider)) == [60, 60, 60]


def test_max_split_size_returns_just_the_oversize_block_that_helps():
    chosen = CudaSettings(max_split_size=40 * MiB)
    result = run((0, 100 * MiB), (1, 60 * MiB), 0, 1, (2, 70 * MiB), settings=chosen, capacity=160 * MiB)
    assert (reserved(result)[-1], result.retries) == (130, 0)


def test_divisions_round_up_to_steps_between_powers_of_two():
    chosen = CudaSettings(roundup_power2_divisions=(4,) * 16)
    for asked, given in [
        (1200, 1536),
        (3000, 3072),
        (4096, 4096),
        (5000, 5120),
        (33 * MiB, 40 * MiB),
        (64 * MiB, 64 * MiB),
    ]:
        assert run((0, asked), settings=chosen).peak.allocated == given


def test_a_collection_threshold_returns_old_unused_segments_before_asking_for_more():
    chosen = CudaSettings(limit=200 * MiB, garbage_collection_threshold=0.5)
    result = run((0, 60 * MiB), (1, 60 * MiB), 0, (2, 70 * MiB), settings=chosen)
    assert reserved(result) == [60, 120, 120, 130]
    plain = run((0, 60 * MiB), (1, 60 * MiB), 0, (2, 70 * MiB), settings=CudaSettings(limit=200 * MiB))
    assert reserved(plain)[-1] == 190


def test_an_expandable_segment_grows_in_place_instead_of_leaving_holes():
    steps = [(0, 30 * MiB), 0, (1, 50 * MiB), 1, (2, 70 * MiB)]
    assert reserved(run(*steps)) == [30, 30, 80, 80, 150]
    assert reserved(run(*steps, allocator="cuda-expandable")) == [40, 40, 60, 60, 80]


def test_an_expandable_segment_returns_only_whole_pages_inside_free_blocks():
    result = run((0, 30 * MiB), (1, 60 * MiB), (2, 10 * MiB), 1, "empty", allocator="cuda-expandable")
    # 30 to 90 of 100 MiB are free: the pages from 40 to 80 go back.
    assert reserved(result) == [40, 100, 100, 100, 60]
    assert [segment.bytes // MiB for segment in result.segments] == [40, 20]


def test_an_expandable_segment_fills_its_holes_again():
    steps = [(0, 30 * MiB), (1, 60 * MiB), (2, 10 * MiB), 1, "empty", (3, 60 * MiB)]
    result = run(*steps, allocator="cuda-expandable")
    assert reserved(result)[-1] == 100
    assert len(result.segments) == 1


def test_a_replay_without_addresses_says_when_a_tie_was_guessed():
    tied = [(0, 30 * MiB), (1, 30 * MiB), 0, 1, (2, 30 * MiB)]
    assert run((0, 30 * MiB), 0, (1, 30 * MiB)).known is Known.EXACT
    assert run(*tied).known is Known.ESTIMATE
    assert run(*tied, addresses=[(1 << 30, 30 * MiB), (1 << 29, 30 * MiB)]).known is Known.EXACT
    assert run(*tied, allocator="cuda-expandable").known is Known.EXACT


def test_addresses_of_a_recording_decide_which_of_two_equal_blocks_is_taken():
    steps = [(0, 30 * MiB), (1, 30 * MiB), 0, 1, (2, 10 * MiB)]
    for addresses in [[(1 << 30, 30 * MiB), (1 << 29, 30 * MiB)], [(1 << 29, 30 * MiB), (1 << 30, 30 * MiB)]]:
        holder = next(s for s in run(*steps, addresses=addresses).segments if s.blocks[0].id == 2)
        assert holder.address == 1 << 29


def test_the_work_for_an_event_does_not_grow_with_the_events():
    def calls(count):
        pick, live, events = random.Random(1), [], []
        for number in range(count):
            if len(live) < 200 and (not live or pick.random() < 0.6):
                events.append(AllocationEvent(number, True, number, int(2 ** pick.uniform(4, 26))))
                live.append(number)
            else:
                events.append(AllocationEvent(number, False, live.pop(pick.randrange(len(live))), 0))
        seen = 0

        def count_call(frame, what, argument):
            nonlocal seen
            seen += what in {"call", "c_call"}

        sys.setprofile(count_call)
        try:
            replay(events)
        finally:
            sys.setprofile(None)
        return seen / count

    assert calls(20_000) <= 1.1 * calls(5_000)
    assert calls(20_000) < 15


def test_an_unknown_allocator_is_refused():
    with pytest.raises(InputError, match="unknown allocator 'mps'"):
        take(1, "mps")
