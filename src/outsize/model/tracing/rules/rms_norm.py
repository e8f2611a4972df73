"""`rms_norm` as CUDA runs it: one kernel that keeps its input and a number a row for the backward pass.

On a meta tensor torch decomposes it, and autograd keeps the normalised rows beside the input: for a model of many norms, as much
as an activation each. `replacement` records the fused operator instead, where torch would take it on a card: from 2.9 on, for
real numbers, a weight of the input's dtype, and rows that lie one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outsize.model.kernels.layouts import is_last
from outsize.model.torch_port.dispatch import below_autograd


def replacement(on_card: Callable[[Any], bool], fused: tuple[Any, Any]) -> Callable[..., Any]:
    """What is called for `aten::rms_norm` while a trace runs; `fused` are the kernel and that of its gradient."""
    kernel, gradient = fused

    class Fused(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, shape: Any, eps: Any) -> Any:
            with below_autograd():
                result, rows = kernel(x, shape, weight, eps)
            ctx.save_for_backward(x, weight, rows)
            ctx.shape = shape
            return result

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            x, weight, rows = ctx.saved_tensors
            wanted = list(ctx.needs_input_grad[:2])
            with below_autograd():
                found = gradient(grads[0], x, ctx.shape, rows, weight, wanted)
            return *found, None, None

    def rms_norm(x: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
        if on_card(x) and _takes(x, weight):
            return Fused.apply(x, weight, list(shape), eps)
        return torch.ops.aten.rms_norm.default.decompose(x, list(shape), weight, eps)

    return rms_norm


def _takes(x: Any, weight: Any) -> bool:
    return not x.is_complex() and not is_last(x) and (weight is None or weight.dtype == x.dtype)


def results(func: Any, args: Any, kwargs: Any) -> Any:
    """The result, and a number of float32 for each row."""
    x, shape = args[:2]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = [*x.shape[: x.dim() - len(shape)], *[1] * len(shape)]
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty(rows, dtype=wide, device="meta")


def gradients(func: Any, args: Any, kwargs: Any) -> Any:
    """Of the input, and of the weight."""
    x, weight, wanted = args[1], args[4], args[5]
    made = torch.empty_like(weight) if weight is not None and wanted[1] else None
    return torch.empty_like(x, memory_format=torch.contiguous_format) if wanted[0] else None, made
