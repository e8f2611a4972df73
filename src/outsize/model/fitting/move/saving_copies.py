"""Copies in host memory of what has no room at home, for whoever saves.

In: tensors whose contents are elsewhere. Out: ordinary tensors of the same shape, strides and bits, made from the store past
the device. Those that share memory at home share it here, so a file has every byte once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def lay_over(storage: Any, tensor: Any) -> Any:
    """A tensor in host memory that lies on a storage as another does on its own."""
    import torch

    return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
        storage, tensor.storage_offset(), tensor.shape, tensor.stride()
    )


class CopiesForSaving:
    """The copies that one `state_dict()` is given."""

    def __init__(self, asker: Any, storage_of: Callable[[Any], Any]) -> None:
        self.asker = asker
        """The module or optimizer whose `state_dict()` it is; those of its parts are part of it."""
        self._storage_of = storage_of
        self._bytes: dict[Any, Any] = {}
        """EvictedStorage -> its bytes."""
        self._copies: dict[int, Any] = {}
        """By id of the tensor."""

    def copy(self, tensor: Any) -> Any:
        """The tensor in host memory; the same one for all who ask."""
        if id(tensor) not in self._copies:
            storage = self._storage_of(tensor)
            if storage not in self._bytes:
                self._bytes[storage] = storage.read().untyped_storage()
            self._copies[id(tensor)] = lay_over(self._bytes[storage], tensor)
        return self._copies[id(tensor)]

    def instead(self, saved: Any, away: type) -> Any:
        """An optimizer's state with copies in the place of tensors of class `away`; its own dicts stay as they are."""
        if isinstance(saved, away):
            return self.copy(saved)
        return {key: self.instead(value, away) for key, value in saved.items()} if type(saved) is dict else saved
