"""Snapshots: nothing in them runs, what they say is summed up exactly, and other settings are answered by replay."""

import os
import pickle
import struct

import hypothesis.strategies as st
import pytest
from effort import examples
from hypothesis import given
from snapshots import make_snapshot

import outsize
from outsize.failure.snapshot.load import load_snapshot
from outsize.failure.snapshot.state import read_state

MiB = 2**20


def write(path, content):
    path.write_bytes(pickle.dumps(content))
    return path


def test_a_snapshot_of_a_fragmented_cache_is_explained_and_replayed(tmp_path):
    diagnosis = outsize.explain(write(tmp_path / "oom.pickle", make_snapshot()))
    assert diagnosis.cause.name == "fragmentation"
    assert diagnosis.failure.requested_bytes == 300 * MiB
    text = str(diagnosis)
    assert "train.py:33 in step" in text
    assert "with expandable_segments:True the peak would have been" in text and "it fits" in text
    assert diagnosis.holders[0].bytes == 8 * 128 * MiB and "train.py:10 in keep" in diagnosis.holders[0].name


def test_the_sums_of_a_snapshot_are_exact():
    state = read_state(make_snapshot())
    assert (state.reserved, state.allocated, state.unused) == (8 * 256 * MiB, 8 * 128 * MiB, 8 * 128 * MiB)
    assert (state.largest_unused, state.unused_blocks, state.private) == (32 * MiB, 32, 0)


def test_a_request_refused_though_the_driver_had_room_is_a_fraction():
    assert outsize.explain(make_snapshot(request=600 * MiB, free=10_000 * MiB)).cause.name == "memory fraction"


def test_private_pools_are_told_apart():
    diagnosis = outsize.explain(make_snapshot(pool=(1, 0)))
    assert diagnosis.cause.name == "CUDA graph pools"


def test_true_need_is_not_called_fragmentation():
    assert outsize.explain(make_snapshot(request=4000 * MiB)).cause.name == "true need"


def test_a_snapshot_without_a_failure_has_none_but_says_what_is_held():
    diagnosis = outsize.explain(make_snapshot(fail=False))
    assert diagnosis.failure is None
    assert "unused" in str(diagnosis) and diagnosis.holders


def test_growth_between_two_snapshots_names_the_line(tmp_path):
    early, late = make_snapshot(segments=2, fail=False), make_snapshot(segments=5, fail=False)
    diagnosis = outsize.explain(write(tmp_path / "a.pickle", early), after=write(tmp_path / "b.pickle", late))
    assert diagnosis.cause.name == "leak"
    assert diagnosis.holders[0].bytes == 3 * 128 * MiB and "train.py:10" in diagnosis.holders[0].name


class Hostile:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (os.system, (f"touch {self.target}",))


def test_a_hostile_pickle_runs_nothing(tmp_path):
    target = tmp_path / "touched"
    path = write(tmp_path / "evil.pickle", {"segments": [Hostile(target)]})
    with pytest.raises(outsize.StoreError, match="Nothing of it was run"):
        outsize.explain(path)
    assert not target.exists()


@pytest.mark.parametrize(
    "payload",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
        b"\x80\x02\x82\x01.",
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
        b"\x80\x04}\x8c\x01ab.",
        b"\x80\x04N\x8c\x03pidQ.",
        b"\x80\x05\x8e" + struct.pack("<Q", 2**62),
        b"\x80\x04" + b"(" * 100_000,
        b"\x80",
        b"",
        b"\x80\x04" + b"]" * 5000 + b"a" * 4999 + b".",
    ],
)
def test_a_pickle_that_is_no_plain_snapshot_gives_a_clear_error(tmp_path, payload):
    path = tmp_path / "bad.pickle"
    path.write_bytes(payload)
    with pytest.raises(outsize.StoreError, match=r"bad\.pickle"):
        load_snapshot(path)


@pytest.mark.parametrize(
    "content",
    [
        3,
        [],
        {},
        {"segments": 3},
        {"segments": [3]},
        {"segments": [], "device_traces": 5},
        {"segments": [{"address": -1, "total_size": 1, "stream": 0, "blocks": []}]},
        {"segments": [{"address": 0, "total_size": 10**40, "stream": 0, "blocks": []}]},
        {"segments": [], "device_traces": [[{"action": "alloc"}]]},
    ],
)
def test_contents_that_are_no_snapshot_are_refused(tmp_path, content):
    with pytest.raises(outsize.StoreError):
        outsize.explain(write(tmp_path / "odd.pickle", content))


def test_one_list_repeated_a_million_times_does_not_stand_still(tmp_path):
    blocks = [{"address": 0, "size": 1, "state": "inactive"}] * 100_000
    segment = {"address": 0, "total_size": 1, "stream": 0, "blocks": blocks}
    with pytest.raises(outsize.StoreError, match="more than"):
        outsize.explain(write(tmp_path / "bomb.pickle", {"segments": [segment] * 100_000}))


@examples(150)
@given(data=st.data())
def test_damaged_snapshots_are_refused_or_read_but_never_crash(tmp_path_factory, data):
    good = pickle.dumps(make_snapshot(segments=2))
    raw = bytearray(good)
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "x.pickle"
    path.write_bytes(bytes(raw[: data.draw(st.integers(0, len(raw)))]))
    try:
        outsize.explain(path)
    except outsize.OutsizeError as error:
        assert str(error)
