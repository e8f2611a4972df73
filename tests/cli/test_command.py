"""The command line as a user meets it: in a process of its own; a fork where what it imports and how it begins is not asked."""

import json
import os
import re
import subprocess
import sys

import forks
import pytest

from outsize.cli import VERBS, main

FORKED = "import sys\nfrom outsize.cli import main\nsys.exit(main(sys.argv[1:]))"


def outsize(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "outsize", *words], capture_output=True, text=True, timeout=900)


def fork_outsize(*words: str) -> subprocess.CompletedProcess[str]:
    child = forks.start(FORKED, *words)
    out, err = child.communicate()
    return subprocess.CompletedProcess(words, child.returncode, out, err)


@pytest.mark.parametrize(
    ("words", "bytes_"),
    [
        (["1,256,1024,1021"], 1070596096), (["3075200,512"], 6298009600), (["384,192"], 294912),
        (["384,192", "--dtype", "float16"], 147456), (["384,192", "--dtype", "int8"], 73728), (["0"], 0),
        (["[384, 192]"], 294912),
        (["384x192"], 294912), (["384,192:int8", "384,192:float16"], 73728 + 147456), (["10", "--count", "3"], 120),
        (["10", "--grad"], 80), (["10", "--optimizer", "AdamW"], 160), (["1000000000,1000000000,1000000000"], 4 * 10**27),
    ],
)  # fmt: skip
def test_size_gives_the_exact_bytes_as_json(words, bytes_, capsys):
    status = main(["size", *words, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["bytes"] == bytes_
    assert status == (0 if answer["fits"] else 1)


@pytest.mark.parametrize(
    "words",
    [
        ["size", "3,-1"], ["size", "3,x"], ["size", ""], ["size", "()"], ["size"], ["size", "3", "--dtype", "flot32"],
        ["size", "3", "--budget", "12XB"], ["size", "3", "--count", "0"], ["size", "3", "--card", "rtx9999"],
        ["size", "3", "--optimizer", "adamz"], ["size", "3", "--nonsense"], ["size", "-1,3"], ["size", "1.5"], ["nonsense"],
        ["size", "3,,4"], ["size", "9" * 5000], ["size", "3:"], ["size", "-x"], ["estimate", "--hf", sys.executable],
        ["run", "--report", "/no/such/folder/why.json", "-c", "1"], ["compute", "x", "--in", "x=no-such.npy"],
        ["convert", "no-such.npy", "y.npy"], ["convert", "no-such.bin", "y.npy", "--shape", "3", "--raw-dtype", "f4"],
        ["compute", "arange(9)", "--out", "/no/such/folder/x.npy"],
        ["explain", "no-such.log"], ["estimate", "no_such:step"], ["run", "no-such.py"],
    ],
)  # fmt: skip
def test_a_mistake_is_one_clear_sentence_and_status_2(words):
    answer = fork_outsize(*words)
    assert answer.returncode == 2, answer
    assert answer.stdout == ""
    assert answer.stderr.startswith("outsize: ")
    assert answer.stderr.count("\n") == 1
    assert "Traceback" not in answer.stderr


def test_outsize_alone_shows_memory_and_every_verb():
    answer = outsize()
    assert answer.returncode == 0
    assert "default budget" in answer.stdout
    for verb in VERBS:
        assert f"outsize {verb}" in answer.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_takes_json(verb):
    answer = fork_outsize(verb, "--help")
    assert answer.returncode == 0
    assert "--json" in answer.stdout


def test_a_size_beyond_the_budget_has_status_1_and_says_what_to_do(capsys):
    assert main(["size", "3075200,512", "--budget", "1GiB"]) == 1
    text = capsys.readouterr().out
    assert "does not fit" in text
    assert "outsize compute" in text


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m outsize size 10 --json | head -c 1"
    answer = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert "Traceback" not in answer.stderr
    assert answer.stdout == "{"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437"])
def test_what_an_encoding_lacks_is_written_plainly(encoding):
    answer = subprocess.run(
        [sys.executable, "-m", "outsize", "memory"],
        capture_output=True, timeout=900, env=os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
    )  # fmt: skip
    assert answer.returncode == 0 and answer.stderr == b""
    assert "default budget" in answer.stdout.decode(encoding)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("verb", ["memory", "explain"])
def test_a_closed_stream_is_no_error(verb, closed):
    command = f"'{sys.executable}' -m outsize {verb} {closed}"
    answer = subprocess.run(
        ["sh", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900
    )
    assert answer.returncode == (0 if verb == "memory" else 1)  # nothing is no out-of-memory failure
    assert answer.stderr == ""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [("memory",), ("size", "3,4", "--json")])
def test_a_full_disk_under_the_answer_is_one_sentence(words, unbuffered):
    with open("/dev/full", "w") as full:
        answer = subprocess.run(
            [sys.executable, "-m", "outsize", *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=900,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert answer.returncode == 1 and answer.stderr == "outsize: No space left on device\n"


def test_a_program_too_quick_to_be_read_is_not_said_to_hold_nothing():
    assert "peak 0 B" not in outsize("run", "--peak", "/bin/true").stderr


def test_help_has_each_verb_beside_its_line_and_says_where_to_begin():
    shown = outsize("--help").stdout
    for verb, line in VERBS.items():
        assert re.search(rf"^    {verb} +{re.escape(line.split()[0])} ", shown, re.M), verb
    assert shown.rstrip().endswith("New here: outsize tour. Options and examples of a verb: outsize VERB --help")
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("words", [["memory", "--card", "rtx4090"], ["size", "3,4", "--colour"]])
def test_an_option_that_a_verb_lacks_leads_to_the_help_of_that_verb(words, capsys):
    assert main(words) == 2
    assert f"(see outsize {words[0]} --help)" in capsys.readouterr().err
