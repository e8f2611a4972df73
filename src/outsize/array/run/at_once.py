"""Small work at once: every node is made whole, one after another, on the calling thread and in plain NumPy arrays.

In: a node. Out: its values, or None where the work is not small, or has a part that only a pass can make. A plan and its
threads cost milliseconds, so work that takes one core a few of them is not planned, if the budget has ample room for all that
it holds. The nodes are the same, and so are their rules: promotion, wide sums, NaN. Chains of arrays beyond the caches go
through in slices, as in a pass, and what is between their ends is never whole. `Tuning.at_once` = 0 turns all this off, so that
tests see the passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outsize.array.graph.barrier import Barrier, Contract, Reduce, Select, Settled
from outsize.array.graph.compile import compile_program
from outsize.array.graph.elementwise import SLOW, Elementwise, Scalar, broadcast_region
from outsize.array.graph.frame import Frame
from outsize.array.graph.node import Node, Source, walk
from outsize.array.graph.rearrange import Affine
from outsize.array.graph.window import Blocks, Window
from outsize.array.kernels.accumulators import KINDS, fold_whole
from outsize.array.kernels.blas import packing
from outsize.array.kernels.fused import Program, run_program
from outsize.array.plan.prepare import kept_bytes, resolve_budget
from outsize.array.store.base import Block, Buffer, Region, Store, region_shape, whole
from outsize.array.tuning import Tuning, current
from outsize.core.units import parse_bytes
from outsize.engine.pool import cores, make_buffer
from outsize.machine.budget import current_wishes

_EMPTY = np.empty(0, np.uint8)
_EACH = 4
"""Bytes that making a node takes, for each byte of it and of what it reads: results, copies and temporaries."""


def compute_at_once(roots: Sequence[Node], budget: Any = None) -> list[Block] | None:
    """The values of small work inside the budget; None where it has to be planned."""
    tuning = current()
    if not tuning.at_once or any(root.nbytes > tuning.at_once for root in roots):
        return None
    given = current_wishes().host if budget is None else budget
    work = _look_at(roots, tuning, given is not None)
    if work is None or not _has_room(work.held, given, tuning):
        return None
    frame = AtOnce(tuning, work.chains)
    with np.errstate(all="ignore"):
        for place, node in enumerate(work.order):
            if id(node) in work.inlined:
                continue
            frame.make(node)
            for child in work.done.get(place, ()):
                frame.made.pop(id(child), None)
    return [_owned(frame.made[id(root)], root) for root in roots]


def _has_room(held: int, given: Any, tuning: Tuning) -> bool:
    """True where the budget is several times what is held. What the machine has left is only read for more than a few MiB."""
    if given is None:
        return held <= tuning.unread or held <= (resolve_budget(None).host or 0) // _EACH
    host = parse_bytes(given) if isinstance(given, int | str) else given.host
    return held <= ((host or 0) - kept_bytes()) // _EACH


@dataclass(slots=True)
class _Work:
    """What is to be made at once."""

    order: list[Node]
    """Nodes, inputs before users."""
    inlined: dict[int, Node]
    """id of a step of a chain -> who runs the chain: the node at its end, or a reduction of that."""
    chains: dict[int, Program] = field(default_factory=dict)
    """id of a node at the end of a chain -> the chain."""
    done: dict[int, list[Node]] = field(default_factory=dict)
    """Number of a node in the order -> what nobody reads after it."""
    held: int = 0
    """Bytes that are held at once."""


def _look_at(roots: Sequence[Node], tuning: Tuning, limited: bool) -> _Work | None:
    """The work, where it is small and every node has a rule for its whole."""
    order, total = walk(*roots), 0
    for node in order:
        if 0 in node.shape or not (_RULES.get(type(node)) or _has_rule(node)):
            return None
        total += _bytes(node)
    if total <= tuning.at_once_little and not (limited and any(isinstance(node, Contract) for node in order)):
        return _Work(order, {}, held=total)
    work = _Work(order, _inline(order, roots, tuning.slice))
    _end_lives(work, roots)
    live, seconds = 0, 0.0
    for place, node in enumerate(order):
        seconds += _seconds(node, tuning)
        if seconds > tuning.at_once_seconds:
            return None
        if id(node) in work.inlined:
            continue
        live += _bytes(node)
        work.held = max(work.held, live + _beside(node, work, tuning, limited))
        if work.held > tuning.at_once:
            return None
        live -= sum([_bytes(child) for child in work.done.get(place, ())])
    return work


_RULES: dict[type[Node], bool] = {}
"""Classes of nodes -> True where each of them has a rule for its whole."""


def _has_rule(node: Node) -> bool:
    """True where a node can be made whole, as its class or its lanes say."""
    if isinstance(node, Barrier) and not isinstance(node, Contract | Settled | Reduce):
        return bool(node.lane)
    found = _RULES[type(node)] = not isinstance(node, Blocks | Window | Select)
    return found


def _inline(order: list[Node], roots: Sequence[Node], least: int) -> dict[int, Node]:
    """Elementwise nodes beyond the caches that one chain, or one reduction, reads and nobody else."""
    found: dict[int, Node | None] = {}
    for node in reversed(order):
        for child in node.inputs:
            if not isinstance(child, Elementwise) or child.nbytes <= least:
                continue
            runs: Node | None = None
            if isinstance(node, Elementwise) and node.shape == child.shape:
                runs = found.get(id(node)) or node
            elif isinstance(node, Reduce) and not isinstance(node, Select) and not KINDS[node.name].startswith("arg"):
                runs = node
            found[id(child)] = runs if found.get(id(child), runs) is runs else None
    if found:
        found.update({id(root): None for root in roots})
    return {number: runs for number, runs in found.items() if runs is not None}


def _end_lives(work: _Work, roots: Sequence[Node]) -> None:
    """Find out when each node is read for the last time: what a chain reads, when it runs."""
    places = {id(node): place for place, node in enumerate(work.order)} if work.inlined else {}
    last: dict[int, int] = {}
    nodes: dict[int, Node] = {}
    for place, node in enumerate(work.order):
        runs = work.inlined.get(id(node))
        at = place if runs is None else places[id(runs)]
        for child in node.inputs:
            last[id(child)], nodes[id(child)] = max(at, last.get(id(child), 0)), child
    for root in roots:
        last.pop(id(root), None)
    for number, place in last.items():
        if number not in work.inlined:
            work.done.setdefault(place, []).append(nodes[number])


def _beside(node: Node, work: _Work, tuning: Tuning, limited: bool) -> int:
    """Bytes that making a node takes beside it: registers of its chain, and what products copy."""
    if isinstance(node, Contract):
        a, b = node.inputs
        wide = node.dtype.char == "e" or node.widens(tuning)
        copied = (a.nbytes + b.nbytes) * (2 if wide else 1) if wide or a.ndim != 2 or b.ndim != 2 else 0
        if limited:  # BLAS's own buffers may be more than all the rest
            rows = node.nbytes // node.dtype.itemsize
            copied += packing(rows, rows, rows, node.dtype, tuning.strip).total(1, cores())
        return copied
    if not work.inlined:
        return 0
    end = node.inputs[0] if isinstance(node, Reduce) else node
    if not any(work.inlined.get(id(child)) is node for child in node.inputs):
        return 0
    read = {one for one in work.order if one is not end and id(one) not in work.inlined}  # as they are
    chain = work.chains[id(end)] = compile_program(end, read, tuning.slice)
    return chain.scratch(end.shape) + tuning.slice


def _seconds(node: Node, tuning: Tuning) -> float:
    """What a node takes one core, roughly."""
    size = node.nbytes
    if isinstance(node, Elementwise):
        return size / (tuning.core_slow_bytes if node.operation.name in SLOW else tuning.core_bytes)
    if isinstance(node, Source):
        return 0.0 if node.store.resident else node.store.extent(whole(node.shape)) / tuning.disk_rate
    if isinstance(node, Affine):
        return 0.0
    moved = size + sum([child.nbytes for child in node.inputs])
    if isinstance(node, Contract):
        summed = math.prod(node.inputs[0].shape[node.inputs[0].ndim - node.summed :])
        flops = 2 * size // node.dtype.itemsize * summed
        return moved / tuning.core_bytes + flops / (tuning.core_flops * cores())
    return moved / (tuning.core_bytes if isinstance(node, Reduce) else tuning.core_slow_bytes)


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

    def __init__(self, tuning: Tuning, chains: dict[int, Program]) -> None:
        super().__init__(_EMPTY, {}, tuning)
        self.chains = chains
        self.made: dict[int, Block] = {}
        """id of a node -> all of it."""

    def make(self, node: Node) -> None:
        """All of a node whose inputs were made."""
        if id(node) in self.chains:
            self.made[id(node)] = self._run_chain(node)
        elif isinstance(node, Elementwise):
            out = np.empty(node.shape, node.dtype)
            args = [arg.value if isinstance(arg, Scalar) else self.made[id(arg)] for arg in node.args]
            node.operation.apply(out, *args)
            self.made[id(node)] = out
        elif isinstance(node, Reduce) and id(node.inputs[0]) in self.made and self._reduce(node):
            return
        elif node.nbytes == node.dtype.itemsize and isinstance(node, Affine) and node.inputs[0].nbytes == node.nbytes:
            self.made[id(node)] = self.made[id(node.inputs[0])].reshape(node.shape)
        else:
            self.made[id(node)] = node.evaluate(whole(node.shape), self, None)

    def _run_chain(self, node: Node) -> Block:
        chain, out = self.chains[id(node)], np.empty(node.shape, node.dtype)
        scratch = np.empty(chain.scratch(node.shape), np.uint8)
        run_program(chain, self.load_leaves(chain, whole(node.shape)), node.shape, out, scratch, ())
        return out

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
        return self.chains.get(id(node)) or Program((node,), (), (), node.dtype, -1, self.tuning.slice)

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
