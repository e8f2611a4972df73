"""Page-locked (pinned) host memory of exactly the requested size, and existing arrays locked in place.

A device copies to and from such memory at the full speed of the link, while the processor goes on. torch rounds its
pinned blocks up to powers of two (20 GiB become 32 GiB). So the memory here is an anonymous map of whole pages that is
registered with the driver. If the driver refuses, torch's pinned memory is used. Without CUDA this is ordinary memory
with the same interface, so that its users run anywhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from outsize.core.errors import InputError
from outsize.engine.pool import cores, make_buffer, round_to_pages

Buffer = npt.NDArray[np.uint8]

_PORTABLE = 1
"""cudaHostRegisterPortable: locked for every device, not only for the current one."""


class Pinned(contextlib.AbstractContextManager["Pinned"]):
    """A stretch of host memory, locked while this is open: `with Pinned(buffer, locked=...) as memory: memory.array`."""

    def __init__(self, array: Buffer, *, locked: bool, registered: bool = False) -> None:
        self.array = array
        """The memory as bytes."""
        self.locked = locked
        """True where it is page-locked, so that copies are asynchronous."""
        self._registered = registered

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def tensor(self) -> Any:
        """The memory as a torch tensor of uint8, sharing it."""
        import torch

        return torch.from_numpy(self.array)

    def close(self) -> None:
        """Unlock it, after waiting for every copy that is under way."""
        if self._registered:
            import torch

            self._registered = self.locked = False
            with contextlib.suppress(RuntimeError):  # a device that has failed copies nothing any more
                torch.cuda.synchronize()
            _cudart().cudaHostUnregister(self.array.ctypes.data)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()


def lock_memory(size: int) -> Pinned:
    """`size` bytes of page-locked memory, rounded to whole pages and no further; ordinary memory without CUDA."""
    if size == 0 or not can_lock():
        return Pinned(make_buffer(size), locked=False)
    buffer = make_buffer(size)
    _touch(buffer)
    if _register(buffer.ctypes.data, round_to_pages(size)):
        return Pinned(buffer, locked=True, registered=True)
    import torch

    del buffer
    return Pinned(torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy(), locked=True)


def _touch(buffer: Buffer) -> None:
    """Touch the buffer's pages with several threads. The driver locks existing pages several times faster than pages
    it has to create."""
    hands = min(16, cores(), buffer.nbytes >> 24)
    if hands < 2:
        buffer[::4096] = 0
        return
    step = round_to_pages(-(-buffer.nbytes // hands))

    def give(start: int) -> None:
        buffer[start : start + step : 4096] = 0

    with ThreadPoolExecutor(hands) as threads:
        list(threads.map(give, range(0, buffer.nbytes, step)))


def lock_array(array: npt.NDArray[Any]) -> Pinned:
    """Lock a contiguous array in place; it stays usable. It is not locked without CUDA, or if the driver refuses."""
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        raise InputError(f"an array of strides {array.strides} is not contiguous: lock the array it is a view of")
    flat = (array if array.flags.c_contiguous else array.T).reshape(-1).view(np.uint8)
    if is_locked(flat):
        return Pinned(flat, locked=True)
    registered = array.nbytes > 0 and can_lock() and _register(flat.ctypes.data, flat.nbytes)
    return Pinned(flat, locked=registered, registered=registered)


def is_locked(array: npt.NDArray[Any]) -> bool:
    """True where the driver knows the array's memory as page-locked, whoever locked it."""
    if array.nbytes == 0 or not can_lock():
        return False
    import torch

    ends = (array.ctypes.data, array.ctypes.data + array.nbytes - 1 if array.flags.forc else array.ctypes.data)
    bytes_ = [np.ctypeslib.as_array((ctypes.c_uint8 * 1).from_address(address)) for address in ends]
    return all(torch.from_numpy(byte).is_pinned() for byte in bytes_)


def can_lock() -> bool:
    """True where torch is installed and has a CUDA device."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def _cudart() -> Any:
    import torch

    return torch.cuda.cudart()


def _register(address: int, size: int) -> bool:
    import torch

    torch.cuda.init()
    if int(_cudart().cudaHostRegister(address, size, _PORTABLE)) == 0:
        return True
    with contextlib.suppress(RuntimeError):  # the refusal waits for whoever asks next: let it be this call
        torch.zeros(1, device="cuda")
    return False
