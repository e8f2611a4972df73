"""What the CPU's convolutions take besides their results: oneDNN computes on copies with the channels in blocks.

In: an operator's name, arguments and results. Out: the order in which blocks and results come and go. Read off the resident bytes
of single layers with torch 2.13: input, output and weights are each copied into blocks of 16 channels (padded up to a multiple),
the result is made in blocks and then copied out, and a transposed convolution holds one more block of its output's size.
The bound adds the partial sums of a weight gradient, one for each thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from outsize.model.ledger import RESULT, Move

BLOCK = 16
"""Channels of a block where the processor has AVX-512; 8 where it has not."""
PLAIN = 4
"""Inputs of up to so many channels, pictures as a rule, are read as they are."""
SMALL = 20480
"""Elements of a single input up to which torch uses its own kernel."""
DTYPES = ("torch.float32", "torch.bfloat16", "torch.float16")


def moves_of(name: str, args: Any, results: list[Any]) -> Iterator[Move]:
    """What one call on the CPU does, in order; nothing where it only makes its results."""
    row = ROWS.get(name)
    return iter(()) if row is None else row(args, results)


def _used(x: Any, weight: Any, groups: int) -> bool:
    """True where torch hands a convolution to oneDNN and the layout is not the one that it works on anyway."""
    import torch

    if not torch.backends.mkldnn.is_available() or str(x.dtype) not in DTYPES:
        return False
    if x.dim() > 3 and x.stride()[1] == 1 and x.shape[1] > 1 and not x.is_contiguous():
        return False
    return bool(x.shape[0] > 1 or groups > 1 or x.numel() > SMALL or min(weight.shape[2:]) > 3)


def _blocked(tensor: Any) -> int:
    """Bytes of a tensor with its channels in blocks."""
    shape = [int(size) for size in tensor.shape]
    full = -(-shape[1] // BLOCK) * BLOCK
    return shape[0] * full * math.prod(shape[2:]) * int(tensor.element_size())


def _read(x: Any) -> int:
    return 0 if x.shape[1] <= PLAIN else _blocked(x)


def _bytes(tensor: Any) -> int:
    return int(tensor.numel()) * int(tensor.element_size())


def _convolution(args: Any, results: list[Any]) -> Iterator[Move]:
    x, weight, transposed, groups = args[0], args[1], args[6], args[8]
    if not _used(x, weight, groups):
        return
    out = _blocked(results[0])
    yield Move("take", "input", _read(x))
    yield Move("take", "weight", _bytes(weight))
    yield Move("take", "output", out)
    if transposed:
        yield Move("take", "second output", out)
    yield Move("free", "input")
    yield Move("free", "weight")
    yield RESULT


def _convolution_backward(args: Any, results: list[Any]) -> Iterator[Move]:
    import torch

    grad, x, weight, groups, wanted = args[0], args[1], args[2], args[9], args[10]
    if not _used(x, weight, groups):
        return
    if not grad.is_contiguous():
        yield Move("take", "whole gradient", _bytes(grad))
    if wanted[0]:
        yield Move("take", "gradient", _blocked(grad))
        yield Move("take", "weight", _bytes(weight))
        yield Move("take", "input's gradient", _blocked(x))
        yield Move("free", "gradient")
        yield Move("free", "weight")
        yield RESULT
        yield Move("free", "input's gradient")
    if wanted[1]:
        yield Move("take", "gradient", _blocked(grad))
        yield Move("take", "input", _read(x))
        yield Move("take", "weight's gradient", _bytes(weight), more=torch.get_num_threads() * _bytes(weight))
        yield Move("free", "gradient")
        yield Move("free", "input")
        yield RESULT


ROWS: dict[str, Callable[[Any, list[Any]], Iterator[Move]]] = {
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
}
"""Operator -> what happens inside it."""
