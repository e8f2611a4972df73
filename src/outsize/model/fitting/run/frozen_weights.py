"""Weights that are not trained, in 8 bits but while their module runs.

In: modules that hold such weights. Out: the same forward and backward pass with rounded weights: they are unpacked before the
module's forward pass and let go after it; where the backward pass needs one, it gets a copy that is unpacked for that operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outsize.model.fitting.move.codes import SMALL
from outsize.model.fitting.move.evicted import EvictedStorages
from outsize.model.fitting.move.stores import StoredTensor
from outsize.model.fitting.run.narrow_saved import NarrowSaved
from outsize.model.fitting.run.offload import saved_by
from outsize.model.torch_port.objects import parameter_table, storage_key


def frozen_modules(model: Any) -> dict[str, list[Any]]:
    """Module -> those of its own weights that are worth packing; a weight that several modules share is none."""
    holders: dict[int, int] = {}
    for module in model.modules():
        for weight in parameter_table(module).values():
            holders[id(weight)] = holders.get(id(weight), 0) + 1
    found = {}
    for name, module in model.named_modules():
        own = [weight for weight in parameter_table(module).values() if weight is not None and holders[id(weight)] == 1]
        packed = [w for w in own if not w.requires_grad and w.is_floating_point() and w.numel() >= SMALL]
        if packed:
            found[name] = packed
    return found


class FrozenWeights:
    """Packs and unpacks them."""

    def __init__(self, model: Any, evicted: EvictedStorages) -> None:
        self.weights = frozen_modules(model)
        self._evicted = evicted

    @property
    def all(self) -> list[Any]:
        return [weight for weights in self.weights.values() for weight in weights]

    def pack(self) -> None:
        self._evicted.send(self.all, dirty=False)

    def wrap(self, name: str, forward: Callable[..., Any], others: NarrowSaved | None) -> Callable[..., Any]:
        """`forward` with its weights there for as long as it runs; `others`: what keeps everything else that it saves."""
        weights = self.weights[name]
        evicted = self._evicted

        def save(tensor: Any) -> Any:
            for weight in weights:
                if storage_key(tensor) == storage_key(weight):
                    return _Reference(weight, tensor, evicted)
            return tensor.detach() if others is None else others.pack(tensor)

        def run(*args: Any, **kwargs: Any) -> Any:
            evicted.fetch(weights)
            try:
                return saved_by(save, _bring, forward)(*args, **kwargs)
            finally:
                evicted.send(weights, dirty=False)

        return run


class _Reference:
    """A saved tensor that lies on a packed weight."""

    __slots__ = ("_evicted", "_layout", "_weight")

    def __init__(self, weight: Any, tensor: Any, evicted: EvictedStorages) -> None:
        self._weight = weight
        self._layout = (tensor.shape, tensor.stride(), tensor.storage_offset() - weight.storage_offset())
        self._evicted = evicted

    def bring(self) -> Any:
        storage = self._evicted.of(self._weight)
        whole = StoredTensor(self._weight, storage.store, slot=storage.slot, owned=False).fetch()
        return whole.as_strided(*self._layout)


def _bring(saved: Any) -> Any:
    return saved.bring() if isinstance(saved, _Reference) else NarrowSaved.unpack(saved)
