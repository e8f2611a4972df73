"""Reductions of what lies on a device, slice by slice, in the wide dtypes of the processor.

Each call takes a chain's leaves and a chunk's shape, and leaves the result in an array that is there already. Slices and what
they come to lie in scratch behind the chain's registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from outsize.array.device.base import Device, padded
from outsize.array.device.lower import DeviceRegisters, Refused
from outsize.array.graph.fold import count
from outsize.array.kernels.accumulators import Accumulator, ArgExtreme, Fold, Moments
from outsize.array.kernels.fused import cut_slices

_TRUTHS = {"or": "maximum", "and": "minimum"}
"""Kind of fold of truths -> what a device does with bytes."""


def dtype_there(accumulator: Accumulator) -> np.dtype[Any]:
    """dtype in which a device accumulates: integers wrap alike with and without sign, truths are bytes; extremes are looked for
    in what they are of."""
    working = (accumulator.dtype if isinstance(accumulator, ArgExtreme) else accumulator.working).newbyteorder("=")
    others: dict[str, np.dtype[Any]] = {"?": np.dtype(np.uint8), "L": np.dtype(np.int64)}
    return others.get(working.char, working)


def check_fold(accumulator: Accumulator, device: Device) -> None:
    """`Refused` where a device cannot make this reduction."""
    kernels = device.kernels
    kind, working = accumulator.kind if isinstance(accumulator, Fold) else "", accumulator.working
    several, extreme = len(accumulator.axes) > 1 and not accumulator.flat, kind in ("minimum", "maximum")
    where = isinstance(accumulator, ArgExtreme)
    extreme, working = extreme or where, accumulator.dtype if where else working
    for what, found in (
        ("indices of extremes over several axes", where and len(accumulator.axes) > 1),
        ("extremes of complex numbers", extreme and working.kind == "c"),
        ("extremes of uint64", extreme and working.char == "L"),  # held as int64, which wraps sums alike and no order
        ("moments of complex numbers", isinstance(accumulator, Moments) and working.kind == "c"),
        ("products over several axes", kind == "multiply" and several),
    ):
        if found:
            raise Refused(f"{what} are found by the processor")
    if not where and not {_TRUTHS.get(fold, fold) for fold in accumulator.device_kinds or ("",)} <= kernels.folds:
        raise Refused("it has no rule for a device")
    if dtype_there(accumulator).char not in kernels.dtypes:
        raise Refused(f"{kernels.name} does not accumulate in {accumulator.working.name}")


@dataclass(frozen=True, slots=True)
class Folding:
    """Reductions of one chain's value."""

    device: Device
    registers: DeviceRegisters
    scratch: int
    """Where free memory begins, behind the registers of all chains."""

    def fold(
        self, accumulator: Accumulator, ins: list[Any], shape: tuple[int, ...], total: Any, mean: Any = None
    ) -> None:  # fmt: skip
        """Reduce slice by slice into `total`; squares of deviations where a mean is given."""
        kernels, device, elements = self.device.kernels, self.device, self.registers.elements
        fold = accumulator.device_kinds[0]
        kind = _TRUTHS.get(fold, fold)
        dtype, axes = dtype_there(accumulator), accumulator.axes
        for index, part in cut_slices(shape, elements):
            value = self.registers.value(ins, index, part)
            places = tuple(slice(0, 1) if axis in axes else span for axis, span in enumerate(index))
            wide = device.view(self.scratch, tuple(value.shape), dtype)
            if fold in _TRUTHS:
                truths = np.dtype(bool)
                kernels.apply("not_equal", truths, device.view(self.scratch, tuple(value.shape), truths), value, 0)
            else:
                kernels.cast(wide, value)
            if mean is not None:
                kernels.apply("subtract", dtype, wide, wide, mean[places])
                kernels.apply("multiply", dtype, wide, wide, wide)
            if all(index[axis].start == 0 for axis in axes):
                self._reduce(kind, total[places], wide, axes)
                continue
            reduced = device.view(self.scratch + padded(elements * dtype.itemsize), accumulator.kept(part), dtype)
            self._reduce(kind, reduced, wide, axes)
            kernels.apply(kind, dtype, total[places], total[places], reduced)

    def moments(
        self, accumulator: Accumulator, ins: list[Any], shape: tuple[int, ...], mean: Any, squares: Any
    ) -> None:  # fmt: skip
        """The mean, and the sum of squares of deviations from it."""
        self.fold(accumulator, ins, shape, mean)
        each = float(count(accumulator, shape))
        self.device.kernels.apply("divide", dtype_there(accumulator), mean, mean, each)
        self.fold(accumulator, ins, shape, squares, mean)

    def find(self, accumulator: ArgExtreme, ins: list[Any], shape: tuple[int, ...], total: Any, where: Any) -> None:
        """Extremes and their places, in slices that are whole along the axis."""
        kernels, device, axis = self.device.kernels, self.device, accumulator.axes[0]
        dtype, elements = dtype_there(accumulator), self.registers.elements
        others = (*shape[:axis], *shape[axis + 1 :])
        for cut, part in cut_slices(others, max(1, elements // shape[axis])):
            index = (*cut[:axis], slice(0, shape[axis]), *cut[axis:])
            value = self.registers.value(ins, index, (*part[:axis], shape[axis], *part[axis:]))
            wide = device.view(self.scratch, tuple(value.shape), dtype)
            kernels.cast(wide, value)
            places = (*cut[:axis], slice(0, 1), *cut[axis:])
            kernels.arg(accumulator.kind, where[places], wide, axis)
            self._reduce("minimum" if accumulator.kind == "argmin" else "maximum", total[places], wide, (axis,))

    def _reduce(self, kind: str, out: Any, value: Any, axes: tuple[int, ...]) -> None:
        if kind == "multiply" and len(axes) > 1:  # over everything: one long axis
            out, value, axes = out.reshape(1), value.reshape(-1), (0,)
        self.device.kernels.reduce(kind, out, value, axes)
