"""`outsize run`: a Python program as a watched child; where memory ended it, a diagnosis with timeline and growing line.

The child runs unchanged, with its own standard streams. The parent reads its tree through `/proc` twenty times a second,
slower as it stays quiet, and asks for a stack (see `child/sitecustomize.py`) only when it has grown. A child that dies by
SIGKILL is told apart by the kernel's own counters: kills in our control group, kills on the machine, neither.
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
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from outsize.core.errors import InputError
from outsize.core.failure import Diagnosis, Evidence, Failure
from outsize.core.footprint import Moment
from outsize.core.memory import Limit, Part, Reading
from outsize.core.noun import Known
from outsize.core.units import format_bytes as said
from outsize.failure.case import Case, process_settings
from outsize.failure.explain import NOTHING, diagnose
from outsize.failure.message import read
from outsize.machine import memory
from outsize.monitor.tree import TreeReading, read_address_limit, read_kills, read_tree

_QUICK, _SLOW = 0.05, 0.25
"""Seconds between readings: while it grows, and while it is quiet."""
_STEP = 8 * 2**20
"""Growth in bytes after which a stack is asked for."""
_NOTABLE = 64 * 2**20
"""Growth in bytes that is worth a word in the report."""
_MOMENTS = 4096
_CHILD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "child")


@dataclass(kw_only=True)
class Watched:
    """What was seen of a child."""

    command: list[str]
    """What was run."""
    pid: int
    """Its process id."""
    began: float
    """Seconds since the epoch."""
    moments: deque[Moment] = field(default_factory=lambda: deque(maxlen=_MOMENTS))
    """Bytes of the tree over time, in seconds since the start."""
    peak: int = 0
    """The most the tree held at a reading, or one of its processes between them: what came after the last one is not in it."""
    last: TreeReading | None = None
    """The last reading of it alive."""
    lines: Counter[str] = field(default_factory=Counter)
    """Bytes of growth between two stacks a few milliseconds apart that were in the same line: what that line does."""
    passed: Counter[str] = field(default_factory=Counter)
    """Bytes of growth since the stack before, by the line reached then: also counts lines that only wait."""
    stacks: int = 0
    """How often it was asked where it is."""
    address_limit: int | None = None
    """Its own `ulimit -v`."""
    status: int = 0
    """Exit status as subprocess gives it: negative for a signal."""


def run(command: Sequence[str]) -> tuple[int, Diagnosis, Watched]:
    """Run a program and wait: (exit status as a shell gives it, diagnosis, what was seen)."""
    words = build_command(list(command))
    before, kills = memory(), read_kills()
    with tempfile.TemporaryDirectory(prefix="outsize-run-") as folder:
        watched = _watch(words, pathlib.Path(folder))
        diagnosis = _diagnose(watched, pathlib.Path(folder), before, kills)
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
    child = subprocess.Popen(words, env=environment)
    watched = Watched(command=words, pid=child.pid, began=time.time())
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
    watched.status = child.returncode
    return watched


def _follow(child: subprocess.Popen[bytes], watched: Watched, folder: pathlib.Path) -> None:
    """Read the tree until the child ends. Waiting on a pidfd wakes once; `Popen.wait(timeout)` would poll all the while."""
    handle = os.pidfd_open(child.pid)
    ended = select.poll()
    ended.register(handle, select.POLLIN)
    try:
        _read_until(child, watched, folder, ended)
    finally:
        os.close(handle)


def _read_until(child: subprocess.Popen[bytes], watched: Watched, folder: pathlib.Path, ended: select.poll) -> None:
    """The loop of readings: quick while the tree grows, slow while it is quiet."""
    pause, asked, held_then = _QUICK, 0.0, 0
    while True:
        if ended.poll(round(pause * 1000)):
            child.wait()
            return
        tree = read_tree(child.pid)
        if not tree.processes:
            continue
        held, now = tree.bytes, tree.time
        watched.moments.append(Moment(time=now - watched.began, bytes=held))
        watched.peak = max(watched.peak, held, *(process.highest for process in tree.processes))
        watched.last = tree
        grew = held - held_then
        if grew >= _STEP:
            pause = _QUICK
            held = max(held, _look_closely(child.pid, tree, watched, folder, grew))
            held_then = held
        else:
            held_then = min(held_then, held)
            pause = min(_SLOW, pause * 1.2)
        if now - asked > 1:
            asked = now
            watched.address_limit = read_address_limit(child.pid)


def _look_closely(root: int, tree: TreeReading, watched: Watched, folder: pathlib.Path, grew: int) -> int:
    """Two stacks with a reading after each: growth between them is of their line, if they agree. Returns the last reading."""
    line = _ask_line(tree, folder)
    between = read_tree(root).bytes
    again = _ask_line(tree, folder)
    after = read_tree(root).bytes
    watched.stacks += 2
    watched.passed[line] += grew
    if line == again:
        watched.lines[line] += max(0, after - between)
    return after


def _ask_line(tree: TreeReading, folder: pathlib.Path) -> str:
    """The line that the largest Python process of the tree is in, as `file.py:12 in load`."""
    for process in sorted(tree.processes, key=lambda process: -process.anonymous):
        file = folder / f"stack.{process.pid}"
        if not file.exists():
            continue
        before = file.stat().st_size
        try:
            os.kill(process.pid, signal.SIGURG)
        except OSError:
            continue
        stack = _read_stack(file, before)
        return _user_line(stack)
    return "outside Python"


def _read_stack(file: pathlib.Path, start: int) -> str:
    """What was written behind `start`. It comes in many small writes, so wait for the outermost frame or for silence."""
    stack, quiet = "", 0
    for _ in range(50):
        time.sleep(0.001)
        with file.open("rb") as stream:
            stream.seek(start)
            now = stream.read(65536).decode("utf-8", "replace")
        quiet = quiet + 1 if now == stack else 0
        stack = now
        if stack.endswith("in <module>\n") or (stack and quiet >= 5):
            break
    return stack


def _user_line(stack: str) -> str:
    """The innermost frame of the user's own code, or the outermost at all."""
    frames = []
    for line in stack.splitlines():
        words = line.strip()
        if words.startswith('File "') and '", line ' in words:
            name, _, rest = words[6:].partition('", line ')
            number, _, function = rest.partition(" in ")
            inside = os.path.isabs(name) and name.startswith(os.getcwd() + os.sep)
            frames.append((name, f"{os.path.relpath(name) if inside else name}:{number} in {function}"))
    if not frames:
        return "starting up"
    libraries = (os.path.dirname(os.__file__), "site-packages", "dist-packages", "<frozen")
    return next((text for name, text in frames if not any(library in name for library in libraries)), frames[-1][1])


def _diagnose(watched: Watched, folder: pathlib.Path, before: Reading, kills: int | None) -> Diagnosis:
    """Its last words if it had any, else how it ended."""
    after = memory()
    diagnosis = NOTHING
    for file in sorted(folder.glob("error.*"), key=lambda file: file.stat().st_mtime):
        text = file.read_text(errors="replace")
        failure = read(text)
        if failure is not None and watched.status != 0:
            diagnosis = diagnose(_case(failure, text, watched, before))
            break
    if diagnosis.failure is None and watched.status in (-signal.SIGKILL, -signal.SIGBUS, 137, 135):
        diagnosis = _explain_signal(watched, before, after, kills)
    return diagnosis if diagnosis.failure is None else _tell_story(diagnosis, watched)


def _case(failure: Failure, text: str, watched: Watched, before: Reading) -> Case:
    """The case with the child's own address limit, which it may have set itself."""
    limit, reading = watched.address_limit, replace(before, rss=watched.last.bytes if watched.last else watched.peak)
    held = watched.last.processes[0].address_space if watched.last and watched.last.processes else None
    if limit is not None and limit < (before.host.total or 0):
        own = Limit(name="ulimit -v", bytes=limit, used=held, source="RLIMIT_AS of the child")
        others = tuple(item for item in before.host.limits if item.name != own.name)
        reading = replace(reading, host=replace(before.host, limits=(own, *others)))
    return Case(failure=failure, text=text, reading=reading, growth=_growth(watched), settings=process_settings())


def _explain_signal(watched: Watched, before: Reading, after: Reading, kills: int | None) -> Diagnosis:
    """SIGKILL or SIGBUS: the kernel's counters say whether memory was the reason."""
    in_group = (after.oom_kills or 0) - (before.oom_kills or 0)
    now = read_kills()
    on_machine = 0 if kills is None or now is None else now - kills
    process = (
        max(watched.last.processes, key=lambda item: item.anonymous)
        if watched.last and watched.last.processes
        else None
    )
    limit = _container_limit(before)
    extra: dict[str, object] = {"format": "dead child", "peak_bytes": watched.peak}
    if watched.status in (-signal.SIGBUS, 135):
        extra["signal"] = "Bus error"
    elif in_group > 0 or (on_machine > 0 and limit is not None and watched.peak > 0.8 * limit.bytes):
        extra |= {"scope": "cgroup", "anon_rss_bytes": process.anonymous if process else watched.peak}
    elif on_machine > 0:
        extra |= {"scope": "machine", "anon_rss_bytes": process.anonymous if process else watched.peak}
    else:
        extra["signal"] = "Killed"
    failure = Failure(
        framework="linux",
        limit_bytes=limit.bytes if extra.get("scope") == "cgroup" and limit else None,
        pid=process.pid if process else watched.pid,
        process=process.name if process else None,
        extra=extra,
    )
    diagnosis = diagnose(Case(failure=failure, reading=after, growth=_growth(watched)))
    counted = (
        [
            Evidence(
                kind="machine", text=f"the kernel killed {max(in_group, on_machine)} time(s) for memory while it ran"
            )
        ]
        if in_group or on_machine
        else []
    )
    return replace(diagnosis, evidence=(*diagnosis.evidence, *counted))


def _container_limit(reading: Reading) -> Limit | None:
    return next((limit for limit in reading.host.limits if not limit.name.startswith(("ulimit", "commit"))), None)


def _growth(watched: Watched) -> int | None:
    """Bytes by which it grew in its last minute, None where that is nothing to speak of."""
    if len(watched.moments) < 2:
        return None
    end = watched.moments[-1]
    start = next(moment for moment in watched.moments if moment.time >= end.time - 60)
    return end.bytes - start.bytes if end.bytes - start.bytes >= _NOTABLE else None


def _tell_story(diagnosis: Diagnosis, watched: Watched) -> Diagnosis:
    """The diagnosis with peak, timeline and who grew."""
    highest = max(watched.moments, key=lambda moment: moment.bytes, default=Moment(time=0, bytes=0))
    evidence = [
        Evidence(
            kind="machine",
            text=f"the program held {said(watched.peak)} of RAM at its peak, {highest.time:.1f} s after its start",
        )
    ]
    lines = growth_by_line(watched).most_common(5)
    if lines and lines[0][1] >= _NOTABLE:
        evidence.append(Evidence(kind="machine", text=f"it grew most at {lines[0][0]}: {said(lines[0][1])}"))
    holders = [
        Part(name=f"grew at {line}", bytes=grown, known=Known.ESTIMATE)
        for line, grown in lines
        if grown >= _NOTABLE // 4
    ]
    if watched.last is not None and len(watched.last.processes) > 1:
        ranked = sorted(watched.last.processes, key=lambda process: -process.anonymous)[:5]
        holders += [
            Part(name=f"pid {process.pid} {process.name}", bytes=process.anonymous, known=Known.EXACT)
            for process in ranked
        ]
    at = next(
        (place for place, item in enumerate(diagnosis.evidence) if item.kind == "inferred"), len(diagnosis.evidence)
    )
    return replace(
        diagnosis,
        evidence=(*diagnosis.evidence[:at], *evidence, *diagnosis.evidence[at:]),
        holders=tuple(holders),
        timeline=_thin(watched),
    )


def growth_by_line(watched: Watched) -> Counter[str]:
    """The growth that was seen, shared out by what grew while a line was watched; a line only passed by counts for little."""
    weights = {line: watched.lines[line] + watched.passed[line] // 1000 for line in watched.passed}
    total, grown = sum(weights.values()), sum(watched.passed.values())
    return Counter({line: grown * weight // total for line, weight in weights.items()}) if total else Counter()


def _thin(watched: Watched, most: int = 60) -> tuple[Moment, ...]:
    """The course of it in at most `most` moments, its peak and end among them."""
    moments = list(watched.moments)
    if len(moments) <= most:
        return tuple(moments)
    edges = [index * len(moments) // most for index in range(most + 1)]
    chosen = [max(moments[low:high], key=lambda moment: moment.bytes) for low, high in pairwise(edges)]
    return (*chosen[:-1], moments[-1])
