"""A step happens as a whole or not at all: what it changes, as it was before.

In: parameters, their optimizer, and a way to copy tensors; what a forward pass changes; interrupts. Out: an `UndoRecord` of each
parameter, from which an update that fails is taken back (values go into the same tensors, state that was not there is gone), a
`Snapshot` of random state and buffers, and `Interrupts`: a Ctrl-C in the middle of an update waits until the update is whole.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from outsize.model.fitting.update.optimizer_subset import copy_all
from outsize.model.torch_port.objects import buffer_table


class UndoRecord:
    """A parameter and its optimizer state as they are now."""

    __slots__ = ("_state", "_value")

    def __init__(self, value: Any, state: dict[str, tuple[Any, Any]]) -> None:
        self._value = value
        self._state = state

    @classmethod
    def of(cls, parameters: list[Any], optimizer: Any, keep: Callable[[list[Any]], list[Any]]) -> list[UndoRecord]:
        """Of each parameter; `keep` copies a list of tensors."""
        states = [optimizer.state.get(parameter, {}) for parameter in parameters]
        wanted = [*parameters, *(v for s in states for v in s.values() if isinstance(v, torch.Tensor))]
        with torch.no_grad():
            copies = iter(keep(wanted))
        values = [next(copies) for _ in parameters]
        return [
            cls(value, {n: (v, next(copies) if isinstance(v, torch.Tensor) else None) for n, v in state.items()})
            for value, state in zip(values, states, strict=True)
        ]

    def restore(self, parameter: Any, optimizer: Any, bring: Callable[[Any], Any]) -> None:
        """Write it back, into the same tensors."""
        with torch.no_grad():
            parameter.data.copy_(bring(self._value))
            for value, kept in self._state.values():
                if kept is not None:
                    value.copy_(bring(kept))
        if self._state:
            optimizer.state[parameter] = {name: value for name, (value, _) in self._state.items()}
        else:
            optimizer.state.pop(parameter, None)


def written_buffers(written: dict[Any, tuple[str, ...]]) -> list[Any]:
    """The buffers of these names, by module."""
    return [buffer_table(module)[name] for module, names in written.items() for name in names]


class Snapshot:
    """Random state and written buffers before a step."""

    def __init__(self, work: Any) -> None:
        self._random = torch.random.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if work.device == "cuda" else None
        self._sources = [(source, source.get_state()) for source in work.sources]
        buffers = written_buffers(work.written)
        self._buffers = list(zip(buffers, copy_all(buffers), strict=True))

    def restore(self) -> None:
        """Put them back."""
        torch.random.set_rng_state(self._random)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        for source, state in self._sources:
            source.set_state(state)
        with torch.no_grad():
            for buffer, copy in self._buffers:
                buffer.copy_(copy)


class Interrupts:
    """Those that came while they were held back.

    What moves tensors must not stop between a storage and the note of where its bytes are. So a step holds them back, lets them
    through between its passes, and in a forward pass in which nothing moves.
    """

    def __init__(self) -> None:
        self._came: tuple[Any, ...] = ()
        self._handler: Any = None
        self._depth = 0
        """How many hold them back."""

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Note an interrupt instead of raising it; only the main thread gets any."""
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(handler):
            yield
            return
        if not self._depth:
            self._handler = handler
            signal.signal(signal.SIGINT, self._note)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                signal.signal(signal.SIGINT, self._handler)

    @contextlib.contextmanager
    def let_through(self) -> Iterator[None]:
        """They come at once, unless more than the step holds them back."""
        if self._depth != 1:
            yield
            return
        self.let_go()
        signal.signal(signal.SIGINT, self._handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, self._note)

    def _note(self, *came: Any) -> None:
        self._came = came

    def let_go(self) -> None:
        """Now one may do what it was meant to, unless more than the step holds it back."""
        if self._came and self._depth < 2:
            came, self._came = self._came, ()
            self._handler(*came)
