"""Nodes that are made at once: what has to be read before the graph above it is known, or is too large to be held. A mask is
counted at once too, since the shape of what it keeps must be known."""

from __future__ import annotations

import os
import pathlib
import weakref
from typing import Any

import numpy as np

from outsize.array.graph import build as make
from outsize.array.graph.filter import flat_mask, keep, tally
from outsize.array.graph.node import Node, Source
from outsize.array.plan.prepare import keep_count, resolve_budget
from outsize.array.run.execute import ARRAY_PREFIX
from outsize.array.run.results import compute_node, save_node
from outsize.array.store.base import Block
from outsize.array.tuning import current
from outsize.core.events import default_listener


def make_now(node: Node) -> Node:
    """The node made now, inside the current budget: in memory where it is small, else in a scratch file that goes with
    it."""
    if node.nbytes <= current().made_now:
        return make.constant(compute_node(node, None, default_listener()))
    return _in_scratch(node, resolve_budget(None).scratch, None)


def _in_scratch(node: Node, folder: str, budget: Any) -> Node:
    """The node in a scratch file that goes with what reads it."""
    name = scratch_file(folder)
    made = make.source(save_node(node, name, budget, default_listener(), resume=False))
    weakref.finalize(made, remove, name)
    return made


def keep_now(node: Node, budget: Any = None) -> Node:
    """The node made now and kept until its last reader goes: in memory where it is at most half of the budget, else in a
    scratch file. Kept memory counts: later budgets are smaller by it."""
    given = resolve_budget(budget)
    if isinstance(node, Source) and node.store.resident:
        return node
    if node.nbytes <= (given.host or 0) // 2:
        values = compute_node(node, given, default_listener())
        keep_count(values)
        return make.constant(values)
    return _in_scratch(node, given.scratch, given)


def scratch_file(folder: str) -> str:
    """A new file for an array, which goes with its process."""
    os.makedirs(folder, exist_ok=True)
    import tempfile

    handle, name = tempfile.mkstemp(".npy", f"{ARRAY_PREFIX}{os.getpid()}-", folder)
    os.close(handle)
    return name


def remove(path: str) -> None:
    """Remove a scratch file, if it is still there."""
    pathlib.Path(path).unlink(missing_ok=True)


def count(mask: Node) -> Block:
    """How many are true before each block of a flat mask, and in all; this pass runs now."""
    counts = compute_node(tally(mask), None, default_listener())
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def masked(node: Node, mask: Node) -> Node:
    """The elements where a mask of the same shape is true, flat; they are counted now."""
    flat = flat_mask(mask)
    return keep(make.reshape(node, (-1,)), flat, count(flat))
