"""Sends calls of attention to the kernel that the device would choose, so that the same tensors are saved.

In: a call of `scaled_dot_product_attention`. Out: the call of one of torch's own operators for it (torch knows
their shapes without a card) or of the plain formula.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outsize.model.kernels.attention import NAMES, choose, fused_on_host
from outsize.model.torch_port.dispatch import aten_operator
from outsize.model.tracing.trace import Trace

ALIGNMENT = 8
"""Every row of a mask begins at a multiple of this many elements."""
DEFAULTS: dict[str, Any] = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}


def attend(tracer: Trace, func: Any, call: Any) -> Any:
    """The attention of one call, through the kernel that the card would choose."""
    args, kwargs = call
    given = {**DEFAULTS, **dict(zip(NAMES, args, strict=False)), **kwargs}
    q = given["query"]
    kind = "cuda" if tracer.on_card(q) else "cpu"
    if torch.is_autocast_enabled(kind):
        for name in ("query", "key", "value", "attn_mask"):
            if given[name] is not None:
                given[name] = tracer.autocasts[kind].lower(given[name])
    with torch.autocast(kind, enabled=False):
        if kind == "cuda":
            return _dispatch(tracer, given)
        said = [*NAMES[: len(args)], *kwargs]
        return _on_host(given) if fused_on_host(given) else func(**{name: given[name] for name in said})


def attention_for(tracer: Trace) -> Callable[..., Any]:
    """Attention in a graph that is being compiled."""

    def attention(*args: Any, **kwargs: Any) -> Any:
        return attend(tracer, torch.nn.functional.scaled_dot_product_attention, (args, kwargs))

    return attention


def _on_host(given: dict[str, Any]) -> Any:
    q, k, v, mask = (given[name] for name in NAMES[:4])
    if mask is not None and mask.dtype == torch.bool:
        mask = _additive(mask, q)
    kernel = aten_operator("_scaled_dot_product_flash_attention_for_cpu")
    return kernel(q, k, v, 0.0, bool(given["is_causal"]), attn_mask=mask, scale=given["scale"])[0]


def _dispatch(tracer: Trace, given: dict[str, Any]) -> Any:
    q, k, v, mask = (given[name] for name in NAMES[:4])
    dropout, causal, scale = float(given["dropout_p"]), bool(given["is_causal"]), given["scale"]
    grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, mask))
    choice = choose(tracer.capability, q, k, v, mask, dropout, given["enable_gqa"], grad)
    if mask is not None and mask.dtype == torch.bool and choice != "math":
        mask = _additive(mask, q)
    if choice == "cudnn":
        out = aten_operator("_scaled_dot_product_cudnn_attention")(
            q, k, v, mask, grad, dropout, causal, False, scale=scale
        )
        return out[0]
    if choice == "flash":
        pad = -q.shape[-1] % 8
        width = q.shape[-1]
        if pad:
            scale = width**-0.5 if scale is None else scale
            q, k, v = (torch.nn.functional.pad(x, (0, pad)) for x in (q, k, v))
        out = aten_operator("_scaled_dot_product_flash_attention")(q, k, v, dropout, causal, False, scale=scale)
        return out[0][..., :width] if pad else out[0]
    if choice == "efficient":
        if mask is not None:
            mask = _aligned(mask).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        out = aten_operator("_scaled_dot_product_efficient_attention")(
            q, k, v, mask, grad, dropout, causal, scale=scale
        )
        return out[0]
    grouped = {"enable_gqa": True} if given["enable_gqa"] else {}  # torch 2.4 does not know the word
    return aten_operator("_scaled_dot_product_attention_math")(
        q, k, v, mask, dropout, causal, None, scale=scale, **grouped
    )[0]


def _additive(mask: Any, like: Any) -> Any:
    """A boolean mask as the numbers that are added: what torch makes of it before any fused kernel."""
    new = torch.empty_like(mask, dtype=like.dtype)
    return new.fill_(0.0).masked_fill_(mask.logical_not(), float("-inf"))


def _aligned(mask: Any) -> Any:
    """The mask with its last axis laid out in multiples of 8, as the memory-efficient kernel wants it."""
    if mask.stride(-1) == 1 and not any(step % ALIGNMENT for step in mask.stride()[:-1]):
        return mask
    last = mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, ALIGNMENT - last % ALIGNMENT))[..., :last]
