"""Counts the storages that a step makes and lets go, on real tensors or on tensors without contents.

In: operators as the dispatcher sees them. Out: a `Ledger` with phases and modules, and from it the peak of each
phase. A real run and its projection are counted by this same code, so that measured and projected mean the same.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator
from typing import Any

from outsize.allocator import replay, settings_from_environment
from outsize.core.allocation import AllocationEvent
from outsize.model.fitting import parcels
from outsize.model.ledger import Held, Ledger

RATES = {"cpu": (5e10, 1e10), "cuda": (1.5e14, 3e12)}
"""Operations and bytes a second of a kind of device; only their ratio matters, since times are compared with each other."""


class Recorder:
    """One recording."""

    def __init__(self, label: str = "cpu") -> None:
        self.ledger = Ledger()
        self.label = label
        self.marks: list[tuple[int, str]] = []
        """(number of the event, phase that begins there)."""
        self.random: dict[str, None] = {}
        """Operators that drew random numbers, with the module they ran in."""
        self.calls: dict[str, int] = {}
        """How often each module ran."""
        self.seconds: dict[tuple[str, str], float] = {}
        """Estimated time by (phase, module), from the numbers that operators compute and touch."""
        self.operators: dict[str, int] = {}
        """Operators by phase."""
        self._rates = RATES[label.partition(":")[0]]
        self._stack: list[str] = []
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
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        recorder = self
        self._names = {id(child): name for name, child in model.named_modules()}

        class Mode(TorchDispatchMode):  # type: ignore[misc]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                if torch.Tag.nondeterministic_seeded in func.tags and recorder._draws(func, args, kwargs or {}):
                    recorder._drawn(func)
                leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
                for leaf in leaves:
                    recorder.ledger.add(leaf, recorder.label, str(func))
                recorder._clock(func, args, kwargs or {}, out, leaves)
                return out

        handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]
        parcels.listeners.append(self._resized)
        try:
            with Mode():
                yield
        finally:
            parcels.listeners.remove(self._resized)
            for handle in handles:
                handle.remove()

    @staticmethod
    def _draws(func: Any, args: Any, kwargs: Any) -> bool:
        """An attention kernel is marked as random but draws only where it drops."""
        for position, argument in enumerate(func._schema.arguments):
            if argument.name == "dropout_p":
                given = args[position] if len(args) > position else kwargs.get("dropout_p", 0.0)
                return bool(given)
        return True

    def _clock(self, func: Any, args: Any, kwargs: Any, out: Any, leaves: list[Any]) -> None:
        """Add an operator's estimated time: what it computes or what it touches, whichever takes longer."""
        from torch.utils.flop_counter import flop_registry

        if func.is_view:
            return
        count = flop_registry.get(func.overloadpacket)
        flops = count(*args, **kwargs, out_val=out) if count is not None else 0
        touched = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        phase = self.marks[-1][1] if self.marks else ""
        key = (phase, self._stack[-1] if self._stack else "")
        seconds = max(flops / self._rates[0], 2 * touched / self._rates[1])
        self.seconds[key] = self.seconds.get(key, 0.0) + seconds
        self.operators[phase] = self.operators.get(phase, 0) + 1

    def _drawn(self, func: Any) -> None:
        place = self._stack[-1] if self._stack else ""
        self.random.setdefault(f"{func.overloadpacket.__name__}{f' in {place}' if place else ''}")

    def _resized(self, tensor: Any) -> None:
        self.ledger.add(tensor, self.label, "resize")

    def _enter(self, module: Any, args: Any) -> None:
        name = self._names.get(id(module))
        self._stack.append(name if name is not None else (self._stack[-1] if self._stack else ""))
        if name is not None:
            self.calls[name] = self.calls.get(name, 0) + 1

    def _leave(self, module: Any, args: Any, out: Any) -> None:
        if self._stack:
            self._stack.pop()

    def _locate(self, held: Held) -> None:
        held.module = self._stack[-1] if self._stack else ""

    # what was seen

    def peaks(self) -> dict[str, int]:
        """Peak of each phase in bytes, as they came: of storages on a CPU, of what torch's allocator reserves on a card."""
        course = self._course()
        found: dict[str, int] = {}
        marks = [*self.marks, (len(course), "")]
        for (start, name), (stop, _) in itertools.pairwise(marks):
            found[name] = max(found.get(name, 0), max(course[max(0, start - 1) : stop], default=0))
        return found

    def _course(self) -> list[int]:
        """Bytes held after each event."""
        if self.label.startswith("cuda"):
            events = (
                AllocationEvent(number, alloc, record.id, record.bytes)
                for number, (alloc, record) in enumerate(self.ledger.events)
            )
            return [
                sample.reserved
                for sample in replay(events, settings=settings_from_environment(os.environ), samples=True).samples
            ]
        return list(
            itertools.accumulate(record.bytes if alloc else -record.bytes for alloc, record in self.ledger.events)
        )
