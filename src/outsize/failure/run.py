"""`outsize run`: a Python program as a watched child; where memory ended it, a diagnosis with timeline and growing line.

The child runs unchanged, with its own standard streams. The parent reads its tree through `/proc` twenty times a second,
slower as it stays quiet, and asks for a stack (see `child/sitecustomize.py`) only when it has grown. When it has ended, the
kernel says the most that one of its processes held (`wait4`), and `ending` says why it ended.
"""

from __future__ import annotations

import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from outsize.core.errors import InputError
from outsize.core.failure import Diagnosis
from outsize.failure.ending import KernelLog, Surroundings, explain_ending
from outsize.failure.stacks import ask_line
from outsize.failure.watched import NOTABLE, Watched
from outsize.machine import count_kills, memory
from outsize.monitor.tree import TreeReading, read_kills, read_library, read_process, read_tree

_QUICK, _SLOW = 0.05, 0.25
"""Seconds between readings: while it grows, and while it is quiet."""
_STEP = 8 * 2**20
"""Growth in bytes after which a stack is asked for."""
_CHILD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "child")


def run(command: Sequence[str]) -> tuple[int, Diagnosis, Watched]:
    """Run a program and wait: (exit status as a shell gives it, diagnosis, what was seen)."""
    words = build_command(list(command))
    before, group, machine, log = memory(), count_kills(), read_kills(), KernelLog()
    with tempfile.TemporaryDirectory(prefix="outsize-run-") as folder:
        watched = _watch(words, pathlib.Path(folder))
        around = Surroundings(
            before=before, group=(group, count_kills()), machine=(machine, read_kills()), log=log.close()
        )
        diagnosis = explain_ending(watched, pathlib.Path(folder), around)
    status = watched.status if watched.status >= 0 else 128 - watched.status
    return status, diagnosis, watched


def build_command(words: list[str]) -> list[str]:
    """`train.py a b`, `-m package a b`, `-c code` run under this Python; anything else is a command as it stands."""
    if not words:
        raise InputError("nothing to run: write  outsize run train.py [arguments]  or  outsize run -m package")
    first = words[0]
    if first in ("-m", "-c"):
        if len(words) < 2:
            raise InputError(f"{first} needs {'a module' if first == '-m' else 'code'} after it")
        return [sys.executable, *words]
    if os.path.isfile(first) and (first.endswith((".py", ".pyz")) or not os.access(first, os.X_OK)):
        return [sys.executable, *words]
    if shutil.which(first) is None:
        raise InputError(f"no such script or command: {first}")
    return words


def _watch(words: list[str], folder: pathlib.Path) -> Watched:
    path = os.environ.get("PYTHONPATH")
    environment = os.environ | {
        "OUTSIZE_RUN_FOLDER": str(folder),
        "PYTHONPATH": _CHILD + (os.pathsep + path if path else ""),
    }
    kills = _count()
    child = subprocess.Popen(words, env=environment)
    watched = Watched(command=words, pid=child.pid, began=time.time(), kills=kills)
    restore = [
        (number, signal.signal(number, handler))
        for number, handler in (
            (signal.SIGINT, lambda *_: None),
            (signal.SIGTERM, lambda *_: child.terminate()),
        )
    ]
    try:
        _follow(child, watched, folder)
    finally:
        for number, handler in restore:
            signal.signal(number, handler)
    return watched


def _count() -> int:
    """The kernel's count of kills for memory: in our control group, or on the machine where there is none."""
    kills = count_kills().kills
    return (read_kills() or 0) if kills is None else kills


def _follow(child: subprocess.Popen[bytes], watched: Watched, folder: pathlib.Path) -> None:
    """Read the tree until the child ends. Waiting on a pidfd wakes once; `Popen.wait(timeout)` would poll all the while."""
    handle = os.pidfd_open(child.pid)
    ended = select.poll()
    ended.register(handle, select.POLLIN)
    try:
        _read_until(child.pid, watched, folder, ended)
    finally:
        os.close(handle)
    _end(child, watched)


def _end(child: subprocess.Popen[bytes], watched: Watched) -> None:
    """Take the exit status, and the peaks that the kernel kept."""
    final = read_process(child.pid)  # before it is waited for: how it ended can still be read
    others = [process for pid in watched.seen if pid != child.pid and (process := read_process(pid)) is not None]
    watched.note(TreeReading(time=time.time(), processes=(*([] if final is None else [final]), *others)), _count())
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = watched.status = os.waitstatus_to_exitcode(status)
    largest = max(watched.seen.values(), key=lambda process: process.highest + process.files, default=None)
    watched.peak = max(watched.peak, usage.ru_maxrss * 1024 - (largest.files if largest else 0))


def _read_until(pid: int, watched: Watched, folder: pathlib.Path, ended: select.poll) -> None:
    """The loop of readings: quick while the tree grows, slow while it is quiet."""
    pause, held_then = _QUICK, 0
    while not ended.poll(round(pause * 1000)):
        tree = read_tree(pid)
        watched.note(tree, _count())
        held = tree.bytes
        grew = held - held_then
        for process in tree.processes:
            if process.pid not in watched.libraries and process.anonymous >= NOTABLE:
                watched.libraries[process.pid] = read_library(process.pid) or ""
        if grew >= _STEP:
            pause = _QUICK
            held_then = max(held, _look_closely(pid, tree, watched, folder, grew))
        else:
            held_then = min(held_then, held)
            pause = min(_SLOW, pause * 1.2)


def _look_closely(root: int, tree: TreeReading, watched: Watched, folder: pathlib.Path, grew: int) -> int:
    """Two stacks with a reading after each: growth between them is of their line, if they agree. Returns the last reading."""
    line = ask_line(tree, folder)
    between = read_tree(root).bytes
    again = ask_line(tree, folder)
    after = read_tree(root).bytes
    watched.stacks += 2
    watched.passed[line] += grew
    if line == again:
        watched.lines[line] += max(0, after - between)
    return after
