"""Linear layers as other libraries change them, so that a trace sees what they would hold: fewer bits, or adapters of low rank.

Only sizes and lifetimes are right: nothing here is meant to compute with. A layer of few bits makes its weight again before each
product, as bitsandbytes and torchao do where no kernel of theirs takes the bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


@functools.cache
def _layers() -> tuple[Any, Any]:
    """The two modules; torch is imported when they are first needed."""
    import torch
    from torch import nn

    class FewBits(nn.Module):  # type: ignore[misc]
        """A linear layer whose weight is kept in a few bits, with a scale for each 64 elements."""

        def __init__(self, linear: Any, bits: int) -> None:
            super().__init__()
            count = linear.weight.numel()
            self.shape, self.dtype = linear.weight.shape, linear.weight.dtype
            device = linear.weight.device
            self.register_buffer("packed", torch.zeros(count * bits // 8, dtype=torch.uint8, device=device))
            self.register_buffer("scale", torch.zeros(-(-count // 64), dtype=self.dtype, device=device))
            self.bias = linear.bias

        def forward(self, x: Any) -> Any:
            weight = torch.empty(self.shape, dtype=self.dtype, device=x.device)
            return nn.functional.linear(x, weight, self.bias)

    class LowRank(nn.Module):  # type: ignore[misc]
        """A layer whose weight stays as it is, beside two narrow ones that are trained."""

        def __init__(self, base: Any, width: int, length: int, rank: int, like: Any) -> None:
            super().__init__()
            self.base = base
            self.down = nn.Linear(width, rank, bias=False, device=like.device, dtype=like.dtype)
            self.up = nn.Linear(rank, length, bias=False, device=like.device, dtype=like.dtype)

        def forward(self, x: Any) -> Any:
            return self.base(x) + self.up(self.down(x))

    return FewBits, LowRank


def keep_in_bits(model: Any, bits: int) -> None:
    """Keep the weights of all linear layers but the last in so many bits."""
    few, _ = _layers()
    _replace(model, lambda linear: few(linear, bits))


def add_low_rank(model: Any, rank: int) -> None:
    """Freeze the model, and put adapters beside all linear layers but the last."""
    few, low = _layers()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if hasattr(model, "enable_input_require_grads"):  # segments that are computed again need an input with a gradient
        model.enable_input_require_grads()

    def adapted(layer: Any) -> Any:
        length, width = layer.shape if isinstance(layer, few) else layer.weight.shape
        like = layer.scale if isinstance(layer, few) else layer.weight
        return low(layer, width, length, rank, like)

    _replace(model, adapted, (few,))


def _replace(model: Any, make: Callable[[Any], Any], also: tuple[Any, ...] = ()) -> None:
    from torch import nn

    last = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, (nn.Linear, *also)) and child is not last:
                setattr(parent, name, make(child))
