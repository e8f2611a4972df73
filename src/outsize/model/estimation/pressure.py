"""Whether a step fits a capacity, when the libraries below it use less memory before they fail.

In: what a trace saw on a device, and a capacity. Out: yes or no. The allocator gives back what it caches before it fails. If
there is no room for the workspace of cuDNN's preferred kernel, torch takes the next kernel and keeps it. 1,254
convolutions on an H200 were given too little room, and none failed. 769 went to at most 8 MiB at once and 425 through
a smaller workspace. The rest had room for a smaller one.
"""

from __future__ import annotations

from collections.abc import Sequence

from outsize.allocator import replay
from outsize.core.allocation import EMPTY_CACHE, AllocationEvent
from outsize.model.tracing.records.ledger import Held
from outsize.model.tracing.records.replay import largest_size, likely_size

Events = Sequence[tuple[bool, Held]]

WAYS = ((), (2,))
"""How a workspace without room shrinks: it is given up at once, or divided by 2 first. The step has to fit both
ways."""


def gets_through(events: Events, capacity: int, most: bool) -> bool:
    """True if every necessary block fits, whichever way the workspaces shrink."""
    for way in WAYS:
        trial = _Try(events, capacity, most, way)
        if not trial.run():
            return False
        if not trial.smaller:  # nothing had to shrink, so the ways are all the same
            return True
    return True


class _Try:
    """Replays with smaller and smaller workspaces, until one fits or fails for another reason."""

    def __init__(self, events: Events, capacity: int, most: bool, way: tuple[int, ...]) -> None:
        self.events, self.capacity, self.most, self.way = events, capacity, most, way
        self.smaller: dict[tuple[str, int], list[tuple[int, int]]] = {}
        """(operator, bytes) of a workspace -> (from which event on, bytes it then has)."""
        self.released: set[int] = set()
        """Events before which the allocator gave back its cache and still found no room."""

    def run(self) -> bool:
        """True if a replay does not run out of memory."""
        while True:
            made, places = self._events()
            failed = replay(made, allocator="cuda", capacity=self.capacity).out_of_memory
            if failed is None:
                return True
            number = places[failed.event]
            held = self.events[number][1]
            if not held.spare:
                return False
            self._shrink(number, held, made[failed.event].bytes)

    def _shrink(self, number: int, held: Held, size: int) -> None:
        steps = self.smaller.setdefault(self._key(held), [])
        full = self._size(held)
        left = full // self.way[len(steps)] if len(steps) < len(self.way) else 0
        steps.append((number, left if left < size else 0))
        self.released.add(number)

    def _events(self) -> tuple[list[AllocationEvent], list[int]]:
        """Events for the allocator, and which of ours each of them is."""
        made: list[AllocationEvent] = []
        places: list[int] = []
        taken: dict[int, int] = {}
        for number, (alloc, held) in enumerate(self.events):
            if number in self.released:
                made.append(AllocationEvent(number, False, EMPTY_CACHE, 0))
                places.append(number)
            if alloc:
                taken[held.id] = self._at(held, number)
            if taken.get(held.id):
                made.append(AllocationEvent(number, alloc, held.id, taken[held.id]))
                places.append(number)
        return made, places

    def _at(self, held: Held, number: int) -> int:
        """Bytes of a block that is asked for at an event."""
        size = self._size(held)
        if held.spare:
            for begin, less in self.smaller.get(self._key(held), ()):
                size = less if number >= begin else size
        return size

    def _size(self, held: Held) -> int:
        return largest_size(held) if self.most else likely_size(held)

    @staticmethod
    def _key(held: Held) -> tuple[str, int]:
        return held.op, held.bytes
