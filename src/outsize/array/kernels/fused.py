"""A chain of elementwise operations as one program that runs over a block in slices that stay in the cache.

In: the elementwise nodes above the blocks they read. Out: the result in a given block, or slice by slice to whoever
consumes it (a reduction). RAM is touched once a chain, not once an operation: each slice goes through all instructions
while it is in the second-level cache, in a few registers that are reused as soon as their value is dead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from outsize.array.graph.elementwise import Elementwise, Operation, Scalar, broadcast_region
from outsize.array.graph.node import Node
from outsize.array.store.base import Block, Region, Store, region_shape

if TYPE_CHECKING:
    from outsize.array.graph.frame import Frame

_SMALL = 1 << 15
"""Elements of a block that is not worth turning."""

_OUT = -1
"""The register that stands for the result's own memory."""

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation on registers."""

    operation: Operation
    """What is done."""
    args: tuple[tuple[str, Any], ...]
    """("leaf", number), ("register", number) or ("scalar", value)."""
    target: int
    """Register of the result."""


@dataclass(frozen=True, slots=True)
class Program:
    """A fused chain."""

    leaves: tuple[Node, ...]
    """What it reads."""
    instructions: tuple[Instruction, ...]
    """In order."""
    registers: tuple[np.dtype[Any], ...]
    """dtype of each register."""
    dtype: np.dtype[Any]
    """dtype of the result."""
    result: int
    """Register of the result before it was renamed to the output; -1 where the result is leaf 0 itself."""
    slice_bytes: int
    """Bytes of a register's slice."""

    def slice_elements(self) -> int:
        """How many elements go through at a time."""
        return self.slice_bytes // max((dtype.itemsize for dtype in self.registers), default=4)

    def scratch(self, shape: tuple[int, ...]) -> int:
        """Bytes of all registers for a block of this shape."""
        count = min(self.slice_elements(), math.prod(shape))
        return sum(_padded(count * dtype.itemsize) for dtype in self.registers)


class Consumer(Protocol):
    """Takes the slices of a result."""

    def begin(self, order: tuple[int, ...] | None, shape: tuple[int, ...]) -> None:
        """Slices will come with the axes in this order (None: all flattened into one) from a block of this shape."""

    def take(self, value: Block, index: Index) -> None:
        """One slice."""


def _padded(size: int) -> int:
    return -(-size // 64) * 64


def compile_program(root: Node, bindings: Mapping[Node, Store], slice_bytes: int) -> Program:
    """The elementwise nodes that end in `root` and have its shape, as a program over what they read."""
    inside: list[Elementwise] = []
    leaves: list[Node] = []
    seen: set[int] = set()
    stack = [(root, False)]
    while stack:
        node, done = stack.pop()
        if done:
            assert isinstance(node, Elementwise)
            inside.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            if not isinstance(node, Elementwise) or node in bindings or node.shape != root.shape:
                leaves.append(node)
                continue
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(node.inputs))
    return _assign_registers(inside, leaves, root, slice_bytes)


def _assign_registers(inside: list[Elementwise], leaves: list[Node], root: Node, slice_bytes: int) -> Program:
    last_use = {id(arg): step for step, node in enumerate(inside) for arg in node.args}
    leaf_number = {id(leaf): number for number, leaf in enumerate(leaves)}
    where: dict[int, int] = {}
    registers: list[np.dtype[Any]] = []
    free: list[int] = []
    instructions = []
    for step, node in enumerate(inside):
        args: list[tuple[str, Any]] = []
        for arg in node.args:
            if isinstance(arg, Scalar):
                args.append(("scalar", arg.value))
            elif id(arg) in leaf_number:
                args.append(("leaf", leaf_number[id(arg)]))
            else:
                args.append(("register", where[id(arg)]))
        dying = {where[id(a)] for a in node.args if id(a) in where and last_use[id(a)] == step}
        if node.operation.in_place:
            free += sorted(dying)
        target = next((r for r in free if registers[r] == node.dtype), None)
        if target is None:
            target = len(registers)
            registers.append(node.dtype)
        else:
            free.remove(target)
        if not node.operation.in_place:
            free += sorted(dying)
        where[id(node)] = target
        instructions.append(Instruction(node.operation, tuple(args), target))
    result = where.get(id(root), -1)
    return Program(tuple(leaves), tuple(instructions), tuple(registers), root.dtype, result, slice_bytes)


def evaluate_fused(root: Node, region: Region, frame: Frame, out: Block | None) -> Block:
    """The block of an elementwise node."""
    program = frame.program(root)
    shape = region_shape(region)
    blocks = load_leaves(program, region, frame)
    order = _natural_order(blocks, shape)
    target = out
    if target is None or (_fast_axis(target) != _fast_axis_of(order, shape) and math.prod(shape) > _SMALL):
        turned = frame.array(tuple(shape[axis] for axis in order), root.dtype)
        target = turned.transpose(tuple(np.argsort(order))) if order else turned
    scratch = frame.bytes(program.scratch(shape))
    if not frame.dry:
        run_program(program, blocks, shape, target, scratch, ())
    if out is not None and target is not out:
        frame.copy(out, target)
        return out
    return target


def load_leaves(program: Program, region: Region, frame: Frame) -> list[Block]:
    """The blocks that a program reads for a region, each with all axes of the result."""
    blocks = []
    for leaf in program.leaves:
        block = frame.evaluate(leaf, broadcast_region(region, leaf.shape))
        blocks.append(block[(None,) * (len(region) - block.ndim)] if block.ndim < len(region) else block)
    return blocks


def run_program(
    program: Program, blocks: Sequence[Block], shape: tuple[int, ...], out: Block | None, scratch: Any,
    consumers: Sequence[Consumer],
) -> None:  # fmt: skip
    """Run over all slices, into `out` or into the consumers."""
    if math.prod(shape) == 0:
        return
    flat = _flattened(blocks, shape, out) if all(getattr(c, "flat", True) for c in consumers) else None
    if flat is not None:
        views, target, extent, order = *flat, None
    else:
        order = _natural_order(blocks, shape)
        views = [block.transpose(order) for block in blocks]
        target = None if out is None else out.transpose(order)
        extent = tuple(shape[axis] for axis in order)
    for consumer in consumers:
        consumer.begin(order, extent)
    single = [tuple(length == 1 for length in view.shape) for view in views]
    registers = _Registers(program, scratch)
    elements = program.slice_elements()
    if flat is not None and program.result < 0 and consumers and all(getattr(c, "whole", False) for c in consumers):
        elements = math.prod(extent)  # nothing is computed on the way, so nothing has to stay in cache
    for index, slice_shape in cut_slices(extent, elements):
        ins = [
            view[tuple(slice(0, 1) if one else part for one, part in zip(ones, index, strict=True))]
            for view, ones in zip(views, single, strict=True)
        ]
        place = None if target is None else target[index]
        value = _run_slice(program, ins, registers.at(slice_shape), place)
        for consumer in consumers:
            consumer.take(value, index)


def _run_slice(program: Program, ins: list[Block], registers: list[Block], place: Block | None) -> Block:
    if program.result < 0:
        if place is not None:
            np.copyto(place, ins[0], casting="unsafe")
        return ins[0]
    if place is not None and place.dtype == program.dtype:
        registers = list(registers)
        registers[program.result], place = place, None
    for step in program.instructions:
        args = [
            ins[value] if kind == "leaf" else registers[value] if kind == "register" else value
            for kind, value in step.args
        ]
        step.operation.apply(registers[step.target], *args)
    if place is not None:  # of another dtype: what the chain's own wraps, rounds or cuts off is part of its result
        np.copyto(place, registers[program.result], casting="unsafe")
    return registers[program.result]


class _Registers:
    """Views of the registers for each slice shape; all slices but the last of an axis share one."""

    def __init__(self, program: Program, scratch: Any) -> None:
        self._program, self._scratch = program, scratch
        self._views: dict[tuple[int, ...], list[Block]] = {}

    def at(self, shape: tuple[int, ...]) -> list[Block]:
        """The registers as blocks of this shape."""
        found = self._views.get(shape)
        if found is None:
            found, offset, size = [], 0, math.prod(shape)
            for dtype in self._program.registers:
                found.append(np.ndarray(shape, dtype, self._scratch.data, offset))
                offset += _padded(size * dtype.itemsize)
            self._views[shape] = found
        return found


def cut_slices(shape: tuple[int, ...], elements: int) -> Iterator[tuple[Index, tuple[int, ...]]]:
    """Boxes of at most `elements` that cover the shape: whole trailing axes, a part of one, single indices of the
    rest."""
    axis, inner = len(shape), 1
    while axis > 0 and inner * shape[axis - 1] <= elements:
        axis -= 1
        inner *= shape[axis]
    tail = tuple(slice(0, length) for length in shape[axis:])
    if axis == 0:
        yield tail, shape
        return
    cut = axis - 1
    step = max(1, elements // inner)
    for lead in itertools.product(*(range(length) for length in shape[:cut])):
        head = tuple(slice(i, i + 1) for i in lead)
        for start in range(0, shape[cut], step):
            stop = min(shape[cut], start + step)
            yield (*head, slice(start, stop), *tail), (*(1 for _ in lead), stop - start, *shape[axis:])


def _flattened(
    blocks: Sequence[Block], shape: tuple[int, ...], out: Block | None
) -> tuple[list[Block], Block | None, tuple[int, ...]] | None:
    """Everything as one long axis, where all that is not a single element is contiguous; else None."""
    everything = [*blocks, *(() if out is None else (out,))]
    if not all(block.size == 1 or (block.shape == shape and block.flags.c_contiguous) for block in everything):
        return None
    target = None if out is None else out.reshape(-1)
    return [block.reshape(-1) for block in blocks], target, (math.prod(shape),)


def _natural_order(blocks: Sequence[Block], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Axes from slow to fast as the first block of full shape lies in memory."""
    for block in blocks:
        if (
            block.shape == shape
            and block.size > 1
            and all(block.strides[a] or shape[a] == 1 for a in range(len(shape)))
        ):
            return tuple(sorted(range(len(shape)), key=lambda axis: -abs(block.strides[axis])))
    return tuple(range(len(shape)))


def _fast_axis(block: Block) -> int | None:
    candidates = [a for a in range(block.ndim) if block.shape[a] > 1]
    return min(candidates, key=lambda a: abs(block.strides[a]), default=None)


def _fast_axis_of(order: tuple[int, ...], shape: tuple[int, ...]) -> int | None:
    return next((axis for axis in reversed(order) if shape[axis] > 1), None)
