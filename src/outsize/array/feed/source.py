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
import math
import mmap
import os
import pickle
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from outsize.array.api.lazy import Array
from outsize.array.graph.frame import Frame
from outsize.array.graph.node import Node, Source, walk
from outsize.array.graph.settle import settle
from outsize.array.store.base import Block, Buffer, Region, Store, region_shape, whole
from outsize.array.store.registry import open_store
from outsize.core.errors import BudgetError, InputError
from outsize.core.units import MiB, format_bytes, parse_bytes
from outsize.machine import current_budget

Batch = Block | tuple[Block, ...]

_STRETCH = 4 * MiB
"""Bytes of rows read at once, where the budget has room: long enough that a disk is at its full rate."""
_DRAWN = 24
"""Bytes per row of a window for the numbers that say which rows are drawn."""
_SAMPLES = 64
"""Places of an array at which the extent of a stretch is asked for; it differs only where blocks of unequal size
meet."""
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
        self.budget = _default_budget() if budget is None else parse_bytes(budget)
        """Bytes that one process may hold for its rows."""
        self._process = os.getpid()
        self._buffer: Buffer | None = None

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
        from outsize.array.feed.torch_batches import TorchBatches

        return TorchBatches(
            self, size=batch_size, shuffle=shuffle, seed=seed, window=window, drop_last=drop_last, shard=shard
        )

    def to_tensorflow(self, batch_size: int, **options: Any) -> Any:
        """A `tf.data.Dataset` of batches; options are those of `batches`."""
        import tensorflow as tf

        signature = tuple(tf.TensorSpec((None, *shape), dtype) for shape, dtype in self.specs)
        return tf.data.Dataset.from_generator(
            lambda: self.batches(batch_size, **options),
            output_signature=signature[0] if len(signature) == 1 else signature,
        )

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

    def _row_bytes(self) -> int:
        return sum(math.prod(store.shape[1:]) * store.dtype.itemsize for store in self._stores)

    def _extent(self, rows: int) -> int:
        """Most buffer that reading a stretch of this many rows takes."""
        step = max(rows, self._length // _SAMPLES)
        starts = [*range(0, self._length, step), max(0, self._length - rows)]
        return max(
            (store.extent(_rows_region(store, start, min(self._length, start + rows)))
             for store in self._stores for start in starts), default=0,
        )  # fmt: skip

    def _gather(self, indices: list[int]) -> list[Block]:
        """Rows in the order of `indices`, new arrays that belong to the caller; near ones are read together."""
        held = len(indices) * self._row_bytes()
        ordered = sorted(range(len(indices)), key=indices.__getitem__)
        most = 1
        while most < _NEAR and held + self._extent(2 * most) <= self.budget:
            most *= 2
        self._refuse_over(held + self._extent(1), f"{len(indices)} rows")
        out = [np.empty((len(indices), *shape), dtype) for shape, dtype in self.specs]
        at = 0
        while at < len(ordered):
            first = indices[ordered[at]]
            end = at
            while end < len(ordered) and indices[ordered[end]] < first + most:
                end += 1
            last = indices[ordered[end - 1]] + 1
            for store, target in zip(self._open(), out, strict=True):
                region = _rows_region(store, first, last)
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
        row = max(1, self._row_bytes())
        wanted = 0 if not shuffle or window is None else self._length if window == "all" else int(window)
        fixed = 2 * batch * row + wanted * (row + _DRAWN)

        def held(rows: int) -> int:
            return fixed + self._extent(rows) + (2 if shuffle else 1) * rows * row

        what = f"a shuffling window of {wanted} rows" if wanted else f"batches of {batch} rows" if batch else "rows"
        self._refuse_over(held(1), what)
        granule = max(1, *(store.granule[0] for store in self._stores))
        stretch = max(1, min(self._length, -(-max(1, _STRETCH // row) // granule) * granule))
        share = fixed + (self.budget - fixed) // 4 if shuffle and not wanted else self.budget
        while stretch > 1 and held(stretch) > share:
            stretch = stretch // 2 if stretch <= granule else max(granule, stretch // 2 // granule * granule)
        room = (self.budget - held(stretch)) // (row + _DRAWN)
        return stretch, wanted or max(1, min(self._length, room))

    def _refuse_over(self, needed: int, what: str) -> None:
        if needed > self.budget:
            raise BudgetError(
                f"{what} hold {format_bytes(needed)}, the budget of the data source is {format_bytes(self.budget)}; "
                f"the smallest that works is {format_bytes(needed)}",
                needed=needed, budget=self.budget, smallest=needed, culprit=what,
            )  # fmt: skip

    def _stretches(self, numbers: Iterable[int], rows: int) -> Iterator[list[Block]]:
        """Stretches of `rows` rows by number; the blocks are new arrays and belong to the caller."""
        for number in numbers:
            start = int(number) * rows
            stop = min(self._length, start + rows)
            blocks = []
            for store, (_, dtype) in zip(self._open(), self.specs, strict=True):
                region = _rows_region(store, start, stop)
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


def _rows_region(store: Store, start: int, stop: int) -> Region:
    return ((start, stop), *whole(store.shape)[1:])


def _default_budget() -> int:
    return current_budget().host or 256 * MiB


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
        self.granule = tuple(min(1, length) for length in node.shape)
        self.paths = tuple(path for n in walk(node) if isinstance(n, Source) for path in n.store.paths)
        self._node = node

    def _measured(self, region: Region) -> Frame:
        frame = Frame(None, {})
        frame.array(region_shape(region), self.dtype)
        frame.evaluate(self._node, region)
        return frame

    def extent(self, region: Region) -> int:
        frame = self._measured(region)
        return frame.peak + frame.outside

    def traffic(self, region: Region) -> int:
        return sum(store.traffic(read) for store, read in self._measured(region).reads)

    def read(self, region: Region, buffer: Buffer) -> Block:
        frame = Frame(buffer, {})
        block = frame.array(region_shape(region), self.dtype)
        return frame.evaluate(self._node, region, block)
