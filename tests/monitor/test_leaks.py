"""Programs that lose memory are found with the line that keeps it; programs that only look like it are left alone."""

import json
import pathlib
import subprocess
import sys

import leak_programs
import pytest
from effort import long

RUNNER = pathlib.Path(__file__).with_name("leak_runner.py")
STEPS = 200
HELD_BY_LIBRARIES = ("threads",)
"""Programs whose leak is held by what a library had loaded before: only a look through all of memory can name that."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Program -> what was found in it. Forks of a process that has loaded torch, and of one that has not.

    All of memory is looked through for those with torch, whose steps are over too soon for less, for the first leak and the first
    clean program of the others, and in the long run for all."""
    answers = {}
    for with_torch in (False, True):
        whole, rest = [], []
        for programs in (leak_programs.LEAKS, leak_programs.CLEAN):
            names = [name for name, code in programs.items() if ("import torch" in code) == with_torch]
            first = names[:1] + [name for name in names[1:] if with_torch or long() or name in HELD_BY_LIBRARIES]
            whole += first
            rest += [name for name in names if name not in first]
        whole += leak_programs.CARD if with_torch else ()
        for mode, names in (("every", whole), ("frozen", rest)):
            answers |= run(tmp_path_factory.mktemp("programs"), mode, names) if names else {}
    return answers


def run(folder, mode, names):
    command = [sys.executable, str(RUNNER), str(folder), str(STEPS), mode, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return {answer["name"]: answer for answer in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", leak_programs.LEAKS)
def test_a_leak_is_found_with_its_line(found, name):
    findings = found[name]["findings"]
    line = leak_programs.leaking_line(leak_programs.LEAKS[name])
    assert findings and findings[0]["where"] == f"{name.replace(' ', '_')}.py:{line}", found[name]
    assert findings[0]["advice"] and findings[0]["per_step"] > 0


@pytest.mark.parametrize("name", leak_programs.CARD)
def test_a_leak_on_a_card_is_one_finding_with_the_cards_bytes(found, name):
    first, *others = found[name]["findings"]
    line = leak_programs.leaking_line(leak_programs.CARD[name])
    assert (first["device"], first["where"]) == ("meta:0", f"{name.replace(' ', '_')}.py:{line}"), found[name]
    assert "on meta:0: 1.00 MiB more each step" in first["text"] and first["name"] in first["text"]
    assert all(one["where"] != first["where"] and one["per_second"] < first["per_second"] for one in others)


@pytest.mark.parametrize("name", leak_programs.CLEAN)
def test_a_clean_program_is_left_alone(found, name):
    assert found[name]["findings"] == []


NAMES = {
    "losses with graphs": ("graphs", "losses"),
    "a running sum with its graph": ("graphs", "total"),
    "hooks": ("hooks", None),
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


@pytest.mark.parametrize("name", NAMES)
def test_a_leak_has_its_kind_and_its_name(found, name):
    kind, holder = NAMES[name]
    finding = found[name]["findings"][0]
    assert finding["kind"] == kind
    assert holder is None or finding["name"] == holder


ENDS = {
    "lazily built cache that is bounded": "the lru_cache of table fills up",
    "a ring of old batches": "a deque fills up",
    "cycles that wait for the collector": "waited for the garbage collector",
}


@pytest.mark.parametrize("name", ENDS)
def test_growth_that_ends_is_noted(found, name):
    assert any(ENDS[name] in note for note in found[name]["notes"])
