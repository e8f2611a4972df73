"""Nodes that are made at once: what has to be read before the graph above it is known, or is too large to be held."""

from __future__ import annotations

import os
import weakref

from outsize.array.graph import build as make
from outsize.array.graph.node import Node
from outsize.array.plan.prepare import resolve_budget
from outsize.array.run.execute import ARRAY_PREFIX
from outsize.array.run.results import compute_node, save_node
from outsize.core.events import default_listener

SMALL = 1 << 20
"""Bytes of a result that stays in memory."""


def make_now(node: Node) -> Node:
    """The node made now, inside the current budget: in memory where it is small, else in a scratch file that goes with
    it."""
    if node.nbytes <= SMALL:
        return make.constant(compute_node(node, None, default_listener()))
    name = scratch_file(resolve_budget(None).scratch)
    made = make.source(save_node(node, name, None, default_listener(), resume=False))
    weakref.finalize(made, remove, name)
    return made


def scratch_file(folder: str) -> str:
    """A new file for an array, which goes with its process."""
    os.makedirs(folder, exist_ok=True)
    import tempfile

    handle, name = tempfile.mkstemp(".npy", f"{ARRAY_PREFIX}{os.getpid()}-", folder)
    os.close(handle)
    return name


def remove(path: str) -> None:
    """Remove a scratch file, if it is still there."""
    if os.path.exists(path):
        os.unlink(path)
