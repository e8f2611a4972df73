"""`outsize run`: the program unchanged, its exit status passed on, and a report where memory ended it."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import cgroup
import pytest

from outsize.core.footprint import Moment
from outsize.failure.ending import _tell_story
from outsize.failure.explain import explain
from outsize.monitor import ProcessReading, TreeReading, launch, read_tree
from outsize.monitor.launch import CHILD, build_command
from outsize.monitor.processes import stacks
from outsize.monitor.processes.stacks import user_line
from outsize.monitor.watched import Watched, growth_by_line

GROW = """
import time
import numpy as np
kept = []
def load():
    return np.ones(4 * 2**20)
def main():
    for _ in range(200):
        kept.append(load())
        time.sleep(0.02)
main()
"""
STEADILY = GROW.replace(
    "return np.ones(4 * 2**20)", "for _ in range(32): kept.append(np.ones(2**17)); time.sleep(0.003)"
)
"""Grows nearly all the time, so that every reading finds it at it."""


def run(folder, code, *words, before="", options=()):
    script = folder / "program.py"
    script.write_text(textwrap.dedent(code))
    line = [sys.executable, "-m", "outsize", "run", *options, str(script), *words]
    shell = ["bash", "-c", f'{before} exec "$@"', "bash", *line]
    return subprocess.run(shell, capture_output=True, text=True, timeout=900, cwd=folder)


def test_a_program_that_does_well_is_not_spoken_of_where_that_is_asked(tmp_path):
    code = "import sys; print(__name__, sys.argv[1:]); sys.exit(7)"
    answer = run(tmp_path, code, "--epochs", "3", options=("--quiet",))
    assert (answer.returncode, answer.stdout, answer.stderr) == (7, "__main__ ['--epochs', '3']\n", "")


def test_another_error_is_left_as_it_is(tmp_path):
    answer = run(tmp_path, "raise KeyError('lr')")
    assert answer.returncode == 1
    assert "KeyError: 'lr'" in answer.stderr and "cause" not in answer.stderr
    assert "ended with status 1" in answer.stderr.splitlines()[-1]


def test_a_program_that_went_well_ends_with_its_peak_its_course_and_its_largest_line(tmp_path):
    code = """
        import ctypes, time
        held = []
        for _ in range(6):
            held.append(ctypes.create_string_buffer(b"x" * (40 * 2**20)))
            time.sleep(0.2)
        print("done")
    """
    answer = run(tmp_path, textwrap.dedent(code))
    assert answer.returncode == 0 and answer.stdout == "done\n"
    said = float(answer.stderr.split("peak of ")[1].split(" MiB of RAM (exact)")[0])
    assert 240 <= said < 400
    assert "█" in answer.stderr and "program.py:5 in <module>" in answer.stderr
    answer = run(tmp_path, "print('mine')", options=("--json",))
    assert json.loads(answer.stdout)["kind"] == "ProgramRun" and answer.stderr == "mine\n"


def test_an_error_at_the_top_is_explained_after_its_traceback(tmp_path):
    answer = run(tmp_path, "import numpy as np\nnp.empty(10**13)\n", options=("--report", "why.json"))
    assert answer.returncode == 1
    assert "ArrayMemoryError" in answer.stderr and "cause: request larger than the machine" in answer.stderr
    assert json.loads((tmp_path / "why.json").read_text())["failure"]["framework"] == "numpy"


def test_the_calls_that_led_to_an_error_are_read_with_it(tmp_path):
    code = "import numpy as np\ndef merge(rows):\n    return np.empty(rows * rows, 'int64')\nmerge(10**7)\n"
    answer = run(tmp_path, code)
    assert "cause: broadcast explosion" in answer.stderr and "a join whose keys" in answer.stderr.lower()


def test_what_was_held_between_two_readings_is_in_the_peak(tmp_path):
    code = """
        import ctypes, os
        held = ctypes.create_string_buffer(300 * 2**20)
        ctypes.memset(held, 1, len(held))
        del held
        os.write(1, b"let go")
        import time
        time.sleep(1)
    """
    answer = run(tmp_path, f"import time\ntime.sleep(1)\n{textwrap.dedent(code)}", options=("--peak",))
    assert answer.stdout == "let go"
    said = float(answer.stderr.split("peak of ")[1].split(" MiB")[0])
    assert 300 <= said < 340


def test_the_peak_is_told_with_its_own_time():
    watched = Watched(command=["a"], pid=1, began=0.0, peak=5)
    watched.moments.extend(Moment(time=time, bytes=held) for time, held in ((1.0, 1), (2.0, 5), (9.0, 2)))
    text = str(_tell_story(explain("MemoryError"), watched))
    assert "at its peak, 2.0 s after its start" in " ".join(text.split())


def test_an_error_that_was_caught_is_not_reported(tmp_path):
    code = "import numpy as np\ntry:\n    np.empty(10**13)\nexcept MemoryError:\n    print('went on')\n"
    answer = run(tmp_path, code, options=("--quiet",))
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "went on\n", "")


def test_a_signal_becomes_the_shells_exit_status(tmp_path):
    assert run(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGTERM)").returncode == 143


def test_a_kill_that_memory_did_not_ask_for_is_only_called_likely(tmp_path):
    answer = run(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", options=("--report", "why.json"))
    assert answer.returncode == 137
    cause = json.loads((tmp_path / "why.json").read_text())["cause"]
    assert cause["name"] == "killed" and not cause["certain"]


def test_the_users_own_sitecustomize_still_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.MINE = 5\n")
    answer = run(tmp_path, "print(MINE)", before=f"PYTHONPATH={tmp_path}:$PYTHONPATH")
    assert answer.stdout == "5\n"


def test_a_module_runs_as_python_runs_it(tmp_path):
    line = [sys.executable, "-m", "outsize", "run", "-m", "platform"]
    assert subprocess.run(line, capture_output=True, text=True, timeout=900).stdout.startswith("Linux")


def test_the_command_is_built_as_the_user_meant_it(tmp_path):
    script = tmp_path / "a.py"
    script.write_text("")
    assert build_command([str(script), "x"]) == [sys.executable, str(script), "x"]
    assert build_command(["-m", "pkg", "x"]) == [sys.executable, "-m", "pkg", "x"]
    assert build_command(["true"]) == ["true"]


@pytest.mark.parametrize(
    ("words", "said"), [([], "nothing to run"), (["nowhere.py"], "no such script"), (["-m"], "needs a module")]
)
def test_a_mistaken_command_is_an_input_error(words, said):
    answer = subprocess.run(
        [sys.executable, "-m", "outsize", "run", *words], capture_output=True, text=True, timeout=900
    )
    assert answer.returncode == 2 and said in answer.stderr


def test_the_growing_line_is_the_users_own():
    stack = (
        'Current thread 0x1 (most recent call first):\n  File "/x/site-packages/numpy/core.py", line 9 in ones\n'
        '  File "/home/me/train.py", line 7 in load\n  File "/home/me/train.py", line 20 in <module>\n'
    )
    assert user_line(stack) == "/home/me/train.py:7 in load"


LINES = {
    "in Python": "while True:\n    x = 1\n",
    "waiting": "import time\nprint(time.sleep(60))\n",
    "inside C": "import itertools, collections\ncollections.deque(itertools.count(), 0)\n",
}


@pytest.mark.parametrize("where", LINES)
def test_a_program_says_its_line_and_is_asked_from_c_only_inside_c(tmp_path, where, monkeypatch):
    """Python writes its own stack where it can: one that C code reads while Python changes it ends the program."""
    program = tmp_path / "program.py"
    program.write_text("import os\nopen('ready', 'w')\n" + LINES[where])
    sent = []
    kill = os.kill
    monkeypatch.setattr(stacks.os, "kill", lambda pid, number: (sent.append(number), kill(pid, number)))
    environment = os.environ | {"OUTSIZE_RUN_FOLDER": str(tmp_path), "PYTHONPATH": CHILD}
    child = subprocess.Popen([sys.executable, str(program)], cwd=tmp_path, env=environment)
    try:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        monkeypatch.chdir(tmp_path)
        found = {stacks.ask_line(read_tree(child.pid), tmp_path) for _ in range(40)}
        assert child.poll() is None
        assert any(f"program.py:{line} in <module>" in found for line in (3, 4))
        assert (signal.SIGWINCH in sent) == (where == "inside C")
    finally:
        child.kill()
        child.wait()


def test_a_program_that_waits_for_a_processor_is_waited_for(tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text("import os\nopen('ready', 'w')\n" + LINES["in Python"])
    environment = os.environ | {"OUTSIZE_RUN_FOLDER": str(tmp_path), "PYTHONPATH": CHILD}
    one = max(os.sched_getaffinity(0))

    def pin():
        os.sched_setaffinity(0, {one})

    child = subprocess.Popen([sys.executable, str(program)], cwd=tmp_path, env=environment, preexec_fn=pin)
    others = []
    try:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        others += [subprocess.Popen(["sh", "-c", "while :; do :; done"], preexec_fn=pin) for _ in range(10)]
        monkeypatch.chdir(tmp_path)
        found = [stacks.ask_line(read_tree(child.pid), tmp_path) for _ in range(8)]
    finally:
        for process in (child, *others):
            process.kill()
            process.wait()
    assert sum(line.startswith("program.py:") for line in found) >= 6, found


def test_no_answer_is_no_line_that_grew(tmp_path, monkeypatch):
    watched = Watched(command=[], pid=os.getpid(), began=0.0)
    monkeypatch.setattr(launch, "ask_line", lambda tree, folder: user_line(""))
    launch._look_closely(os.getpid(), read_tree(os.getpid()), watched, tmp_path, 100)
    assert watched.passed and not watched.lines


def test_growth_belongs_to_the_line_that_grew_while_it_was_watched():
    watched = Watched(command=[], pid=1, began=0.0)
    watched.passed.update({"a.py:5 in sleep": 900, "a.py:3 in load": 100})
    watched.lines.update({"a.py:3 in load": 40})
    assert growth_by_line(watched).most_common(1) == [("a.py:3 in load", 1000)]
    assert not growth_by_line(Watched(command=[], pid=1, began=0.0))


def reading(pid, held, ended=None):
    return ProcessReading(pid=pid, name="python", anonymous=held, shared=0, address_space=0, ended=ended)


def note(watched, kills, *processes):
    watched.note(TreeReading(time=0.0, processes=processes), kills)


def test_the_process_that_ends_when_the_count_of_kills_rises_was_killed():
    watched = Watched(command=[], pid=1, began=0.0, kills=7)
    note(watched, 7, reading(1, 10), reading(2, 900), reading(3, 300), reading(4, 500))
    note(watched, 7, reading(1, 10), reading(3, 300), reading(4, 500))  # 2 ended, and nobody was killed
    note(watched, 8, reading(1, 10), reading(3, 400), reading(4, 500))  # killed, and still on its way
    note(watched, 8, reading(1, 10), reading(3, 0, ended=-9), reading(4, 0, ended=0))
    assert [process.pid for process in watched.killed] == [3]
    assert (watched.killed[0].anonymous, watched.peak) == (400, 1710)


def test_a_process_that_has_ended_holds_nothing_and_hides_nothing():
    watched = Watched(command=[], pid=1, began=0.0)
    note(watched, 0, reading(1, 500))
    note(watched, 1, reading(1, 0, ended=-9))
    assert watched.last.processes[0].anonymous == 500
    assert len(watched.moments) == 1 and watched.killed[0].anonymous == 500


def test_a_tree_counts_its_children():
    child = subprocess.Popen(
        [sys.executable, "-c", "import sys; x = bytearray(50 * 2**20); print(flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    child.stdout.readline()
    tree = read_tree(os.getpid())
    child.communicate()
    assert child.pid in {process.pid for process in tree.processes}
    assert next(process for process in tree.processes if process.pid == child.pid).anonymous >= 50 * 2**20
    assert not read_tree(child.pid).processes


@pytest.fixture
def group():
    with cgroup.limited(400 * 2**20) as made:
        yield made


def test_a_kill_by_a_control_group_tells_limit_peak_and_growing_line(tmp_path, group):
    answer = run(tmp_path, STEADILY, before=f"echo $BASHPID > {group.procs};", options=("--report", "why.json"))
    assert answer.returncode == 137
    why = json.loads((tmp_path / "why.json").read_text())
    assert (why["cause"]["name"], why["cause"]["certain"], why["failure"]["limit_bytes"]) == (
        "limit",
        True,
        400 * 2**20,
    )
    text = " ".join(answer.stderr.split())
    assert "at its peak" in text and "program.py:6 in load" in text
    assert 200 * 2**20 < max(moment["bytes"] for moment in why["timeline"]) <= 400 * 2**20


def test_an_address_limit_of_the_childs_own_is_seen(tmp_path):
    code = """
        import resource, time
        import numpy as np
        resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30))
        held = np.ones(10**7)
        time.sleep(1.5)
        np.ones(4 * 10**8)
    """
    answer = run(tmp_path, code, options=("--report", "why.json"))
    assert json.loads((tmp_path / "why.json").read_text())["cause"]["name"] == "address space", answer.stderr
