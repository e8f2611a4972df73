"""`outsize watch` from outside: processes, the machine, commands and recordings; every trouble is one line."""

import dataclasses
import io
import json
import os
import pty
import re
import subprocess
import sys
import textwrap
import time
import types
from collections import Counter

import answers
import pytest

from outsize.core.outcomes.outlook import Outlook, host_outlook
from outsize.core.outcomes.recording import (
    AllocatorSample,
    GpuSample,
    Head,
    HostSample,
    Note,
    ProcessSample,
    Recording,
    Sample,
)
from outsize.core.units import format_seconds, format_span, parse_seconds
from outsize.machine.fake import FakeMachine
from outsize.monitor import outside as outside_module
from outsize.monitor.gpus import Gpus
from outsize.monitor.outside import Outside
from outsize.monitor.pace import Paced, Pause
from outsize.monitor.processes.tree import ProcessReading, TreeReading
from outsize.monitor.recorder import load
from outsize.monitor.sampler import Sampler
from outsize.monitor.tree_growth import TreeGrowth
from outsize.report.live import Screen, render

MiB = 2**20
GROW = """
import time
kept = []
def work():
    kept.append(bytearray(2**18))
for step in range(9000):
    work()
    time.sleep(0.01)
    if step % 50 == 0 and '"finding"' in open("run.watch").read():
        break
"""
"""Grows until it was found, so that a busy machine may take its time."""


def watch(*words, cwd, **more):
    return subprocess.run(
        [sys.executable, "-m", "outsize", "watch", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=900,
        **more,
    )


def test_once_is_one_line_about_this_machine(tmp_path):
    done = watch("--once", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.count("\n") == 1 and " of " in done.stdout and "RAM" in done.stdout


def test_json_lines_are_a_recording(tmp_path):
    done = watch("--json", "--for", "1s", os.getpid(), cwd=tmp_path)
    (tmp_path / "x.watch").write_text(done.stdout)
    recording = load(tmp_path / "x.watch")
    assert recording.complete and recording.head.pid == os.getpid() and len(recording.samples) >= 2


def test_a_process_that_is_not_there_is_one_line(tmp_path):
    done = watch("999999999", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "outsize: there is no process 999999999\n")


def test_a_command_keeps_its_output_and_status_and_its_recording_is_replayed(tmp_path):
    (tmp_path / "train.py").write_text(
        "import sys, time\nprint('trained', sys.argv[1:])\ntime.sleep(1.5)\nsys.exit(7)\n"
    )
    done = watch("--record", "run.watch", "--", "train.py", "--lr", "1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (7, "trained ['--lr', '1']\n")
    recording = load(tmp_path / "run.watch")
    assert recording.complete and recording.head.command == ("train.py", "--lr", "1")
    assert any(sample.allocators for sample in recording.samples)
    replayed = watch("run.watch", cwd=tmp_path)
    assert replayed.returncode == 0 and "train.py --lr 1" in replayed.stdout
    assert json.loads(watch("--json", "run.watch", cwd=tmp_path).stdout)["head"]["command"][0] == "train.py"


def test_a_process_that_is_killed_in_the_middle_ends_the_watch_with_what_was_seen(tmp_path):
    (tmp_path / "train.py").write_text("import os, time\ntime.sleep(0.5)\nos.kill(os.getpid(), 9)\n")
    done = watch("--record", "run.watch", "--", "train.py", cwd=tmp_path)
    assert done.returncode == 137 and "Traceback" not in done.stderr
    assert load(tmp_path / "run.watch").marks[-1].name == "the process has ended"


def test_a_full_disk_while_recording_is_one_line_and_the_program_runs_on(tmp_path):
    (tmp_path / "train.py").write_text("import time\ntime.sleep(0.6)\nprint('done')\n")
    done = watch("--record", "/dev/full", "--", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert done.stderr.count("outsize: /dev/full is not written for now: No space left on device") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--",), "nothing to run"),
        (("--", "nowhere.py"), "no such script or command: nowhere.py"),
        (("--for", "soon", "1"), "cannot read 'soon' as a time"),
        (("gone.watch",), "there is no file gone.watch"),
        (("/tmp",), "/tmp is a folder: give a process id, a recording, or a program to start"),
        (("--once", "--record", "/nowhere/x.watch"), "/nowhere/x.watch cannot be written: No such file or directory"),
    ],
)
def test_mistakes_are_one_line(tmp_path, words, said):
    done = watch(*words, cwd=tmp_path)
    assert done.returncode in (1, 2) and said in done.stderr and done.stderr.count("\n") == 1


def test_a_culprit_is_found_from_outside_by_run_and_is_in_the_recording(tmp_path):
    (tmp_path / "grow.py").write_text(textwrap.dedent(GROW))
    command = [sys.executable, "-m", "outsize", "run", "--watch", "--record", "run.watch", "grow.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=900)
    assert done.returncode == 0
    assert "outsize: grows: `kept` (list) in grow.py:5 keeps" in done.stderr
    assert load(tmp_path / "run.watch").findings[0].where == "grow.py:5"


def test_record_without_watch_is_refused(tmp_path):
    command = [sys.executable, "-m", "outsize", "run", "--record", "x", "y.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "--record needs --watch" in done.stderr


def test_a_terminal_shows_a_screen_that_obeys_keys(tmp_path):
    master, slave = pty.openpty()
    line = [sys.executable, "-m", "outsize", "watch", str(os.getpid())]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen(line, stdin=slave, stdout=slave, stderr=slave, cwd=tmp_path, env=environment)
    os.close(slave)
    shown = b""
    answers = ((b"", b"q quit"), (b"s", b"processes by shared"), (b"f", b"frozen"), (b"f", b""), (b"p", b"watch-"))
    for key, answer in answers:
        os.write(master, key)
        until = time.monotonic() + 600
        while answer not in shown and time.monotonic() < until:
            shown += os.read(master, 65536)
    os.write(master, b"q")
    with open(master, "rb", closefd=True) as file:
        try:
            while part := file.read1(65536):
                shown += part
        except OSError:  # the other end has closed
            pass
    assert process.wait(600) == 0
    assert b"processes by shared" in shown and b"frozen" in shown and b"\x1b[?1049l" in shown
    assert json.loads(next(tmp_path.glob("watch-*.json")).read_text())["samples"]


def recording(count=60, limit=4000 * MiB, rate=50 * MiB, name="python"):
    samples = tuple(
        Sample(
            time=number / 2,
            host=HostSample(
                rss=number * rate // 2, anonymous=number * rate // 2, shared=0, used=number * rate // 2 + 100 * MiB, limit=limit,
                limit_name="container", page_cache=5 * MiB,
            ),
            gpus=(GpuSample(index=0, name="NVIDIA H200", used=number * MiB, free=MiB, total=141 * 1024 * MiB, utilisation=0.5),),
            processes=tuple(ProcessSample(pid=pid, name=name, anonymous=pid * MiB, swap=-pid + 9) for pid in (1, 2, 3)),
            process_count=3,
            step=number,
        )
        for number in range(count)
    )  # fmt: skip
    return Recording(head=Head(command=("train.py",), pid=4, started=0.0, interval=0.5), samples=samples)


def test_the_screen_fits_eighty_columns_without_colour():
    text = render(recording(90), 80, "RAM", False, color=False)
    assert max(map(len, text.splitlines())) <= 80 and "\x1b" not in text
    low, high = map(int, re.search(r"full in (\d+) to (\d+) s at this rate", text).groups())
    assert low <= 33.5 <= high and high - low < 12
    assert "container 2.27 GiB of 3.91 GiB (58%)" in text and "NVIDIA H200" in text and "50% busy" in text


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_lines_of_the_screen_end_between_two_facts(columns):
    made = recording(120, rate=40 * MiB)
    last = dataclasses.replace(
        made.samples[-1],
        allocators=(
            AllocatorSample(
                framework="torch", device="cuda:0", pid=123456, requested=512 * MiB, allocated=512 * MiB,
                reserved=512 * MiB, fragments=512 * MiB,
            ),
        ),
    )  # fmt: skip
    text = render(dataclasses.replace(made, samples=(*made.samples[:-1], last)), columns, "RAM", False, color=False)
    assert max(map(len, text.splitlines())) <= columns
    facts = [fact for line in text.splitlines() for fact in re.split(r"\s{3,}", line.strip())]
    assert {"fragments 512.00 MiB", "torch cuda:0 (pid 123456)", "shared 0 B", "50% busy"} <= set(facts)
    assert any(re.fullmatch(r"full in .* at this rate", fact) for fact in facts)


def test_forks_that_share_pages_hold_at_most_what_is_said_and_fill_nothing():
    def forked(seconds, used):
        host = HostSample(
            rss=0, anonymous=seconds * 100 * MiB, shared=0, used=used, limit=4000 * MiB, limit_name="container"
        )
        return Sample(time=float(seconds), host=host)

    steady = [forked(seconds, 500 * MiB) for seconds in range(60)]
    assert host_outlook(steady) is None
    growing = [forked(seconds, (500 + 20 * seconds) * MiB) for seconds in range(60)]
    assert host_outlook(growing).middle == pytest.approx(116, abs=4)
    made = dataclasses.replace(recording(), samples=tuple(steady))
    assert "RAM  at most 5.76 GiB held" in render(made, 80, "RAM", False, color=False)
    assert "at most" not in render(recording(), 80, "RAM", False, color=False)


def test_a_low_terminal_keeps_the_keys(capsys, monkeypatch):
    monkeypatch.setenv("LINES", "8")
    monkeypatch.setenv("COLUMNS", "80")
    Screen().show(recording())
    shown = capsys.readouterr().out
    assert shown.count("\n") == 7 and "q quit" in shown


def test_the_screen_can_be_written_in_ascii():
    from outsize.cli.streams import prepare_streams

    prepare_streams()
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="outsize")
    file.write(render(recording(), 80, "RAM", False, color=False))
    file.flush()


def test_the_processes_fit_a_terminal_of_forty_columns():
    lines = render(recording(), 40, "RAM", False, color=False).splitlines()
    table = lines[lines.index("3 processes by RAM") + 1 :]
    assert table[0].split() == ["pid", "process", "RAM"]
    assert [line.split() for line in table[1:4]] == [[str(pid), "python", f"{pid}.00", "MiB"] for pid in (3, 2, 1)]


def test_what_the_processes_hold_is_told_from_what_the_machine_uses():
    from outsize.report.text.recording import draw_line

    host = HostSample(rss=5, anonymous=MiB, shared=0, used=3 * MiB, limit=10 * MiB)
    line = draw_line(
        Recording(head=Head(command=(), pid=None, started=0.0, interval=1.0), samples=(Sample(time=0.0, host=host),)),
        80,
    )
    assert "held    1.00 MiB  RAM in use 3.00 MiB of 10.00 MiB (30%)" in line


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_plain_lines_of_a_watch_fit_the_terminal_and_lose_nothing(columns):
    from outsize.report.text.recording import draw_line, draw_news

    samples = [
        Sample(
            time=12345.6 + second, step=123_456,
            host=HostSample(rss=5, anonymous=second * MiB, shared=0, used=1000 * MiB, limit=1023 * MiB, limit_name="container"),
            gpus=tuple(GpuSample(index=i, name="a card", used=1000 * MiB, free=0, total=1023 * MiB) for i in range(8)),
        )
        for second in range(900, 940)
    ]  # fmt: skip
    made = Recording(head=Head(command=(), pid=None, started=0.0, interval=1.0), samples=tuple(samples), complete=True)
    finding = answers.recording().findings[0]
    note = Note(time=0.0, text="run.watch is not written for now: No space left on device: the watch goes on " * 3)
    line, *news = draw_line(made, columns), draw_news(finding, columns), draw_news(note, columns)
    for text in (line, *news):
        assert max(map(len, text.splitlines())) <= columns
    words = re.split(r"\s{2,}", line.strip())
    assert (
        words == re.split(r"\s{2,}", draw_line(made, 10_000).strip()) and words[-1] == "step 123456" and len(words) > 11
    )
    assert " ".join(news[0].split()) == f"outsize: {' '.join(draw_news(finding, 10_000)[9:].split())}"
    assert " ".join(news[1].split()) == f"outsize: {note.text}".strip()
    assert draw_news(samples[0], columns) is None


@pytest.mark.parametrize("words", [("--record", "/nowhere/x.watch"), ("--metrics", ":99999")])
def test_what_cannot_be_written_is_said_before_the_program_starts(tmp_path, words):
    (tmp_path / "train.py").write_text("open('started', 'w').close()\n")
    done = watch(*words, "--", "train.py", cwd=tmp_path)
    assert done.returncode in (1, 2) and done.stderr.count("\n") == 1
    assert not (tmp_path / "started").exists()


def test_a_program_that_ends_at_once_is_one_sentence():
    text = str(Recording(head=Head(command=("true",), pid=4, started=0.0, interval=0.5)))
    assert text.strip() == "true (pid 4): it ended before its memory could be read"


def test_keys_sort_freeze_snapshot_and_quit():
    screen = Screen()
    assert [screen.press(key) for key in "sfpqx"] == [None, None, "snapshot", "quit", None]
    assert (screen.sort, screen.frozen) == ("shared", True)
    lines = render(recording(), 80, "swap", False, color=False).splitlines()
    table = lines[lines.index("3 processes by swap") + 2 :]
    assert [line.split()[0] for line in table[:3]] == ["1", "2", "3"]


class NVMLError(Exception):
    pass


def scripted_nvml(*, fails=False, hides=False, names_nobody=False, breaks=False):
    def init():
        if fails:
            raise NVMLError("driver not loaded")

    def memory(handle):
        if breaks:
            raise NVMLError("GPU is lost")
        return types.SimpleNamespace(total=24 * 2**30, free=4 * 2**30, used=20 * 2**30)

    module = types.ModuleType("pynvml")
    module.NVMLError, module.nvmlInit = NVMLError, init
    module.nvmlDeviceGetCount = lambda: 1
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetUUID = lambda handle: "GPU-a"
    module.nvmlDeviceGetName = lambda handle: b"Card"
    module.nvmlDeviceGetMemoryInfo = memory
    held = [] if names_nobody else [types.SimpleNamespace(pid=99999991, usedGpuMemory=None if hides else 2**30)]
    module.nvmlDeviceGetComputeRunningProcesses = lambda handle: held
    module.nvmlDeviceGetGraphicsRunningProcesses = lambda handle: []
    module.nvmlDeviceGetUtilizationRates = lambda handle: types.SimpleNamespace(gpu=37)
    return module


DRIVER = {"/proc/driver/nvidia/version": "NVRM version: 560"}
TROUBLES = {
    "the driver hides what each process holds": {"hides": True},
    "the driver names no process": {"names_nobody": True},
    "GPUs are no longer shown: the NVIDIA driver did not answer: GPU is lost": {"breaks": True},
    "GPUs are not shown: the NVIDIA driver did not answer: driver not loaded": {"fails": True},
}


@pytest.mark.parametrize("said", TROUBLES)
def test_what_the_driver_hides_is_said_once(monkeypatch, said):
    monkeypatch.setitem(sys.modules, "pynvml", scripted_nvml(**TROUBLES[said]))
    with FakeMachine() as system:
        system.files.update(DRIVER)
        sampler = Sampler(os.getpid(), time.time())
        notes = [text for _ in range(3) for text in (sampler.read(), sampler.news())[1]]
    assert [said in note for note in notes] == [True]


def test_without_nvml_a_driver_is_said_to_be_there_and_a_machine_without_one_says_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with FakeMachine() as system:
        system.files.update(DRIVER)
        assert "outsize[gpu]" in Gpus().notes[0]
    with FakeMachine():
        assert Gpus().notes == [] and Gpus().read() == ()


def test_a_card_is_read_with_its_use_and_its_holders(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", scripted_nvml())
    with FakeMachine():
        (card,) = Gpus().read()
    assert (card.used, card.free, card.utilisation, card.holders[0].bytes) == (20 * 2**30, 4 * 2**30, 0.37, 2**30)


def burn(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def slow_nvml(monkeypatch, calls, **costs):
    """Calls that take as long as a driver's, and are counted."""
    module = scripted_nvml()

    def slow(name, answer, seconds):
        def call(*words):
            calls[name] += 1
            burn(seconds)
            return answer(*words)

        return call

    for name in [name for name in vars(module) if name.startswith("nvmlDeviceGet")]:
        setattr(module, name, slow(name, getattr(module, name), costs.get(name, 0.0005)))
    monkeypatch.setitem(sys.modules, "pynvml", module)


def test_a_cards_memory_is_read_each_time_where_that_is_cheap_and_the_rest_less_often(monkeypatch):
    calls = Counter()
    slow_nvml(
        monkeypatch,
        calls,
        nvmlDeviceGetMemoryInfo=0.0001,
        nvmlDeviceGetUtilizationRates=0.001,
        nvmlDeviceGetComputeRunningProcesses=0.0015,
    )
    with FakeMachine():
        cards = Gpus()
        for number in range(100):
            cards.read(now=number / 10)
    assert calls["nvmlDeviceGetMemoryInfo"] >= 60 and calls["nvmlDeviceGetName"] == 1
    assert 2 <= calls["nvmlDeviceGetUtilizationRates"] <= 10
    assert 1 <= calls["nvmlDeviceGetComputeRunningProcesses"] == calls["nvmlDeviceGetGraphicsRunningProcesses"] <= 5


@pytest.mark.parametrize("memory", [0.0003, 0.0015])
def test_reading_cards_takes_a_third_of_a_hundredth_of_a_processor_at_most(monkeypatch, memory):
    slow_nvml(
        monkeypatch,
        Counter(),
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetUtilizationRates=0.0015,
        nvmlDeviceGetComputeRunningProcesses=0.0015,
        nvmlDeviceGetGraphicsRunningProcesses=0.0015,
    )
    with FakeMachine():
        cards = Gpus()
        began = time.thread_time()
        for number in range(300):
            cards.read(now=number / 10)
        share = (time.thread_time() - began) / 30
    assert share <= 0.0033


def test_what_a_watcher_does_between_its_readings_counts_too():
    outside = Outside(os.getpid())
    for _ in range(4):
        outside.read()
        burn(0.02)  # drawing, writing, threads of a driver's library
    assert outside.pause >= 2


def test_a_container_whose_files_may_not_be_read_leaves_the_limit_of_the_machine():
    with FakeMachine(total="16GiB"):
        host = Sampler(os.getpid(), time.time()).read().host
    assert (host.limit, host.limit_name) == (16 * 2**30, "RAM")


def test_pages_that_may_not_be_looked_at_are_one_note(monkeypatch):
    from outsize.monitor import sampler

    monkeypatch.setattr(sampler, "read_private", lambda pid: None)
    own = Sampler(os.getpid(), time.time())
    assert own.read().host.uss is None
    assert [note for note in own.news() if "may not look at its pages" in note] and own.news() == []


def test_a_tree_of_a_thousand_processes_is_read_less_often_and_says_so(monkeypatch):
    many = TreeReading(
        time=0.0,
        processes=tuple(
            ProcessReading(pid=pid, name="p", anonymous=pid, shared=0, address_space=0) for pid in range(1, 1001)
        ),
    )

    def slow(follower):
        burn(0.02)
        return many

    monkeypatch.setattr("outsize.monitor.processes.follower.TreeFollower.read", slow)
    outside = Outside(os.getpid())
    items = outside.read()
    assert outside.read() is not None and outside.pause >= 2
    assert "1,000 processes: they are read every" in outside.history.notes[-1].text
    assert items[0].process_count == 1000 and len(items[0].processes) == 8


def test_the_limit_is_spoken_of_before_it_is_reached_and_again_when_half_the_time_is_left(monkeypatch):
    outside = Outside(os.getpid())
    outside.history.samples = list(recording().samples)
    left = iter([500.0, 400.0, 240.0, 200.0])
    monkeypatch.setattr(outside, "_outlook", lambda now: Outlook(middle := next(left), middle, middle))
    said = [bool(outside._warn()) for _ in range(4)]
    assert said == [True, False, True, False]


def test_a_limit_that_may_be_near_is_spoken_of_as_such_and_one_that_went_away_is_a_new_danger(monkeypatch):
    outside = Outside(os.getpid())
    outside.history.samples = list(recording().samples)
    wide = [(20.0, 70.0, 90.0), (2.0, 14.0, 40.0), (2.0, 9.0, 40.0), (1.0, 6.0, 30.0)]
    outlooks = iter(Outlook(*one) for one in (*wide, (390.0, 400.0, 410.0), (95.0, 100.0, 106.0)))
    monkeypatch.setattr(outside, "_outlook", lambda now: next(outlooks))
    said = [[note.text for note in outside._warn()] for _ in range(6)]
    assert said[1] == ["container may be full in 2 to 40 s: memory rises unevenly"]
    assert said[3] == ["container may be full in 1 to 30 s: memory rises unevenly"]
    assert said[4] == ["container is full in 6.5 to 6.9 min at this rate"]
    assert said[5] == ["container is full in 95 to 106 s at this rate"]
    assert said[0] == said[2] == []


def test_a_worker_that_copies_what_it_reads_is_told_from_one_that_only_grows():
    def follow(uss, anonymous):
        growth, found = TreeGrowth(lambda: ("Words.items", "data.py:9", "`Words.items`, a list of 9 objects,")), []
        for number in range(12):
            worker = ProcessSample(pid=9, name="pt_data_worker", anonymous=anonymous(number), uss=uss(number))
            root = ProcessSample(pid=4, name="python", anonymous=10, uss=1)
            host = HostSample(rss=0, anonymous=0, shared=0)
            found += list(growth.add(Sample(time=float(number), host=host, processes=(root, worker))))
        return found

    copied = follow(lambda number: number * 20 * MiB, lambda number: 300 * MiB)
    assert [(one.kind, one.name, one.where) for one in copied] == [("workers", "Words.items", "data.py:9")]
    assert "a NumPy array" in copied[0].advice or "NumPy" in copied[0].advice
    assert follow(lambda number: number * 20 * MiB, lambda number: (300 + number * 20) * MiB) == []
    assert follow(lambda number: 50 * MiB, lambda number: 300 * MiB) == []


def test_page_cache_and_arenas_are_noted_as_no_leak():
    from outsize.core.outcomes.recording import AllocatorSample

    growth = TreeGrowth()
    for number in (0, 1):
        host = HostSample(rss=0, anonymous=number * 200 * MiB, shared=0, page_cache=number * 400 * MiB)
        own = AllocatorSample(pid=1, framework="malloc", device="host", requested=50 * MiB)
        assert list(growth.add(Sample(time=float(number), host=host, allocators=(own,)))) == []
    notes = list(growth.explain({}))
    assert "the page cache grew by 400.00 MiB: no leak" in notes[0]
    assert "the allocator keeps 200.00 MiB that the program has given back" in notes[1]


def test_paces_follow_the_cost():
    calls = []
    paced = Paced(lambda: calls.append(1) or len(calls), every=1.0, share=0.5)
    assert [paced(now) for now in (0.0, 0.5, 1.5, 1.6)] == [1, None, 2, None]
    pause = Pause(0.1, 0.008)
    pause.note(5.0)  # the first loads what later ones have
    assert pause.seconds == 0.1
    pause.note(0.08)
    assert pause.seconds == pytest.approx(10.0)


def test_times_are_read_and_written():
    assert [parse_seconds(text) for text in ("5s", "500ms", "2min", "1.5h", "3")] == [5.0, 0.5, 120.0, 5400.0, 3.0]
    assert [format_seconds(seconds) for seconds in (5, 90, 400, 9000, 300000)] == [
        "5.0 s",
        "90 s",
        "6.7 min",
        "2.5 h",
        "3 days",
    ]


def test_spans_of_time_are_written_outwards_in_one_unit():
    spans = [(3.21, 4.58), (40.2, 49.7), (95, 125), (310, 420), (5000, 9000), (86400, 200000), (5, 5), (0, 0.01)]
    assert [format_span(*span) for span in spans] == [
        "3.2 to 4.6 s", "40 to 50 s", "1.5 to 2.1 min", "5.1 to 7.0 min", "1.3 to 2.5 h", "1.0 to 2.4 days", "5.0 s",
        "0.0 to 0.1 s",
    ]  # fmt: skip


def test_the_words_of_a_process_are_read():
    assert outside_module.read_command(os.getpid())[0].endswith(os.path.basename(sys.executable))
    assert outside_module.read_command(999999999) == ()
