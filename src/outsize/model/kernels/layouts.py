"""The memory layout of results on a card, where torch's rules for meta tensors give another one.

In: an operator with its arguments. Out: its results, in the layout that the card's kernels give them. A convolution on
a card works in channels-last layout if its input or its weights have it; its result and gradients then have it too.
Batch normalisation keeps its input's layout in both directions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outsize.model.torch_port.objects import sizeof


def is_last(tensor: Any) -> bool:
    """True where the channels are last in memory and that is not the plain layout as well."""
    layout = layout_of(tensor)
    return layout is not None and not tensor.is_contiguous() and bool(tensor.is_contiguous(memory_format=layout))


def layout_of(tensor: Any) -> Any:
    """torch's name for the layout with the channels last, None where a tensor has too few axes."""
    return {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())


def works_last(x: Any, weight: Any) -> bool:
    """True where a convolution of these works with the channels last."""
    return is_last(x) or is_last(weight)


def copy_bytes(tensor: Any, last: bool) -> tuple[int, ...]:
    """The copy that is made of a tensor that is not in the required layout; () if none is made."""
    layout = layout_of(tensor) if last else None
    fits = tensor.is_contiguous() if layout is None else tensor.is_contiguous(memory_format=layout)
    return () if fits else (sizeof(tensor),)


def _laid(tensor: Any, last: bool) -> Any:
    if tensor is None or tensor.dim() < 4:
        return tensor
    layout = layout_of(tensor) if last else torch.contiguous_format
    return tensor if tensor.is_contiguous(memory_format=layout) else torch.empty_like(tensor, memory_format=layout)


def _convolution(func: Any, args: Any, kwargs: Any) -> Any:
    return _laid(func(*args, **kwargs), works_last(args[0], args[1]))


def _convolution_backward(func: Any, args: Any, kwargs: Any) -> Any:
    last = works_last(args[1], args[2])
    of_input, of_weight, of_bias = func(*args, **kwargs)
    return _laid(of_input, last), _laid(of_weight, last), of_bias


ON_CARD: dict[str, Callable[[Any, Any, Any], Any]] = {
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
}
"""Operator -> its results as the card lays them out."""
