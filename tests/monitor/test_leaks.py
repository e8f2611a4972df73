"""Programs that lose memory are found with the line that keeps it; programs that only look like it are left alone."""

import json
import pathlib

import forks
import leak_programs
import pytest
from effort import long

RUNNER = pathlib.Path(__file__).with_name("leak_runner.py")
STEPS = 200
WATCH = ("numpy", "outsize.monitor.growth", "outsize.monitor.watching")
WATCH_AND_TORCH = (*WATCH, "torch", "torch._dynamo")
"""The first optimizer would load the second one."""
HELD_BY_LIBRARIES = ("threads",)
"""Programs whose leak is held by what a library had loaded before: only a look through all of memory can name that."""


def find(name, programs, folder):
    """What was found in a program, in a fork of a process that has loaded torch, or of one that has not.

    All of memory is looked through for the first leak and the first clean program of both, and in the long run for all."""
    with_torch = "import torch" in programs[name]
    first = next(one for one, code in programs.items() if ("import torch" in code) == with_torch)
    whole = long() or name in (first, *HELD_BY_LIBRARIES)
    mode, imported = "every" if whole else "frozen", WATCH_AND_TORCH if with_torch else WATCH
    child = forks.start(RUNNER, folder, str(STEPS), mode, name, imported=imported)
    out, err = child.communicate()
    assert child.returncode == 0, err
    return json.loads(out)


NAMES = {
    "losses with graphs": ("graphs", "losses"),
    "a running sum with its graph": ("graphs", "total"),
    "hooks": ("hooks", None),
    "a queue that nobody empties": ("list", "Pipeline.waiting.queue"),
    "a dict cache": ("cache", "cache"),
    "an lru_cache without end": ("cache", "table"),
    "a list of arrays": ("list", "outputs"),
    "an attribute": ("list", "Trainer.history"),
    "closures": ("closures", "Bus.listeners"),
    "tracebacks": ("tracebacks", "errors"),
    "threads": ("threads", "wait_for"),
    "cycles with the collector off": ("cycles", "Node"),
    "an array that is appended to": ("array", "kept"),
    "a C library's memory": ("unknown", None),
    "shared memory": ("shared memory", None),
    "parts of a model": ("modules", None),
    "log lines": ("array", "Logger.lines"),
    "an unbounded cache on a method": ("cache", "Encoder.encode"),
    "buffers for a C library": ("cache", "buffers"),
    "calls at exit": ("objects", None),
    "classes made at run time": ("cache", "handlers"),
    "a list of the thread": ("list", "local.seen"),
    "gradient hooks": ("hooks", None),
}


@pytest.mark.parametrize("name", leak_programs.LEAKS)
def test_a_leak_is_found_with_its_line_its_kind_and_its_name(name, tmp_path):
    found = find(name, leak_programs.LEAKS, tmp_path)
    line = leak_programs.leaking_line(leak_programs.LEAKS[name])
    assert found["findings"], found
    finding = found["findings"][0]
    assert finding["where"] == f"{name.replace(' ', '_')}.py:{line}", found
    assert finding["advice"] and finding["per_step"] > 0
    kind, holder = NAMES[name]
    assert finding["kind"] == kind
    assert holder is None or finding["name"] == holder


@pytest.mark.parametrize("name", leak_programs.CARD)
def test_a_leak_on_a_card_is_one_finding_with_the_cards_bytes(name, tmp_path):
    found = find(name, leak_programs.CARD, tmp_path)
    first, *others = found["findings"]
    line = leak_programs.leaking_line(leak_programs.CARD[name])
    assert (first["device"], first["where"]) == ("meta:0", f"{name.replace(' ', '_')}.py:{line}"), found
    assert "on meta:0: 1.00 MiB more each step" in first["text"] and first["name"] in first["text"]
    assert all(one["where"] != first["where"] and one["per_second"] < first["per_second"] for one in others)


ENDS = {
    "lazily built cache that is bounded": "the lru_cache of table fills up",
    "a ring of old batches": "a deque fills up",
    "cycles that wait for the collector": "waited for the garbage collector",
}


@pytest.mark.parametrize("name", leak_programs.CLEAN)
def test_a_clean_program_is_left_alone_and_growth_that_ends_is_noted(name, tmp_path):
    found = find(name, leak_programs.CLEAN, tmp_path)
    assert found["findings"] == []
    assert name not in ENDS or any(ENDS[name] in note for note in found["notes"])


def test_all_programs_whose_growth_ends_are_tried():
    assert ENDS.keys() <= leak_programs.CLEAN.keys()
