"""A memory limit for the scripts beside this file, and files to work on. `SCALE` makes everything smaller, the limit too."""

from __future__ import annotations

import contextlib
import os
import pathlib
import resource
import tempfile
from collections.abc import Iterator

import numpy as np

SCALE = int(os.environ.get("SCALE", "8"))
"""1 is the size of the articles: 12 GB of disk and some minutes."""
MANY = 3075200 // SCALE
"""Rows of 512 numbers: 5.87 GiB at scale 1."""
WIDE = (1, 256, 1024 // SCALE, 1021)
"""A picture's activations: 1021 MiB at scale 1."""
ROOM = (2048 << 20) // SCALE
"""Bytes that a program may take beside what it has when its work begins."""


def limit(more: int = ROOM) -> None:
    """`ulimit -d`: this process may take so many bytes more."""
    status = pathlib.Path("/proc/self/status").read_text().split()
    taken = int(status[status.index("VmData:") + 1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (taken + more, resource.RLIM_INFINITY))


@contextlib.contextmanager
def stored(*shape: int) -> Iterator[str]:
    """A file of float32 numbers of this shape."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/x.npy"
        whole = np.lib.format.open_memmap(path, "w+", "float32", shape)
        flat = whole.reshape(-1)
        for start in range(0, len(flat), 1 << 22):
            flat[start : start + (1 << 22)] = np.random.default_rng(start).random(len(flat[start : start + (1 << 22)]))
        del whole, flat
        yield path


def run(cases: dict, name: str, way: str) -> None:
    """One case, and what came of it."""
    try:
        print(f"{name} {way}: {cases[name, way]()}")
    except Exception as error:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        lines = [line for line in str(error).splitlines() if "memory" in line or "OOM" in line or "llocate" in line]
        print(f"{name} {way}: {type(error).__name__}: {lines[0] if lines else error}")
        raise SystemExit(1) from None
