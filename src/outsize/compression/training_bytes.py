"""What a training step holds for a model whatever its batch is: weights, gradients of what is trained, optimizer state.

The state is that of the user's own optimizer, which takes one step on parameters without contents. Kept in fewer bits
(`narrow_state.py`), it is counted so, with that of the one parameter that is updated whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outsize.compression.weights import count_bytes
from outsize.core.errors import InputError
from outsize.model.fitting.move.codes import SMALL, sizes_of
from outsize.model.fitting.update.optimizer_subset import parameters_of

BITS = "state_bits"
"""Attribute of a model: in so many bits its optimizer's state is kept; none: as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """Bytes of a training step that do not depend on its batch."""

    weights: int
    gradients: int
    state: int
    whole: int = 0
    """State of the parameter that is being updated, where it is kept in fewer bits."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.state + self.whole


def count_step(model: Any, make: Callable[[Any], Any] | None, bits: int | None = None) -> StepBytes:
    """The bytes of a model under an optimizer (parameters -> optimizer; None: AdamW). `bits` in place of the model's own."""
    import torch

    bits = model.__dict__.get(BITS, 0) if bits is None else bits
    trained = {id(p): p for p in model.parameters() if p.requires_grad and p.is_floating_point()}
    copies = [torch.nn.Parameter(torch.empty_like(p, device="meta")) for p in trained.values()]
    gradients = sum(p.nbytes for p in trained.values())
    if not copies:
        return StepBytes(weights=count_bytes(model), gradients=0, state=0)
    optimizer = (make or torch.optim.AdamW)(copies)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"optimizer(parameters) gave {type(optimizer).__name__}: it must return a torch.optim.Optimizer"
        )
    for parameter in parameters_of(optimizer):
        parameter.grad = torch.empty_like(parameter)
    try:
        optimizer.step()
    except Exception as error:
        raise InputError(
            f"{type(optimizer).__name__} cannot take a step without contents, so its state cannot be counted: {error}"
        ) from error
    states = [[_size(value, bits) for value in values.values()] for values in optimizer.state.values()]
    whole = max(
        (sum(one.nbytes for one in v.values() if hasattr(one, "nbytes")) for v in optimizer.state.values()), default=0
    )
    return StepBytes(
        weights=count_bytes(model), gradients=gradients, state=sum(map(sum, states)), whole=whole if bits else 0
    )


def _size(value: Any, bits: int) -> int:
    if not hasattr(value, "nbytes"):
        return 0
    if not bits or not value.is_floating_point() or value.numel() < SMALL:
        return int(value.nbytes)
    codes, scales = sizes_of(value.numel(), bits)
    return codes + 4 * scales
