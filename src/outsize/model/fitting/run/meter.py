"""What a step really holds, by the account of torch's own allocator.

In: the tensors that are there when a window begins. Out: the highest moment of the window in bytes. A card's allocator keeps
statistics; the CPU's tells of every block that it hands out and takes back. Nothing of the plan's arithmetic is in these
numbers, so they show what the plan has missed: the scratch of a kernel, a user's own optimizer.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from outsize.model.fitting.move import evicted
from outsize.model.torch_port.dispatch import parts_of
from outsize.model.torch_port.objects import key_of, start_allocator_events, stop_allocator_events, storage_key

STATE = 5056
"""Bytes of the state of the CPU's generator: whoever runs a module twice keeps some, which no plan counts."""


MARK = 7919
"""Bytes of a mark among the allocator's events: a size that nobody else asks for."""


class Meter:
    """Measures one window after the other."""

    def __init__(self, kind: str) -> None:
        """`kind`: that of the device; empty where nothing is measured."""
        self.open = False
        """A window is open."""
        self._kind = kind
        self._total = self._peak = 0
        self._is_apart = False
        """The events that come belong to nobody's count."""
        self._old: dict[int, int] = {}
        """Storage -> bytes, where the allocator had handed them out before it was listened to: it does not tell of their end."""
        self._renewed: dict[int, int] = {}
        """Storage -> its address, where it was emptied and filled again in a window."""

    def begin(self, held: Callable[[], Iterable[Any]], reset: bool = True) -> bool:
        """A window begins, with the tensors that `held` gives; False where one is open. `reset`: a card counts from now."""
        if self.open or not self._kind:
            return False
        if self._kind == "cuda":
            if reset:
                torch.cuda.reset_peak_memory_stats()
            self.open = True
            return True
        parts = (part for tensor in held() for part in parts_of(tensor))
        storages = {key_of(storage): storage for part in parts for storage in (part.untyped_storage(),)}
        self._total = self._peak = sum(storage.nbytes() for storage in storages.values())
        self._old = {
            key: storage.nbytes()
            for key, storage in storages.items()
            if storage.nbytes() and self._renewed.get(key) != storage.data_ptr()
        }
        evicted.listeners.append(self._resized)
        evicted.before_emptied.append(self._before_emptied)
        self._listen()
        return self.open

    def flush(self, *_: Any) -> None:
        """Add up what has come so far: the notes of a whole step would take memory themselves."""
        if self.open and self._kind == "cpu":
            self._add_up()
            self._listen()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """What the block takes and gives back is not counted: its events stand between two marks."""
        marks = self.open and self._kind == "cpu"
        if marks:
            torch.empty(MARK, dtype=torch.uint8)
        try:
            yield
        finally:
            if marks:
                torch.empty(MARK, dtype=torch.uint8)

    def end(self) -> int | None:
        """The window's peak; None where nothing was measured."""
        if not self.open:
            return None
        self.open = False
        if self._kind == "cuda":
            return int(torch.cuda.max_memory_reserved())
        self._add_up()
        self._leave()
        return self._peak

    def _listen(self) -> None:
        """To the allocator, unless somebody else does already."""
        self.open = start_allocator_events()
        if not self.open:
            self._leave()

    def _leave(self) -> None:
        evicted.listeners.remove(self._resized)
        evicted.before_emptied.remove(self._before_emptied)

    def _add_up(self) -> None:
        changes = self._counted(stop_allocator_events())
        self._peak = max(self._peak, *itertools.accumulate(changes, initial=self._total))
        self._total += sum(changes)

    def _counted(self, changes: list[int]) -> list[int]:
        """Without states of generators, and what stands between marks."""
        if MARK in changes or self._is_apart:
            inside, changes = changes, []
            for change in inside:
                if change == MARK:
                    self._is_apart = not self._is_apart
                elif change != -MARK and not self._is_apart:
                    changes.append(change)
        return [change for change in changes if change not in (STATE, -STATE)]

    def _before_emptied(self, tensor: Any) -> None:
        """The allocator would complain of a block of which it has not told."""
        if storage_key(tensor) in self._old:
            self._add_up()

    def _resized(self, tensor: Any) -> None:
        """A storage was emptied or filled again."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self._renewed[key_of(storage)] = storage.data_ptr()
            return
        self._renewed.pop(key_of(storage), None)  # outside of windows it may be filled again, even at the same address
        if key_of(storage) in self._old:
            self._total -= self._old.pop(key_of(storage))
            self._listen()
