"""Which line of a running Python program is at work, asked from outside.

In: a reading of a process tree, and the folder in which `child/sitecustomize.py` writes stacks. Out: the innermost line of
the user's own code, as `file.py:12 in load`. Python answers SIGURG between two of its instructions. A process that has
computed for a while without an answer is inside C code, and its stack stands still: then SIGWINCH has it written from C. One
that waits for a processor cannot answer, so on a busy machine it is waited for.
"""

from __future__ import annotations

import os
import pathlib
import signal
import time

from outsize.monitor.processes.tree import TreeReading


def ask_line(tree: TreeReading, folder: pathlib.Path) -> str:
    """The line that the largest Python process of the tree is in, as `file.py:12 in load`."""
    for process in sorted(tree.processes, key=lambda process: -process.anonymous):
        file = folder / f"stack.{process.pid}"
        if not file.exists():
            continue
        try:
            return user_line(_ask(process.pid, file))
        except OSError:  # it has just ended
            continue
    return "outside Python"


UNTOLD = "a line that was not told"
"""Instead of a line, where no answer came in time."""
_INSIDE, _MUTE = 5_000_000, 20_000_000
"""Nanoseconds of computing without an answer after which a process is taken to be inside C code, and after which it is let be."""
_LOOKS = 20
"""Looks at a process that neither answers nor wants a processor, a millisecond apart."""
_LONGEST = 0.25
"""Seconds after which a process that waits for a processor is let be."""


def _ask(pid: int, file: pathlib.Path) -> str:
    """The stack that a process writes. It comes in many small writes, so wait for the outermost frame or for silence."""
    start, ran, end = file.stat().st_size, _computed(pid), time.monotonic() + _LONGEST
    os.kill(pid, signal.SIGURG)
    stack, quiet, idle, asked_c = "", 0, 0, False
    while idle < _LOOKS and time.monotonic() < end:
        time.sleep(0.001)
        with file.open("rb") as stream:
            stream.seek(start)
            now = stream.read(65536).decode("utf-8", "replace")
        quiet = quiet + 1 if now == stack else 0
        stack = now
        if stack.endswith("in <module>\n") or (stack and quiet >= 5):
            break
        computed = _computed(pid) - ran
        if not stack and computed > _MUTE:
            break
        if not stack and not asked_c and computed > _INSIDE:
            os.kill(pid, signal.SIGWINCH)
            asked_c = True
        idle += not _wants_processor(pid)
    return stack


def _wants_processor(pid: int) -> bool:
    """True where the main thread of a process runs or waits for its turn."""
    text = pathlib.Path(f"/proc/{pid}/task/{pid}/stat").read_text()
    return text.rpartition(")")[2].split()[0] == "R"


def _computed(pid: int) -> int:
    """Nanoseconds for which the main thread of a process has been on a processor."""
    thread = pathlib.Path(f"/proc/{pid}/task/{pid}")
    try:
        return int((thread / "schedstat").read_text().split()[0])
    except FileNotFoundError:  # not every kernel has it: in ticks then
        words = (thread / "stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def user_line(stack: str) -> str:
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
        return UNTOLD
    libraries = (os.path.dirname(os.__file__), "site-packages", "dist-packages", "<frozen")
    return next((text for name, text in frames if not any(library in name for library in libraries)), frames[-1][1])
