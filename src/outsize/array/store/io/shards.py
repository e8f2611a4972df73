"""Shards of zarr: one object with many chunks, and an index of where each lies.

In: the metadata of an array, then the index of a shard. Out: which bytes of which object hold which chunks; chunks that lie one
after another are read at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from outsize.array.store.base import Buffer
from outsize.array.store.io.chunks import Piece

_RUN = 4 << 20
"""Bytes that are read at once."""
_ABSENT = 2**64 - 1
"""Offset and length of a chunk that holds only the fill value."""


class Span(NamedTuple):
    """What one request brings."""

    key: str
    start: int | None
    """Its first byte; None for all of it."""
    size: int
    """How many bytes; 0 for all of it."""
    parts: list[tuple[int, Piece]]
    """(length, chunk) one after another; a length of 0 is all of them."""


class Sharding:
    """How the shards of an array are laid out."""

    def __init__(self, shard: tuple[int, ...], chunk: tuple[int, ...], *, at_start: bool, checked: bool) -> None:
        self._per = tuple(s // c for s, c in zip(shard, chunk, strict=True))
        self._checked = checked
        self.index_bytes = 16 * math.prod(self._per) + 4 * checked
        """Bytes of an index."""
        self.index_at = 0 if at_start else -self.index_bytes
        """Where it begins, from the end where negative."""

    def shard_of(self, chunk: tuple[int, ...]) -> tuple[int, ...]:
        """The place of the shard that a chunk lies in."""
        return tuple(index // per for index, per in zip(chunk, self._per, strict=True))

    def open_index(self, data: Buffer) -> Any:
        """(offset, length) of every chunk; a `ValueError` where it is damaged."""
        plain = data[: 16 * math.prod(self._per)]
        if self._checked:
            import google_crc32c

            if google_crc32c.value(plain.tobytes()) != int.from_bytes(data[plain.nbytes :].tobytes(), "little"):
                raise ValueError("the checksum of its index is another one")
        return plain.view("<u8").reshape(*self._per, 2)

    def spans(
        self, key: str, index: Any, pieces: Iterable[Piece], longest: int, absent: Callable[[Piece], None]
    ) -> Iterator[Span]:
        """What is to be read of a shard, in runs of chunks that lie one after another. No chunk has more than `longest` bytes;
        `absent` is told those that hold only the fill value."""
        found = []
        for piece in pieces:
            start, length = map(
                int, index[tuple(place % per for place, per in zip(piece.chunk, self._per, strict=True))]
            )
            if start == length == _ABSENT:
                absent(piece)
            elif length > longest:
                raise ValueError(f"chunk {piece.chunk} would have {length} bytes, more than any encoding of it")
            else:
                found.append((start, length, piece))
        found.sort(key=lambda row: row[:2])
        run: list[tuple[int, int, Piece]] = []
        for row in found:
            if run and (row[0] != run[-1][0] + run[-1][1] or row[0] + row[1] - run[0][0] > _RUN):
                yield _join(key, run)
                run = []
            run.append(row)
        if run:
            yield _join(key, run)


def _join(key: str, run: list[tuple[int, int, Piece]]) -> Span:
    first, last = run[0], run[-1]
    return Span(key, first[0], last[0] + last[1] - first[0], [(length, piece) for _, length, piece in run])


def find_sharding(array: Any) -> tuple[Sharding | None, list[dict[str, Any]] | None]:
    """The shards of an array of format 3 and the codecs of their chunks; (None, None) where its shards are of another kind."""
    codecs = array.metadata.to_dict()["codecs"]
    if len(codecs) != 1 or codecs[0]["name"] != "sharding_indexed":
        return None, None
    told = codecs[0]["configuration"]
    names = [codec["name"] for codec in told["index_codecs"]]
    endian = told["index_codecs"][0].get("configuration", {}).get("endian")
    if names not in (["bytes"], ["bytes", "crc32c"]) or endian != "little":
        return None, None
    location = str(getattr(told["index_location"], "value", told["index_location"]))
    sharding = Sharding(tuple(array.shards), tuple(array.chunks), at_start=location == "start", checked=len(names) == 2)
    return sharding, list(told["codecs"])
