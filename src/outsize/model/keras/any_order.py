"""The most that a graph can hold in whatever order its operators run, on however many threads.

In: a step followed once, with notes of who made and who read each buffer. Out: bytes that no order passes. Threads of a real run
meet differently each time: on a busy machine one may stand still inside a gradient of weights while others run the whole backward
pass, so that every activation and every gradient lives at once. Trying orders finds no such moment.

A moment is a set of operators that have begun, with all that these read. A buffer lives in it if its maker has begun, and surely
lives no longer once an operator has begun that comes after all of its readers. The set with the most living bytes is a maximum
closure, found by a minimum cut (Picard 1976). Buffers whose readers have all ended and whose successor has not begun are counted
as living: that is what makes this a bound and not the exact maximum, which is NP-hard (Touati 2005).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from outsize.model.keras.buffers import UPDATES, Buffer, Memory, Tensor
from outsize.model.keras.graph import Flat
from outsize.model.keras.minimum_cut import Network

SMALL = 0.002
"""Part of a step's bytes that small buffers may have together, to be counted as if they lived all the time."""


@dataclass(slots=True, eq=False)
class Life:
    """A buffer of the step."""

    bytes: int
    maker: int | None
    """The operator that begins its life; None where it was there before the step."""
    holders: set[int] = field(default_factory=set)
    """Operators during which it lives."""
    stays: bool = False
    """It outlives the step."""


class Relations:
    """Which operators come after which, as sets of bits; a bit is a place in an order that the graph allows."""

    def __init__(self, flat: Flat) -> None:
        left = list(flat.pending)
        self.order = [number for number, count in enumerate(left) if count == 0 and flat.needed[number]]
        for number in self.order:
            for reader in flat.readers[number]:
                left[reader] -= 1
                if left[reader] == 0:
                    self.order.append(reader)
        self.place = {number: place for place, number in enumerate(self.order)}
        self.before = [0] * len(self.order)
        """By place: all that has ended when it begins."""
        self.direct: list[list[int]] = [[] for _ in self.order]
        for place, number in enumerate(self.order):
            for reader in flat.readers[number]:
                self.before[self.place[reader]] |= self.before[place] | 1 << place
                self.direct[self.place[reader]].append(place)
        self.after = [0] * len(self.order)
        for place in range(len(self.order) - 1, -1, -1):
            for source in self.direct[place]:
                self.after[source] |= self.after[place] | 1 << place

    def precedes(self, holders: Iterable[int], number: int) -> bool:
        """All of these have ended when this one begins."""
        before = self.before[self.place[number]]
        return all(before >> self.place[each] & 1 for each in holders)

    def first_after(self, holders: Iterable[int]) -> list[int]:
        """The first operators that can only begin when all of these have ended, as places."""
        common = -1
        for each in holders:
            common &= self.after[self.place[each]]
        found = []
        while common:
            place = (common & -common).bit_length() - 1
            found.append(place)
            common &= ~(self.after[place] | 1 << place)
        return found


class Lives:
    """Notes, while a step is followed, who makes and who reads each buffer."""

    def __init__(self, flat: Flat) -> None:
        self.relations = Relations(flat)
        self.lives: dict[int, Life] = {}
        self.own: list[Life] = []
        """What operators hold only while they run."""
        self._buffers: list[Buffer] = []
        self._events = 0
        self._variables: list[tuple[Tensor, Buffer | None]] = []

    def surely_last(self, buffer: Buffer, number: int) -> bool:
        """In every order this operator reads the buffer after all that have read it."""
        return self.relations.precedes(self._of(buffer).holders - {number}, number)

    def begins(self, number: int, given: list[Tensor], memory: Memory) -> None:
        """An operator is about to run."""
        for each in given:
            self._hold(number, each.buffer)
            self._hold(number, None if each.variable is None else each.variable.buffer)
        self._events = len(memory.events)
        self._variables = [(each, each.variable.buffer) for each in given if each.variable is not None]

    def made(self, number: int, kind: str, memory: Memory) -> None:
        """It has run: what it made, what it took inside, and which variables it set."""
        now = most = 0
        mine: dict[int, Buffer] = {}
        for alloc, buffer in memory.events[self._events :]:
            if alloc:
                mine[buffer.id] = buffer
            elif mine.pop(buffer.id, None) is None:
                continue
            now += buffer.bytes if alloc else -buffer.bytes
            most = max(most, now)
        if most > now:
            self.own.append(Life(most - now, number, {number}))
        for buffer in mine.values():
            life = self._of(buffer)
            life.maker, life.stays = number, False
            self._hold(number, buffer)
        for tensor, old in self._variables:
            assert tensor.variable is not None
            if old is not None:
                self._set(number, kind, old, tensor.variable.buffer)

    def _set(self, number: int, kind: str, old: Buffer, new: Buffer | None) -> None:
        """A variable is read or set: its old value lives until its readers have ended; it is written over if they surely have."""
        life = self._of(old)
        if new is old and kind not in UPDATES:
            return
        if new is old:
            life.stays = True
            if not self.relations.precedes(life.holders - {number}, number):
                self.own.append(Life(old.bytes, number, {number}, stays=True))
                life.stays = False
            return
        life.stays = False
        if new is not None:
            value = self._of(new)
            value.stays = True
            if not self.relations.precedes(value.holders - {number}, number):
                self.own.append(Life(new.bytes, number, {number}, stays=True))

    def _of(self, buffer: Buffer) -> Life:
        if buffer.id not in self.lives:
            self.lives[buffer.id] = Life(buffer.bytes, None, stays=True)
            self._buffers.append(buffer)
        return self.lives[buffer.id]

    def _hold(self, number: int, buffer: Buffer | None) -> None:
        if buffer is None:
            return
        self._of(buffer).holders.add(number)
        for item in buffer.items or ():
            if item is not None:
                self._hold(number, item.buffer)

    def most(self, there: int) -> int:
        """Bytes that no order passes, where so many were there before the step; asked while its results are held."""
        moving = [*self.own]
        for buffer in self._buffers:
            life = self.lives[buffer.id]
            life.stays = life.stays or (buffer.refs > 0 and life.maker is not None)
            if life.bytes and (life.maker is not None or not life.stays):
                moving.append(life)
        moving.sort(key=lambda life: life.bytes)
        always, few = 0, SMALL * (there + sum(life.bytes for life in moving))
        while moving and moving[0].bytes + always <= few:
            life = moving.pop(0)
            always += life.bytes if life.maker is not None else 0
        return there + always + self._closure(moving)

    def _closure(self, moving: list[Life]) -> int:
        """The most that these buffers add to what was there before the step."""
        relations = self.relations
        count = len(relations.order)
        network = Network(count + 2 + len(moving))
        source, sink = count, count + 1
        total = 0
        for place in range(count):
            for before in relations.direct[place]:
                network.add(place, before, inf)
        for number, life in enumerate(moving):
            if life.maker is not None:
                total += life.bytes
                network.add(source, relations.place[life.maker], life.bytes)
            if life.stays:
                continue
            over = count + 2 + number
            network.add(over, sink, life.bytes)
            for place in relations.first_after(life.holders):
                network.add(place, over, inf)
        return total - int(network.flow(source, sink))
