"""Memory that a library takes by itself while it reads for us, counted in the buffer that the engine handed over.

A store that decodes through a library (zarr-python's filters, HDF5's) cannot make it work inside our buffer. So
`extent` asks for as much more as the library takes, and the store gives the pages of that part back to the system
before it calls the library: what the process holds is then the buffer's size or less, whoever allocates it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import Any

from outsize.array.store.base import Buffer

_DONTNEED = 4


def give_back(buffer: Buffer) -> None:
    """Return the whole pages inside `buffer` to the system; they read as zeros afterwards."""
    start = -(-buffer.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (buffer.ctypes.data + buffer.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if stop > start:
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _DONTNEED)


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
