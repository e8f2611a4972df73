"""Who holds memory in this process: live arrays and tensors by size, with what refers to them.

In: nothing, or the traceback of an exception. Out: `Part`s, text and numbers only: not one reference to an array is kept, nor
left behind in a frame (reading a frame's locals makes a copy that CPython keeps until the frame ends; it is emptied here).
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from outsize.core.memory import Part
from outsize.core.noun import Known

LONGEST_SEARCH = 2.0
"""Seconds after which the search through the heap stops; what was found is told."""
_OPTIMIZED = 0x1
_SMALLEST = 2**20


def live_arrays(trace: TracebackType | None = None, most: int = 8) -> tuple[Part, ...]:
    """The largest arrays and tensors alive, largest first, one row a piece of memory."""
    found: dict[tuple[str, int], tuple[int, str, str]] = {}
    types = _array_types()
    for array, holder in (*_in_frames(trace, types), *_in_heap(types)):
        key, size, what = _identify(array)
        if size >= _SMALLEST and key not in found:
            found[key] = (size, what, holder)
    rows = sorted(found.values(), reverse=True)[:most]
    return tuple(Part(name=f"{what}: {holder}", bytes=size, known=Known.EXACT) for size, what, holder in rows)


def _in_frames(trace: TracebackType | None, types: tuple[type, ...]) -> Iterator[tuple[Any, str]]:
    """Arrays in the locals of the frames that failed."""
    while trace is not None:
        frame = trace.tb_frame
        place = f"in {frame.f_code.co_qualname} ({frame.f_code.co_filename}:{trace.tb_lineno})"
        values = frame.f_locals
        for name, value in list(values.items()):
            if issubclass(type(value), types):
                yield value, f"`{name}` {place}"
            del value
        _forget(frame, values)
        trace = trace.tb_next


def _forget(frame: FrameType, values: Any) -> None:
    """Empty the copy of the locals that CPython up to 3.12 keeps on the frame."""
    if type(values) is dict and frame.f_code.co_flags & _OPTIMIZED:
        values.clear()


def _in_heap(types: tuple[type, ...]) -> Iterator[tuple[Any, str]]:
    """Arrays that containers and objects refer to."""
    modules = {
        id(vars(module)): name
        for name, module in list(sys.modules.items())
        if module is not None and hasattr(module, "__dict__")
    }
    until = time.monotonic() + LONGEST_SEARCH
    for count, owner in enumerate(gc.get_objects()):
        if count % 1024 == 0 and time.monotonic() > until:
            return
        if type(owner) is FrameType:  # isinstance would ask strange objects for their class
            continue
        for value in gc.get_referents(owner):
            if issubclass(type(value), types):
                yield value, _name(owner, value, modules)


def _array_types() -> tuple[type, ...]:
    """The array types of the libraries that this program has loaded."""
    names = (("numpy", "ndarray"), ("torch", "Tensor"), ("cupy", "ndarray"))
    found = [getattr(sys.modules[module], name, None) for module, name in names if module in sys.modules]
    return tuple(kind for kind in found if isinstance(kind, type))


def _identify(array: Any) -> tuple[tuple[str, int], int, str]:
    """(which piece of memory, its bytes, a description)."""
    kind = "torch" if hasattr(array, "untyped_storage") else "array"
    dtype, shape = str(array.dtype).removeprefix("torch."), ", ".join(map(str, array.shape))
    if kind == "torch":
        try:
            storage = array.untyped_storage()
            return (str(array.device), storage.data_ptr()), storage.nbytes(), f"{dtype}[{shape}] on {array.device}"
        except Exception:  # tensors without storage: fake, sparse, functional
            return ("torch", id(array)), 0, f"{dtype}[{shape}]"
    base = array
    while type(getattr(base, "base", None)).__name__ in ("ndarray", "memmap"):
        base = base.base
    return (kind, id(base)), int(base.nbytes), f"{dtype}[{shape}]"


def _name(owner: Any, value: Any, modules: dict[int, str]) -> str:
    kind = type(owner)
    if issubclass(kind, dict):
        key = next((key for key, item in list(owner.items()) if item is value), None)
        module = modules.get(id(owner))
        if module is not None:
            return f"`{key}` of module {module}"
        return f"[{str(key)[:40]!r}] of a dict" if not isinstance(key, str) else f"`{key[:40]}` of an object or dict"
    if issubclass(kind, list | tuple | set):
        return f"in a {kind.__name__} of {len(owner)}"
    return f"held by a {kind.__qualname__}"
