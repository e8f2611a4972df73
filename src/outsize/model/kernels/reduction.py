"""The buffer of a reduction that is split over thread blocks.

In: the shape and strides of what is summed and the axes. Out: bytes of the buffer and of its counters, none if one
block does the work alone. Follows torch's launch rule for reductions (ATen/native/cuda/Reduce.cuh), so the bytes are those of the
card: checked against 116 recorded reductions on an H200.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

THREADS = 512
VECTOR = 4
MIN_VALUES, MAX_VALUES = 16, 256


class Axis(NamedTuple):
    """One axis of the input; contiguous neighbouring axes are merged."""

    length: int
    stride: int
    reduced: bool


def buffer_bytes(tensor: Any, axes: set[int], processors: int, threads_per_processor: int = 2048) -> tuple[int, ...]:
    """Bytes of (buffer, counters) that a reduction of `tensor` over `axes` allocates, () where it needs none."""
    shape, strides = tensor.shape, tensor.stride()
    element = max(4, tensor.element_size()) if tensor.dtype.is_floating_point else tensor.element_size()
    merged = _merge([Axis(n, strides[i], i in axes) for i, n in enumerate(shape) if n != 1])
    reduced = [axis for axis in merged if axis.reduced]
    kept = [axis for axis in merged if not axis.reduced]
    inputs, outputs = (math.prod(axis.length for axis in axes_) for axes_ in (reduced, kept))
    if not reduced or inputs * outputs == 0:
        return ()
    inner = not kept or min(axis.stride for axis in reduced) < min(axis.stride for axis in kept)
    vector = 1
    if inner:
        dim0, dim1 = inputs, outputs
        if len(merged) == 1 and reduced[0].stride == 1 and dim0 > 128:
            dim0 //= VECTOR
    else:
        dim0, dim1 = outputs, inputs
        vector = _vector(tensor, merged, kept)
        dim0 //= vector
    return _split(inputs, outputs, dim0, dim1, inner, vector, element, processors, threads_per_processor)


def _split(
    inputs: int, outputs: int, dim0: int, dim1: int, inner: bool, vector: int, element: int, processors: int,
    threads: int,
) -> tuple[int, ...]:  # fmt: skip
    most = THREADS // vector
    wide, high = min(floor_power(dim0), most), min(floor_power(dim1), most)
    width = min(wide, 32)
    height = min(high, most // width)
    width = min(wide, most // height)
    step_in = width if inner else 1
    step_out = 1 if inner else width
    if -(-inputs // step_in) >= min(height * MIN_VALUES, MAX_VALUES):
        step_in *= height
    else:
        return ()
    grid = -(-(outputs // vector) // step_out)
    target = processors * (threads // (width * height))
    values = -(-inputs // step_in)
    if values < MAX_VALUES or grid > target:
        return ()
    blocks = max(min(-(-target // grid), -(-values // MIN_VALUES)), -(-values // MAX_VALUES))
    if blocks <= 1:
        return ()
    size = element * outputs * blocks
    return (size if inner else size * width * vector, 4 * grid)


def _merge(axes: list[Axis]) -> list[Axis]:
    """Axes from the fastest to the slowest; contiguous axes that are all summed, or all kept, are merged."""
    out: list[Axis] = []
    for axis in sorted(axes, key=lambda a: a.stride):
        last = out[-1] if out else None
        if last is not None and last.reduced == axis.reduced and axis.stride == last.length * last.stride:
            out[-1] = Axis(last.length * axis.length, last.stride, last.reduced)
        else:
            out.append(axis)
    return out


def _vector(tensor: Any, merged: list[Axis], kept: list[Axis]) -> int:
    fastest = min(kept, key=lambda axis: axis.stride)
    if fastest.stride != 1:
        return 1
    vector = VECTOR
    others = [axis.stride for axis in merged if axis is not fastest]
    while vector > 1 and (fastest.length % vector or any(stride % vector for stride in others)):
        vector //= 2
    return vector


def floor_power(value: int) -> int:
    """The largest power of two that is not above a value, at least one."""
    return 1 << (max(1, value).bit_length() - 1)
