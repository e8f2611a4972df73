"""Which attention kernel torch chooses for a call, and what the kernels return and take.

In: the arguments of `scaled_dot_product_attention`. Out: the name of the kernel, its results, the bytes inside it. On
compute capability 9 and above torch takes the first kernel that supports the call: cuDNN, flash, memory-efficient,
plain. This order was seen on an H200 with torch 2.11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.backends import cuda as flags

from outsize.model.kernels.call_events import RESULT, CallEvent
from outsize.model.torch_port.dispatch import host_attention_takes_groups
from outsize.model.torch_port.objects import sizeof

HOST_ROWS = ((768, 256), (192, 64), (0, 32))
"""(from this sequence length on, positions that the CPU's forward kernel takes at once), from torch's
FlashAttentionKernel.cpp."""
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def fused_on_host(given: dict[str, Any]) -> bool:
    """True where torch's one fused kernel for the CPU takes a call."""
    q, k, v, mask = (given[name] for name in NAMES[:4])
    if given["dropout_p"] or not flags.flash_sdp_enabled():
        return False
    if any(x.dim() != 4 or x.stride(-1) != 1 or 0 in x.shape or x.dtype != q.dtype for x in (q, k, v)):
        return False
    if not q.dtype.is_floating_point or q.shape[-1] != v.shape[-1] or not _heads_go_together(given):
        return False
    return mask is None or (mask.dim() in (2, 4) and mask.dtype in (q.dtype, torch.bool) and not mask.requires_grad)


def _heads_go_together(given: dict[str, Any]) -> bool:
    """True where every head of the queries has keys and values, its own or those of its group."""
    q, k, v = (int(given[name].shape[1]) for name in NAMES[:3])
    if given["enable_gqa"] and q != k:
        return k == v and q % k == 0 and host_attention_takes_groups()
    return q == k == v


def host_events(args: Any, results: list[Any]) -> Iterator[CallEvent]:
    """What the CPU's kernel takes inside: a block of scores and of its output for each thread."""
    q, k = args[:2]
    rows = next(rows for least, rows in HOST_ROWS if q.shape[2] >= least)
    yield CallEvent("take", "scores", _per_thread(q, min(rows, q.shape[2]), k.shape[2], more=q.shape[3] + 4))


def host_backward_events(args: Any, results: list[Any]) -> Iterator[CallEvent]:
    """The same of its backward pass: two blocks of scores, and the gradient laid out head by head in each position."""
    grad, q, k = args[:3]
    yield from (RESULT,) * len(results)
    if not grad.transpose(1, 2).is_contiguous():
        yield CallEvent("take", "gradient", sizeof(grad))
    yield CallEvent("take", "scores", 2 * _per_thread(q, min(256, q.shape[2]), k.shape[2]))


def _per_thread(q: Any, rows: int, columns: int, more: int = 0) -> int:
    """Blocks of all threads, in the type of the sums; for narrow types also a narrow and a repacked copy."""
    size = int(rows * (min(512, columns) + more) * max(4, q.element_size()))
    return int(torch.get_num_threads()) * size * (1 if q.element_size() >= 4 else 2)


def choose(
    capability: tuple[int, int], q: Any, k: Any, v: Any, mask: Any, dropout: float, gqa: bool, grad: bool
) -> str:
    """`cudnn`, `flash`, `efficient` or `math`, by the same checks as torch."""
    half = q.dtype in (torch.float16, torch.bfloat16)
    same = q.dtype == k.dtype == v.dtype
    dense = all(x.dim() == 4 and x.stride(-1) == 1 for x in (q, k, v)) and (mask is None or mask.stride(-1) == 1)
    width = q.shape[-1]
    heads = gqa or q.shape[1] == k.shape[1] == v.shape[1]
    learned = mask is not None and mask.requires_grad and grad
    if not (same and dense) or 0 in q.shape or 0 in k.shape:
        return "math"
    fits_cudnn = half and width % 8 == 0 and width <= 256 and v.shape[-1] <= 256 and capability >= (9, 0)
    if fits_cudnn and flags.cudnn_sdp_enabled() and heads and k.shape[2] > 1 and not learned:
        return "cudnn"
    if (
        half
        and mask is None
        and width <= 256
        and v.shape[-1] == width
        and capability >= (8, 0)
        and heads
        and flags.flash_sdp_enabled()
    ):
        return "flash"
    wide = 4 if q.dtype == torch.float32 else 8
    if flags.mem_efficient_sdp_enabled() and not gqa and heads and width % wide == 0 and v.shape[-1] % wide == 0:
        return "efficient"
    return "math"


def _flash_results(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Any:
    """Output, the sums of each row, and small things."""
    nothing = torch.empty(0, dtype=torch.int32, device="meta")
    sums = torch.empty(q.shape[:3], dtype=torch.float32, device="meta")
    return torch.empty_like(q), sums, nothing, nothing, q.shape[2], k.shape[2], _seed(), _seed(), nothing


def _efficient_results(q: Any, k: Any, v: Any, mask: Any, wanted: bool, *_: Any, **__: Any) -> Any:
    """The same of the memory-efficient kernel: heads lie inside positions, sums are padded to 32 rows."""
    rows = -(-q.shape[2] // 32) * 32 if wanted else 0
    sums = torch.empty(*q.shape[:2], rows, dtype=torch.float32, device="meta")
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)
    return out, sums, _seed(), _seed()


def _seed() -> Any:
    return torch.empty((), dtype=torch.int64, device="meta")


UNKNOWN: dict[str, Callable[..., Any]] = {
    "aten._scaled_dot_product_flash_attention.default": _flash_results,
    "aten._scaled_dot_product_efficient_attention.default": _efficient_results,
}
"""Operator -> its results; torch 2.4 knows their shapes on a card only."""
