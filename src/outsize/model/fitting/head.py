"""The output head and its cross entropy in pieces, so that the logits of a whole batch never exist.

In: hidden states, the head's weight and the labels. Out: the summed loss and the count of labels, with gradients to
both. Each piece is computed again in the backward pass, so one piece of logits is alive at a time. For transformers'
causal language models whose loss is the library's own, `chunked_heads` puts this in the place of head and loss;
elsewhere call `chunked_cross_entropy` yourself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from outsize.core.errors import InputError


def chunked_cross_entropy(
    hidden: Any, weight: Any, labels: Any, *, bias: Any = None, chunks: int = 8, ignore_index: int = -100
) -> tuple[Any, Any]:
    """(total, count) of `cross_entropy(hidden @ weight.T + bias, labels)`: total / count is its mean.

    `hidden` is [..., features], `labels` [...] of the same leading shape.
    """
    import torch
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    if hidden.shape[:-1] != labels.shape:
        raise InputError(f"hidden states {tuple(hidden.shape)} and labels {tuple(labels.shape)} do not belong together")

    def piece(rows: Any, matrix: Any, offset: Any, wanted: Any) -> Any:
        logits = functional.linear(rows, matrix, offset)
        return functional.cross_entropy(logits.float(), wanted, ignore_index=ignore_index, reduction="sum")

    rows, wanted = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    size = -(-rows.shape[0] // max(1, min(chunks, rows.shape[0])))
    total = None
    for start in range(0, rows.shape[0], size):
        part = (rows[start : start + size], weight, bias, wanted[start : start + size])
        if torch.is_grad_enabled():
            lost = checkpoint(piece, *part, use_reentrant=False, preserve_rng_state=False)
        else:
            lost = piece(*part)
        total = lost if total is None else total + lost
    count = (labels != ignore_index).sum()
    return total, count


def find_heads(model: Any) -> list[Any]:
    """Transformers' causal language models in `model` whose loss and head are the library's plain ones."""
    import torch

    found = []
    for module in model.modules():
        loss = getattr(type(module), "loss_function", None)
        head = getattr(module, "lm_head", None)
        if loss is None or not isinstance(head, torch.nn.Linear) or "forward" in module.__dict__:
            continue
        own = getattr(module.loss_function, "__name__", "") == "ForCausalLMLoss"
        if own and type(head) is torch.nn.Linear and not _hooked(head):
            found.append(module)
    return found


def _hooked(module: Any) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


@contextlib.contextmanager
def chunked_heads(model: Any, chunks: int) -> Iterator[None]:
    """Heads hand their input on, and the loss takes it from there."""
    changed = []
    for module in find_heads(model):
        head = module.lm_head
        head.__dict__["forward"] = lambda hidden: hidden
        before = module.__dict__.get("_loss_function", module)
        module.loss_function = _loss(head, chunks)
        changed.append((module, head, before))
    try:
        yield
    finally:
        for module, head, before in changed:
            head.__dict__.pop("forward", None)
            if before is module:
                module.__dict__.pop("_loss_function", None)
            else:
                module._loss_function = before


def _loss(head: Any, chunks: int) -> Any:
    """The library's causal loss on hidden states: labels shifted by one, mean over those that count."""

    def loss(
        logits: Any = None, labels: Any = None, vocab_size: Any = None, num_items_in_batch: Any = None,
        ignore_index: int = -100, shift_labels: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        from torch.nn import functional

        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        total, count = chunked_cross_entropy(
            logits, head.weight, shift_labels, bias=head.bias, chunks=chunks, ignore_index=ignore_index
        )
        return total / (count if num_items_in_batch is None else num_items_in_batch)

    return loss
