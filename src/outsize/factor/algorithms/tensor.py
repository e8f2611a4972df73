"""A tensor on its way: the user's data first, then what each projection leaves of them, in memory or in a scratch file."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from outsize.array.graph import build as make
from outsize.array.graph.frame import phantom
from outsize.array.graph.node import Node
from outsize.array.plan.residency import Scratch, ScratchStore
from outsize.array.store.base import Block, Region, region_shape
from outsize.array.store.formats.memory import MemoryStore
from outsize.engine.pool import make_buffer, round_to_pages


class Tensor:
    """What a pass reads."""

    def __init__(
        self, node: Node, *, left: bool = False, end: Callable[[], None] = lambda: None,
        seen: Callable[[tuple[int, ...]], Node] | None = None,
    ) -> None:  # fmt: skip
        self.node, self.left, self.end, self._seen = node, left, end, seen
        self.shape, self.dtype = node.shape, node.dtype
        """`left`: a projection left it, and it is held until `end` is called; else it is the user's."""

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def reshaped(self, shape: tuple[int, ...]) -> Tensor:
        """The same elements in C order under another shape."""
        if shape == self.shape:
            return self
        node = self._seen(shape) if self._seen is not None else make.reshape(self.node, shape)
        return Tensor(node, left=self.left, end=self.end, seen=self._seen)


class Target:
    """What a projection writes: an array in memory, or a file in the scratch folder."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], path: str | None) -> None:
        self.shape, self.dtype, self.path = shape, dtype, path
        self.nbytes = math.prod(shape) * dtype.itemsize
        self.written = 0 if path is None else self.nbytes
        self._array: Block | None = None
        self._sink: Scratch | None = None
        self._described = Scratch(shape, dtype, "what is left")

    def create(self) -> None:
        """Take the memory, or the file: the one that an earlier run left, if it is there."""
        if self.path is None:
            self._array = np.ndarray(self.shape, self.dtype, make_buffer(max(1, self.nbytes)).data)
        else:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            self._sink = self._described.make(self.path)

    def __reduce__(self) -> Any:
        return Target, (self.shape, self.dtype, self.path)  # another process opens the same file

    def room(self, shape: tuple[int, ...]) -> int:
        """Bytes of buffer that writing a block of this shape takes."""
        if self.path is None:
            return 0
        region = tuple((0, n) for n in shape)
        return round_to_pages(self._described.room(region) + self._described.extent(region))

    def write(self, region: Region, block: Block) -> None:
        """Put a block in its place; its elements are rounded to the target's."""
        if self._array is not None:
            self._array[tuple(slice(*span) for span in region)] = block
            return
        assert self._sink is not None
        room = self._sink.room(region)
        buffer = make_buffer(room + self._sink.extent(region))
        laid = self._sink.lay(region, buffer[:room])
        np.copyto(laid, block.reshape(region_shape(region)), casting="unsafe")
        self._sink.write(region, laid, buffer[room:])

    def sync(self) -> None:
        """Make what is in the file survive a kill of the machine."""
        if self.path is not None:
            handle = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def state(self) -> dict[str, Any]:
        """What is in memory."""
        return {} if self._array is None else {"left": self._array}

    def restore(self, state: dict[str, Any]) -> None:
        """Take it back."""
        if self._array is not None:
            np.copyto(self._array, state["left"])

    def tensor(self) -> Tensor:
        """What is left, to be read."""
        if self._array is not None:
            array = self._array
            return Tensor(make.source(MemoryStore(array)), left=True,
                          seen=lambda shape: make.source(MemoryStore(array.reshape(shape))))  # fmt: skip
        sink = self._sink
        assert sink is not None

        def seen(shape: tuple[int, ...]) -> Node:
            store = ScratchStore(shape, self.dtype, "what is left")
            store.file, store.paths = sink.file, (sink.partial,)
            return make.source(store)

        return Tensor(seen(self.shape), left=True, end=sink.end, seen=seen)

    def phantom(self) -> Tensor:
        """What a plan has instead of what is left: it is read like that, and takes nothing."""

        def seen(shape: tuple[int, ...]) -> Node:
            if self.path is None:
                return make.source(MemoryStore(phantom(shape, self.dtype)))
            return make.source(ScratchStore(shape, self.dtype, "what is left"))

        return Tensor(seen(self.shape), left=True, seen=seen)

    def close(self) -> None:
        """Let go of it; a file stays."""
        self._array = None
        if self._sink is not None:
            self._sink.file.close()
            self._sink = None

    def abandon(self) -> None:
        """Let go of it."""
        self._array = None
        if self._sink is not None:
            self._sink.end()
            self._sink = None
