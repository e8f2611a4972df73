"""Where an unfinished output lies, and what lies beside it.

Both are found by name after a kill, so an output that is begun anew first removes what an earlier one left: its journal
speaks of tiles that this one does not have.
"""

from __future__ import annotations

import os
import shutil

JOURNAL = ".journal"
"""Beside the unfinished output: the folder of what is finished in it."""
EDGES = ".edges"
"""Beside the unfinished output: the file of pages that are half there."""


def partial_path(path: str) -> str:
    """Where the unfinished output for a target lies: hidden, in the same folder, always the same name."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(folder, f".{name}.outsize-partial")


def forget_earlier(partial: str) -> None:
    """Remove what an earlier run left beside its unfinished output; called before this one's first byte."""
    shutil.rmtree(partial + JOURNAL, ignore_errors=True)
    if os.path.exists(partial + EDGES):
        os.unlink(partial + EDGES)
