"""Host memory of a model that visits a device: one page-locked block a unit, each tensor at its place in it.

In: the user's parameters and optimizer state in ordinary memory. Out: the same parameter objects, whose data lie in
blocks of exact size that a device copies by itself, a whole unit in one go. Every tensor keeps a storage of its own
size, so that saved files are what they were. A few units move at a time: that takes a few units more, not a second model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from outsize.engine.pinned import Pinned, lock_memory
from outsize.model.fitting.hosted.ring import aligned
from outsize.model.fitting.hosted.units import Cut, Place, Unit


@dataclass(frozen=True, slots=True)
class Shape:
    """One tensor of optimizer state: what it is and where it lies in the parameter's stretch."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    offset: int

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * int(self.dtype.itemsize)


MOVERS = 4
"""Units that move into their blocks at once."""
MAKERS = 8
"""Blocks that are made at once: the kernel clears and locks their pages, a core each."""

Layout = dict[int, list[Shape]]
"""id of a parameter -> its state that travels."""


def stretch(shapes: list[Shape]) -> int:
    """Bytes of a parameter's state, laid out."""
    return max((shape.offset + aligned(shape.size) for shape in shapes), default=0)


class Block:
    """One page-locked block and the tensors in it."""

    def __init__(self, size: int) -> None:
        self._memory: Pinned = lock_memory(size)
        self.bytes = self._memory.tensor()
        """All of it."""
        self.array = self._memory.array
        """All of it, for whoever fills it without torch."""

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """A tensor with a storage of its own, on this memory."""
        import torch

        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        array = self._memory.array[offset : offset + count * dtype.itemsize]
        return torch.frombuffer(array, dtype=dtype, count=count).view(shape)

    def unlock(self) -> None:
        """Ordinary memory from now on; no copy may be under way."""
        self._memory.close()


class Weights:
    """The weights of a model in blocks."""

    def __init__(self, cut: Cut, old: Weights | None = None) -> None:
        self.blocks: dict[str, Block] = {}
        """By name of the unit; the empty name is what stays on the device."""
        self.homes: dict[int, tuple[str, Place]] = {}
        """id of a parameter -> its unit and place."""
        self.strides: dict[int, tuple[int, ...]] = {} if old is None else dict(old.strides)
        """id of a parameter -> its strides as it was given, where they are not those of its block."""
        with ThreadPoolExecutor(MOVERS) as pool:
            for _ in pool.map(self._move, (*cut.units.values(), cut.held)):
                if old is not None:
                    old.forget(self.homes)

    def forget(self, moved: Iterable[int]) -> None:
        """Blocks whose parameters have all moved elsewhere are given back."""
        moved = set(moved)
        left = {name for key, (name, _) in self.homes.items() if key not in moved}
        for name in [name for name in self.blocks if name not in left]:
            self.blocks.pop(name).unlock()

    def _move(self, unit: Unit) -> None:
        import torch

        if not unit.own:
            return
        block = self.blocks[unit.name] = Block(unit.own)
        for place in unit.places:
            parameter = place.parameter
            here = block.tensor(place.offset, tuple(parameter.shape), parameter.dtype)
            if not parameter.is_contiguous():
                self.strides[id(parameter)] = parameter.stride()
            with torch.no_grad():
                here.copy_(parameter.data)
            parameter.data = here
            self.homes[id(parameter)] = (unit.name, place)

    def bytes_of(self, parameter: Any) -> Any:
        """The memory of one parameter."""
        name, place = self.homes[id(parameter)]
        return self.blocks[name].bytes[place.offset : place.offset + place.size]

    def close(self) -> None:
        """The parameters stay where they are, in memory that is ordinary again; those of another layout get it back."""
        import torch

        for key, strides in self.strides.items():
            parameter = self.homes[key][1].parameter
            given = torch.empty_strided(parameter.shape, strides, dtype=parameter.dtype)
            parameter.data = given.copy_(parameter.detach())
        for block in self.blocks.values():
            block.unlock()


class State:
    """Optimizer state in blocks, one a unit."""

    def __init__(self, cut: Cut, layout: Layout) -> None:
        self.layout = layout
        self._starts: dict[int, tuple[str, int]] = {}
        self._sizes: dict[str, int] = {}
        self._tensors: dict[int, dict[str, Any]] = {}
        self.blocks: dict[str, Block] = {}
        for unit in (*cut.units.values(), cut.held):
            size = 0
            for place in unit.places:
                self._starts[id(place.parameter)] = (unit.name, size)
                size += stretch(layout.get(id(place.parameter), []))
            self._sizes[unit.name] = size

    def bytes_of(self, parameter: Any) -> Any:
        """The stretch of one parameter's state."""
        name, start = self._starts[id(parameter)]
        return self._block(name).bytes[start : start + stretch(self.layout.get(id(parameter), []))]

    def tensors(self, parameter: Any) -> dict[str, Any]:
        """Its state tensors, on that stretch."""
        found = self._tensors.get(id(parameter))
        if found is None:
            name, start = self._starts[id(parameter)]
            block = self._block(name)
            shapes = self.layout.get(id(parameter), [])
            found = {s.name: block.tensor(start + s.offset, s.shape, s.dtype) for s in shapes}
            self._tensors[id(parameter)] = found
        return found

    def move_in(self, optimizer: Any) -> None:
        """State that the optimizer brought along."""
        for parameter, values in optimizer.state.items():
            if values and id(parameter) in self._starts:
                for name, tensor in self.tensors(parameter).items():
                    if values[name].data_ptr() != tensor.data_ptr():
                        tensor.copy_(values[name])
                        values[name] = tensor

    def take_over(self, old: State, optimizer: Any) -> None:
        """State from the blocks of another plan, which are given back as they empty."""
        moved: set[int] = set(old._starts) - {id(parameter) for parameter in optimizer.state}
        old.forget(moved)
        for parameter, values in optimizer.state.items():
            for name, tensor in self.tensors(parameter).items():
                tensor.copy_(values[name])
                values[name] = tensor
            moved.add(id(parameter))
            old.forget(moved)

    def forget(self, moved: set[int]) -> None:
        """Blocks whose parameters' state is all elsewhere are given back."""
        left = {name for key, (name, _) in self._starts.items() if key not in moved}
        for name in [name for name in self.blocks if name not in left]:
            self.blocks.pop(name).unlock()
        for key in [key for key in self._tensors if key in moved]:
            del self._tensors[key]

    def make_all(self) -> None:
        """All blocks now, several at once: the first step would have to, one after the other."""
        with ThreadPoolExecutor(MAKERS) as pool:
            list(pool.map(self._block, self._sizes))

    def close(self) -> None:
        """Ordinary memory again."""
        for block in self.blocks.values():
            block.unlock()

    def _block(self, name: str) -> Block:
        if name not in self.blocks:
            self.blocks[name] = Block(self._sizes[name])
        return self.blocks[name]
