"""Parquet and Arrow (Feather) files: numeric columns as a matrix, or one column by its key.

A file of several columns is rows by columns, in the dtype that holds all of them. Missing values are NaN among floats, and are
refused among whole numbers. One column is decoded at a time: of Parquet a few rows at a time, page by page, of Arrow a record
batch. So a row group may be larger than the budget. What that takes is counted from the sizes in the file's own metadata.
Arrow's usual allocator keeps what is freed, so it is told to give that back after every column.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from outsize.array.store.base import Block, Region, Store, round_up
from outsize.array.store.formats.pieces import Decoded, touched
from outsize.array.store.options import Options
from outsize.core.errors import InputError, StoreError
from outsize.core.extras import need

_ALLOCATOR = "ARROW_DEFAULT_MEMORY_POOL"
_ROWS = 1 << 16
"""Rows of a Parquet column that are decoded at once."""
_STREAM = 1 << 16
"""Bytes of a Parquet column that are read from the file at once."""
_LEAST = 1 << 18
"""Bytes of an Arrow file that are read at once where columns are short: opening a file takes time for each of its columns."""
_CONSTANT = 1 << 17
"""Bytes of readers and decompressors, whatever they read."""
_FIELD = 512
"""Bytes of the schema for each column while a file is open."""


@functools.cache
def _library() -> Any:
    """pyarrow; where nobody has loaded it yet, with the allocator of the C library, which gives back what is freed."""
    given, name = os.environ.get(_ALLOCATOR), _ALLOCATOR
    try:
        os.environ[name] = given or "system"
        pyarrow = need("pyarrow", "reading Parquet and Arrow files")
        pyarrow.default_memory_pool()
    finally:
        if given is None:
            del os.environ[name]
    return pyarrow


def open_file(path: str, options: Options) -> Store:
    """The numeric columns of a file, or the one that the key names."""
    arrow = _library()
    try:
        with open(path, "rb") as file:
            parquet = file.read(4) == b"PAR1"
        source = ParquetColumns(path) if parquet else ArrowColumns(path)
    except (arrow.ArrowException, OSError) as error:
        raise StoreError(f"{path} cannot be read as Parquet or Arrow: {error}", path=path) from None
    numeric = {field.name: field.type.to_pandas_dtype() for field in source.schema if _is_number(field.type)}
    if options.key is not None and options.key not in numeric:
        raise InputError(f"{path} has no column of numbers {options.key!r}: it has {', '.join(numeric) or 'none'}")
    others = [field.name for field in source.schema if field.name not in numeric]
    if others and options.key is None:
        raise InputError(
            f"{path} has columns that are no numbers ({', '.join(others[:5])}): name one that is, as {path}::COLUMN, of "
            f"{', '.join(numeric) or 'none'}"
        )
    names = [options.key] if options.key is not None else list(numeric)
    if not names:
        raise InputError(f"{path} has no columns")
    return ColumnStore(path, source, names, [np.dtype(numeric[name]) for name in names], options.key)


def _is_number(type_: Any) -> bool:
    from pyarrow import types

    return bool(types.is_integer(type_) or types.is_floating(type_) or types.is_boolean(type_))


class ParquetColumns:
    """The columns of a Parquet file."""

    def __init__(self, path: str) -> None:
        import pyarrow.parquet

        self._path, self._meta = path, pyarrow.parquet.read_metadata(path)
        self.schema = self._meta.schema.to_arrow_schema()
        self.counts = [self._meta.row_group(number).num_rows for number in range(self._meta.num_row_groups)]
        self._places = {self._meta.schema.column(at).path: at for at in range(self._meta.num_columns)}

    def memory(self, names: list[str]) -> int:
        """Pages as they lie and unpacked, a dictionary, and some rows of 8 bytes or less, twice and with their levels."""
        chunks = [
            self._meta.row_group(group).column(self._places[name])
            for group in range(len(self.counts))
            for name in names
        ]
        pages = max((chunk.total_compressed_size + 2 * chunk.total_uncompressed_size for chunk in chunks), default=0)
        return pages + 32 * min(_ROWS, max(self.counts, default=0)) + _FIELD * len(self.schema) + _CONSTANT

    def read(self, group: int, names: list[str]) -> Iterator[Iterator[Any]]:
        """For each of the columns its values in a row group, few rows at a time."""
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(
            self._path, metadata=self._meta, buffer_size=_STREAM, pre_buffer=False
        ) as file:
            for name in names:
                batches = file.reader.iter_batches(_ROWS, [group], [self._places[name]], use_threads=False)
                yield (batch.column(0) for batch in batches)


class ArrowColumns:
    """The columns of an Arrow file, each whole in a record batch."""

    def __init__(self, path: str) -> None:
        import pyarrow

        self._path = path
        with pyarrow.memory_map(path) as file:
            reader = self._open(file, [])
            self.schema = reader.schema
            widths = [field.type.bit_width if _is_number(field.type) else 1 << 30 for field in reader.schema]
            if widths:  # how many rows a batch has is known with a column of it
                reader = self._open(file, [int(np.argmin(widths))])
            self.counts = [reader.get_batch(number).num_rows for number in range(reader.num_record_batches)]

    def _open(self, file: Any, places: list[int]) -> Any:
        import pyarrow
        import pyarrow.ipc

        options = pyarrow.ipc.IpcReadOptions(included_fields=places, use_threads=False)
        return pyarrow.ipc.open_file(file, options=options)

    def memory(self, names: list[str]) -> int:
        """A column as it lies, unpacked, and as NumPy's."""
        return (
            3 * max(self._most_of_a_column(names), min(_LEAST, len(names) * self._most_of_a_column(names)))
            + _FIELD * len(self.schema)
            + _CONSTANT
        )

    def _most_of_a_column(self, names: list[str]) -> int:
        widest = max(self.schema.field(name).type.bit_width for name in names)
        return int(max(self.counts, default=0) * (-(-widest // 8) + 1) + 64)

    def read(self, batch: int, names: list[str]) -> Iterator[Iterator[Any]]:
        """For each of the columns its values in a record batch."""
        import pyarrow

        step = max(1, _LEAST // max(1, self._most_of_a_column(names)))
        with pyarrow.OSFile(self._path) as file:
            for low in range(0, len(names), step):
                some = names[low : low + step]
                read = self._open(file, sorted(map(self.schema.get_field_index, some))).get_batch(batch)
                for name in some:
                    yield iter([read.column(name)])


class ColumnStore(Decoded):
    """Columns side by side, or one of them."""

    def __init__(
        self, path: str, source: ParquetColumns | ArrowColumns, names: list[str], dtypes: list[np.dtype[Any]], key: str | None
    ) -> None:  # fmt: skip
        self.name = path if key is None else f"{path}::{key}"
        self.paths, self.dtype = (path,), np.result_type(*dtypes)
        self._source, self._names, self._flat = source, names, key is not None
        self._edges = [0, *np.cumsum(source.counts, dtype=np.int64).tolist()]
        rows, longest = self._edges[-1], max(1, *source.counts, 1)
        self.shape = (rows,) if self._flat else (rows, len(names))
        self.granule = (longest,) if self._flat else (longest, 1)
        self._memory = round_up(source.memory(names))

    def extent(self, region: Region) -> int:
        return round_up(self.bytes_of(region)) + self._memory

    def traffic(self, region: Region) -> int:
        first, last = touched(self._edges, region)
        columns = 1 if self._flat else region[1][1] - region[1][0]
        return int((self._edges[last] - self._edges[first]) * columns * self.dtype.itemsize)

    def decode(self, region: Region, block: Block) -> None:
        columns = [block] if self._flat else [block[:, place] for place in range(block.shape[1])]
        names = self._names if self._flat else self._names[slice(*region[1])]
        try:
            for group in range(*touched(self._edges, region)):
                for name, column, parts in zip(names, columns, self._source.read(group, names), strict=True):
                    self._fill(column, region[0], group, name, parts)
        except (_library().ArrowException, OSError) as error:
            raise StoreError(f"{self.name} cannot be decoded: {error}", path=self.name) from None

    def _fill(self, column: Block, wanted: tuple[int, int], group: int, name: str, parts: Iterator[Any]) -> None:
        """What a row group has of the wanted rows of a column."""
        at, (start, stop) = self._edges[group], wanted
        last = min(stop, self._edges[group + 1])
        for values in parts:
            low, high = max(start, at), min(last, at + len(values))
            if low < high:
                part = values.slice(low - at, high - low)
                if part.null_count and self.dtype.kind != "f":
                    raise StoreError(
                        f"{self.name}: column {name!r} has missing values among {self.dtype}: fill them first", path=self.name
                    )  # fmt: skip
                column[low - start : high - start] = part.to_numpy(zero_copy_only=False)
            at += len(values)
            if at >= last:
                break
        else:
            raise StoreError(f"{self.name}: column {name!r} ends at row {at}: the file is damaged", path=self.name)
        _library().default_memory_pool().release_unused()
