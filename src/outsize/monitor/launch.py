"""A Python program as a watched child, as `outsize run` and `outsize watch -- command` start it.

The child runs unchanged. Python loads `child/sitecustomize.py` at its start, which notes its last error, writes its stack
when asked, and, where the child is to cooperate, starts a watch inside it. The parent reads its tree through `/proc`
twenty times a second, slower as it stays quiet, and asks for a stack only when it has grown. When it has ended, the
kernel says the most that one of its processes held (`wait4`).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import IO

from outsize.core.errors import InputError
from outsize.machine import count_kills
from outsize.monitor.processes.stacks import UNTOLD, ask_line
from outsize.monitor.processes.tree import TreeReading, read_kills, read_library, read_process, read_tree
from outsize.monitor.watched import NOTABLE, Watched

_QUICK, _SLOW = 0.05, 0.25
"""Seconds between readings: while it grows, and while it is quiet."""
_STEP = 8 * 2**20
"""Growth in bytes after which a stack is asked for."""
CHILD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "child")
"""Folder of the `sitecustomize` that a child loads."""
FOLDER, COOPERATE = "OUTSIZE_RUN_FOLDER", "OUTSIZE_WATCH"
"""Environment: where a child writes what it says, and whether it watches itself from inside."""


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


def start(
    words: list[str], folder: pathlib.Path | None, *, cooperate: bool = False, output: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start the program with our `sitecustomize`; `output` takes both its streams where they are not ours to share.
    Without a folder it starts as it would without us."""
    if folder is None:
        return subprocess.Popen(words, stdout=output, stderr=output)
    path = os.environ.get("PYTHONPATH")
    environment = os.environ | {FOLDER: str(folder), "PYTHONPATH": CHILD + (os.pathsep + path if path else "")}
    if cooperate:
        environment[COOPERATE] = "1"
    return subprocess.Popen(words, env=environment, stdout=output, stderr=output)


@contextlib.contextmanager
def passing_signals(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """While the child runs, SIGINT is its own (the terminal sends it to both) and SIGTERM is passed on."""
    handlers = ((signal.SIGINT, lambda *_: None), (signal.SIGTERM, lambda *_: child.terminate()))
    restore = [(number, signal.signal(number, handler)) for number, handler in handlers]
    try:
        yield
    finally:
        for number, handler in restore:
            signal.signal(number, handler)


def follow(
    words: list[str],
    folder: pathlib.Path,
    *,
    cooperate: bool = False,
    listener: Callable[[TreeReading], None] | None = None,
    output: IO[bytes] | None = None,
) -> Watched:
    """Run a program to its end and say what was seen of it; the listener gets every reading of its tree."""
    kills = _count()
    child = start(words, folder, cooperate=cooperate, output=output)
    watched = Watched(command=words, pid=child.pid, began=time.time(), kills=kills)
    with passing_signals(child):
        handle = os.pidfd_open(child.pid)  # waiting on it wakes once; `Popen.wait(timeout)` would poll all the while
        ended = select.poll()
        ended.register(handle, select.POLLIN)
        try:
            _read_until(child.pid, watched, folder, ended, listener)
        finally:
            os.close(handle)
        _end(child, watched)
    watched.seconds = time.time() - watched.began
    return watched


def _count() -> int:
    """The kernel's count of kills for memory: in our control group, or on the machine where there is none."""
    kills = count_kills().kills
    return (read_kills() or 0) if kills is None else kills


def _end(child: subprocess.Popen[bytes], watched: Watched) -> None:
    """Take the exit status, and the peaks that the kernel kept."""
    final = read_process(child.pid)  # before it is waited for: how it ended can still be read
    others = [process for pid in watched.seen if pid != child.pid and (process := read_process(pid)) is not None]
    watched.note(TreeReading(time=time.time(), processes=(*([] if final is None else [final]), *others)), _count())
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = watched.status = os.waitstatus_to_exitcode(status)
    watched.largest = usage.ru_maxrss * 1024
    largest = max(watched.seen.values(), key=lambda process: process.highest + process.files, default=None)
    watched.peak = max(watched.peak, usage.ru_maxrss * 1024 - (largest.files if largest else 0))


def _read_until(
    pid: int,
    watched: Watched,
    folder: pathlib.Path,
    ended: select.poll,
    listener: Callable[[TreeReading], None] | None,
) -> None:
    """The loop of readings: quick while the tree grows, slow while it is quiet."""
    pause, held_then = _QUICK, 0
    while not ended.poll(round(pause * 1000)):
        tree = read_tree(pid)
        watched.note(tree, _count())
        if listener is not None:
            listener(tree)
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
    """Two stacks with a reading after each: growth between them is of their line, if they agree. Returns the last
    reading."""
    line = ask_line(tree, folder)
    between = read_tree(root).bytes
    again = ask_line(tree, folder)
    after = read_tree(root).bytes
    watched.stacks += 2
    watched.passed[line] += grew
    if line == again != UNTOLD:
        watched.lines[line] += max(0, after - between)
    return after
