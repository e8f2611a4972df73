"""Arrays of other libraries that are already in memory: opened without a copy.

Anything that speaks DLPack (torch, JAX, CuPy), or NumPy's own protocols. Arrays on a device are refused: moving them
is a choice that the user makes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from outsize.array.store.base import Store
from outsize.array.store.formats.memory import MemoryStore
from outsize.array.store.io.narrow_floats import NARROW, widened
from outsize.core.errors import InputError

_HOST_DEVICES = {1: "cpu", 3: "pinned host memory"}
"""DLPack's numbers of devices whose memory the processor can read."""


def open_memory(source: Any, mode: str = "r") -> Store:
    """A store over an array in memory."""
    if isinstance(source, np.ndarray):
        array = source
    elif hasattr(source, "__dlpack__") and hasattr(source, "__dlpack_device__"):
        return _open_dlpack(source, mode)
    elif hasattr(source, "__array_interface__") or hasattr(source, "__array__"):
        array = np.asarray(source)
    else:
        raise InputError(
            f"cannot open a {type(source).__name__}: give a path, a NumPy array, a tensor on the CPU, "
            f"or anything with __dlpack__"
        )
    return _wrap(array, mode)


def _open_dlpack(source: Any, mode: str) -> Store:
    try:
        device = source.__dlpack_device__()
    except ValueError:  # a tensor without contents has none
        device = (-1, 0)
    if int(device[0]) not in _HOST_DEVICES:
        where = getattr(source, "device", f"device {device}")
        raise InputError(f"the array lies on {where}: move it to host memory first, for instance with .cpu()")
    name = str(getattr(source, "dtype", "")).rpartition(".")[2]
    if getattr(source, "requires_grad", False):
        source = source.detach()
    if name in NARROW and type(source).__module__.split(".")[0] == "torch":
        import torch

        bits = source.view(torch.uint8 if NARROW[name].itemsize == 1 else torch.int16)
        return widened(MemoryStore(np.from_dlpack(bits).view(NARROW[name])), name)
    try:
        array = np.asarray(source) if name in NARROW else np.from_dlpack(source)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"cannot share a {type(source).__name__} of {name or 'unknown dtype'} with NumPy: {error}"
        ) from None
    return _wrap(array, mode)


def _wrap(array: np.ndarray[Any, Any], mode: str) -> Store:
    if array.dtype.name in NARROW:  # a NumPy array of ml_dtypes' types
        return widened(MemoryStore(array.view(NARROW[array.dtype.name])), array.dtype.name)
    if array.dtype.hasobject:
        raise InputError("an array of Python objects has no size in bytes: give one of numbers")
    return MemoryStore(array, writable=mode == "r+" and array.flags.writeable)
