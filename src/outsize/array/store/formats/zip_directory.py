"""The directory of a zip file (`.npz`, torch's `.pt`): which entries there are, and where their bytes stand.

In: a path. Out: a `Member` per entry. Entries that are stored uncompressed are then read directly at their offset, as
if they were files of their own; no entry is read to learn that.
"""

from __future__ import annotations

import os
import struct
import zipfile
from dataclasses import dataclass

from outsize.core.errors import StoreError

_SIGNATURE = b"PK\x03\x04"
_LOCAL = struct.Struct("<4s5H3I2H")
"""Header in front of an entry's bytes: signature, ..., length of the name, length of the extra field."""
DAMAGE = (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, ValueError)
"""What reading a damaged zip may raise."""


@dataclass(frozen=True, slots=True)
class Member:
    """One entry of a zip."""

    path: str
    info: zipfile.ZipInfo

    @property
    def size(self) -> int:
        """Bytes when decompressed."""
        return self.info.file_size

    @property
    def compressed(self) -> bool:
        """False where the bytes stand in the file as they are."""
        return self.info.compress_type != zipfile.ZIP_STORED

    def offset(self) -> int:
        """Where its first byte stands in the file; checked against the file's length."""
        with open(self.path, "rb") as file:
            file.seek(self.info.header_offset)
            header = file.read(_LOCAL.size)
            length = os.fstat(file.fileno()).st_size
        if len(header) < _LOCAL.size or header[:4] != _SIGNATURE:
            raise StoreError(
                f"{self.path}: no entry where its directory says {self.info.filename!r} is", path=self.path
            )
        *_, name_length, extra_length = _LOCAL.unpack(header)
        start: int = self.info.header_offset + _LOCAL.size + name_length + extra_length
        if start + self.info.compress_size > length:
            raise StoreError(
                f"{self.path} is truncated: entry {self.info.filename!r} ends at byte "
                f"{start + self.info.compress_size}, the file at {length}", path=self.path,
            )  # fmt: skip
        return start

    def read(self, most: int) -> bytes:
        """The entry's first bytes, at most `most` of them; for small entries."""
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(self.info) as stream:
                return stream.read(most)
        except DAMAGE as error:
            message = f"{self.path}: cannot read entry {self.info.filename!r}: {error}"
            raise StoreError(message, path=self.path) from None


def holds_entry(path: str, head: bytes, ending: str) -> bool:
    """True where the first bytes are a zip's, and one of its entries has this ending."""
    return head.startswith(_SIGNATURE) and any(name.endswith(ending) for name in read_directory(path))


def read_directory(path: str) -> dict[str, Member]:
    """Every entry of a zip by name; a `StoreError` where it is not a whole zip."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {info.filename: Member(path, info) for info in archive.infolist()}
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, EOFError) as error:
        raise StoreError(f"{path} is a damaged or truncated zip file: {error}", path=path) from None
