"""Tensors that are at home on the device only while they are needed.

In: the tensors of a model or an optimizer. Out: the same tensors, whose storage is emptied (resized to nothing) while
their bytes wait in a store, and filled again before use. The tensor objects, their views, ties and names stay what
they are, so nothing that refers to them notices; autograd's version counters do not move, since the bytes are the
same. A kernel that reads an emptied storage would end the process, so a tensor is of class `EvictedTensor` meanwhile, which
brings everything home before its contents are used. All of what is asked for comes home, or, without room, nothing does:
what has come goes away again, which costs nothing, since the store has its bytes.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from outsize.core.errors import InputError, OutOfMemory
from outsize.core.units import format_bytes
from outsize.model.fitting.move.narrow_store import NarrowStore
from outsize.model.fitting.move.out_of_memory import clear_up, in_a_line, is_out_of_memory
from outsize.model.fitting.move.stores import Store
from outsize.model.torch_port.dispatch import no_subclass_functions, unseen
from outsize.model.torch_port.objects import sizeof, storage_key

listeners: list[Callable[[Any], None]] = []
"""Called with a tensor whose storage was resized: ledgers that count storages at the dispatcher cannot see it there."""

before_emptied: list[Callable[[Any], None]] = []
"""Called with a tensor whose storage is about to be emptied."""

ASKED = frozenset({
    "numel", "nelement", "dim", "ndimension", "size", "stride", "element_size", "storage_offset", "is_contiguous", "__len__",
    "untyped_storage", "is_floating_point", "is_complex", "get_device", "requires_grad_", "retain_grad", "register_hook",
    "register_post_accumulate_grad_hook",
})  # fmt: skip
"""What a tensor answers without its contents."""

CONTENTS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
"""Attributes that give its contents; all others do not."""

COPIED = frozenset({"detach", "clone", "cpu", "to"})
"""What whoever saves does with a tensor; without room at home it is done with a copy in host memory."""


class ReadWhileEvicted(InputError):
    """Contents that are elsewhere were asked for in the middle of a step."""


class EvictedTensor:
    """First base of a tensor's class while its contents are elsewhere."""

    kind: type
    """What it is of when they are at home."""
    evicted: EvictedStorages
    """Who brings them."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:

        name = getattr(func, "__name__", "")
        owner = getattr(func, "__self__", None) if name in ("__get__", "__set__", "__delete__") else None
        if name in ASKED or (owner is not None and owner.__name__ not in CONTENTS):
            with no_subclass_functions():
                return func(*args, **(kwargs or {}))
        saving = cls.evicted.saving
        if saving is not None and name in COPIED:
            return func(saving.copy(args[0]), *args[1:], **(kwargs or {}))
        if name == "to" and _is_so(*args, **(kwargs or {})):
            return args[0]
        if name == "copy_" and isinstance(args[0], EvictedTensor) and args[0].evicted.may_write(*args[:2]):
            return args[0].evicted.overwrite(*args[:2])
        for kind in types:
            if issubclass(kind, EvictedTensor):
                kind.evicted.call_home(name if owner is None else owner.__name__)
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Any:
        self.evicted.call_home("deepcopy")
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.evicted.call_home("pickle")
        return self.__reduce_ex__(protocol)


def _is_so(tensor: Any, *more: Any, dtype: Any = None, device: Any = None, **others: Any) -> bool:
    """True where `tensor.to(dtype=, device=)` would give the tensor itself."""
    return not (more or others) and device == tensor.device and dtype in (None, tensor.dtype)


def raw(storage: Any, real: bool) -> Any:
    """The bytes of a storage as a flat tensor with a version counter of its own."""
    if not real:
        return torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class EvictedStorage:
    """One storage that can be away; it is emptied when the copy of its bytes has landed."""

    __slots__ = ("_number", "_real", "_slot", "away", "bytes", "dirty", "key", "store", "tensor", "tensors")

    def __init__(self, tensor: Any, store: Store, real: bool) -> None:
        self.tensor = tensor
        self.tensors = {id(tensor): tensor}
        """All that lie on the storage and were sent."""
        self.key = storage_key(tensor)
        """Of the storage."""
        self.bytes = int(tensor.untyped_storage().nbytes())
        self.dirty = True
        """The copy in the store, if there is one, is old."""
        self.away = False
        """The bytes are in the store, or on their way there."""
        self.store = store
        """Where it goes."""
        self._real = real
        self._slot: Any = None
        self._number = 0
        """Of the copy that brought it last."""

    def send(self) -> None:
        """Away with it; bytes that the store has already are not written again."""
        if self.away or not self.bytes:
            return
        self.store.finish(self._number)
        if self.dirty or self._slot is None:
            self.drop()
            self._slot = self.store.put(unseen(raw, self.tensor.untyped_storage(), self._real), self._empty)
            self.dirty = False
        else:
            self._empty()
        self.away = True

    def fetch(self) -> None:
        """Begin to bring it home; `Store.finish` before use."""
        if not self.away:
            return
        storage = self.tensor.untyped_storage()
        if storage.nbytes():  # on its way out still
            self.store.land()
        storage.resize_(self.bytes)
        _tell(self.tensor)
        try:
            self._number = self.store.begin(self._slot, unseen(raw, storage, self._real))
        except BaseException:
            self._empty()
            raise
        self.away = False

    @property
    def slot(self) -> Any:
        """Where its bytes are in the store, None where they are not."""
        return self._slot

    def pretend(self) -> None:
        """In a dry run: as if it had come from the store."""
        if self._slot is None:
            self._slot, self.dirty = self.store.have(self.bytes), False

    def hand_over(self) -> Any:
        """The slot that has the bytes as they came, now the asker's; None where there is none."""
        slot, self._slot = (None if self.dirty else self._slot), (self._slot if self.dirty else None)
        return slot

    def read(self) -> Any:
        """A copy of its bytes in host memory; it stays away."""
        flat = torch.empty(self.bytes, dtype=torch.uint8, device="cpu")
        self.store.read(self._slot, flat)
        return flat

    def write(self, flat: Any) -> None:
        """Other bytes in the place of its own; it stays away."""
        self.store.write(self._slot, flat)

    def is_held(self) -> bool:
        """True where somebody else holds one of its tensors."""
        seen = [weakref.ref(tensor) for tensor in self.tensors.values()]
        self.tensor, self.tensors = None, {}
        self.tensors = {id(tensor): tensor for ref in seen if (tensor := ref()) is not None}
        self.tensor = next(iter(self.tensors.values()), None)
        return self.tensor is not None

    def _empty(self) -> None:
        for listener in before_emptied:
            listener(self.tensor)
        self.tensor.untyped_storage().resize_(0)
        _tell(self.tensor)

    def drop(self) -> None:
        """It is home for good: the store need not keep its bytes."""
        if self._slot is not None:
            self.store.drop(self._slot)
            self._slot = None


def _tell(tensor: Any) -> None:
    for listener in listeners:
        listener(tensor)


class EvictedStorages:
    """All evicted storages of one fitted step."""

    def __init__(self, store: Store, real: bool) -> None:
        self.store = store
        self.real = real
        self.narrow: Callable[[Any], NarrowStore | None] = lambda tensor: None
        """The store of a tensor that is packed in fewer bits instead of moved."""
        self._all: dict[int, EvictedStorage] = {}
        self._kinds: dict[type, type] = {}
        """Class of a tensor -> its class while it is away."""
        self._busy = 0
        self.loaded = False
        """State came from a checkpoint since the last step: all of it is away."""
        self.saving: CopiesForSaving | None = None
        """Copies for somebody who is saving and for whom there was no room at home."""

    def of(self, tensor: Any) -> EvictedStorage:
        """What is known of a tensor's storage."""
        key = storage_key(tensor)
        found = self._all.get(key)
        if found is None:
            found = self._all[key] = EvictedStorage(tensor, self.narrow(tensor) or self.store, self.real)
        found.tensors[id(tensor)] = tensor
        return found

    def send(self, tensors: Iterable[Any], dirty: bool = True) -> None:
        for tensor in tensors:
            storage = self.of(tensor)
            storage.dirty |= dirty and not storage.away
            storage.send()
            self._mark(storage)

    def begin(self, tensors: Iterable[Any]) -> None:
        """Begin to bring them home; `Store.finish` before use."""
        for tensor in tensors:
            storage = self.of(tensor)
            storage.fetch()
            self._mark(storage)

    def fetch(self, tensors: Iterable[Any]) -> None:
        self.begin(tensors)
        self.store.finish()

    def hand_over(self, tensor: Any) -> Any:
        """The slot that has a tensor's bytes as they came; None where there is none, or others' bytes are in it too."""
        storage = self._all.get(storage_key(tensor))
        alone = storage is not None and len(storage.tensors) == 1
        return storage.hand_over() if storage is not None and alone and storage.bytes == sizeof(tensor) else None

    def take_in(self, tensor: Any) -> None:
        """Away with one, and nothing of it is here when this is over."""
        self.loaded = True
        self.send([tensor])
        self.store.land()

    def may_write(self, tensor: Any, source: Any) -> bool:
        """True between steps, where autograd does not look."""
        return not self._busy and not (torch.is_grad_enabled() and (tensor.requires_grad or source.requires_grad))

    def overwrite(self, tensor: Any, source: Any) -> Any:
        """`tensor.copy_(source)` where it waits, past the device."""
        storage = self.of(tensor)
        flat = storage.read()
        lay_over(flat.untyped_storage(), tensor).copy_(source)
        storage.write(flat)
        return tensor

    def prune(self, wanted: set[int]) -> None:
        """Forget the tensors, other than those of these ids, that nobody else holds."""
        self.store.land()
        for storage in [storage for storage in self._all.values() if storage.tensors.keys().isdisjoint(wanted)]:
            if not storage.is_held():
                self._remove(storage)

    def forget(self, tensors: Iterable[Any]) -> None:
        """They are at home, for good, and the store need not keep their bytes."""
        given = {id(tensor): tensor for tensor in tensors}
        keys = dict.fromkeys(storage_key(tensor) for tensor in given.values())
        for storage in [self._all[key] for key in keys if key in self._all]:
            if storage.tensors.keys() <= given.keys():
                assert not storage.away
                self._remove(storage)

    def settle(self, away: Callable[[Any], bool], asker: str) -> None:
        """Home with every tensor for which `away(tensor)` does not hold."""
        self._bring([s for s in self._all.values() if not away(s.tensor) or self._is_elsewhere(s)], asker)

    def _is_elsewhere(self, storage: EvictedStorage) -> bool:
        """True where it is in another store than it would go to now."""
        wanted, there = self.narrow(storage.tensor), storage.store
        bits = (wanted.bits if wanted is not None else None, there.bits if isinstance(there, NarrowStore) else None)
        return bits[0] != bits[1]

    def packed(self) -> list[Any]:
        """Tensors that hold what is packed in fewer bits."""
        stores = ((s.store, s) for s in self._all.values() if isinstance(s.store, NarrowStore))
        return [tensor for store, storage in stores for tensor in store.tensors_of(storage.slot)]

    def gather(self, asker: str = "gather()") -> None:
        """Everything home; the store is empty afterwards."""
        self._bring(list(self._all.values()), asker)

    def bring(self, tensors: Iterable[Any], asker: str) -> None:
        """Home with those of them that are away."""
        found = {id(storage): storage for t in tensors if isinstance(t, EvictedTensor) for storage in (self.of(t),)}
        self._bring(list(found.values()), asker)

    def before_saving(self, asker: Any, tensors: Iterable[Any]) -> None:
        """Home with these, or, without room, `COPIED` gives copies until `saving` is None again."""
        if self.saving is not None:
            return
        try:
            self.bring(tensors, "state_dict()")
        except OutOfMemory:
            self.saving = CopiesForSaving(asker, self.of)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """A pass runs: what is away now is meant to be."""
        self._busy += 1
        self.saving = None
        try:
            yield
        finally:
            self._busy -= 1

    def call_home(self, asker: str) -> None:
        """Somebody wants contents: between steps everything comes home, in the middle of one that is an error."""
        if self._busy:
            raise ReadWhileEvicted(
                f"weights were read ({asker}) outside of the module that owns them, while they wait elsewhere: fit with "
                "without=('stream',), or read them in that module's forward"
            )
        self.gather(f"who reads weights or state ({asker})")

    def _bring(self, storages: list[EvictedStorage], asker: str) -> None:
        """Home for good with all of them, or with none."""
        coming: list[EvictedStorage] = []
        room, failure = 0, ""
        try:
            for storage in storages:
                if storage.away:
                    coming.append(storage)
                    storage.fetch()
                    room += storage.bytes
            self.store.finish()
        except BaseException as error:
            for storage in coming:
                storage.send()
            if not is_out_of_memory(error):
                raise
            failure = in_a_line(error)
        if failure:
            clear_up()
            raise OutOfMemory(
                _say_no_room(asker, sum(p.bytes for p in storages if p.away), room, self.store.name, failure)
            )
        for storage in storages:
            self._mark(storage)
            self._remove(storage)

    def _remove(self, storage: EvictedStorage) -> None:
        """Neither we nor the store have anything to do with it any more."""
        storage.drop()
        del self._all[storage.key]

    def _mark(self, storage: EvictedStorage) -> None:
        """The class of a storage's tensors says where it is."""
        for tensor in storage.tensors.values() if self.real else ():
            kind = type(tensor)
            if issubclass(kind, EvictedTensor) != storage.away:
                tensor.__class__ = self._kind(kind) if storage.away else kind.kind

    def _kind(self, kind: type) -> type:
        if kind not in self._kinds:
            self._kinds[kind] = type("EvictedTensor", (EvictedTensor, kind), {"kind": kind, "evicted": self})
        return self._kinds[kind]


def lay_over(storage: Any, tensor: Any) -> Any:
    """A tensor in host memory that lies on a storage as another does on its own."""
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


def _say_no_room(asker: str, needed: int, room: int, place: str, failure: str) -> str:
    return (
        f"{asker} needs {format_bytes(needed)} on the device that wait elsewhere ({place}), and {format_bytes(room)} of them "
        f"found room there ({failure}). Nothing is lost: all of it is away again and the fitted step goes on. Free memory or "
        "lift the limit and try again; state_dict() and load_state_dict() need no room: they go past the device"
    )


def check_movable(name: str, tensor: Any) -> str | None:
    """Why this tensor cannot be away, or None."""
    storage = tensor.untyped_storage()
    if not storage.resizable():
        return f"{name} lives in memory that torch does not own (a memory map or a NumPy array)"
    return None


def is_home(model: Any) -> bool:
    """True where no weight is away."""
    return not any(isinstance(parameter, EvictedTensor) for parameter in model.parameters())


def require_home(model: Any, optimizer: Any) -> None:
    """An `InputError` where weights or state are away: an earlier fit of the same model still holds them."""
    state = () if optimizer is None else optimizer.state.values()
    values = (value for values in state for value in values.values() if isinstance(value, torch.Tensor))
    for tensor in (*model.parameters(), *values):
        if tensor.numel() and not tensor.is_meta and not tensor.untyped_storage().nbytes():
            raise InputError(
                "an earlier fit of this model keeps its weights or state elsewhere: call undo() on it first"
            )
