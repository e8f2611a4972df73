"""What batch normalisation takes on the card besides its results.

In: the arguments of torch's two operators. Out: blocks inside the call, and the gradient laid out as the card lays it out. cuDNN
runs it for float32 and float16, torch's own kernels for bfloat16. Both need partial sums only in channels-last layout,
where many blocks sum over rows. The sizes are cuDNN's as recorded on an H200 and those of torch's launch
rule (ATen/native/cuda/Normalization.cuh).
"""

from __future__ import annotations

from typing import Any

import torch

from outsize.model.kernels.layouts import copy_bytes, is_last
from outsize.model.kernels.reduction import floor_power

TILE = 64
"""Channels that cuDNN takes together."""
FORWARD_ROWS = {4: 64, 2: 160}
"""Rows that one of cuDNN's blocks sums, by the bytes of an element."""
BACKWARD_ROWS = 96
"""The same in the backward pass."""
THREADS, WIDE, PER_THREAD, MOST_HIGH, LEAST_HIGH = 512, 32, 16, 128, 8
"""torch's launch rule: threads of a block, its width, values for each thread, and when sums over blocks are worth it."""


def channels_last(tensor: Any) -> bool:
    """True where the channels of a picture, or of a batch of rows, are neighbours in memory."""
    return is_last(tensor) or bool(tensor.dim() > 1 and tensor.stride(1) == 1 and tensor.is_contiguous())


def by_cudnn(x: Any, weight: Any) -> bool:
    """True where torch hands the layer to cuDNN."""
    if x.dim() < 3 or weight is None or x.dtype not in (torch.float32, torch.float16):
        return False
    return bool(weight.dtype == torch.float32)


def forward_blocks(x: Any, weight: Any, training: bool) -> tuple[int, ...]:
    """Bytes of the blocks inside the forward call."""
    if not training or not channels_last(x):
        return ()
    rows, channels = int(x.numel()) // int(x.shape[1]), int(x.shape[1])
    if by_cudnn(x, weight):
        return (-(-channels // TILE) * (-(-rows // FORWARD_ROWS[x.element_size()]) * 516 + 4) + 1072,)
    return _partial(rows, channels, 4)


def backward_copies(grad: Any, x: Any, weight: Any) -> tuple[int, ...]:
    """The gradient laid out as the input, which cuDNN asks for."""
    return copy_bytes(grad, is_last(x)) if by_cudnn(x, weight) else ()


def backward_blocks(x: Any, weight: Any) -> tuple[int, ...]:
    """Bytes of the blocks inside the backward call."""
    if not channels_last(x):
        return ()
    rows, channels = int(x.numel()) // int(x.shape[1]), int(x.shape[1])
    if by_cudnn(x, weight):
        return (-(-channels // TILE) * (-(-rows // BACKWARD_ROWS) * 512 + 4) + 1056,)
    return _partial(rows, channels, 2)


def _partial(rows: int, channels: int, values: int) -> tuple[int, ...]:
    """(partial sums, counters) of torch's own kernel, () where one block sums a column alone."""
    wide = min(floor_power(channels), WIDE)
    high = min(floor_power(-(-rows // PER_THREAD)), THREADS // wide)
    if wide * high != THREADS:
        wide = min(floor_power(channels), THREADS // high)
    across = min(-(-rows // (high * PER_THREAD)), MOST_HIGH)
    if across < LEAST_HIGH:
        return ()
    return (values * channels * across * 4, 4 * -(-channels // wide))
