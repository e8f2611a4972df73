"""Who holds memory in this process: live arrays and tensors by size, with what refers to them.

In: nothing, or the traceback of an exception. Out: `Part`s, text and numbers only: not one reference to an array is kept, nor
left behind in a frame (reading a frame's locals makes a copy that CPython keeps until the frame ends; it is emptied here).
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
import traceback
from collections.abc import Collection, Iterable, Iterator
from types import FrameType, ModuleType, TracebackType
from typing import Any

from outsize.core.memory import Part
from outsize.core.noun import Known
from outsize.monitor.leaks.frameworks import array_bytes

LONGEST_SEARCH = 2.0
"""Seconds of processor time after which the search through the heap stops; what was found is told."""
_OPTIMIZED = 0x1
_SMALLEST = 2**20


def live_arrays(trace: TracebackType | None = None, most: int = 8) -> tuple[Part, ...]:
    """The largest arrays and tensors alive, largest first, one row a piece of memory."""
    types = _array_types()
    return _largest((*_in_frames(traceback.walk_tb(trace), types), *_in_heap(types), *_of_jax()), most)


def arrays_of_thread(thread: int, without: Iterable[Any] = (), most: int = 8) -> tuple[Part, ...]:
    """The largest arrays that the running functions of a thread can name, those of `without` left out.

    The thread goes on meanwhile, and what is looked at stays alive as long as the look takes. So the heap is not searched, and
    every frame is let go at once: a frame that is held keeps its locals after its function has returned.
    """
    types = _array_types()
    known = {_identify(array)[0] for array in without if issubclass(type(array), types)}
    return _largest(_in_frames(_running_frames(thread), types, depth=3), most, known)


def _largest(arrays: Iterable[tuple[Any, str]], most: int, known: Collection[tuple[str, int]] = ()) -> tuple[Part, ...]:
    found: dict[tuple[str, int], tuple[int, str, str]] = {}
    for array, holder in arrays:
        key, size, what = _identify(array)
        if size >= _SMALLEST and key not in found and key not in known:
            found[key] = (size, what, holder)
        del array
    rows = sorted(found.values(), reverse=True)[:most]
    return tuple(Part(name=f"{what}: {holder}", bytes=size, known=Known.EXACT) for size, what, holder in rows)


def _running_frames(thread: int) -> Iterator[tuple[FrameType, int]]:
    """The outermost first, as in a traceback: a name in the user's code is better than one in a library."""
    frame = sys._current_frames().get(thread)
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    while found:
        frame = found.pop()
        yield frame, frame.f_lineno
        frame = None


def _in_frames(
    frames: Iterable[tuple[FrameType, int]], types: tuple[type, ...], depth: int = 0
) -> Iterator[tuple[Any, str]]:
    """Arrays in the locals of frames, and in lists, dicts and objects there down to a depth."""
    for frame, line in frames:
        place = f"in {frame.f_code.co_qualname} ({frame.f_code.co_filename}:{line})"
        values = frame.f_locals
        for name, value in list(values.items()):
            for array, path in _inside(name, value, types, depth):
                yield array, f"`{path}` {place}"
                del array
            del value
        _forget(frame, values)


_MOST_ITEMS = 500
"""Items of one container that are looked at."""


def _inside(path: str, value: Any, types: tuple[type, ...], depth: int) -> Iterator[tuple[Any, str]]:
    """A value if it is an array, or the arrays in it; with the path to each."""
    kind = type(value)
    if issubclass(kind, types):
        yield value, path
        return
    if not depth:
        return
    inner: list[tuple[str, Any]] = []
    if kind is list or kind is tuple:
        inner = [(f"{path}[{number}]", item) for number, item in enumerate(value[:_MOST_ITEMS])]
    elif kind is dict:
        inner = [
            (f"{path}[{str(key)[:20]!r}]", item) for key, item in itertools.islice(list(value.items()), _MOST_ITEMS)
        ]
    elif kind.__flags__ & _HEAP_TYPE and not issubclass(kind, type | ModuleType):
        fields = getattr(value, "__dict__", None)
        inner = [(f"{path}.{name}", item) for name, item in itertools.islice(list((fields or {}).items()), _MOST_ITEMS)]
    for name, item in inner:
        yield from _inside(name, item, types, depth - 1)


_HEAP_TYPE = 1 << 9
"""Flag of classes that were made in Python."""


def _forget(frame: FrameType, values: Any) -> None:
    """Empty the copy of the locals that CPython up to 3.12 keeps on the frame."""
    if type(values) is dict and frame.f_code.co_flags & _OPTIMIZED:
        values.clear()


def _of_jax() -> Iterator[tuple[Any, str]]:
    """What JAX itself counts, where it has started: it also knows arrays that only its own code refers to."""
    jax: Any = sys.modules.get("jax")
    started = getattr(sys.modules.get("jax._src.xla_bridge"), "backends_are_initialized", None)
    if started is not None and started() and hasattr(jax, "live_arrays"):
        for array in jax.live_arrays():
            yield array, "alive in JAX"


def _in_heap(types: tuple[type, ...]) -> Iterator[tuple[Any, str]]:
    """Arrays that containers and objects refer to."""
    modules = {
        id(vars(module)): name
        for name, module in list(sys.modules.items())
        if module is not None and hasattr(module, "__dict__")
    }
    until = time.thread_time() + LONGEST_SEARCH
    owners = [
        owner for owner in gc.get_objects() if type(owner) is not FrameType
    ]  # isinstance would ask strange objects
    for count, owner in enumerate(owners):
        if count % 1024 == 0 and time.thread_time() > until:
            return
        for value in gc.get_referents(owner):
            if issubclass(type(value), types):
                yield value, _name(owner, value, modules)


def _array_types() -> tuple[type, ...]:
    """The array types of the libraries that this program has loaded."""
    names = (
        ("numpy", "ndarray"), ("torch", "Tensor"), ("cupy", "ndarray"), ("jaxlib._jax", "ArrayImpl"),
        ("jaxlib.xla_extension", "ArrayImpl"), ("tensorflow.python.framework.ops", "EagerTensor"),
        ("tensorflow.python.ops.resource_variable_ops", "ResourceVariable"),
    )  # fmt: skip
    found = [getattr(sys.modules[module], name, None) for module, name in names if module in sys.modules]
    return tuple(kind for kind in found if isinstance(kind, type))


def _identify(array: Any) -> tuple[tuple[str, int], int, str]:
    """(which piece of memory, its bytes, a description)."""
    if hasattr(array, "untyped_storage"):
        try:
            text = f"{str(array.dtype).removeprefix('torch.')}[{', '.join(map(str, array.shape))}] on {array.device}"
            storage = array.untyped_storage()
            return (str(array.device), storage.data_ptr()), storage.nbytes(), text
        except Exception:  # tensors without a shape or storage of their own: nested, fake, sparse, functional
            return ("torch", id(array)), 0, type(array).__name__
    shape = ", ".join(map(str, array.shape))
    if hasattr(array.shape, "num_elements"):
        return ("array", id(array)), array_bytes(array) or 0, f"{array.dtype.name}[{shape}]"
    dtype = str(array.dtype)
    base = array
    while type(getattr(base, "base", None)).__name__ in ("ndarray", "memmap"):
        base = base.base
    return ("array", id(base)), int(base.nbytes), f"{dtype}[{shape}]"


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
