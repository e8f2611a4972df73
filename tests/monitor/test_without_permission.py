"""`outsize watch` where it may not see, write or read: real namespaces, users, mounts and capabilities of Linux.

Each trouble is one clear sentence, and what can be known goes on. Where such a place cannot be made (no root, no `unshare`),
the test is skipped with the reason.
"""

import os
import re
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from effort import long

from outsize.machine.cgroup import is_hidden
from outsize.machine.fake import FakeMachine
from outsize.monitor.processes import access
from outsize.monitor.recorder import load

NOBODY = "setpriv --reuid 65534 --regid 65534 --clear-groups --bounding-set=-all --inh-caps=-all"
"""Another user, without any capability."""
WATCH = f"{sys.executable} -m outsize watch"
SLEEP = "sleep 60 & "
HIDE_PROC = "mount -t proc -o hidepid=2 proc /proc && "


def read_only(*folders):
    """Folders that nobody may write, with what lies in them: this project may be there."""
    real = sorted({os.path.realpath(folder) for folder in folders if os.path.isdir(folder)})
    mounts = [f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}" for folder in real]
    return " && ".join((*mounts, "cd /proc && "))


def enter(script, namespaces="-m -p -f --mount-proc --kill-child", seconds=300):
    """Run a script in namespaces of its own, from a folder that everybody may read."""
    return subprocess.run(
        ["unshare", *namespaces.split(), "sh", "-c", script],
        capture_output=True,
        text=True,
        cwd="/",
        timeout=seconds,
        env=os.environ | {"PYTHONPATH": str(Path(access.__file__).parents[3]), "COLUMNS": "200"},
    )


@pytest.fixture(autouse=True, scope="module")
def can_make_namespaces():
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        pytest.skip("there is no unshare or setpriv here")
    tried = enter(f"mount -t tmpfs none /mnt && {NOBODY} {sys.executable} -c 'import outsize.cli'")
    if tried.returncode:
        pytest.skip(f"namespaces of another user cannot be made here: {tried.stderr.strip()[-200:]}")


def sentences(done):
    """What the watch has to say, without the samples."""
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("outsize: ")]


def samples(done):
    return re.findall(r"^ +[0-9.]+ s  held .* of ", done.stdout + done.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    "who", [NOBODY, "setpriv --bounding-set=-all --inh-caps=-all"], ids=["nobody", "no capabilities"]
)
def test_a_process_whose_pages_may_not_be_looked_at(who):
    owner = "setpriv --reuid 65533 --clear-groups sleep 60 & "
    done = enter(f"{owner} sleep 0.2; {who} {WATCH} --for 1s --plain $!")
    said = sentences(done)
    assert said[0] == (
        "outsize: what only process 2 holds (USS) is not shown: this user may not look at its pages (/proc/2/smaps_rollup)"
    )
    assert said[1:] == ["outsize: stopped"] and samples(done) and done.returncode == 0


def test_a_process_that_proc_hides_is_told_from_one_that_is_not_there():
    done = enter(f"{SLEEP} {HIDE_PROC} {NOBODY} {WATCH} --for 1s $!; {NOBODY} {WATCH} --for 1s 99")
    assert sentences(done) == [
        "outsize: process 2 is there, and /proc hides it (hidepid): watch it as its own user or as root",
        "outsize: there is no process 99: a container sees its own processes only",
    ]
    assert done.returncode == 2


def test_a_machine_whose_proc_hides_processes_is_shown_as_a_whole():
    done = enter(f"{SLEEP} {HIDE_PROC} {NOBODY} {WATCH} --for 1s")
    assert sentences(done) == [
        "outsize: /proc hides the processes of other users (hidepid): only those of this user are named",
        "outsize: stopped",
    ]
    assert samples(done) and done.returncode == 0


def test_a_program_that_a_user_starts_is_watched_where_proc_hides_the_others():
    done = enter(f"{SLEEP} {HIDE_PROC} {NOBODY} {WATCH} -- sleep 0.5")
    assert sentences(done) == [] and samples(done) and done.returncode == 0


def test_a_process_of_another_namespace_is_not_there():
    done = enter(f"{WATCH} --for 1s {os.getpid()}")
    assert sentences(done) == [f"outsize: there is no process {os.getpid()}: a container sees its own processes only"]
    assert done.returncode == 2


@pytest.mark.parametrize(
    "hide",
    [
        "mount -t tmpfs none /sys/fs/cgroup",
        "mount -t tmpfs none /sys",
        "mount -t tmpfs -o mode=0700 none /sys/fs/cgroup",
    ],
    ids=["not mounted", "without sys", "not readable"],
)
def test_a_control_group_that_cannot_be_read_leaves_the_limit_unknown(hide):
    done = enter(f"{SLEEP} {hide} && {NOBODY} {WATCH} --for 1s; {WATCH} --for 1s --plain $!")
    text = "outsize: the limit of the container is not known: its control group cannot be read (/sys/fs/cgroup)"
    if not Path("/proc/self/cgroup").read_text().strip():
        pytest.skip("this kernel has no control groups")
    assert sentences(done) == [text, "outsize: stopped"] * 2
    assert len(samples(done)) >= 2 and done.returncode == 0


def test_control_groups_that_can_be_read_are_not_hidden_and_no_control_groups_are_none():
    files = {
        "/proc/self/cgroup": "0::/box\n",
        "/proc/self/mountinfo": "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
    }
    here = types.SimpleNamespace(read_text=files.get)
    assert is_hidden(here)
    files["/sys/fs/cgroup/cgroup.procs"] = "1\n"
    assert not is_hidden(here)
    assert not is_hidden(types.SimpleNamespace(read_text={}.get))
    assert not any(is_hidden(FakeMachine(container="1GiB", cgroup=version).system) for version in (1, 2))


def test_a_proc_that_cannot_be_written_is_enough():
    done = enter(f"{SLEEP} mount -o remount,bind,ro /proc && {WATCH} --for 1s $!")
    assert sentences(done) == ["outsize: stopped"] and samples(done) and done.returncode == 0


def test_without_proc_a_process_is_refused_a_machine_is_summed_up_and_a_program_runs():
    gone = "mount -t tmpfs none /proc && "
    unknown = "outsize: /proc cannot be read here: processes and what they hold are not known"
    done = enter(f"{gone} {WATCH} --for 1s 1")
    assert sentences(done) == [unknown] and done.returncode == 2
    done = enter(f"{gone} {WATCH} --for 1s")
    assert sentences(done) == [unknown, "outsize: stopped"] and done.returncode == 0
    assert samples(done) and "in use 0 B" not in done.stdout
    done = enter(f"{gone} {WATCH} -- sh -c 'echo ran; exit 3'")
    assert sentences(done) == [f"{unknown}: the program runs unwatched"]
    assert (done.stdout, done.returncode) == ("ran\n", 3)


def test_a_program_is_watched_from_outside_where_no_temporary_file_can_be_written():
    closed = read_only("/tmp", "/var/tmp", "/usr/tmp")
    done = enter(f"{closed} unset TMPDIR TEMP TMP; {NOBODY} {WATCH} -- sh -c 'echo ran; sleep 1; exit 3'")
    assert sentences(done) == [
        "outsize: no folder for temporary files can be written (TMPDIR): the program is watched from outside only"
    ]
    assert samples(done) and (done.stdout, done.returncode) == ("ran\n", 3)


def test_a_home_that_cannot_be_written_is_no_trouble():
    done = enter(f"export HOME=/nonexistent; unset XDG_RUNTIME_DIR; {NOBODY} {WATCH} -- sleep 1")
    assert sentences(done) == [] and samples(done) and done.returncode == 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_end_nothing(closed):
    done = enter(f"{SLEEP} setsid {WATCH} --for 1s $! {closed}; echo status $? >/dev/stderr")
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.endswith("status 0\n")


def test_a_watch_inside_a_program_that_may_write_nowhere():
    code = "import outsize, time\nwith outsize.watch() as w: time.sleep(1)\nprint(len(w.readings) > 2, w.notes)"
    closed = read_only("/tmp", "/var/tmp", "/dev/shm")
    done = enter(f'{closed} unset XDG_RUNTIME_DIR; export HOME=/nonexistent; {NOBODY} {sys.executable} -c "{code}"')
    assert (done.stdout, done.stderr) == ("True ()\n", "")


def test_a_disk_that_fills_up_keeps_whole_samples_and_says_so_once(tmp_path):
    full = f"mount -t tmpfs -o size=8k none {tmp_path} && "
    done = enter(f"{full} {SLEEP} {WATCH} --for 4s --record {tmp_path}/run.watch $!; cat {tmp_path}/run.watch >&2")
    said = [line for line in done.stdout.splitlines() if line.startswith("outsize: ")]
    assert said == [
        f"outsize: {tmp_path}/run.watch is not written for now: No space left on device: the watch goes on",
        "outsize: stopped",
    ]
    (tmp_path / "kept.watch").write_text(done.stderr)
    kept = load(tmp_path / "kept.watch")
    assert len(kept.samples) > 5 and not kept.complete


def test_a_process_that_ends_in_the_middle_ends_the_watch():
    begin = time.monotonic()
    done = enter(f"(sleep 2) & {WATCH} --for 60s $!")
    assert sentences(done) == ["outsize: the process has ended"] and samples(done) and done.returncode == 0
    assert time.monotonic() - begin < 50


MANY, PACE = (1000, "--for 6s --every 2s") if long() else (600, "--for 3s --every 1s")
FORKS = (
    f"import os, time\nfor _ in range({MANY}):\n    if not os.fork(): time.sleep(99)\nprint(flush=True)\ntime.sleep(99)"
)


def test_a_tree_of_many_processes_is_one_line_about_the_cost():
    forks = f'{sys.executable} -S -c "{FORKS}" >/forked & while [ ! -s /forked ]; do sleep 0.1; done; '
    done = enter(f"mount -t tmpfs none /mnt; {forks.replace('/forked', '/mnt/forked')} {WATCH} {PACE} $!")
    said = sentences(done)
    assert len(said) == 2 and said[1] == "outsize: stopped"
    assert re.fullmatch(
        rf"outsize: {MANY + 1:,} processes: they are read every [0-9.]+ s, to keep the cost low", said[0]
    )
    assert samples(done) and f"{MANY + 1:,} processes" in done.stdout


def test_a_driver_without_its_library_is_one_line():
    driver = (
        "mount -t tmpfs none /proc/driver && cd /proc/driver && mkdir nvidia && echo NVRM version: 560 >nvidia/version"
    )
    done = enter(f"{driver} && {WATCH} --for 1s")
    said = sentences(done)
    assert (len(said) == 2 and said[1] == "outsize: stopped" and "NVML" in said[0]) or "nvidia" in said[0].lower()
    assert samples(done) and done.returncode == 0
