"""Counts the storages that a real step makes and lets go, and what its operators are like.

In: operators as the dispatcher sees them. Out: a `Ledger` with phases, and from it the peak of each phase; which operators
drew random numbers, which modules ran.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from outsize.model.fitting.move import evicted
from outsize.model.fitting.move.visits import Visits
from outsize.model.fitting.run.random_sources import Drawn
from outsize.model.torch_port.dispatch import arguments_of, dispatch_mode, leaves_of
from outsize.model.torch_port.objects import storage_key, version_of
from outsize.model.tracing.ledger import Held, Ledger


class Recorder:
    """One recording."""

    def __init__(self, label: str = "cpu") -> None:
        self.ledger = Ledger()
        self.label = label
        self.marks: list[tuple[int, str]] = []
        """(number of the event, phase that begins there)."""
        self.random: dict[str, None] = {}
        """Operators that drew random numbers, with the module they ran in."""
        self.drawn = Drawn()
        """Generators beside torch's that were drawn from."""
        self.calls: dict[str, int] = {}
        """How often each module ran."""
        self.writing: set[str] = set()
        """Modules that change what they are given in place."""
        self.lower = False
        """Something was computed in a type of fewer than 32 bits."""
        self._stack: list[str] = []
        self._given: list[list[tuple[Any, int]]] = []
        """Tensors that modules on the stack were given, and how often each had been written."""
        self._names: dict[int, str] = {}
        self.ledger.where = self._locate

    def hold(self, tensors: Iterable[Any]) -> None:
        """What is there before the step begins."""
        for tensor in tensors:
            self.ledger.add(tensor, self.label, "given")

    def phase(self, name: str) -> None:
        """A phase begins."""
        self.marks.append((len(self.ledger.events), name))

    @contextlib.contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        """Count while the block runs."""
        import torch
        from torch.nn.modules import module as hooks

        recorder = self
        self._names = {id(child): name for name, child in model.named_modules()}

        class Mode(dispatch_mode()):  # type: ignore[misc]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if kwargs and "generator" in kwargs:
                    recorder.drawn.meet(kwargs["generator"])
                out = func(*args, **(kwargs or {}))
                if torch.Tag.nondeterministic_seeded in func.tags and recorder.draws(func, args, kwargs or {}):
                    recorder._drawn(func)
                leaves = [leaf for leaf in leaves_of(out) if isinstance(leaf, torch.Tensor)]
                for leaf in leaves:
                    recorder.ledger.add(leaf, recorder.label, str(func))
                recorder.lower |= any(leaf.dtype.is_floating_point and leaf.element_size() < 4 for leaf in leaves)
                return out

        handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]
        evicted.listeners.append(self._resized)
        try:
            with Mode():
                yield
        finally:
            evicted.listeners.remove(self._resized)
            for handle in handles:
                handle.remove()

    @staticmethod
    def draws(func: Any, args: Any, kwargs: Any) -> bool:
        """An attention kernel is marked as random but draws only where it drops."""
        for position, argument in enumerate(arguments_of(func)):
            if argument.name == "dropout_p":
                given = args[position] if len(args) > position else kwargs.get("dropout_p", 0.0)
                return bool(given)
        return True

    def _drawn(self, func: Any) -> None:
        place = self._stack[-1] if self._stack else ""
        self.random.setdefault(f"{func.overloadpacket.__name__}{f' in {place}' if place else ''}")

    def _resized(self, tensor: Any) -> None:
        self.ledger.add(tensor, self.label, "resize")

    def _enter(self, module: Any, args: Any) -> None:
        import torch

        self._given.append([(value, version_of(value)) for value in args if isinstance(value, torch.Tensor)])
        name = self._names.get(id(module))
        self._stack.append(name if name is not None else (self._stack[-1] if self._stack else ""))
        if name is not None:
            self.calls[name] = self.calls.get(name, 0) + 1

    def _leave(self, module: Any, args: Any, out: Any) -> None:
        if self._stack:
            self._stack.pop()
            name = self._names.get(id(module))
            if any(version_of(tensor) != before for tensor, before in self._given.pop()) and name is not None:
                self.writing.add(name)

    def _locate(self, held: Held) -> None:
        held.module = self._stack[-1] if self._stack else ""

    # what was seen

    def peaks(self) -> dict[str, int]:
        """Peak of each phase in bytes of storages, as they came."""
        course = list(
            itertools.accumulate(record.bytes if alloc else -record.bytes for alloc, record in self.ledger.events)
        )
        found: dict[str, int] = {}
        marks = [*self.marks, (len(course), "")]
        for (start, name), (stop, _) in itertools.pairwise(marks):
            found[name] = max(found.get(name, 0), max(course[max(0, start - 1) : stop], default=0))
        return found


class Seen:
    """What a trace shows beside storages."""

    def __init__(self) -> None:
        self.outside: dict[int, None] = {}
        """ids of parameters whose proxies are used while they have no data."""
        self.random: dict[str, None] = {}
        """Operators that draw random numbers."""
        self.drawn = Drawn()
        """Generators beside torch's; those of the user's own are put back in the end."""


@contextlib.contextmanager
def watching(visits: Visits) -> Iterator[Seen]:
    """See what operators are called with while the block runs, on tensors with contents or without."""
    import torch

    seen = Seen()
    keys = {id(proxy): key for key, proxy in visits.proxies.items()}
    blanks = visits.blanks

    class Mode(dispatch_mode()):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if "generator" in kwargs:
                seen.drawn.meet(kwargs["generator"])
            if torch.Tag.nondeterministic_seeded in func.tags and Recorder.draws(func, args, kwargs):
                seen.random.setdefault(func.overloadpacket.__name__)
            if func.namespace == "aten":
                for leaf in leaves_of((args, kwargs)):
                    if id(leaf) in keys and storage_key(leaf) in blanks:
                        seen.outside.setdefault(keys[id(leaf)])
            return func(*args, **kwargs)

    try:
        with Mode():
            yield seen
    finally:
        seen.drawn.put_back()
