"""Small files that the tasks of a run on a cluster leave for each other, in a folder that every worker reaches.

In: names, bytes, arrays. A file appears whole or not at all, so a task that runs twice leaves what it left before. The folder may
be on a shared disk or in an object store (`s3://bucket/folder`).
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from outsize.array.store.base import Block
from outsize.array.store.io.addresses import is_remote, open_files
from outsize.array.store.io.file import naming, written_whole

_PIECE = 1 << 20
"""Bytes of an array that are written at once where its rows lie apart."""


class SideFiles:
    """One folder of them."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.remote = is_remote(folder)

    def create(self) -> None:
        """Make the folder, unless it is there."""
        if not self.remote:
            with naming(self.folder):
                os.makedirs(self.folder, exist_ok=True)

    def path(self, name: str) -> str:
        return f"{self.folder.rstrip('/')}/{name}"

    def there(self) -> bool:
        """True while the run goes on: its end removes the folder."""
        return self.remote or os.path.isdir(self.folder)

    def names(self) -> set[str]:
        if self.remote:
            files, inside = open_files(self.folder)
            with contextlib.suppress(FileNotFoundError):
                return {os.path.basename(path) for path in files.ls(inside, detail=False, refresh=True)}
            return set()
        with contextlib.suppress(FileNotFoundError):
            return set(os.listdir(self.folder))
        return set()

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Any]:
        """A file to write to; it is there after the block."""
        if self.remote:
            memory = io.BytesIO()
            yield memory
            files, inside = open_files(self.path(name))
            files.pipe_file(inside, memory.getvalue())
            return
        part = self.path(f".{name}.{os.uname().nodename}-{os.getpid()}-{threading.get_ident()}")
        with naming(part), written_whole(self.path(name), part) as file:
            yield file

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[Any]:
        if self.remote:
            files, inside = open_files(self.path(name))
            yield io.BytesIO(files.cat_file(inside))
            return
        with naming(self.path(name)), open(self.path(name), "rb") as file:
            yield file

    def put(self, name: str, blocks: list[Block]) -> None:
        """Write arrays one after another."""
        with self.writing(name) as file:
            for block in blocks:
                _write_array(file, block)

    def get(self, name: str, number: int) -> list[Block]:
        with self.reading(name) as file:
            return [np.lib.format.read_array(file, allow_pickle=False) for _ in range(number)]

    def remove(self) -> None:
        """Remove the folder and all that is in it."""
        if self.remote:
            files, inside = open_files(self.folder)
            with contextlib.suppress(FileNotFoundError):
                files.rm(inside, recursive=True)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)


def _write_array(file: Any, block: Block) -> None:
    """As `np.save` does, without a copy of the whole where its rows lie apart."""
    header = {"descr": np.lib.format.dtype_to_descr(block.dtype), "fortran_order": False, "shape": block.shape}
    np.lib.format.write_array_header_2_0(file, header)
    if block.flags.c_contiguous or block.ndim == 0:
        file.write(np.ascontiguousarray(block).tobytes() if block.ndim == 0 else block.reshape(-1).view(np.uint8).data)
        return
    step = max(1, _PIECE * len(block) // max(1, block.nbytes))
    for low in range(0, len(block), step):
        file.write(np.ascontiguousarray(block[low : low + step]).reshape(-1).view(np.uint8).data)
