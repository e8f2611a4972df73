"""A fused chain in a device's terms: the same program, every operand in the dtype of NumPy's own loop.

In: a `Program`. Out: the same program with functions of the device's library, or the reason why it cannot be had. What a
chunk takes on the device is counted here: its leaves and its result stay while it is worked on; registers hold a slice
of it and are shared by all chunks, since kernels run one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outsize.array.device.base import Device, Kernels, padded
from outsize.array.graph.elementwise import Operation
from outsize.array.graph.node import Fill
from outsize.array.kernels.fused import Index, Instruction, Program, run_slice
from outsize.array.memo import remembered


class Refused(Exception):
    """The device's library cannot do this; the text says why."""


class Trivial(Refused):
    """There is nothing in it for a device: the processor does it, also where the user named the device."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """A chain that a device can run."""

    program: Program
    """The chain, in the functions of the device's library."""
    moved: tuple[bool, ...]
    """Per leaf: True where its block is sent to the device; a filled array is a number there."""

    def registers(self, elements: int) -> int:
        """Bytes of all registers and casts for slices of this many elements."""
        casts = max((_bytes(step.casts, elements) for step in self.program.instructions), default=0)
        return _bytes(self.program.registers, elements) + casts


def _bytes(dtypes: Sequence[np.dtype[Any] | None], elements: int) -> int:
    """Bytes of one array of so many elements of each dtype."""
    return sum(padded(elements * dtype.itemsize) for dtype in dtypes if dtype is not None)


def lower(program: Program, kernels: Kernels) -> Lowered:
    """The program in the library's functions; `Refused` where one is missing."""
    for leaf in program.leaves:
        _check(leaf.dtype, kernels)
    moved = tuple(not isinstance(leaf, Fill) for leaf in program.leaves)
    if not any(moved):
        raise Trivial("nothing is read: what is computed from numbers alone need not cross the link")
    steps = tuple(_lower_step(instruction, program, kernels) for instruction in program.instructions)
    return Lowered(replace(program, instructions=steps), moved)


def _check(dtype: np.dtype[Any], kernels: Kernels) -> None:
    if dtype.newbyteorder("=").char not in kernels.dtypes:
        raise Refused(f"{kernels.name} does not compute with {dtype.name} on a device")


def _lower_step(instruction: Instruction, program: Program, kernels: Kernels) -> Instruction:
    operation, given = instruction.operation, []
    for kind, value in instruction.args:
        if kind == "leaf":
            given.append(program.leaves[value].dtype.newbyteorder("="))
        elif kind == "register":
            given.append(program.registers[value].newbyteorder("="))
        else:
            given.append(value)
    result = program.registers[instruction.target]
    _check(result, kernels)
    wanted = _loop(operation, given, result)
    call = kernels.function(operation.name, wanted[0].char if wanted else "?")
    if call is None:
        over = f" over {wanted[0].name}" if wanted else ""
        raise Refused(f"{kernels.name} has no '{operation.name}'{over} that equals NumPy's")
    args: list[tuple[str, Any]] = []
    casts: list[np.dtype[Any] | None] = []
    for (kind, value), dtype in zip(instruction.args, wanted, strict=True):
        _check(dtype, kernels)
        if kind == "leaf" and isinstance(program.leaves[value], Fill):
            kind, value = "scalar", program.leaves[value].value
        if kind == "scalar":
            args.append((kind, kernels.scalar(value, dtype)))
            casts.append(None)
            continue
        have = program.leaves[value].dtype if kind == "leaf" else program.registers[value]
        args.append((kind, value))
        casts.append(None if have.newbyteorder("=") == dtype else dtype)
    if all(kind == "scalar" for kind, _ in args):
        raise Trivial(f"'{operation.name}' of numbers alone is done at once by the processor")
    return replace(instruction, args=tuple(args), call=call, casts=tuple(casts))


def _loop(operation: Operation, given: list[Any], result: np.dtype[Any]) -> list[np.dtype[Any]]:
    """The dtypes in which NumPy would do it."""
    if isinstance(operation.probe, np.ufunc):
        dtypes = [value for value in given if isinstance(value, np.dtype)]
        kinds = [value if isinstance(value, np.dtype) else _kind(value, dtypes) for value in given]
        return list(operation.probe.resolve_dtypes((*kinds, None))[: len(given)])
    if operation.name == "where":
        return [np.dtype(bool), result, result]
    return [value if isinstance(value, np.dtype) else np.asarray(value).dtype for value in given]


def _kind(value: Any, beside: list[np.dtype[Any]]) -> Any:
    """A NumPy scalar has its dtype; Python's are weak. An integer that the dtypes beside it cannot hold (NumPy compares
    with those too) needs a wider one."""
    if isinstance(value, np.generic | np.ndarray):
        return value.dtype
    if isinstance(value, bool):
        return np.dtype(bool)
    if isinstance(value, int) and not all(_holds(dtype, value) for dtype in beside if dtype.kind in "iu"):
        if not _holds(np.dtype(np.int64), value):
            raise Refused(f"{value} is outside of int64")
        return np.dtype(np.int64)
    return type(value)


def _holds(dtype: np.dtype[Any], value: int) -> bool:
    return bool(np.iinfo(dtype).min <= value <= np.iinfo(dtype).max)


class DeviceRegisters:
    """Registers of a chain in the memory of a device, from `base` on, for slices of so many elements."""

    def __init__(self, lowered: Lowered, device: Device, base: int, elements: int) -> None:
        self.program, self.device, self.elements = lowered.program, device, elements
        self.cast = device.kernels.cast
        self.base = base
        self._spare = base + _bytes(self.program.registers, elements)

    def value(self, leaves: Sequence[Any], index: Index, shape: tuple[int, ...], out: Any = None) -> Any:
        """The chain's value on a slice of what was sent."""
        ins = [None if leaf is None else _pick(leaf, index) for leaf in leaves]
        return run_slice(self.program, ins, self, shape, out, True)

    @remembered
    def at(self, shape: tuple[int, ...]) -> list[Any]:
        """All registers as arrays of this shape."""
        place, found = self.base, []
        for dtype in self.program.registers:
            found.append(self.device.view(place, shape, dtype.newbyteorder("=")))
            place += padded(self.elements * dtype.itemsize)
        return found

    def widen(self, value: Any, casts: Sequence[np.dtype[Any] | None], number: int) -> Any:
        """The operand of this number, in its dtype of an instruction's casts."""
        place, dtype = self._spare + _bytes(casts[:number], self.elements), casts[number]
        assert dtype is not None
        wide = self.device.view(place, tuple(value.shape), dtype)
        self.cast(wide, value)
        return wide


def _pick(leaf: Any, index: Index) -> Any:
    """The part of a leaf that belongs to a slice; axes of length 1 are broadcast."""
    return leaf[tuple(slice(0, 1) if n == 1 else part for n, part in zip(leaf.shape, index, strict=True))]


def slice_elements(room: int, most: int, bytes_each: int, beside: int = 0) -> int:
    """Elements of a slice whose registers, and what lies beside them, take a third of the room at most."""
    return max(256, min(most, (room // 3 - beside) // max(1, bytes_each)))
