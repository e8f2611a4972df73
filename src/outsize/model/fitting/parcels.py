"""Tensors that are at home on the device only while they are needed.

In: the tensors of a model or an optimizer. Out: the same tensors, whose storage is emptied (resized to nothing) while
their bytes wait in a store, and filled again before use. The tensor objects, their views, ties and names stay what
they are, so nothing that refers to them notices; autograd's version counters do not move, since the bytes are the
same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from outsize.core.errors import InputError
from outsize.model.fitting.stores import Store

listeners: list[Callable[[Any], None]] = []
"""Called with a tensor whose storage was resized: ledgers that count storages at the dispatcher cannot see it there."""


def raw(storage: Any, real: bool) -> Any:
    """The bytes of a storage as a flat tensor with a version counter of its own."""
    import torch

    if not real:
        return torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Parcel:
    """One storage that can be away."""

    __slots__ = ("_real", "_slot", "_store", "bytes", "dirty", "tensor")

    def __init__(self, tensor: Any, store: Store, real: bool) -> None:
        self.tensor = tensor
        self.bytes = int(tensor.untyped_storage().nbytes())
        self.dirty = True
        """The copy in the store, if there is one, is old."""
        self._store = store
        self._real = real
        self._slot: Any = None

    @property
    def home(self) -> bool:
        """True where the bytes are on the device."""
        return bool(self.tensor.untyped_storage().nbytes()) or not self.bytes

    def send(self) -> None:
        """Away with it; bytes that the store has already are not written again."""
        storage = self.tensor.untyped_storage()
        if not self.home or not self.bytes:
            return
        if self.dirty or self._slot is None:
            self._drop()
            self._slot = self._store.put(_unseen(raw, storage, self._real), emptied=True)
            self.dirty = False
        storage.resize_(0)
        if self._real:  # torch would read memory that is not there
            self.tensor.__dict__.update(__deepcopy__=self._copied, __reduce_ex__=self._reduced)
        _tell(self.tensor)

    def _copied(self, memo: Any) -> Any:
        """The tensor is to be copied: home first, until the next step."""
        self.fetch()
        self._store.finish()
        return copy.deepcopy(self.tensor, memo)

    def _reduced(self, protocol: Any) -> Any:
        """The tensor is to be pickled."""
        self.fetch()
        self._store.finish()
        return self.tensor.__reduce_ex__(protocol)

    def fetch(self) -> None:
        """Begin to bring it home; `Store.finish` before use."""
        if self.home:
            return
        for name in ("__deepcopy__", "__reduce_ex__"):
            self.tensor.__dict__.pop(name, None)
        storage = self.tensor.untyped_storage()
        storage.resize_(self.bytes)
        _tell(self.tensor)
        self._store.begin(self._slot, _unseen(raw, storage, self._real), emptied=True)

    def release(self) -> None:
        """Home for good."""
        self.fetch()
        self._store.finish()
        self._drop()

    def _drop(self) -> None:
        if self._slot is not None:
            self._store.drop(self._slot)
            self._slot = None


def _unseen(make: Callable[..., Any], *args: Any) -> Any:
    """Make an alias that no mode counts as an allocation."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return make(*args)


def _tell(tensor: Any) -> None:
    for listener in listeners:
        listener(tensor)


class Parcels:
    """All parcels of one fitted step, one per storage."""

    def __init__(self, store: Store, real: bool) -> None:
        self.store = store
        self.real = real
        self._all: dict[int, Parcel] = {}

    def of(self, tensor: Any) -> Parcel:
        """The parcel of a tensor's storage."""
        key = tensor.untyped_storage()._cdata
        found = self._all.get(key)
        if found is None:
            found = self._all[key] = Parcel(tensor, self.store, self.real)
        return found

    def send(self, tensors: Iterable[Any], dirty: bool = True) -> None:
        """Away with all of them."""
        for tensor in tensors:
            parcel = self.of(tensor)
            parcel.dirty |= dirty
            parcel.send()

    def fetch(self, tensors: Iterable[Any]) -> None:
        """All of them home, ready for use."""
        for tensor in tensors:
            self.of(tensor).fetch()
        self.store.finish()

    def settle(self, away: Callable[[Any], bool]) -> None:
        """Home with every tensor for which `away(tensor)` does not hold."""
        for key, parcel in list(self._all.items()):
            if not away(parcel.tensor):
                parcel.release()
                del self._all[key]

    def gather(self) -> None:
        """Everything home; the store is empty afterwards."""
        for parcel in self._all.values():
            parcel.release()
        self._all.clear()


def check_movable(name: str, tensor: Any) -> str | None:
    """Why this tensor cannot be away, or None."""
    storage = tensor.untyped_storage()
    if not storage.resizable():
        return f"{name} lives in memory that torch does not own (a memory map or a NumPy array)"
    return None


def require_home(model: Any, optimizer: Any) -> None:
    """An `InputError` where weights or state are away: an earlier fit of the same model still holds them."""
    import torch

    state = () if optimizer is None else optimizer.state.values()
    values = (value for values in state for value in values.values() if isinstance(value, torch.Tensor))
    for tensor in (*model.parameters(), *values):
        if tensor.numel() and not tensor.is_meta and not tensor.untyped_storage().nbytes():
            raise InputError(
                "an earlier fit of this model keeps its weights or state elsewhere: call undo() on it first"
            )


def require_movable(named: Iterable[tuple[str, Any]]) -> None:
    """An `InputError` that names the first tensor that cannot be away."""
    for name, tensor in named:
        why = check_movable(name, tensor)
        if why:
            raise InputError(f"{why}, so its storage cannot be emptied: copy it with .clone() first")
