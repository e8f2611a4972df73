"""The replay of recordings from an H200 against what torch's own allocator did there."""

import pytest
from recorded import CASES, entries_of, load, reserved_at_allocations, settings_of

from outsize.allocator import read_trace, replay
from outsize.core.allocation import AllocationEvent
from outsize.core.noun import Known

TRACED = [case for case in CASES if case != "pinned"]


def replayed(recording):
    limited = any(recording["result"].get(name) is not None for name in ("capacity", "limit"))
    read = read_trace(entries_of(recording), keep_releases=not limited)
    return read, replay_of(recording, read)


def replay_of(recording, read, **options):
    capacity = recording["result"].get("capacity")
    return replay(read.events, settings=settings_of(recording), capacity=capacity, **options)


@pytest.mark.parametrize("case", TRACED)
def test_the_replay_follows_torch_to_the_byte_through_every_allocation(case):
    recording = load(case)
    read, free = replayed(recording)
    result = replay_of(recording, read, addresses=read.addresses, samples=True)
    assert result.peak._asdict() == recording["peak"]
    assert result.known is Known.EXACT
    assert result.out_of_memory is None
    # The recording has no entry for a request that failed; each of those was one more retry.
    assert result.retries == recording["retries"] - recording["out_of_memories"]
    ours = [sample.reserved for sample, event in zip(result.samples, read.events, strict=True) if event.alloc]
    assert ours == reserved_at_allocations(recording)
    # Without the recorded addresses the peak is within half a percent.
    for name in ("reserved", "allocated"):
        assert abs(getattr(free.peak, name) - recording["peak"][name]) <= 0.005 * recording["peak"][name]


@pytest.mark.parametrize("case", ["fuzz-divisions", "unseen-fuzz-divisions", "unseen-gpt2"])
def test_divisions_are_read_into_the_table_that_torch_reads(case):
    recording = load(case)
    ours = settings_of(recording).roundup_power2_divisions or (0,) * 16
    assert list(ours) == recording["divisions"]


@pytest.mark.parametrize(("case", "allocator"), [("vectors", "cuda"), ("vectors-expandable", "cuda-expandable")])
def test_a_single_request_takes_what_torch_took_for_it(case, allocator):
    for size, allocated, reserved in load(case)["result"]["vectors"]:
        peak = replay([AllocationEvent(0, True, 0, size)], allocator).peak
        assert (peak.allocated, peak.reserved) == (allocated, reserved)


def test_pinned_memory_is_reserved_as_torch_reserved_it_at_every_step():
    rows = load("pinned")["result"]["rows"]
    events = [AllocationEvent(i, kind == "a", id, size) for i, (kind, id, size, *_) in enumerate(rows)]
    result = replay(events, "pinned", samples=True)
    # torch 2.11 calls the bytes that it took from the system `allocated_bytes` here.
    assert [sample.reserved for sample in result.samples] == [row[3] for row in rows]


@pytest.mark.parametrize("case", ["resnet50", "gpt2"])
def test_a_recording_answers_what_other_settings_would_have_reserved(case):
    default, expandable = load(case), load(f"{case}-expandable")
    read = read_trace(entries_of(default))
    foreseen = replay(read.events, "cuda-expandable").peak
    assert abs(foreseen.reserved - expandable["peak"]["reserved"]) <= 0.01 * expandable["peak"]["reserved"]


@pytest.mark.parametrize("case", ["resnet50", "gpt2", "convnext"])
def test_a_recording_under_a_smaller_device_says_where_it_ran_out(case):
    recording = load(case)
    read = read_trace(entries_of(recording))
    needed = recording["peak"]["allocated"]
    enough = replay(read.events, capacity=recording["peak"]["reserved"], addresses=read.addresses)
    assert enough.out_of_memory is None
    short = replay(read.events, capacity=needed // 2)
    assert short.out_of_memory is not None
    assert short.out_of_memory.event == short.events - 1
    assert read.events[short.out_of_memory.event].bytes == short.out_of_memory.requested
    assert short.peak.reserved <= needed // 2
