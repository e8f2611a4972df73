"""Reading torch's traces and snapshots."""

import pytest
from recorded import entries_of, load

from outsize.allocator import read_snapshot, read_trace, replay
from outsize.core.allocation import EMPTY_CACHE
from outsize.core.errors import InputError
from outsize.core.units import MiB


def entry(action, addr, size, stream=0):
    return {"action": action, "addr": addr, "size": size, "stream": stream}


def test_a_free_that_completes_at_once_is_one_event():
    read = read_trace([entry("alloc", 512, 100), entry("free_requested", 512, 100), entry("free_completed", 512, 100)])
    assert [(event.alloc, event.id, event.bytes, event.waits) for event in read.events] == [
        (True, 0, 100, False),
        (False, 0, 0, False),
    ]


def test_a_free_that_another_stream_delays_is_two_events():
    entries = [
        entry("alloc", 512, 100),
        entry("free_requested", 512, 100),
        entry("alloc", 1024, 200, 3),
        entry("free_completed", 512, 100),
    ]
    read = read_trace(entries)
    assert [(event.alloc, event.id, event.waits) for event in read.events] == [
        (True, 0, False),
        (False, 0, True),
        (True, 1, False),
        (False, 0, False),
    ]
    assert read.events[2].stream == 3


def test_an_address_that_is_used_again_is_another_block():
    block = [entry("alloc", 512, 100), entry("free_requested", 512, 100), entry("free_completed", 512, 100)]
    assert [event.id for event in read_trace(block * 2).events] == [0, 0, 1, 1]


def test_segments_are_read_as_addresses_and_their_return_as_one_empty_cache():
    entries = [
        entry("segment_alloc", 0, 2 * MiB),
        entry("alloc", 0, 100),
        entry("free_completed", 0, 100),
        entry("segment_free", 0, 2 * MiB),
        entry("segment_free", 4 * MiB, 20 * MiB),
    ]
    read = read_trace(entries)
    assert read.addresses == ((0, 2 * MiB),)
    assert [event.id for event in read.events] == [0, 0, EMPTY_CACHE]
    assert [event.id for event in read_trace(entries, keep_releases=False).events] == [0, 0]


def test_a_request_that_failed_had_emptied_the_cache():
    failed = {"action": "oom", "device_free": 5, "size": 100, "stream": 0}
    assert read_trace([failed], keep_releases=False).events[0].id == EMPTY_CACHE


def test_blocks_from_before_the_recording_are_put_in_front():
    snapshot = {
        "device_traces": [
            [entry("free_requested", 4096, 300), entry("free_completed", 4096, 300), entry("alloc", 8192, 7)]
        ],
        "segments": [
            {
                "device": 0,
                "address": 0,
                "total_size": 2 * MiB,
                "stream": 0,
                "blocks": [
                    {"address": 512, "size": 1024, "requested_size": 1000, "state": "active_allocated"},
                    {"address": 4096, "size": 512, "state": "inactive"},
                    {"address": 8192, "size": 512, "requested_size": 7, "state": "active_allocated"},
                ],
            },
        ],
    }
    read = read_snapshot(snapshot)
    assert read.alive_before == 2
    assert [(event.alloc, event.bytes) for event in read.events] == [(True, 1000), (True, 300), (False, 0), (True, 7)]
    assert read.addresses == ((0, 2 * MiB),)
    assert replay(read.events, addresses=read.addresses).peak.requested == 1300


def test_a_recording_cut_at_its_start_still_replays_close_to_the_truth():
    recording = load("resnet50")
    entries = entries_of(recording)
    whole = replay(read_trace(entries).events).peak
    cut = read_trace(entries[len(entries) // 2 :])
    assert cut.alive_before > 100
    assert abs(replay(cut.events).peak.allocated - whole.allocated) <= 0.1 * whole.allocated


def test_a_device_without_traces_is_refused():
    with pytest.raises(InputError, match="traces of 1 devices, so none of device 3"):
        read_snapshot({"device_traces": [[]], "segments": []}, device=3)
