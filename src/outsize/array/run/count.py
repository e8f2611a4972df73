"""Results whose length depends on data: a mask is counted now, since the shape of what it keeps must be known.

In: a mask, and an array beside it. Out: a node of the elements where the mask is true.
"""

from __future__ import annotations

import numpy as np

from outsize.array.graph import build as make
from outsize.array.graph.filter import flat_mask, keep, tally
from outsize.array.graph.node import Node
from outsize.array.run.results import compute_node
from outsize.array.store.base import Block
from outsize.core.events import default_listener


def count(mask: Node) -> Block:
    """How many are true before each block of a flat mask, and in all; this pass runs now."""
    counts = compute_node(tally(mask), None, default_listener())
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def masked(node: Node, mask: Node) -> Node:
    """The elements where a mask of the same shape is true, flat; they are counted now."""
    flat = flat_mask(mask)
    return keep(make.reshape(node, (-1,)), flat, count(flat))
