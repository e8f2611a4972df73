"""What a file is: its format and the arrays in it, from its headers alone."""

from __future__ import annotations

from dataclasses import dataclass

from outsize.core.noun import Noun


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray(Noun):
    """One array of a file."""

    key: str
    """Its name in the file; empty where the file is one array."""
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    """Bytes of its elements in memory."""
    chunks: tuple[int, ...] | None = None
    """Shape of a chunk where it is stored in chunks."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Contents(Noun):
    """A file or folder of arrays."""

    path: str
    format: str
    """As users call it: `.npy`, `zarr`, ..."""
    on_disk: int | None
    """Bytes that it takes on disk; None where it lies elsewhere."""
    arrays: tuple[StoredArray, ...]
    """Its arrays, the first of them if there are very many."""
    count: int
    available: int | None = None
    """Bytes of memory that can be had here now."""
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of the listed arrays in memory."""
        return sum(array.bytes for array in self.arrays)

    @property
    def fits(self) -> bool | None:
        """True where all of it could be loaded here; None where that is not known."""
        return None if self.available is None or self.count > len(self.arrays) else self.bytes <= self.available
