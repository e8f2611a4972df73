"""Chains of a pass on a device, and the short lanes that they read (sums of rows, norms, largest elements), made there chunk by
chunk.

In: the nodes that a pass evaluates. Out: what has to be sent for a region of them, and what is made of it on the device before
they are computed: reductions of lanes that the chunk holds whole, and small chains of those. Without such lanes nothing is
made, and what is sent are the leaves of the chains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outsize.array.device.base import Device, array_bytes
from outsize.array.device.folding import Folding, check_fold, dtype_there
from outsize.array.device.lower import DeviceRegisters, Lowered, Refused, lower
from outsize.array.graph.barrier import Reduce, Select
from outsize.array.graph.compile import compile_program
from outsize.array.graph.elementwise import Elementwise, broadcast_region
from outsize.array.graph.node import Node, walk
from outsize.array.graph.rearrange import Affine, only_reshapes
from outsize.array.kernels.accumulators import KINDS, Accumulator, Moments, make_accumulator
from outsize.array.kernels.fused import cut_slices
from outsize.array.store.base import Region, Store, region_shape
from outsize.array.tuning import Tuning

Part = tuple[Node, Region]
"""A region of a node."""
Arrays = dict[tuple[int, Region], Any]
"""(id of a node, its region) -> where it lies on the device."""


def can_make(node: Reduce, device: Device) -> bool:
    """True where the lanes of this reduction can be made on the device."""
    if isinstance(node, Select) or KINDS.get(node.name) in (None, "argmin", "argmax"):
        return False
    try:
        check_fold(_accumulator(node), device)
    except Refused:
        return False
    return node.dtype.newbyteorder("=").char in device.kernels.dtypes


def _accumulator(node: Reduce) -> Accumulator:
    child = node.inputs[0]
    return make_accumulator(KINDS[node.name], node.axes, child.shape, child.dtype, node.working)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a region of a pass needs."""

    sent: tuple[Part, ...]
    made: tuple[Part, ...]
    """What is made of it on the device, in order."""


class LocalWork:
    """The chains of a pass, with everything that is made for them."""

    def __init__(self, device: Device, bindings: Mapping[Node, Store], tuning: Tuning) -> None:
        self.device, self._bindings, self._tuning = device, bindings, tuning
        self.chains: dict[int, Lowered] = {}
        """id of a node -> its chain."""
        self.leaves: list[Node] = []
        """Everything that is sent, each once."""
        self.accumulators: dict[int, Accumulator] = {}
        """id of a reduction of lanes -> what it keeps."""
        self.lanes: frozenset[int] = frozenset()
        """Axes along which a chunk must be whole."""
        self._roots: list[Node] = []
        self._made: dict[int, bool] = {}
        self._known: dict[Region, Parts] = {}

    def add(self, root: Node) -> None:
        """A node that the pass evaluates."""
        self._lower(root)
        self._roots.append(root)
        self._known.clear()

    def _lower(self, root: Node) -> None:
        if id(root) in self.chains:
            return
        chain = lower(compile_program(root, self._bindings, self._tuning.slice), self.device.kernels)
        self.chains[id(root)] = chain
        for leaf in _moved(chain):
            self._prepare(leaf)

    def _prepare(self, node: Node) -> None:
        if not self._is_made(node):
            if not any(node is known for known in self.leaves):
                self.leaves.append(node)
        elif isinstance(node, Reduce):
            self._lower(node.inputs[0])
            self.accumulators[id(node)] = _accumulator(node)
            self.lanes |= frozenset(node.axes)
        elif isinstance(node, Affine):
            self._prepare(node.inputs[0])
        else:
            self._lower(node)

    def _is_made(self, node: Node) -> bool:
        """True where lanes are below it that are made inside the pass."""
        if id(node) not in self._made:
            for one in walk(node):
                found = isinstance(one, Reduce) and one.local
                if isinstance(one, Elementwise) or (isinstance(one, Affine) and only_reshapes(one)):
                    found = any(self._made[id(child)] for child in one.inputs)
                self._made[id(one)] = found and one not in self._bindings
        return self._made[id(node)]

    def parts(self, region: Region) -> Parts:
        """What a region of the pass needs."""
        found = self._known.get(region)
        if found is None:
            sent: dict[tuple[int, Region], Part] = {}
            made: dict[tuple[int, Region], Part] = {}
            for root in self._roots:
                self._need_leaves(self.chains[id(root)], region, sent, made)
            found = self._known[region] = Parts(tuple(sent.values()), tuple(made.values()))
            if len(self._known) > 64:
                self._known = {region: found}
        return found

    def _need_leaves(self, chain: Lowered, region: Region, sent: dict[Any, Part], made: dict[Any, Part]) -> None:
        for leaf in _moved(chain):
            self._need(leaf, broadcast_region(region, leaf.shape), sent, made)

    def _need(self, node: Node, region: Region, sent: dict[Any, Part], made: dict[Any, Part]) -> None:
        key = id(node), region
        if not self._is_made(node):
            sent[key] = node, region
        elif key not in made:
            if isinstance(node, Reduce):
                self._need_leaves(self.chains[id(node.inputs[0])], node.across(region), sent, made)
            elif isinstance(node, Affine):
                self._need(node.inputs[0], _below(node, region), sent, made)
            else:
                self._need_leaves(self.chains[id(node)], region, sent, made)
            made[key] = node, region

    def nbytes(self, region: Region) -> int:
        """Bytes on the device for a chunk: what is sent, and what is made."""
        parts = self.parts(region)
        return sum(array_bytes(region_shape(part), node.dtype) for node, part in parts.sent) + sum(
            self._made_bytes(node, region_shape(part)) for node, part in parts.made
        )

    def _made_bytes(self, node: Node, shape: tuple[int, ...]) -> int:
        if isinstance(node, Affine):
            return 0
        own = array_bytes(shape, node.dtype)
        accumulator = self.accumulators.get(id(node))
        if accumulator is None:
            return own
        return own + array_bytes(shape, dtype_there(accumulator)) * len(accumulator.device_kinds)

    def leaves_of(self, root: Node, region: Region, arrays: Arrays) -> list[Any]:
        """What a chain reads of what lies on the device, with as many axes as the region has."""
        chain = self.chains[id(root)]
        found: list[Any] = []
        for leaf, moved in zip(chain.program.leaves, chain.moved, strict=True):
            if not moved:
                found.append(None)
                continue
            array = arrays[id(leaf), broadcast_region(region, leaf.shape)]
            lead = len(region) - len(leaf.shape)
            found.append(array[(None,) * lead] if lead else array)
        return found

    def make(
        self, registers: Mapping[int, DeviceRegisters], scratch: int, arrays: Sequence[Any], place: int, region: Region
    ) -> tuple[Arrays, int]:  # fmt: skip
        """(everything that the chains read, where free memory begins), of what was sent for a region."""
        parts = self.parts(region)
        found: Arrays = {(id(node), part): array for (node, part), array in zip(parts.sent, arrays, strict=True)}
        for node, part in parts.made:
            shape = region_shape(part)
            if isinstance(node, Affine):
                found[id(node), part] = found[id(node.inputs[0]), _below(node, part)].reshape(shape)
                continue
            out = self.device.view(place, shape, node.dtype.newbyteorder("="))
            if isinstance(node, Reduce):
                after = place + array_bytes(shape, node.dtype)
                self._reduce(node, part, registers, scratch, found, out, after)
            else:
                own, ins = registers[id(node)], self.leaves_of(node, part, found)
                for index, piece in cut_slices(shape, own.elements):
                    own.value(ins, index, piece, out[index] if index else out)
            place += self._made_bytes(node, shape)
            found[id(node), part] = out
        return found, place

    def _reduce(
        self, node: Reduce, part: Region, registers: Mapping[int, DeviceRegisters], scratch: int, found: Arrays,
        out: Any, place: int,
    ) -> None:  # fmt: skip
        source, wide, accumulator = node.inputs[0], node.across(part), self.accumulators[id(node)]
        ins, shape, dtype = self.leaves_of(source, wide, found), region_shape(wide), dtype_there(accumulator)
        folding, apply = Folding(self.device, registers[id(source)], scratch), self.device.kernels.apply
        total = self.device.view(place, region_shape(part), dtype)
        each = math.prod(shape[axis] for axis in node.axes)
        if isinstance(accumulator, Moments):
            squares = self.device.view(place + array_bytes(region_shape(part), dtype), region_shape(part), dtype)
            folding.moments(accumulator, ins, shape, total, squares)
            apply("divide", dtype, squares, squares, float(max(each - node.ddof, 0)))
            if node.name == "std":
                apply("sqrt", dtype, squares, squares)
            total = squares
        else:
            folding.fold(accumulator, ins, shape, total)
            if node.name == "mean":
                apply("divide", dtype, total, total, float(each))
        self.device.kernels.cast(out, total)


def _moved(chain: Lowered) -> list[Node]:
    return [leaf for leaf, moved in zip(chain.program.leaves, chain.moved, strict=True) if moved]


def _below(node: Affine, region: Region) -> Region:
    """The region of the input of a node that only adds or drops axes of length 1."""
    return tuple((0, 1) if target is None else region[target] for target, _, _ in node.axes)
