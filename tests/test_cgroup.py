"""The runner of control groups: the names of both versions on a made-up hierarchy, and a real group where one can be made."""

import os
import subprocess
import sys
from pathlib import Path

import cgroup
import pytest

TOLD = {
    1: {
        "memory.max_usage_in_bytes": "4096",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
        "memory.stat": "rss 1\ntotal_rss 77\n",
    },
    2: {
        "memory.peak": "4096",
        "memory.events": "low 0\nmax 3\noom 1\noom_kill 1\noom_group_kill 0\n",
        "memory.stat": "anon 77\nfile 5\n",
    },
}


def make_mount(folder: Path, version: int) -> Path:
    """The files that a kernel would have put there before the first group."""
    (folder / "memory").mkdir()
    if version == 2:
        (folder / "cgroup.controllers").write_text("cpu memory\n")
        (folder / "cgroup.subtree_control").write_text("cpu\n")
    return folder


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_of_either_version_is_made_read_and_removed(tmp_path, version):
    mount = make_mount(tmp_path, version)
    with cgroup.limited(1 << 20, mount) as group:
        assert group.path.parent == (mount if version == 2 else mount / "memory")
        written = {path.name: path.read_text() for path in group.path.iterdir()}
        limit, swap = (
            ("memory.max", "memory.swap.max") if version == 2 else ("memory.limit_in_bytes", "memory.swappiness")
        )
        assert written == {limit: "1048576", swap: "0"}
        assert not group.killed()
        for name, text in TOLD[version].items():
            (group.path / name).write_text(text)
        assert (group.peak(), group.killed(), group.anonymous()) == (4096, True, 77)
        for path in group.path.iterdir():
            path.unlink()  # a kernel's files go with their folder
    assert not group.path.exists()
    if version == 2:
        assert (mount / "cgroup.subtree_control").read_text() == "+memory"


def test_children_that_have_memory_already_are_left_as_they_are(tmp_path):
    mount = make_mount(tmp_path, 2)
    (mount / "cgroup.subtree_control").write_text("cpu memory\n")
    with cgroup.limited(1 << 20, mount) as group:
        for path in group.path.iterdir():
            path.unlink()
    assert (mount / "cgroup.subtree_control").read_text() == "cpu memory\n"


def test_where_no_group_can_be_made_a_test_is_skipped_with_the_reason(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import cgroup, pathlib\n\ndef test_it():\n    with cgroup.limited(1, pathlib.Path('nothing')):\n        pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", str(tmp_path)]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path})
    assert "1 skipped" in done.stdout
    assert "no memory control group can be made here: [Errno 2]" in done.stdout


def test_a_kernel_that_does_not_tell_the_peak_says_so(tmp_path):
    with cgroup.limited(1 << 20, make_mount(tmp_path, 2)) as group:
        for path in group.path.iterdir():
            path.unlink()
        with pytest.raises(cgroup.Unavailable, match=r"memory\.peak"):
            group.peak()


def test_a_process_that_passes_its_limit_is_killed_and_one_inside_is_not():
    fine = cgroup.run([sys.executable, "-c", "print(len(bytearray(20 << 20)))"], 60 << 20)
    assert fine.fine and fine.stdout == f"{20 << 20}\n"
    assert 20 << 20 <= fine.peak <= 60 << 20
    killed = cgroup.run([sys.executable, "-c", "bytearray(100 << 20)"], 60 << 20)
    assert killed.killed and not killed.fine and killed.status == -9
    slow = cgroup.run([sys.executable, "-c", "import time; time.sleep(60)"], 60 << 20, seconds=0.5)
    assert slow.status is None
