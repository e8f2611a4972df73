"""Recordings as lines: whatever happens to the file, what was written before can be read."""

import json
import os
from itertools import accumulate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outsize.core.errors import InputError, StoreError
from outsize.core.memory import Holder
from outsize.core.noun import from_plain, to_plain
from outsize.core.outcomes.recording import (
    AllocatorSample,
    Finding,
    GpuSample,
    Head,
    HostSample,
    Mark,
    Note,
    ProcessSample,
    Sample,
)
from outsize.core.outcomes.watch_stream import decode, encode, encode_head, newest
from outsize.monitor.history import History
from outsize.monitor.recorder import Recorder, load

HEAD = Head(command=("train.py",), pid=7, started=100.0, interval=0.1)


def sample(time=1.0, anonymous=10):
    return Sample(
        time=time,
        host=HostSample(rss=20, anonymous=anonymous, shared=2, uss=9, used=30, limit=100, limit_name="container"),
        gpus=(
            GpuSample(index=0, name="H200", used=5, free=6, total=11, holders=(Holder(pid=7, name=None, bytes=None),)),
        ),
        allocators=(AllocatorSample(pid=7, framework="torch", device="cuda:0", requested=3, tensors=("1 MiB",)),),
        processes=(ProcessSample(pid=7, name="python", anonymous=10),),
        process_count=1,
        step=4,
        phase="train",
    )


FINDING = Finding(
    kind="graphs",
    device="host",
    text="`losses` keeps 3 graphs",
    advice="append `.item()`",
    name="losses",
    where="a.py:3",
)
ITEMS = [sample(), Mark(time=1.5, kind="phase", name="evaluate"), FINDING, Note(time=2.0, text="é")]


def write(path, items=ITEMS):
    recorder = Recorder(path, HEAD)
    for item in items:
        recorder(item)
    recorder.close(3.0)


def test_what_is_written_is_read_back(tmp_path):
    write(tmp_path / "run.watch")
    recording = load(tmp_path / "run.watch")
    assert recording.head == HEAD and recording.complete
    assert recording.samples == (ITEMS[0],) and recording.findings == (FINDING,)
    assert [mark.kind for mark in recording.marks] == ["phase", "end"] and recording.notes == (ITEMS[3],)
    assert recording.peak == ITEMS[0] and recording.seconds == 1.0


@given(st.integers(0, 2000))
@example(len(encode_head(HEAD)) - 2)
@example(len(encode_head(HEAD)) - 1)
def test_a_recording_that_was_cut_anywhere_keeps_what_was_whole(cut):
    written = [encode_head(HEAD), *map(encode, [sample(time=float(number)) for number in range(4)])]
    left = "".join(written)[:cut]
    # A line is whole when its object is: only the end of the line may be missing.
    whole = sum(cut >= end - 1 for end in accumulate(map(len, written)))
    if not whole:
        with pytest.raises(StoreError, match="no recording"):
            decode(left.splitlines())
        return
    recording = decode(left.splitlines(keepends=True))
    assert len(recording.samples) == whole - 1 and not recording.complete


def test_a_damaged_line_in_the_middle_is_skipped_and_noted():
    lines = [encode_head(HEAD), '{"sample": {"time": "soon"}}\n', "\x00garbage\n", encode(sample())]
    recording = decode(lines)
    assert len(recording.samples) == 1
    assert "2 damaged line(s)" in recording.notes[-1].text


@pytest.mark.parametrize("text", ["", "hello", "[1]", '{"watch": 1}', '{"watch": 1, "head": {"pid": "x"}}', "{" * 5000])
def test_another_file_is_refused_in_one_sentence(tmp_path, text):
    (tmp_path / "x.watch").write_text(text)
    with pytest.raises(StoreError, match=r"x\.watch is no recording"):
        load(tmp_path / "x.watch")


def test_a_newer_format_is_refused_with_both_versions(tmp_path):
    (tmp_path / "x.watch").write_text('{"watch": 9, "head": {}}\n')
    with pytest.raises(StoreError, match="version 9 of the format, and this Outsize reads 1"):
        load(tmp_path / "x.watch")


def test_a_file_that_is_no_recording_is_not_written_over(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"weights")
    with pytest.raises(InputError, match=r"model\.pt is there and is no recording"):
        Recorder(tmp_path / "model.pt", HEAD)
    assert (tmp_path / "model.pt").read_bytes() == b"weights"


def test_an_old_recording_is_written_over(tmp_path):
    write(tmp_path / "run.watch", [sample(), sample()])
    write(tmp_path / "run.watch", [sample()])
    assert len(load(tmp_path / "run.watch").samples) == 1


def test_a_full_disk_is_said_and_ends_nothing(tmp_path):
    recorder = Recorder("/dev/full", HEAD)
    recorder(sample())
    assert recorder.trouble == "/dev/full is not written for now: No space left on device: the watch goes on"
    recorder.close(1.0)


def test_after_a_full_disk_whole_lines_follow(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path / "run.watch", HEAD)
    recorder(sample(time=1.0))
    real = os.write
    left = [30]

    def write(file, data):
        if not left[0]:
            raise OSError(28, "No space left on device")
        part, left[0] = data[: left[0]], 0
        return real(file, part)

    monkeypatch.setattr(os, "write", write)
    recorder(sample(time=2.0))
    assert "No space left" in recorder.trouble
    monkeypatch.setattr(os, "write", real)
    recorder._retry_at = 0.0
    recorder(sample(time=3.0))
    recorder.close(4.0)
    assert [one.time for one in load(tmp_path / "run.watch").samples] == [1.0, 3.0]
    assert recorder.trouble is None


def test_findings_are_the_newest_of_each_culprit_and_none_that_ended():
    other = Finding(kind="list", device="host", text="b", advice="", name="kept")
    again = Finding(kind="list", device="host", text="c", advice="", name="kept")
    ended = Finding(kind="graphs", device="host", text="", advice="", name="losses", where="a.py:3", ended=True)
    assert newest([FINDING, other, again]) == (FINDING, again)
    assert newest([FINDING, other, ended]) == (other,)


def test_a_long_history_is_thinned_and_keeps_its_peak():
    history = History(most=64)
    for number in range(10_000):
        history.add(sample(time=float(number), anonymous=10**9 if number == 777 else number))
    assert len(history.samples) <= 64
    assert history.recording(HEAD, True).peak.time == 777.0
    assert history.samples[0].time == 0.0 and history.samples[-1].time > 9800


@pytest.mark.parametrize("noun", [HEAD, *ITEMS], ids=lambda noun: type(noun).__name__)
def test_nouns_come_back_from_json(noun):
    assert from_plain(type(noun), json.loads(json.dumps(to_plain(noun)))) == noun


@pytest.mark.parametrize("data", [[], {"time": "x"}, {"time": True, "host": {}}, {"time": 1.0, "host": 5}])
def test_data_of_another_type_are_refused(data):
    with pytest.raises(TypeError):
        from_plain(Sample, data)
