"""Which line of a running Python program is at work, asked from outside.

In: a reading of a process tree, and the folder in which `child/sitecustomize.py` lets `faulthandler` write stacks. Out: the
innermost line of the user's own code, as `file.py:12 in load`.
"""

from __future__ import annotations

import os
import pathlib
import signal
import time

from outsize.monitor.tree import TreeReading


def ask_line(tree: TreeReading, folder: pathlib.Path) -> str:
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
        return user_line(stack)
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
        return "starting up"
    libraries = (os.path.dirname(os.__file__), "site-packages", "dist-packages", "<frozen")
    return next((text for name, text in frames if not any(library in name for library in libraries)), frames[-1][1])
