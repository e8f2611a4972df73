"""Programs that a real memory control group kills, with workers, threads, forks and limits they inherit: the right victim, what
it would have needed, and a first advice that can help; with the kernel's log and without it."""

import json
import re
import signal
import subprocess
import sys
import textwrap

import pytest
from cgroup import limited
from effort import long, points

MiB = 2**20
GROW = """
import os, pathlib, sys, time
import numpy as np
def note(name="victim"):
    pathlib.Path(name).write_text(str(os.getpid()))
def grow(total=1500):
    note()
    kept = []
    for _ in range(total // 20):
        kept.append(np.ones(20 * 2**17))
        time.sleep(0.01)
"""
RUN = """
import sys
import outsize.failure.ending as ending
ending.KERNEL_LOG = sys.argv.pop(1)
from outsize.cli import main
sys.exit(main(["run", "--report", "why.json", *sys.argv[1:]]))
"""


def run(folder, code, limit, *, log="/dev/kmsg", before="", command=("program.py",)):
    """The report on a program that runs in a group of `limit` MiB, and what it printed."""
    (folder / "program.py").write_text(textwrap.dedent(GROW) + textwrap.dedent(code))
    with limited(limit * MiB) as group:
        shell = f'echo $$ > {group.procs}; {before} exec "$@"'
        line = ["bash", "-c", shell, "bash", sys.executable, "-c", RUN, log, *command]
        for _ in range(5):
            done = subprocess.run(line, capture_output=True, text=True, timeout=900, cwd=folder)
            if (
                done.returncode != -signal.SIGKILL
            ):  # a kernel that is slow to free what the program held kills who ran it too
                break
    report = folder / "why.json"
    return (json.loads(report.read_text()) if report.exists() else None), done


def advised(why):
    """MiB of the first advice that raises the limit."""
    how = next(remedy["how"] for remedy in why["remedies"] if "--memory=" in remedy["how"])
    return int(re.search(r"--memory=([0-9]+)m", how).group(1))


KILLS = {
    "alone": "grow()",
    "in a thread": "import threading\nthread = threading.Thread(target=grow)\nthread.start(); thread.join()",
    "in one of several threads": """
        import threading
        idle = [threading.Thread(target=time.sleep, args=(60,), daemon=True) for _ in range(20)]
        [thread.start() for thread in idle]
        grow()
    """,
    "in a fork": """
        pid = os.fork()
        if pid == 0:
            grow()
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0)
    """,
    "in a fork, beside a larger one that ended well": """
        pid = os.fork()
        if pid == 0:
            kept = np.ones(220 * 2**17)
            time.sleep(0.5)
            os._exit(0)
        os.waitpid(pid, 0)
        pid = os.fork()
        if pid == 0:
            grow()
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0)
    """,
    "in a pool": """
        from concurrent.futures import ProcessPoolExecutor
        if __name__ == "__main__":
            with ProcessPoolExecutor(2) as pool:
                idle = pool.submit(time.sleep, 1)
                pool.submit(grow).result()
    """,
    "the parent, not its workers": """
        import multiprocessing
        def outlive():
            while not pathlib.Path("why.json").exists():
                time.sleep(0.1)
        if __name__ == "__main__":
            workers = [multiprocessing.Process(target=outlive, daemon=True) for _ in range(3)]
            [worker.start() for worker in workers]
            grow()
    """,
}


LOGS = {"with the log": "/dev/kmsg", "without it": "/nowhere"}
BOTH = [(name, log) for name in KILLS for log in LOGS]
IN_TURN = [pair for number, pair in enumerate(BOTH) if number % 4 in (0, 3)]
"""Every program once, and half of them with each of the two."""


@pytest.mark.parametrize(("name", "log"), BOTH if long() else IN_TURN)
def test_the_process_that_was_killed_is_named(name, log, tmp_path):
    why, done = run(tmp_path, KILLS[name], 300, log=LOGS[log])
    assert why is not None, done.stderr
    assert why["failure"]["pid"] == int((tmp_path / "victim").read_text()), done.stderr
    assert (why["cause"]["name"], why["cause"]["certain"], why["failure"]["limit_bytes"]) == ("limit", True, 300 * MiB)
    assert 200 * MiB < why["failure"]["extra"]["anon_rss_bytes"] <= 300 * MiB
    assert advised(why) >= 450
    assert "outsize run" not in done.stderr
    for budget in re.findall(r'budget="([0-9]+)MiB"', done.stderr):
        assert int(budget) < 300


def test_a_command_that_ran_it_is_not_called_the_victim(tmp_path):
    why, done = run(tmp_path, "grow()", 300, command=("bash", "-c", f"{sys.executable} program.py; exit 3"))
    assert done.returncode == 3
    assert why["failure"]["pid"] == int((tmp_path / "victim").read_text())


def test_what_it_had_asked_for_is_the_need_and_the_limit_to_set_covers_it(tmp_path):
    fill = "for part in np.split(np.empty(2**27), 128):\n    part[:] = 1\n    time.sleep(0.02)"
    why, done = run(tmp_path, f"note()\n{fill}", 300)
    assert why["failure"]["extra"]["asked_bytes"] >= 1024 * MiB
    assert why["failure"]["pid"] == int((tmp_path / "victim").read_text())
    assert advised(why) >= 1024
    assert "had asked for" in " ".join(done.stderr.split())


LOADER = """
import torch
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        if index == 5:
            grow()
        return torch.zeros(10)
if __name__ == "__main__":
    for batch in torch.utils.data.DataLoader(Rows(), num_workers=3, batch_size=1):
        time.sleep(0.2)
"""


@pytest.mark.parametrize("log", points(list(LOGS.values()), 1), ids=points(list(LOGS), 1))
def test_a_worker_of_a_loader_is_named_and_fewer_workers_are_advised(tmp_path, log):
    pytest.importorskip("torch")
    why, done = run(tmp_path, LOADER, 1200, log=log)
    assert why["failure"]["pid"] == int((tmp_path / "victim").read_text()), done.stderr
    assert (why["cause"]["name"], why["failure"]["process"]) == ("limit", "DataLoader worker")
    assert any("num_workers" in remedy["how"] for remedy in why["remedies"])
    assert "outsize.open" not in done.stderr


FORWARD = """
import torch
note()
layers = [torch.nn.Linear(200, 200) for _ in range(40)]
x = torch.ones(40000, 200)
for layer in layers:
    x = torch.relu(layer(x))
    time.sleep(0.02)
"""


def test_a_training_step_is_fitted_not_streamed(tmp_path):
    pytest.importorskip("torch")
    why, done = run(tmp_path, FORWARD, 1200)
    assert (why["cause"]["name"], why["failure"]["pid"]) == ("limit", int((tmp_path / "victim").read_text()))
    ways = [remedy["how"] for remedy in why["remedies"]]
    assert "--memory=" in ways[0] and "outsize.fit(" in ways[1]
    assert "outsize.open" not in done.stderr


@pytest.mark.parametrize(
    ("code", "limit", "said"),
    [
        ("kept = [np.ones(2**24) for _ in range(100)]", 900, "900.00 MiB"),
        ("kept = np.ones(2**28)", 900, "900.00 MiB"),
        ("kept = [bytearray(2**26) for _ in range(100)]", 900, "900.00 MiB"),
        ("import torch\nkept = [torch.ones(2**24) for _ in range(100)]", 1800, "1.76 GiB"),
    ],
    ids=["many arrays", "one array", "bytes", "torch"],
)
def test_a_limit_on_address_space_that_was_inherited_is_told_as_a_limit(code, limit, said, tmp_path):
    why, done = run(tmp_path, code, 8000, before=f"ulimit -v {limit * 1024};")
    assert why["cause"]["name"] == "address space", done.stderr
    assert said in why["cause"]["text"]
    assert "ulimit -v unlimited" in why["remedies"][0]["how"]
    assert "true need" not in done.stderr


def test_the_peak_is_the_kernels_own_even_where_no_reading_saw_it(tmp_path):
    code = "import mmap\nheld = mmap.mmap(-1, 200 * 2**20)\nheld.write(b'1' * (200 * 2**20))\n1 / 0"
    (tmp_path / "program.py").write_text(code)
    line = [sys.executable, "-m", "outsize", "run", "--peak", "program.py"]
    answer = subprocess.run(line, capture_output=True, text=True, timeout=900, cwd=tmp_path)
    (said,) = re.findall(r"peak of ([0-9.]+) MiB of RAM \(exact\)", answer.stderr)
    assert 400 <= float(said) < 450


def test_a_program_that_goes_on_without_a_killed_process_is_told(tmp_path):
    code = """
        pid = os.fork()
        if pid == 0:
            grow()
            os._exit(0)
        os.waitpid(pid, 0)
    """
    why, done = run(tmp_path, code, 200)
    assert done.returncode == 0 and why["cause"]["name"] == "limit"
    assert why["failure"]["pid"] == int((tmp_path / "victim").read_text())


def test_what_a_victim_held_is_not_what_its_parent_holds(tmp_path):
    code = """
        kept = np.ones(150 * 2**17)
        pid = os.fork()
        if pid == 0:
            del kept
            grow()
        sys.exit(os.waitpid(pid, 0)[1] != 0)
    """
    why, _ = run(tmp_path, code, 400)
    assert why["failure"]["extra"]["anon_rss_bytes"] < 390 * MiB


def test_a_limit_on_data_that_was_inherited_is_told_as_a_limit(tmp_path):
    why, _ = run(tmp_path, "kept = [np.ones(20 * 2**17) for _ in range(60)]", 2000, before="ulimit -d 500000;")
    assert why["cause"]["name"] == "address space" and "ulimit -d" in why["cause"]["text"]
    assert "ulimit -d unlimited" in why["remedies"][0]["how"]
