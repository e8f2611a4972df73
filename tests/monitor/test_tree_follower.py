"""A tree that is read again and again: cheaply, and with the same numbers as one that is read in full."""

import gc
import mmap
import os
import subprocess
import sys

import pytest

from outsize.monitor.history import History
from outsize.monitor.processes import follower as tree_follower
from outsize.monitor.processes.follower import TreeFollower
from outsize.monitor.processes.tree import read_process, read_tree
from outsize.monitor.sampler import Sampler

MiB = 2**20
CHILD = "import sys; block = bytearray(40 << 20); print('ready', flush=True); sys.stdin.read()"


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def clock(monkeypatch):
    """The time by which the slower readings are paced."""
    now = [100.0]
    monkeypatch.setattr(tree_follower.time, "monotonic", lambda: now[0])
    return now


def test_a_followed_process_has_the_numbers_of_one_that_is_read_in_full(child):
    follower = TreeFollower(child.pid)
    for _ in range(3):
        (followed,), (whole,) = follower.read().processes, read_tree(child.pid).processes
        assert (followed.pid, followed.name) == (whole.pid, whole.name)
        for name in ("anonymous", "shared", "files", "swap"):
            assert abs(getattr(followed, name) - getattr(whole, name)) <= MiB  # one that waits may still touch a page


def test_only_one_short_file_is_read_of_a_process_that_is_known(child, clock, monkeypatch):
    follower, whole = TreeFollower(child.pid), []
    monkeypatch.setattr(tree_follower, "read_process", lambda pid: whole.append(pid) or read_process(pid))
    for _ in range(10):
        follower.read()
    assert whole == [child.pid]
    clock[0] += 3600
    follower.read()
    assert whole == [child.pid] * 2


def test_shared_memory_is_told_from_files_at_once(clock):
    follower = TreeFollower(os.getpid())
    before = follower.read().processes[0]
    with mmap.mmap(-1, 64 * MiB) as block:
        block.write(bytes(64 * MiB))
        after = follower.read().processes[0]
    assert 60 * MiB <= after.shared - before.shared <= 68 * MiB
    assert abs(after.files - before.files) < 8 * MiB


def test_a_new_process_is_found_when_it_is_time_to_look(clock, child):
    follower = TreeFollower(os.getpid())
    follower.read()
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as later:
        later.stdout.readline()
        clock[0] += 3600
        assert {child.pid, later.pid} <= {process.pid for process in follower.read().processes}
        later.kill()


def test_a_process_that_has_ended_is_known_to_have_ended_and_then_gone(child):
    follower = TreeFollower(child.pid)
    assert follower.read().processes[0].ended is None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert follower.read().processes[0].ended == -9
    child.wait()
    assert follower.read().processes == ()


def test_a_long_watch_does_not_take_its_own_samples_for_growth():
    sampler, history = Sampler(os.getpid(), 0.0), History()
    for _ in range(20):
        sampler.read()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(400):
        history.add(sampler.read())
    held = sys.getallocatedblocks() - before
    assert 0.6 * held <= history.count_objects() <= 1.6 * held
