"""The home of a model that visits a device: one page-locked block a unit, each tensor at its place in it.

In: the user's parameters and optimizer state in ordinary memory. Out: the same parameter objects, whose data lie in
blocks of exact size that a device copies by itself, a whole unit in one go. Every tensor keeps a storage of its own
size, so that saved files are what they were. A few units move at a time: that takes a few units more, not a second model. What
the host has no room for is in the scratch file: there a parameter's tensors are windows.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from outsize.engine.heap import trim_heap
from outsize.model.fitting.move.locked_memory import Block
from outsize.model.fitting.move.ring import aligned
from outsize.model.fitting.move.scratch_file import ScratchFile, Stretch
from outsize.model.fitting.move.units import Cut, Place, Unit


@dataclass(frozen=True, slots=True)
class Shape:
    """One tensor of optimizer state: what it is and where it lies in the parameter's stretch."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    offset: int

    @property
    def size(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


MOVERS = 4
"""Units that move into their blocks at once."""
MAKERS = 8
"""Blocks that are made at once: the kernel clears and locks their pages, a core each."""

Layout = dict[int, list[Shape]]
"""id of a parameter -> its state that travels."""


def state_bytes(shapes: list[Shape]) -> int:
    """Bytes of a parameter's state, laid out."""
    return max((shape.offset + aligned(shape.size) for shape in shapes), default=0)


class HostTensors:
    """Where each parameter's bytes of one kind are at home: in a block a unit, or in the scratch file."""

    kind = ""
    """As the scratch file knows them."""

    def __init__(self, cut: Cut, filed: Collection[int] = (), scratch: ScratchFile | None = None) -> None:
        self.blocks: dict[str, Block] = {}
        """By name of the unit; the empty name is what stays on the device."""
        self.filed: dict[int, Stretch] = {}
        """id of a parameter -> its bytes in the scratch file."""
        self._scratch = scratch
        self._starts: dict[int, tuple[str, int, int]] = {}
        """id of a parameter -> unit, where it begins in the unit's block, bytes."""
        self._sizes: dict[str, int] = {}
        for unit in (*cut.units.values(), cut.held):
            at = 0
            for place in unit.places:
                size = self._size(place)
                if scratch is not None and id(place.parameter) in filed:
                    self.filed[id(place.parameter)] = scratch.stretch(self.kind, place.parameter)
                else:
                    self._starts[id(place.parameter)] = (unit.name, at, size)
                    at += aligned(size)
            self._sizes[unit.name] = at

    def _size(self, place: Place) -> int:
        return place.size

    def bytes_of(self, parameter: Any) -> Any:
        """One parameter's bytes: memory, or a stretch of the scratch file."""
        if id(parameter) in self.filed:
            return self.filed[id(parameter)]
        name, start, size = self._starts[id(parameter)]
        return self._block(name).bytes[start : start + size]

    def tensor(self, parameter: Any, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """A tensor on these bytes; in the scratch file, on the window to them."""
        if id(parameter) in self.filed:
            return self.filed[id(parameter)].tensor(offset, shape, dtype)
        name, start, _ = self._starts[id(parameter)]
        return self._block(name).tensor(start + offset, shape, dtype)

    def forget(self, moved: Collection[int]) -> None:
        """Blocks whose parameters are all elsewhere are given back."""
        left = {name for key, (name, _, _) in self._starts.items() if key not in moved}
        for name in [name for name in self.blocks if name not in left]:
            self.blocks.pop(name).unlock()

    def unlock(self) -> None:
        """The blocks are ordinary memory from now on."""
        for block in self.blocks.values():
            block.unlock()

    def _block(self, name: str) -> Block:
        if name not in self.blocks:
            self.blocks[name] = Block(self._sizes[name])
        return self.blocks[name]


class Weights(HostTensors):
    kind = "weights"

    def __init__(
        self, cut: Cut, old: Weights | None = None, filed: Collection[int] = (), scratch: ScratchFile | None = None
    ) -> None:
        super().__init__(cut, filed, scratch)
        self._moved: set[int] = set()
        self._parameters = {id(place.parameter): place.parameter for place in cut.places()}
        self.strides: dict[int, tuple[int, ...]] = {} if old is None else dict(old.strides)
        """id of a parameter -> its strides as it was given, where they are not those of its home."""
        try:
            with ThreadPoolExecutor(MOVERS) as pool:
                for _ in pool.map(self._move, sorted((*cut.units.values(), cut.held), key=self._is_here)):
                    if old is not None:
                        old.forget(self._moved)
        except BaseException:  # a disk that fails: what has moved comes back
            self.close()
            raise

    def _move(self, unit: Unit) -> None:
        for place in sorted(unit.places, key=lambda place: id(place.parameter) not in self.filed):
            parameter = place.parameter
            here = self.tensor(parameter, 0, tuple(parameter.shape), parameter.dtype)
            if not parameter.is_contiguous():
                self.strides[id(parameter)] = parameter.stride()
            if here.data_ptr() != parameter.data_ptr():
                if id(parameter) in self.filed:
                    assert self._scratch is not None
                    self._scratch.put(self.filed[id(parameter)], [(0, parameter)])
                else:
                    with torch.no_grad():
                        here.copy_(parameter.data)
                parameter.data = here
            self._moved.add(id(parameter))
        if self._scratch is not None:
            trim_heap()  # of what the parameters were in

    def _is_here(self, unit: Unit) -> bool:
        """Nothing of a unit is in the scratch file; those that have something there go first, and leave room."""
        return not any(id(place.parameter) in self.filed for place in unit.places)

    def whole(self, unit: Unit) -> Any:
        """A unit's own bytes in one, None where some are in the scratch file."""
        return self._block(unit.name).bytes[: unit.own] if unit.own and self._is_here(unit) else None

    def close(self, home: bool = True) -> None:
        """Parameters stay where they are, in memory that is ordinary again; `home`: those in the scratch file leave it."""
        for key in self._moved & self.filed.keys() if home else ():
            parameter, stretch = self._parameters[key], self.filed[key]
            parameter.data = stretch.load().tensor(0, tuple(parameter.shape), parameter.dtype)
        for key, strides in self.strides.items():
            if home or key not in self.filed:
                parameter = self._parameters[key]
                given = torch.empty_strided(parameter.shape, strides, dtype=parameter.dtype)
                parameter.data = given.copy_(parameter.detach())
        self.unlock()


class State(HostTensors):
    """Optimizer state, one stretch a parameter."""

    kind = "state"

    def __init__(
        self, cut: Cut, layout: Layout, filed: Collection[int] = (), scratch: ScratchFile | None = None
    ) -> None:
        self.layout = layout
        self._tensors: dict[int, dict[str, Any]] = {}
        super().__init__(cut, filed, scratch)

    def _size(self, place: Place) -> int:
        return state_bytes(self.layout.get(id(place.parameter), []))

    def tensors(self, parameter: Any) -> dict[str, Any]:
        found = self._tensors.get(id(parameter))
        if found is None:
            shapes = self.layout.get(id(parameter), [])
            found = {s.name: self.tensor(parameter, s.offset, s.shape, s.dtype) for s in shapes}
            self._tensors[id(parameter)] = found
        return found

    def move_in(self, optimizer: Any) -> None:
        """State that the optimizer brought along, or that was loaded."""
        for parameter, values in optimizer.state.items():
            if values and (id(parameter) in self._starts or id(parameter) in self.filed):
                moved = self._take(parameter, values)
                if moved and self._scratch is not None:
                    trim_heap()

    def _take(self, parameter: Any, values: dict[str, Any]) -> bool:
        """Bring a parameter's state home; False where it is."""
        homes = self.tensors(parameter)
        strange = {name: home for name, home in homes.items() if values[name].data_ptr() != home.data_ptr()}
        if strange and id(parameter) in self.filed:
            assert self._scratch is not None
            places = {shape.name: shape.offset for shape in self.layout[id(parameter)]}
            self._scratch.put(self.filed[id(parameter)], [(places[name], values[name]) for name in homes])
        for name, home in strange.items():
            if id(parameter) not in self.filed:
                home.copy_(values[name])
            values[name] = home
        return bool(strange)

    def take_over(self, old: State, optimizer: Any) -> None:
        """State from the blocks of another plan, which are given back as they empty."""
        moved: set[int] = set(old._starts) - {id(parameter) for parameter in optimizer.state}
        old.forget(moved)
        for parameter, values in optimizer.state.items():
            if values:
                self._take(parameter, values)
            moved.add(id(parameter))
            old.forget(moved)

    def forget(self, moved: Collection[int]) -> None:
        super().forget(moved)
        for key in [key for key in self._tensors if key in moved]:
            del self._tensors[key]

    def make_all(self) -> None:
        """All blocks now, several at once: the first step would have to, one after the other."""
        with ThreadPoolExecutor(MAKERS) as pool:
            list(pool.map(self._block, self._sizes))

    def close(self, optimizer: Any, home: bool = True) -> None:
        """Ordinary memory again; `home`: what is in the scratch file leaves it."""
        for parameter, values in optimizer.state.items() if home else ():
            if values and id(parameter) in self.filed:
                block = self.filed[id(parameter)].load()
                values |= {s.name: block.tensor(s.offset, s.shape, s.dtype) for s in self.layout.get(id(parameter), [])}
        self.unlock()
