"""How many bytes each further element of a container keeps alive: what one element reaches and the others do not."""

from __future__ import annotations

import ctypes
import gc
import io
import mmap
import sys
from collections import Counter
from collections.abc import Sequence
from types import FunctionType, ModuleType
from typing import Any

from outsize.core.outcomes.recording import HOST_DEVICE
from outsize.monitor.leaks.frameworks import array_bytes, library_of

_REACHED = 3000
"""Objects that are followed from one element."""
_C_MEMORY = (ctypes.Array, ctypes.Structure, ctypes.Union)
_STOP = (ModuleType, type, str, int, float, bool, type(None), type(gc.collect))


def measure_each(elements: Sequence[Any], device: str = HOST_DEVICE) -> int:
    """Mean bytes that one of the elements keeps for itself alone. What several reach (a model, a logger) is no growth.
    On a card only what may lie there counts. On the host everything does: what lies on a card has a small part of itself here."""
    if not elements:
        return 0
    reached: Counter[int] = Counter()
    sizes: dict[int, int] = {}
    for element in elements:
        own: dict[int, int] = {}
        _reach(element, own, device)
        reached.update(own.keys())
        sizes |= own
    alone = sum(size for key, size in sizes.items() if reached[key] == 1)
    if len(elements) == 1:
        return sum(sizes.values())
    return alone // len(elements)


def _reach(element: Any, found: dict[int, int], device: str) -> None:
    queue, count = [element], 0
    seen: set[int] = set()
    while queue and count < _REACHED:
        item = queue.pop()
        if id(item) in seen or (isinstance(item, ModuleType | type) and item is not element):
            continue
        seen.add(id(item))
        count += 1
        key, size = _own_bytes(item)
        found[key] = size if _may_lie_on(item, device) else 0
        if isinstance(item, type):  # a class that was made at run time: what it has, not what it is made of
            queue += list(vars(item).values())
        elif not isinstance(item, _STOP):
            queue += _referents(item)


def _referents(item: Any) -> list[Any]:
    """What an object holds; of a function only what its closure and defaults hold."""
    if isinstance(item, FunctionType):
        cells = item.__closure__ or ()
        return [*cells, *(item.__defaults__ or ())]
    if isinstance(item, dict) and "__builtins__" in item:  # a module's variables
        return []
    base = getattr(item, "base", None) if type(item).__module__ == "numpy" else None
    return [base] if base is not None else gc.get_referents(item)


def _may_lie_on(item: Any, device: str) -> bool:
    """False for what surely takes no memory of this card."""
    if device == HOST_DEVICE:
        return True
    try:
        if hasattr(item, "untyped_storage"):
            return f"{item.device.type}:{item.device.index or 0}" == device
        return array_bytes(item) is not None or library_of(type(item)) == "cupy"
    except Exception:  # objects answer as they like
        return False


def _own_bytes(item: Any) -> tuple[int, int]:
    """(identity, bytes) of one object without what it holds; tensors and arrays by the memory under them."""
    try:
        if hasattr(item, "untyped_storage"):
            storage = item.untyped_storage()
            return storage.data_ptr() or id(item), storage.nbytes()
        if isinstance(item, mmap.mmap):
            return id(item), len(item)
        if (held := array_bytes(item)) is not None:
            return id(item), held
        if isinstance(item, _C_MEMORY):
            return ctypes.addressof(item), ctypes.sizeof(item)
        return id(item), sys.getsizeof(item)
    except Exception:  # objects answer as they like
        return id(item), 0


def buffer_bytes(value: Any, device: str = HOST_DEVICE) -> int:
    """Bytes of an array, tensor, text or table; 0 for anything else, and for what does not lie on this card."""
    try:
        if not _may_lie_on(value, device):
            return 0
        if isinstance(value, str | bytes | bytearray):
            return len(value)
        if isinstance(value, io.BytesIO):
            return value.getbuffer().nbytes
        if hasattr(value, "untyped_storage"):
            return int(value.untyped_storage().nbytes())
        if type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "memory_usage"):
            used = value.memory_usage(index=False)
            return int(used.sum() if hasattr(used, "sum") else used)
        if (held := array_bytes(value)) is not None:
            return held
        if type(value).__module__.partition(".")[0] in ("numpy", "array", "cupy"):
            return int(getattr(value, "nbytes", 0))
    except Exception:  # tensors without contents, closed buffers
        return 0
    return 0
