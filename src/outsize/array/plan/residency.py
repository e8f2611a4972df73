"""Where a pass may put its result besides a user's file: memory that stays, a scratch file, or a turned view of another sink;
and a source of which the beginning stays in memory after it was read.

A plan has descriptions of them, which take no memory and no file. The run makes the real ones out of these.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

import numpy as np

from outsize.array.graph.frame import phantom
from outsize.array.store.base import Block, Buffer, Region, Sink, Store, block_in
from outsize.array.store.formats.flat import FlatLayout, FlatSink, FlatStore
from outsize.array.store.formats.memory import MemorySink, MemoryStore
from outsize.array.store.io.file import AlignedFile
from outsize.array.store.io.view import SeenSink, SeenStore
from outsize.engine.pool import make_buffer


class Kept(MemorySink):
    """A result that stays in memory until its last reader; without memory of its own until `create` or `make`."""

    shared = True  # workers of a cluster tell what they wrote

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> None:
        super().__init__(phantom(shape, dtype), name)
        self.order = None
        self.nbytes = self.array.nbytes

    def create(self, *, resume: bool = False) -> None:
        """Memory that belongs to whoever takes the result."""
        self._lie_in(make_buffer(self.nbytes))

    def make(self, buffer: Buffer) -> Kept:
        """One that lies in a buffer."""
        made = Kept(self.shape, self.dtype, self.name)
        made._lie_in(buffer)
        return made

    def _lie_in(self, buffer: Buffer) -> None:
        self.array = block_in(buffer, self.shape, self.dtype)

    def store(self) -> Store:
        return MemoryStore(self.array, self.name)


class Head(SeenStore):
    """A source whose first indices along its slowest axis stay in memory once a pass has read them. It is only a cache: what was
    not read is read from the source."""

    def __init__(self, inner: Store, rows: int, *, filled: bool) -> None:
        self.inner, self.rows, self.filled = inner, rows, filled
        self.name, self.shape, self.dtype, self.paths = inner.name, inner.shape, inner.dtype, inner.paths
        self.granule, self.order = inner.granule, inner.order
        self.axis = inner.order[0] if inner.order else 0
        self.memory: Block | None = None

    def kept(self) -> Kept:
        """The memory that its beginning takes."""
        order = self.order or tuple(range(len(self.shape)))
        lengths = [self.rows if axis == self.axis else self.shape[axis] for axis in order]
        return Kept(
            tuple(lengths), self.dtype, f"{self.rows / self.shape[self.axis]:.0%} of {os.path.basename(self.name)}"
        )

    def lie_in(self, kept: Kept) -> Head:
        """One that keeps its beginning there."""
        made = Head(self.inner, self.rows, filled=False)
        made.memory = kept.array.transpose(np.argsort(self.order)) if self.order else kept.array
        return made

    def traffic(self, region: Region) -> int:
        """On the average of all regions, where a pass before this one has filled it."""
        return self._share(self.inner.traffic(region))

    def seeks(self, region: Region) -> int:
        return self._share(self.inner.seeks(region))

    def _share(self, of_all: int) -> int:
        length = self.shape[self.axis]
        return -(-of_all * (length - self.rows) // length) if self.filled else of_all

    def read(self, region: Region, buffer: Buffer) -> Block:
        start, stop = region[self.axis]
        memory = self.memory
        assert memory is not None
        place = tuple(slice(*span) for span in region)
        if self.filled and stop <= self.rows:
            return memory[place]
        block = self.inner.read(region, buffer)
        if not self.filled and start < self.rows:
            part = (slice(None),) * self.axis
            np.copyto(memory[(*place[: self.axis], slice(start, min(stop, self.rows)), *place[self.axis + 1 :])],
                      block[(*part, slice(0, min(stop, self.rows) - start))])  # fmt: skip
        return block


class ScratchStore(FlatStore):
    """Reads a scratch file."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> None:
        self.shape, self.dtype, self.name = shape, dtype, name
        self.layout = FlatLayout(shape, dtype, 0)


class Scratch(FlatSink):
    """A result that is written to the scratch folder and removed after its last reader; without a file until `make`."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> None:
        self.shape, self.dtype, self.name = shape, dtype, name
        self.partial = "scratch"
        self.layout = FlatLayout(shape, dtype, 0)
        self.reader = ScratchStore(shape, dtype, name)
        self.nbytes = self.layout.nbytes

    def make(self, path: str) -> Scratch:
        """One with a file."""
        made = Scratch(self.shape, self.dtype, self.name)
        made.partial = path
        made.file = made.reader.file = AlignedFile(path, writable=True, create=True)
        made.file.allocate(self.nbytes)
        made.reader.paths = (path,)
        return made

    def store(self) -> Store:
        return self.reader

    def sync(self) -> None:
        """Scratch need not survive a crash."""

    def end(self) -> None:
        self.file.close()
        pathlib.Path(self.partial).unlink(missing_ok=True)


class Turned(SeenSink):
    """A sink seen with its axes in another order, or with axes of length 1 more or fewer."""

    def __init__(self, sink: Sink, shape: tuple[int, ...], targets: tuple[int | None, ...]) -> None:
        self.sink, self.shape, self.targets = sink, shape, targets
        self.name, self.dtype, self.partial = sink.name, sink.dtype, sink.partial
        self.granule = tuple(1 if t is None else sink.granule[t] for t in targets)
        under = sink.order or tuple(range(len(sink.shape)))
        place = {axis: rank for rank, axis in enumerate(under)}
        ranks = [-1 if target is None else place[target] for target in targets]
        order = tuple(sorted(range(len(shape)), key=lambda axis: ranks[axis]))
        self.order = None if order == tuple(range(len(shape))) else order

    def _under(self, region: Region) -> Region:
        spans: list[tuple[int, int]] = [(0, 1)] * len(self.sink.shape)
        for span, target in zip(region, self.targets, strict=True):
            if target is not None:
                spans[target] = span
        return tuple(spans)

    def _over(self, block: Block) -> Block:
        """A block of the sink below, with our axes."""
        kept = [t for t in self.targets if t is not None]
        picks = tuple(slice(None) if axis in kept else 0 for axis in range(block.ndim))
        ranks = {target: rank for rank, target in enumerate(sorted(kept))}
        view = block[(*picks, ...)].transpose([ranks[t] for t in kept])
        return view[(*(None if t is None else slice(None) for t in self.targets), ...)]

    def _below(self, block: Block) -> Block:
        """A block of ours, with the axes of the sink below."""
        view = block[(*(0 if t is None else slice(None) for t in self.targets), ...)]
        kept = [t for t in self.targets if t is not None]
        view = view.transpose([kept.index(t) for t in sorted(kept)])
        return view[(*(slice(None) if axis in kept else None for axis in range(len(self.sink.shape))), ...)]
