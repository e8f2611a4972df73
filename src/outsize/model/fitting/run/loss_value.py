"""What a user's loss function gave: a scalar, or a pair whose quotient is the loss."""

from __future__ import annotations

from typing import Any

from outsize.core.errors import InputError


def read_loss(value: Any) -> tuple[Any, Any]:
    """(loss, None) for a scalar, (total, count) for a pair; an `InputError` for anything else."""
    import torch

    pair = isinstance(value, tuple) and len(value) == 2
    loss, count = value if pair else (value, None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or (pair and not _is_number(count)):
        raise InputError(
            f"loss(model, batch) gave {_describe(value)}: it must give a scalar tensor, or a pair (total, count) whose quotient "
            "is the loss"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise InputError(
            "loss(model, batch) gave a number that has no gradient: it was detached, made under no_grad, or depends on no "
            "parameter that is trained"
        )
    return loss.reshape(()), count


def _is_number(value: Any) -> bool:
    import torch

    if isinstance(value, torch.Tensor):
        return bool(value.numel() == 1)
    return isinstance(value, int | float)


def _describe(value: Any) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_describe, value))})"
    return type(value).__name__
