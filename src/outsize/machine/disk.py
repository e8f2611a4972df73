"""The scratch folder and the disk under it."""

from __future__ import annotations

import os
import stat

from outsize.core.memory import DISK, PoolReading
from outsize.machine.system import System

_IN_MEMORY = {"tmpfs", "ramfs"}
_KINDS = {"0": "solid state"}
"""What `rotational` means. Virtual disks always answer 1, so 1 is not used."""


def default_scratch(system: System) -> str:
    """`OUTSIZE_SCRATCH`, else the user's cache folder, else (not writable) a temporary one. /tmp is last: it is often
    in RAM."""
    environ = system.environ
    home = environ.get("HOME") or os.path.expanduser("~")
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    if environ.get("OUTSIZE_SCRATCH"):
        return environ["OUTSIZE_SCRATCH"]
    usual = os.path.join(cache, "outsize", "scratch")
    own = f"outsize-{os.getuid()}"
    shared = (os.path.join(folder, own) for folder in ("/var/tmp", environ.get("TMPDIR") or "/tmp"))
    trusted = (usual, *(folder for folder in shared if _is_ours(folder)))
    return next((folder for folder in trusted if system.disk_space(folder).direct is not None), usual)


def _is_ours(folder: str) -> bool:
    """True if no other user owns a folder of this name: the owner could replace what we write there."""
    try:
        found = os.lstat(folder)
    except OSError:
        return True
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def read_disk(system: System, scratch: str) -> PoolReading:
    """Free space, type, and whether direct I/O works."""
    space = system.disk_space(scratch)
    kind, device = _find_file_system(system, space.folder)
    notes = []
    if kind:
        drive = _KINDS.get((system.read_text(f"/sys/dev/block/{device}/queue/rotational") or "").strip())
        notes.append(f"{kind}{f', {drive}' if drive else ''}")
    if kind in _IN_MEMORY:
        notes.append("this folder is in RAM: set OUTSIZE_SCRATCH to a folder on a disk")
    said = {True: "direct I/O works", False: "no direct I/O: the page cache is used", None: "not writable"}
    notes.append(said[space.direct])
    return PoolReading(
        pool=DISK, name=scratch, total=space.total, available=space.free if space.direct is not None else 0,
        source=f"statvfs {space.folder}", notes=tuple(notes),
    )  # fmt: skip


def is_in_memory(system: System, folder: str) -> bool:
    """True where files of a folder are in RAM."""
    return _find_file_system(system, system.disk_space(folder).folder)[0] in _IN_MEMORY


def _find_file_system(system: System, folder: str) -> tuple[str | None, str | None]:
    """(type, device number) of the mount that holds a folder: the longest mount point above it."""
    best: tuple[int, str | None, str | None] = (-1, None, None)
    for line in (system.read_text("/proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after.split():
            continue
        point = fields[4]
        inside = folder == point or folder.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best[0]:
            best = (len(point), after.split()[0], fields[2])
    return best[1], best[2]
