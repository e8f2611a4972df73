"""Small work at once: every node is made whole, one after another, on the calling thread and in plain NumPy arrays.

In: a node. Out: its values, or None where the work is not small, or has a part that only a pass can make. A plan costs
milliseconds and NumPy microseconds, so work of a few MiB is not planned. The nodes are the same, and so are their rules:
promotion, wide sums, NaN. `Tuning.at_once` = 0 turns it off, so that tests see the passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outsize.array.graph.barrier import Barrier, Contract, Reduce, Select, Settled
from outsize.array.graph.elementwise import Elementwise, Scalar, broadcast_region
from outsize.array.graph.frame import Frame
from outsize.array.graph.node import Node, Source, walk
from outsize.array.graph.rearrange import Affine
from outsize.array.graph.window import Blocks, Window
from outsize.array.kernels.accumulators import fold_whole
from outsize.array.kernels.blas import packing
from outsize.array.kernels.fused import Program
from outsize.array.store.base import Block, Buffer, Region, Store, region_shape, whole
from outsize.array.tuning import Tuning, current
from outsize.core.units import parse_bytes
from outsize.engine.pool import cores, make_buffer
from outsize.machine.budget import current_wishes

_EMPTY = np.empty(0, np.uint8)
_EACH = 4
"""Bytes that making a node takes, for each byte of it and of what it reads: results, copies and temporaries."""


def compute_at_once(root: Node, budget: Any = None) -> Block | None:
    """The values of small work inside the budget; None where it has to be planned."""
    found = compute_all_at_once((root,), budget)
    return None if found is None else found[0]


def compute_all_at_once(roots: Sequence[Node], budget: Any = None) -> list[Block] | None:
    """The values of several nodes, where all of that is small."""
    tuning = current()
    most = tuning.at_once
    if not most or any(root.nbytes > most for root in roots):
        return None
    given = current_wishes().host if budget is None else budget
    if given is not None:
        host = parse_bytes(given) if isinstance(given, int | str) else given.host
        most = min(most, (host or 0) // _EACH)
    order = walk(*roots)
    last = {id(child): place for place, node in enumerate(order) for child in node.inputs}
    last.update((id(root), len(order)) for root in roots)
    if not _is_small(order, last, most, tuning, given is not None):
        return None
    frame = AtOnce(tuning)
    with np.errstate(all="ignore"):
        for place, node in enumerate(order):
            frame.make(node)
            for child in node.inputs:
                if last[id(child)] == place:
                    frame.made.pop(id(child), None)
    return [_owned(frame.made[id(root)], root) for root in roots]


def _is_small(order: list[Node], last: dict[int, int], most: int, tuning: Tuning, limited: bool) -> bool:
    """True where all that is held at any moment stays below `most`, and every node has a rule for its whole."""
    live = 0
    for place, node in enumerate(order):
        if 0 in node.shape or isinstance(node, Blocks | Window | Select):
            return False
        if isinstance(node, Barrier) and not (node.lane or isinstance(node, Contract | Settled | Reduce)):
            return False
        live += _bytes(node)
        beside = 0
        if isinstance(node, Contract) and limited:  # BLAS's own buffers may be more than all the rest
            rows = node.nbytes // node.dtype.itemsize
            beside = packing(rows, rows, rows, node.dtype, tuning.strip).total(1, cores())
        if live + beside > most:
            return False
        live -= sum(_bytes(child) for child in set(node.inputs) if last[id(child)] == place)
    return True


def _bytes(node: Node) -> int:
    if not isinstance(node, Source):
        return node.nbytes
    return 0 if node.store.resident else node.store.extent(whole(node.shape))


def _owned(found: Block, root: Node) -> Block:
    """Values that nobody else holds, in C order."""
    plain = found.dtype == root.dtype and found.flags.owndata and found.flags.c_contiguous and found.flags.writeable
    return found if plain and not isinstance(root, Source) else np.array(found, root.dtype, order="C")


class AtOnce(Frame):
    """Hands out arrays of NumPy's own; what was made stays until the end."""

    at_once = True

    def __init__(self, tuning: Tuning) -> None:
        super().__init__(_EMPTY, {}, tuning)
        self.made: dict[int, Block] = {}
        """id of a node -> all of it."""

    def make(self, node: Node) -> None:
        """All of a node whose inputs were made."""
        if isinstance(node, Elementwise):
            out = np.empty(node.shape, node.dtype)
            args = [arg.value if isinstance(arg, Scalar) else self.made[id(arg)] for arg in node.args]
            node.operation.apply(out, *args)
            self.made[id(node)] = out
        elif isinstance(node, Reduce) and self._reduce(node):
            return
        elif node.nbytes == node.dtype.itemsize and isinstance(node, Affine) and node.inputs[0].nbytes == node.nbytes:
            self.made[id(node)] = self.made[id(node.inputs[0])].reshape(node.shape)
        else:
            self.made[id(node)] = node.evaluate(whole(node.shape), self, None)

    def _reduce(self, node: Reduce) -> bool:
        out = self.made[id(node)] = np.empty(node.shape, node.dtype)
        return fold_whole(node.name, self.made[id(node.inputs[0])], node.axes, node.working, out)

    def bytes(self, size: int) -> Buffer:
        return np.empty(size, np.uint8)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Block:
        return np.empty(shape, dtype)

    def read(self, store: Store, region: Region) -> Block:
        return store.read(region, _EMPTY if store.resident else make_buffer(store.extent(region)))

    def program(self, node: Node) -> Program:
        return Program((node,), (), (), node.dtype, -1, self.tuning.slice)

    def evaluate_chain(self, root: Node, region: Region, out: Block | None) -> Block:
        assert isinstance(root, Elementwise)
        block = np.empty(region_shape(region), root.dtype) if out is None else out
        args = [
            arg.value if isinstance(arg, Scalar) else self.evaluate(arg, broadcast_region(region, arg.shape))
            for arg in root.args
        ]
        root.operation.apply(block, *args)
        return block

    def evaluate(self, node: Node, region: Region, out: Block | None = None) -> Block:
        block = self.made.get(id(node))
        if block is None:  # a part of a node that is being made
            block = node.evaluate(region, self, out)
            if block is out:
                return block
        elif region_shape(region) != node.shape:
            block = block[tuple(slice(start, stop) for start, stop in region)]
        if out is not None:
            self.copy(out, block)
            return out
        return block
