"""A tensor that waits in a store: saved activations, gradients, what an update may have to take back.

In: a tensor. Out: the way back to one with the same values, shape and order of axes.
"""

from __future__ import annotations

import weakref
from typing import Any

from outsize.model.fitting.move.evicted import unseen
from outsize.model.fitting.move.stores import Store


class StoredTensor:
    """A tensor that waits in a store, with the way back."""

    __slots__ = ("__weakref__", "_layout", "_slot", "_store", "fetched")

    def __init__(self, tensor: Any, store: Store, device: str = "", slot: Any = None) -> None:
        """`slot`: where the store has these bytes already."""
        dense = without_gaps(tensor)
        data = dense if dense.is_contiguous() else dense.as_strided((dense.numel(),), (1,))
        self._layout = (tensor.shape, tensor.stride(), tensor.dtype, device or tensor.device, dense.stride())
        self._store = store
        self.fetched: Any = None
        self._slot = unseen(lambda: store.put(_bytes(data.detach()))) if slot is None else slot
        weakref.finalize(self, store.drop, self._slot)

    def fetch(self) -> Any:
        """Begin to bring the tensor back; the same one for all who ask while it lives."""
        import torch

        tensor = self.fetched() if self.fetched is not None else None
        if tensor is None:
            shape, _, dtype, device, strides = self._layout
            tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            flat = tensor.as_strided((tensor.numel(),), (1,))
            unseen(lambda: self._store.begin(self._slot, _bytes(flat)))
            self.fetched = weakref.ref(tensor)
        return tensor


def without_gaps(tensor: Any) -> Any:
    """The tensor itself where its elements fill one run of memory in some order of the axes, else a packed copy."""
    expected = 1
    for stride, length in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return tensor.contiguous()
        expected *= length
    return tensor


def _bytes(flat: Any) -> Any:
    import torch

    if type(flat) is not torch.Tensor:
        return torch.empty(flat.numel() * flat.element_size(), dtype=torch.uint8, device="meta")
    return flat.view(-1).view(torch.uint8)
