"""What a forward pass saves for the backward pass, kept in 8 bits.

In: a module's forward function. Out: another that gives the same result, and whose saved tensors wait as 8-bit steps with a scale
for 128 numbers (`codes.py`). The gradient is that of rounded activations. Kept as they are: weights, the batch, whole numbers,
small tensors, and one number a row, such as the mean of a norm or the log-sum-exp of an attention, which is an exponent.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from outsize.model.fitting.move.codes import decode, encode
from outsize.model.fitting.move.stores import without_gaps
from outsize.model.fitting.run.offload import KeptOnce, is_its_bytes, is_small, saved_by
from outsize.model.torch_port.dispatch import is_functorch
from outsize.model.torch_port.objects import storage_key


class Packed:
    """A tensor in 8 bits."""

    __slots__ = ("__weakref__", "_codes", "_layout", "made")

    def __init__(self, tensor: Any, device: Any) -> None:
        dense = without_gaps(tensor)
        flat = dense if dense.is_contiguous() else dense.as_strided((dense.numel(),), (1,))
        self._layout = (tensor.shape, dense.stride(), tensor.dtype, device)
        self._codes = encode(flat.view(-1), 8, steps=True)
        self.made: Any = None

    def unpack(self) -> Any:
        """The tensor, rounded; the same one for all who ask while it lives."""
        tensor = self.made() if self.made is not None else None
        if tensor is None:
            shape, strides, dtype, device = self._layout
            tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            decode(self._codes, tensor.as_strided((tensor.numel(),), (1,)))
            self.made = weakref.ref(tensor)
        return tensor


class NarrowSaved:
    """Saved tensors of one pass."""

    def __init__(self, stays: set[int], device: str) -> None:
        self._device = device
        """Where tensors come back to: one without contents does not know."""
        self._stays = stays
        """Storages that are there anyway."""
        self._once = KeptOnce()
        self._rows: set[tuple[int, ...]] = set()
        """Shapes of saved tensors without their last axis."""

    def wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward` whose saved tensors are packed."""

        return saved_by(self.pack, self.unpack, forward)

    def pack(self, tensor: Any) -> Any:
        if is_functorch(tensor):
            return tensor
        known = is_its_bytes(tensor) and tensor.is_floating_point() and tensor.dim() > 1 and tensor.shape[-1] > 1
        if not known or is_small(tensor) or storage_key(tensor) in self._stays or tuple(tensor.shape) in self._rows:
            return tensor.detach()
        self._rows.add(tuple(tensor.shape[:-1]))
        with torch.no_grad():
            return self._once.of(tensor, lambda kept: Packed(kept.detach(), self._device))

    @staticmethod
    def unpack(packed: Any) -> Any:
        return packed.unpack() if isinstance(packed, Packed) else packed
