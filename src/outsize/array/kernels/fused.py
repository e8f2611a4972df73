"""A chain of elementwise operations as one program that runs over a block in slices that stay in the cache.

In: a program (`graph/compile.py` makes it of nodes) and the blocks it reads. Out: the result in a given block, or slice by
slice to whoever consumes it (a reduction). RAM is touched once a chain, not once an operation: each slice goes through all
instructions while it is in the second-level cache, in a few registers that are reused as soon as their value is dead.

`run_slice` is the only interpreter of programs. Where the registers lie is its caller's: in a worker's buffer here, on a
device in `device/lower.py`, which also puts the functions of the device's library into the instructions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from outsize.array.memo import remembered
from outsize.array.store.base import Block

_OUT = -1
"""The register that stands for the result's own memory."""

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation on registers."""

    operation: Any
    """What is done: an operation of the graph."""
    args: tuple[tuple[str, Any], ...]
    """("leaf", number), ("register", number) or ("scalar", value)."""
    target: int
    """Register of the result."""
    call: Callable[..., Any]
    """call(out, *operands): does it."""
    casts: tuple[np.dtype[Any] | None, ...] = ()
    """The dtype each operand is brought to first, None where it has it; () where `call` takes any."""


@dataclass(frozen=True, slots=True)
class Program:
    """A fused chain."""

    leaves: tuple[Any, ...]
    """What it reads: nodes of the graph."""
    instructions: tuple[Instruction, ...]
    registers: tuple[np.dtype[Any], ...]
    """dtype of each register."""
    dtype: np.dtype[Any]
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


class Registers(Protocol):
    """Where the values of a program lie on their way."""

    def at(self, shape: tuple[int, ...]) -> list[Any]:
        """All registers as arrays of this shape."""

    def cast(self, out: Any, value: Any) -> None:
        """out[...] = value, whatever the dtypes."""

    def widen(self, value: Any, casts: Sequence[np.dtype[Any] | None], number: int) -> Any:
        """The operand of this number, in its dtype of an instruction's casts."""


def _padded(size: int) -> int:
    return -(-size // 64) * 64


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
        order = natural_order(blocks, shape)
        views = [block.transpose(order) for block in blocks]
        target = None if out is None else out.transpose(order)
        extent = tuple(shape[axis] for axis in order)
    for consumer in consumers:
        consumer.begin(order, extent)
    single = [tuple(length == 1 for length in view.shape) for view in views]
    registers = _HostRegisters(program, scratch)
    elements = program.slice_elements()
    if flat is not None and program.result < 0 and consumers and all(getattr(c, "whole", False) for c in consumers):
        elements = math.prod(extent)  # nothing is computed on the way, so nothing has to stay in cache
    for index, slice_shape in cut_slices(extent, elements):
        ins = [
            view[tuple(slice(0, 1) if one else part for one, part in zip(ones, index, strict=True))]
            for view, ones in zip(views, single, strict=True)
        ]
        place = None if target is None else target[index]
        value = run_slice(program, ins, registers, slice_shape, place, target is None or target.dtype == program.dtype)
        for consumer in consumers:
            consumer.take(value, index)


def run_slice(
    program: Program, ins: Sequence[Any], registers: Registers, shape: tuple[int, ...], out: Any, direct: bool
) -> Any:
    """The program's value on a slice: in `out` where that is given, else in a register (or a leaf itself). `direct` says that
    `out` has the dtype of the result, and so can be its register."""
    if program.result < 0:
        if out is not None:
            registers.cast(out, ins[0])
        return ins[0] if out is None else out
    made = registers.at(shape)
    if out is not None and direct:
        made = list(made)
        made[program.result] = out
    for step in program.instructions:
        args = [
            ins[value] if kind == "leaf" else made[value] if kind == "register" else value for kind, value in step.args
        ]
        for number, dtype in enumerate(step.casts):
            if dtype is not None:
                args[number] = registers.widen(args[number], step.casts, number)
        step.call(made[step.target], *args)
    if out is not None and not direct:  # what the chain's own dtype wraps, rounds or cuts off is part of its result
        registers.cast(out, made[program.result])
    return made[program.result]


class _HostRegisters:
    """Registers in a worker's buffer; all slices but the last of an axis share one shape."""

    def __init__(self, program: Program, scratch: Any) -> None:
        self._program, self._scratch = program, scratch

    def cast(self, out: Block, value: Block) -> None:
        """A cast as of `astype`."""
        np.copyto(out, value, casting="unsafe")

    def widen(self, value: Any, casts: Sequence[np.dtype[Any] | None], number: int) -> Any:
        """Never asked for: NumPy's functions take operands of any dtype."""
        raise AssertionError(casts)

    @remembered
    def at(self, shape: tuple[int, ...]) -> list[Block]:
        """The registers as blocks of this shape."""
        found, offset, size = [], 0, math.prod(shape)
        for dtype in self._program.registers:
            found.append(np.ndarray(shape, dtype, self._scratch.data, offset))
            offset += _padded(size * dtype.itemsize)
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


def natural_order(blocks: Sequence[Block], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Axes from slow to fast as the first block of full shape lies in memory."""
    for block in blocks:
        if (
            block.shape == shape
            and block.size > 1
            and all(block.strides[a] or shape[a] == 1 for a in range(len(shape)))
        ):
            return tuple(sorted(range(len(shape)), key=lambda axis: -abs(block.strides[axis])))
    return tuple(range(len(shape)))


def lies_across(block: Block, order: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """True where the fastest axis of a block is another than that of axes in this order."""
    candidates = [a for a in range(block.ndim) if block.shape[a] > 1]
    fastest = min(candidates, key=lambda a: abs(block.strides[a]), default=None)
    return fastest != next((axis for axis in reversed(order) if shape[axis] > 1), None)
