"""What a module's forward pass saves for the backward pass, kept elsewhere.

In: a module's forward function. Out: another that gives the same result and the same gradient, and whose saved tensors wait in
a store.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from outsize.model.fitting.move.stores import Store, StoredTensor
from outsize.model.torch_port.dispatch import is_functorch
from outsize.model.torch_port.objects import is_zero_tensor, key_of, storage_key, version_of

SMALL = 16 * 2**10
"""Tensors below this stay: a copy costs more than it frees."""

Forward = Callable[..., Any]


def is_its_bytes(tensor: Any) -> bool:
    """False for zeros of forward-mode gradients, which have no memory, and values that are read with another sign than they
    are written."""
    return not (is_zero_tensor(tensor) or tensor.is_conj() or tensor.is_neg())


def is_small(tensor: Any) -> bool:
    """True where little is freed: an expanded view holds less than it shows."""
    size = tensor.numel() * tensor.element_size()
    return bool(size < SMALL or tensor.untyped_storage().nbytes() < size)


def saved_by(pack: Callable[[Any], Any], unpack: Callable[[Any], Any], forward: Forward) -> Forward:
    """`forward` whose saved tensors are packed, and unpacked for the backward pass."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return forward(*args, **kwargs)

    return run


class KeptOnce:
    """What is kept of saved tensors: one thing for a tensor, however often it is saved, as long as someone holds that thing."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Any] = {}

    def of(self, tensor: Any, keep: Callable[[Any], Any]) -> Any:
        """What is kept of a tensor; `keep` makes it where there is none yet."""
        storage = tensor.untyped_storage()
        place = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        key = (key_of(storage), version_of(tensor), *place)
        alive, found = self._known.get(key, (lambda: None, lambda: None))
        kept = found() if alive() is storage else None
        if kept is None:
            kept = keep(tensor)
            self._known[key] = (weakref.ref(storage), weakref.ref(kept))
        return kept


class Offload:
    """Saved tensors of the modules that are offloaded, over one step."""

    def __init__(self, store: Store, ahead: bool, device: str) -> None:
        self._store = store
        self._device = device
        """Where tensors come back to: one without contents does not know."""
        self._ahead = ahead
        """Begin the fetch of the tensor before while this one is used: on a card, where copies run beside."""
        self._once = KeptOnce()
        self._order: list[Any] = []
        self._soon: Any = None

    def wrap(self, forward: Forward, stays: set[int]) -> Forward:
        """`forward` whose saved tensors go away; storages in `stays` (weights, the batch) do not."""

        def pack(tensor: Any) -> Any:
            if is_functorch(tensor):
                return tensor
            if not is_its_bytes(tensor) or is_small(tensor) or storage_key(tensor) in stays:
                return tensor.detach()  # a result would hold the graph that holds it, for ever where a pass fails
            with torch.no_grad():
                return self._once.of(tensor, self.keep)

        return saved_by(pack, self._unpack, forward)

    def keep(self, tensor: Any) -> StoredTensor:
        with torch.no_grad():
            saved = StoredTensor(tensor, self._store, self._device)
        self._order.append(weakref.ref(saved))
        return saved

    def _unpack(self, saved: Any) -> Any:
        return self.bring(saved) if isinstance(saved, StoredTensor) else saved

    def bring(self, saved: StoredTensor) -> Any:
        tensor = saved.fetch()
        self._store.finish()
        if self._ahead:
            self._soon = self._before(saved)
        return tensor

    def _before(self, saved: StoredTensor) -> Any:
        """The tensor that was saved before this one, on its way."""
        while self._order:
            last = self._order.pop()()
            if last is not None and last is not saved:
                self._order.append(weakref.ref(last))
                return last.fetch()
        return None
