"""Outputs that are folders: made to survive a crash, and given their final name when complete."""

from __future__ import annotations

import os
import shutil

from outsize.array.store.io.file import naming, sync_folder


def sync_path(path: str) -> None:
    """Make a file, or a folder's list of names, survive a crash."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_folder(partial: str, target: str) -> None:
    """Give a complete folder its final name; an older one is moved away first, since a rename cannot replace it."""
    target = os.path.abspath(target)
    old = f"{partial}.replaced"
    with naming(target):
        if os.path.lexists(target):
            shutil.rmtree(old, ignore_errors=True)
            os.rename(target, old)
        os.rename(partial, target)
        sync_folder(os.path.dirname(target))
    if os.path.isdir(old) and not os.path.islink(old):
        shutil.rmtree(old, ignore_errors=True)
    elif os.path.lexists(old):
        os.unlink(old)
