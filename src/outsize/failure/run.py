"""`outsize run`: a Python program as a watched child; where memory ended it, a diagnosis with timeline and growing line.

`monitor.launch` runs and follows it. When it has ended, `ending` says why.
"""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import IO

from outsize.core.failure import Diagnosis
from outsize.failure.ending import KernelLog, Surroundings, explain_ending
from outsize.machine import count_kills, memory
from outsize.monitor.launch import build_command, follow
from outsize.monitor.processes.tree import TreeReading, read_kills
from outsize.monitor.watched import Watched

Listener = Callable[[TreeReading], None]


def run(
    command: Sequence[str], *, listen: Callable[[pathlib.Path], Listener] | None = None, output: IO[bytes] | None = None
) -> tuple[int, Diagnosis, Watched]:
    """Run a program and wait: (exit status as a shell gives it, diagnosis, what was seen). With `listen` the program also
    watches itself from inside: it is given the folder in which the program says so, and answers who takes the readings.
    `output` takes what the program writes, where its streams are not ours to share."""
    words = build_command(list(command))
    before, group, machine, log = memory(), count_kills(), read_kills(), KernelLog()
    with tempfile.TemporaryDirectory(prefix="outsize-run-") as name:
        folder = pathlib.Path(name)
        watched = follow(
            words,
            folder,
            cooperate=listen is not None,
            listener=None if listen is None else listen(folder),
            output=output,
        )
        around = Surroundings(
            before=before, group=(group, count_kills()), machine=(machine, read_kills()), log=log.close()
        )
        diagnosis = explain_ending(watched, folder, around)
    status = watched.status if watched.status >= 0 else 128 - watched.status
    return status, diagnosis, watched
