"""Storages and their lifetimes: what was allocated when, where and by whom, and when it was freed.

In: tensors as the dispatcher sees them. Out: `Held` records, in the order in which they were allocated and freed.
Views share one storage, which is one allocation, so the ledger counts storages. A weak reference to each shows when it
is freed.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outsize.model.torch_port.dispatch import is_wrapper, parts_of, unwrap_functorch
from outsize.model.torch_port.objects import key_of


@dataclass(slots=True, eq=False)
class Held:
    """One allocation from its birth to its end."""

    id: int
    bytes: int
    label: str
    """Device the step believes it is on: `cuda:0`, `cpu`, `pinned`."""
    op: str
    born: int
    """Number of the event that allocated it."""
    step: int
    """-1 while things are built, then the number of the step."""
    phase: str
    """`build`, `forward`, `backward`, `optimizer`."""
    most: int = field(init=False)
    """Most bytes it may have; the same except for the workspaces of convolutions."""
    died: int | None = None
    kind: str = ""
    """`weights`, `gradients`, ...; empty until it is known."""
    spare: bool = False
    """True for a workspace that the library can make smaller if there is no room."""
    module: str = ""
    line: str = ""
    node: int = -1
    """Number of the autograd node whose backward made it."""

    def __post_init__(self) -> None:
        self.most = self.bytes


class Ledger:
    """Every storage that a trace has seen."""

    def __init__(self) -> None:
        self.all: list[Held] = []
        self.events: list[tuple[bool, Held]] = []
        """(True at an allocation, False at a free; what), in order."""
        self.live: dict[int, Held] = {}
        """Address of the storage -> its record."""
        self.values: dict[int, Any] = {}
        """Address of the storage -> a real storage with its contents, for the few small ones whose contents are known."""
        self.drawn: set[int] = set()
        """Addresses of the storages whose contents were drawn at random in a step, or computed from such."""
        self._watch: dict[int, Any] = {}
        self._ids = itertools.count()
        self.step = -1
        self.closed = False
        """True when the trace is over: what is freed later is not recorded."""
        self.phase: Callable[[], str] = lambda: "build"
        self.where: Callable[[Held], None] = lambda held: None
        """Writes module and line into a new record."""

    def allocate(self, size: int, label: str, op: str) -> Held:
        """A new record that starts now."""
        held = Held(next(self._ids), size, label, op, len(self.events), self.step, self.phase())
        self.where(held)
        self.all.append(held)
        self.events.append((True, held))
        return held

    def free(self, held: Held) -> None:
        held.died = len(self.events)
        self.events.append((False, held))

    def begin_anew(self) -> None:
        """What was freed before now was never there, and what is held now is the beginning."""
        gone = {held.id for held in self.all if held.died is not None}
        self.all = [held for held in self.all if held.id not in gone]
        self.events = [(True, held) for held in self.all]
        for number, held in enumerate(self.all):
            held.born = number

    def of(self, tensor: Any) -> Held | None:
        return self.live.get(key_of(_storage_of(tensor)))

    def label_of(self, tensor: Any) -> str | None:
        """Device that a tensor believes to be on, None for a tensor the trace has not seen."""
        held = self.of(tensor)
        if held is None and is_wrapper(tensor):
            held = next(filter(None, map(self.of, parts_of(tensor))), None)
        return None if held is None else held.label

    def add(self, tensor: Any, label: str, op: str) -> Held:
        """Count the tensor's storage from now until it dies; a storage that is known already stays as it is."""
        storage = tensor.untyped_storage()
        key = key_of(storage)
        held = self.live.get(key)
        if held is None:
            held = self.live[key] = self.allocate(storage.nbytes(), label, op)
            self._watch[key] = weakref.ref(storage, functools.partial(self._gone, key))
        elif held.bytes != storage.nbytes():  # resized in place: the old block goes after the new one has come
            old = held
            held = self.live[key] = self.allocate(storage.nbytes(), old.label, op)
            held.kind = old.kind
            self.free(old)
        return held

    def _gone(self, key: int, _: Any) -> None:
        held = self.live.pop(key)
        if not self.closed:
            self.free(held)
        self._watch.pop(key, None)
        self.values.pop(key, None)
        self.drawn.discard(key)


def _storage_of(tensor: Any) -> Any:
    """A tensor's storage; inside torch.func (where transformers makes its masks) that of the wrapped tensor."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return _storage_of(unwrap_functorch(tensor))
