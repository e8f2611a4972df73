"""An array larger than memory as training data: rows for PyTorch, TensorFlow, or a plain loop, inside a budget.

In: arrays (or paths, or stores) that share their axis 0. Out: single rows by index, batches in order, or batches in a
shuffled order, without ever holding more than the budget.

Shuffling. A full uniform shuffle reads every row on its own, which a disk serves hundreds of times slower than it
serves stretches. So `batches(shuffle=True)` reads stretches of rows in random order into a window, and draws rows at
random from the window, which is refilled as it drains. Every row comes exactly once an epoch, and the order is the
same for the same seed and epoch; but rows that stand close together in the file come closer together than chance
would have it, unless the window holds all rows (`window="all"`), which is a full uniform shuffle. `DataLoader(source,
shuffle=True)` is one too, at the price of a read per row.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from outsize.array.api.lazy import Array
from outsize.array.feed.rows import RowWork, rows_region, size_rows
from outsize.array.graph.frame import Frame
from outsize.array.graph.node import Node, Source, walk
from outsize.array.graph.settle import settle
from outsize.array.passes.base import traffic
from outsize.array.plan.prepare import resolve_budget
from outsize.array.store.base import Block, Buffer, Region, Store, region_shape
from outsize.array.store.registry import open_store
from outsize.core.errors import InputError
from outsize.core.extras import need
from outsize.core.units import MiB, format_bytes

Batch = Block | tuple[Block, ...]

_NEAR = 64
"""Rows that are asked for together and lie fewer rows apart than this are read as one stretch."""


class DataSource:
    """Rows of one or more arrays. A map-style dataset: `len(source)`, `source[i]`, `source[2:5]`, `source[[7, 1, 3]]`.

    >>> source = DataSource("images.npy", "labels.npy", budget="256MiB")
    >>> loader = torch.utils.data.DataLoader(source, batch_size=64, shuffle=True, num_workers=2)
    """

    def __init__(self, *arrays: Any, budget: int | str | None = None) -> None:
        if not arrays:
            raise InputError("a data source needs at least one array")
        self._stores = tuple(_as_store(array) for array in arrays)
        lengths = [store.shape[0] if store.shape else None for store in self._stores]
        if None in lengths or len(set(lengths)) > 1:
            raise InputError(f"arrays of one data source need the same length along axis 0, these have {lengths}")
        self._length: int = lengths[0] or 0
        given = resolve_budget(budget).host
        self.budget = 256 * MiB if given is None else given
        """Bytes that one process may hold for its rows."""
        self._process = os.getpid()
        self._buffer: Buffer | None = None
        self._near: dict[int, int] = {}

    @property
    def specs(self) -> tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]:
        """(shape of a row, dtype) of every array."""
        return tuple((store.shape[1:], store.dtype.newbyteorder("=")) for store in self._stores)

    def with_budget(self, budget: int | str) -> DataSource:
        """The same rows inside another budget."""
        return DataSource(*self._open(), budget=budget)

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        parts = ", ".join(f"{store.name} {store.dtype}{list(store.shape[1:])}" for store in self._stores)
        return f"DataSource({self._length} rows of {parts}, budget {format_bytes(self.budget)})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_buffer": None, "_process": None}

    def __getitem__(self, index: Any) -> Batch:
        """One row, or a batch for a slice or a list of indices."""
        if isinstance(index, slice):
            return self.take(range(*index.indices(self._length)))
        if isinstance(index, Sequence | np.ndarray):
            return self.take([int(number) for number in index])
        rows = self._gather([self._check_index(index)])
        return self._pack([block[0] for block in rows])

    def __getitems__(self, indices: Sequence[int]) -> list[Batch]:
        """The rows of one batch, as PyTorch's loader asks for them; read together where they are near each other."""
        rows = self._gather([self._check_index(index) for index in indices])
        return [self._pack([block[number] for block in rows]) for number in range(len(indices))]

    def take(self, indices: Sequence[int]) -> Batch:
        """The rows of a list of indices, in its order."""
        return self._pack(self._gather([self._check_index(index) for index in indices]))

    def __iter__(self) -> Iterator[Batch]:
        """Every row in order."""
        stretch, _ = self._plan(1)
        for blocks in self._stretches(range(self._stretch_count(stretch)), stretch):
            for number in range(len(blocks[0])):
                yield self._pack([np.array(block[number]) for block in blocks])
            del blocks  # before the next stretch is read

    def batches(
        self, size: int, *, shuffle: bool = False, seed: int = 0, epoch: int = 0, window: int | Literal["all"] | None = None,
        drop_last: bool = False, shard: tuple[int, int] = (0, 1),
    ) -> Iterator[Batch]:  # fmt: skip
        """Batches of `size` rows: in order, or shuffled through a window of that many rows (by default what the budget
        holds).

        `shard=(i, n)` takes the i-th of n shares, for n workers or machines; shares do not overlap and cover
        everything.
        """
        if size < 1:
            raise InputError(f"a batch has at least 1 row, not {size}")
        stretch, kept = self._plan(size, shuffle=shuffle, window=window)
        order = np.arange(self._stretch_count(stretch))
        random = np.random.default_rng([seed, epoch]) if shuffle else None
        if random is not None:
            random.shuffle(order)
        mine = order[shard[0] :: shard[1]]
        blocks = self._stretches(mine, stretch)
        if random is not None:
            own = np.random.default_rng([seed, epoch, *shard])
            blocks = self._shuffled(blocks, own, kept, stretch)
        for parts in self._cut(blocks, size):
            if len(parts[0]) == size or not drop_last:
                yield self._pack(parts)

    def to_torch(
        self, batch_size: int, *, shuffle: bool = False, seed: int = 0, window: int | Literal["all"] | None = None,
        drop_last: bool = False, shard: tuple[int, int] = (0, 1),
    ) -> Any:  # fmt: skip
        """A `torch.utils.data.IterableDataset` of batches; its workers share the rows and the budget between them.

        >>> loader = torch.utils.data.DataLoader(source.to_torch(64, shuffle=True), batch_size=None, num_workers=2)
        """
        need("torch", "DataSource.to_torch")
        from outsize.array.feed.torch_batches import TorchBatches

        return TorchBatches(
            self, size=batch_size, shuffle=shuffle, seed=seed, window=window, drop_last=drop_last, shard=shard
        )

    def to_tensorflow(self, batch_size: int, **options: Any) -> Any:
        """A `tf.data.Dataset` of batches; options are those of `batches`."""
        tf = need("tensorflow", "DataSource.to_tensorflow")
        signature = tuple(tf.TensorSpec((None, *shape), dtype) for shape, dtype in self.specs)
        return tf.data.Dataset.from_generator(
            lambda: self.batches(batch_size, **options),
            output_signature=signature[0] if len(signature) == 1 else signature,
        )

    def to_jax(self, batch_size: int, *, device: Any = None, **options: Any) -> Iterator[Any]:
        """Batches as arrays of JAX, the next one on its way while one is used; other options are those of `batches`.

        `device` is a device or a sharding. A source is a random access source of grain too: `grain.MapDataset.source(source)`.
        """
        jax = need("jax", "DataSource.to_jax")
        put = functools.partial(jax.device_put, device=device)  # starts a copy and returns
        return _one_ahead(map(put, self.batches(batch_size, **options)))

    # Reading

    def _check_index(self, index: Any) -> int:
        number = int(index)
        if not -self._length <= number < self._length:
            raise IndexError(f"row {number} of {self._length}")
        return number % self._length

    def _pack(self, parts: list[Block]) -> Batch:
        return parts[0] if len(parts) == 1 else tuple(parts)

    def _open(self) -> tuple[Store, ...]:
        """The stores, opened again in a process that was forked or got them by pickle."""
        if self._process != os.getpid():
            if self._process is not None:  # a fork: own handles, where the stores can be opened again
                with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
                    self._stores = pickle.loads(pickle.dumps(self._stores))
            self._process, self._buffer = os.getpid(), None
        return self._stores

    def _scratch(self, size: int) -> Buffer:
        """A buffer of at least this size; one is kept."""
        if self._buffer is None or self._buffer.nbytes < size:
            self._buffer = None
            self._buffer = np.frombuffer(mmap.mmap(-1, max(size, mmap.PAGESIZE)), np.uint8)
        return self._buffer[:size]

    def _nearest(self, number: int) -> int:
        """How many rows are read together where so many are asked for; sized once for every number."""
        if number not in self._near:
            work = RowWork(self._stores, self._length, number, 0, _NEAR)
            self._near[number] = size_rows(work, self.budget, f"{number} rows").stretch
        return self._near[number]

    def _gather(self, indices: list[int]) -> list[Block]:
        """Rows in the order of `indices`, new arrays that belong to the caller; near ones are read together."""
        ordered = sorted(range(len(indices)), key=indices.__getitem__)
        most = self._nearest(len(indices))
        out = [np.empty((len(indices), *shape), dtype) for shape, dtype in self.specs]
        at = 0
        while at < len(ordered):
            first = indices[ordered[at]]
            end = at
            while end < len(ordered) and indices[ordered[end]] < first + most:
                end += 1
            last = indices[ordered[end - 1]] + 1
            for store, target in zip(self._open(), out, strict=True):
                region = rows_region(store, first, last)
                block = store.read(region, self._scratch(store.extent(region)))
                for place in ordered[at:end]:
                    target[place] = block[indices[place] - first]
            at = end
        return out

    def _stretch_count(self, rows: int) -> int:
        return -(-self._length // rows)

    def _plan(
        self, batch: int, *, shuffle: bool = False, window: int | Literal["all"] | None = None
    ) -> tuple[int, int]:
        """(rows of a stretch, rows of the shuffling window) with which everything that is held is inside the budget.

        Held are two batches (one with the caller, one being filled), a stretch with what reading it takes, and when
        shuffling the window, the rows drawn from it and the numbers that say which.
        """
        wanted = None if not shuffle else 0 if window is None else self._length if window == "all" else int(window)
        what = f"a shuffling window of {wanted} rows" if wanted else f"batches of {batch} rows" if batch else "rows"
        work = RowWork(self._stores, self._length, 2 * batch, 2 if shuffle else 1, None, wanted)
        sized = size_rows(work, self.budget, what)
        return sized.stretch, sized.window

    def _stretches(self, numbers: Iterable[int], rows: int) -> Iterator[list[Block]]:
        """Stretches of `rows` rows by number; the blocks are new arrays and belong to the caller."""
        for number in numbers:
            start = int(number) * rows
            stop = min(self._length, start + rows)
            blocks = []
            for store, (_, dtype) in zip(self._open(), self.specs, strict=True):
                region = rows_region(store, start, stop)
                blocks.append(np.array(store.read(region, self._scratch(store.extent(region))), dtype, order="C"))
            yield blocks
            del blocks  # before the next stretch is read

    def _shuffled(
        self, blocks: Iterator[list[Block]], random: np.random.Generator, window: int, stretch: int
    ) -> Iterator[list[Block]]:
        """Rows drawn at random from a window that incoming rows refill; pieces of at most a stretch of rows."""
        held = [np.empty((window, *shape), dtype) for shape, dtype in self.specs]
        filled = 0
        for incoming in blocks:
            while len(incoming[0]):
                taken = min(len(incoming[0]), window - filled)
                for number, target in enumerate(held):
                    target[filled : filled + taken] = incoming[number][:taken]
                filled += taken
                incoming = [block[taken:] for block in incoming]
                drawn = min(len(incoming[0]), window)
                if drawn:
                    slots = random.choice(filled, drawn, replace=False)
                    yield [target[slots] for target in held]
                    for number, target in enumerate(held):
                        target[slots] = incoming[number][:drawn]
                    incoming = [block[drawn:] for block in incoming]
            del incoming  # before the next stretch is read
        rest = random.permutation(filled)
        for start in range(0, filled, stretch):
            yield [target[rest[start : start + stretch]] for target in held]

    def _cut(self, blocks: Iterator[list[Block]], size: int) -> Iterator[list[Block]]:
        """Pieces of any length as batches of one size, the last one shorter."""
        batch, filled = [np.empty((size, *shape), dtype) for shape, dtype in self.specs], 0
        for parts in blocks:
            start = 0
            while start < len(parts[0]):
                taken = min(size - filled, len(parts[0]) - start)
                for number, target in enumerate(batch):
                    target[filled : filled + taken] = parts[number][start : start + taken]
                start, filled = start + taken, filled + taken
                if filled == size:
                    yield batch
                    batch, filled = [np.empty((size, *shape), dtype) for shape, dtype in self.specs], 0
            del parts  # before the next stretch is read
        if filled:
            yield [target[:filled] for target in batch]


def _one_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """The next batch is made before the present one is handed out."""
    before = next(batches, None)
    for now in batches:
        yield before
        before = now
    if before is not None:
        yield before


def _as_store(array: Any) -> Store:
    """The store behind whatever was given."""
    if isinstance(array, Store):
        return array
    if isinstance(array, Array):
        return array.node.store if isinstance(array.node, Source) else LazyRows(array.node)
    return open_store(array)


class LazyRows(Store):
    """Rows of an array that is computed as it is read: slices, casts and elementwise work on stored arrays."""

    def __init__(self, node: Node) -> None:
        for inner in walk(settle(node)):
            if inner.barrier:
                raise InputError(
                    f"rows of an array with a '{inner.label()}' in it would be computed anew for every batch: "
                    f"save it first, and feed what was saved"
                )
        self.name, self.shape, self.dtype = node.label(), node.shape, node.dtype
        self.paths = tuple(path for n in walk(node) if isinstance(n, Source) for path in n.store.paths)
        self._node = node

    def _measured(self, region: Region, *, loose: bool = False) -> Frame:
        frame = Frame(None, {})
        frame.loose = loose
        frame.array(region_shape(region), self.dtype)
        frame.evaluate(self._node, region)
        return frame

    def extent(self, region: Region, *, loose: bool = False) -> int:
        frame = self._measured(region, loose=loose)
        return frame.peak + frame.outside

    def most(self, region: Region) -> int:
        return self.extent(region, loose=True)

    def traffic(self, region: Region) -> int:
        return traffic(self._measured(region))

    def read(self, region: Region, buffer: Buffer) -> Block:
        frame = Frame(buffer, {})
        block = frame.array(region_shape(region), self.dtype)
        return frame.evaluate(self._node, region, block)
