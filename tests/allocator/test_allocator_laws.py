"""Laws that hold for any events: what is counted, how blocks tile segments, what a limit means."""

import hypothesis.strategies as st
import pytest
from effort import examples
from hypothesis import given

from outsize.allocator import MODELS, BfcSettings, CudaSettings, replay
from outsize.core.allocation import EMPTY_CACHE, AllocationEvent
from outsize.core.errors import InputError
from outsize.core.units import KiB, MiB

SIZES = st.one_of(st.integers(0, 4 * KiB), st.integers(0, 4 * MiB), st.integers(0, 300 * MiB))
CHOICES = st.lists(st.tuples(st.integers(0, 9), SIZES, st.integers(0, 1)), max_size=60)
CUDA = ["cuda", "cuda-expandable"]
SETTINGS = st.builds(
    CudaSettings,
    max_split_size=st.sampled_from([None, 20 * MiB, 64 * MiB]),
    roundup_power2_divisions=st.sampled_from([(), (4,) * 16, (0, 2, 0, 8) * 4]),
    large_segment_size=st.sampled_from([20 * MiB, 32 * MiB]),
)


def make_events(choices):
    """Random choices as events that make sense: a free, a free that waits, or an allocation."""
    events, live, waiting, next_id = [], [], [], 0
    for kind, size, stream in choices:
        if kind == 9:
            events.append(AllocationEvent(len(events), False, EMPTY_CACHE, 0))
        elif kind >= 6 and live:
            events.append(AllocationEvent(len(events), False, live.pop(size % len(live)), 0))
        elif kind == 5 and live:
            waiting.append(live.pop(size % len(live)))
            events.append(AllocationEvent(len(events), False, waiting[-1], 0, stream, True))
        elif kind == 4 and waiting:
            events.append(AllocationEvent(len(events), False, waiting.pop(), 0))
        else:
            events.append(AllocationEvent(len(events), True, next_id, size, stream))
            live.append(next_id)
            next_id += 1
    return events, [*live, *waiting]


@pytest.mark.parametrize("allocator", MODELS)
@given(choices=CHOICES)
def test_reserved_covers_active_covers_allocated_and_requested(allocator, choices):
    events, _ = make_events(choices)
    for sample in replay(events, allocator, samples=True).samples:
        assert sample.reserved >= sample.active >= sample.allocated >= 0
        assert sample.active >= sample.requested >= 0


@pytest.mark.parametrize("allocator", MODELS)
@given(choices=CHOICES)
def test_the_blocks_of_a_segment_tile_it_and_the_segments_are_what_is_reserved(allocator, choices):
    events, left = make_events(choices)
    result = replay(events, allocator, samples=True)
    for segment in result.segments:
        end = 0
        for block in segment.blocks:
            assert block.offset == end
            assert block.bytes > 0 or allocator == "exact"
            end += block.bytes
        assert end == segment.bytes
    last = result.samples[-1] if result.samples else None
    assert sum(segment.bytes for segment in result.segments) == (last.reserved if last else 0)
    held = [block for segment in result.segments for block in segment.blocks if block.id is not None]
    assert sum(block.bytes for block in held) == (last.active if last else 0)
    assert {block.id for block in held} <= set(left)


@pytest.mark.parametrize("allocator", MODELS)
@given(choices=CHOICES)
def test_segments_do_not_overlap(allocator, choices):
    events, _ = make_events(choices)
    end = 0
    for segment in sorted(replay(events, allocator).segments, key=lambda segment: segment.address):
        assert segment.address >= end
        end = segment.address + segment.bytes


@pytest.mark.parametrize("allocator", CUDA)
@given(choices=CHOICES, chosen=SETTINGS)
def test_freeing_everything_leaves_whole_free_segments_that_empty_cache_returns(allocator, choices, chosen):
    events, left = make_events(choices)
    events += [AllocationEvent(0, False, id, 0) for id in left]
    freed = replay(events, allocator, settings=chosen, samples=True)
    if freed.samples:
        last = freed.samples[-1]
        assert (last.requested, last.allocated, last.active) == (0, 0, 0)
    for segment in freed.segments:
        assert [block.id for block in segment.blocks] == [None]
    emptied = replay([*events, AllocationEvent(0, False, EMPTY_CACHE, 0)], allocator, settings=chosen)
    assert emptied.segments == ()


@pytest.mark.parametrize("allocator", MODELS)
@given(choices=CHOICES, capacity=st.integers(1, 600).map(lambda n: n * MiB))
def test_a_replay_never_reserves_more_than_the_device_has(allocator, choices, capacity):
    events, _ = make_events(choices)
    result = replay(events, allocator, capacity=capacity)
    assert result.peak.reserved <= capacity
    if result.out_of_memory is not None:
        assert result.out_of_memory.requested > 0
        assert 0 <= result.out_of_memory.free <= capacity


@pytest.mark.parametrize("allocator", CUDA)
@given(choices=CHOICES, limit=st.integers(1, 600).map(lambda n: n * MiB), threshold=st.sampled_from([0.0, 0.5, 0.9]))
def test_a_limit_holds_up_to_the_last_page(allocator, choices, limit, threshold):
    events, _ = make_events(choices)
    chosen = CudaSettings(limit=limit, garbage_collection_threshold=threshold)
    # torch checks the limit against the size of a plain segment, but an expandable one is mapped in pages of 20 MiB.
    slack = 20 * MiB if allocator == "cuda-expandable" else 0
    assert replay(events, allocator, settings=chosen).peak.reserved <= limit + slack


@pytest.mark.parametrize("allocator", MODELS)
@given(choices=CHOICES)
@examples(20)
def test_the_same_events_give_the_same_replay(allocator, choices):
    events, _ = make_events(choices)
    assert replay(events, allocator, samples=True) == replay(iter(events), allocator, samples=True)


@given(choices=CHOICES)
def test_a_device_that_is_large_enough_changes_nothing(choices):
    events, _ = make_events(choices)
    free = replay(events)
    assert replay(events, capacity=free.peak.reserved).peak == free.peak


@given(choices=CHOICES)
def test_bfc_without_growth_holds_its_whole_limit_from_the_first_request(choices):
    events, _ = make_events(choices)
    result = replay(events, "bfc", capacity=30_000 * MiB, settings=BfcSettings(growth=False))
    assert result.peak.reserved == (30_000 * MiB if any(event.alloc and event.bytes for event in events) else 0)


def test_events_that_make_no_sense_are_refused_with_their_number():
    alloc, free = AllocationEvent(0, True, 7, 10), AllocationEvent(1, False, 7, 0)
    with pytest.raises(InputError, match="event 1 allocates 7, which is still allocated"):
        replay([alloc, alloc])
    with pytest.raises(InputError, match="event 2 frees 7, which is not allocated"):
        replay([alloc, free, free])
    with pytest.raises(InputError, match="event 0 allocates -1 bytes"):
        replay([AllocationEvent(0, True, 0, -1)])
    with pytest.raises(InputError, match="unknown allocator 'jemalloc'"):
        replay([alloc], "jemalloc")
    with pytest.raises(InputError, match="takes BfcSettings, not CudaSettings"):
        replay([alloc], "bfc", settings=CudaSettings())
