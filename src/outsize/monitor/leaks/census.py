"""A count of everything in this process that can grow: `take_census()` -> `Census`. Three of them, a few steps apart,
show what does.

Counted are the lengths of lists, dicts, sets, deques and byte buffers, the entries of `lru_cache`s, the traces of functions
that TensorFlow and JAX compile, the bytes of named
arrays in the program's own modules, functions and objects, the nodes of the largest autograd graph, and the threads.
Takes about a second for each million objects.
"""

from __future__ import annotations

import functools
import gc
import io
import itertools
import sys
import threading
import types
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from outsize.core.outcomes.recording import HOST_DEVICE
from outsize.monitor.leaks.frameworks import count_traces, is_traced_kind
from outsize.monitor.leaks.retained import buffer_bytes
from outsize.monitor.leaks.user_code import is_user_module, locals_of, user_frames, user_modules

CONTAINERS = (list, dict, set, deque, bytearray, io.BytesIO)
CACHE = type(functools.lru_cache(lambda: None))
GRAPH_NODES = 20_000
"""Nodes of an autograd graph that are counted."""
_ALL_NODES = 3 * GRAPH_NODES
"""Nodes of all graphs that are looked at in one census: about half a second."""
_NO_HOLDERS = {
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType, types.MappingProxyType, set,
    frozenset, property, staticmethod, classmethod, weakref.ref,
}  # fmt: skip
"""Types that make up most of a heap and hold no containers of data."""
_NO_CULPRITS = _NO_HOLDERS - {types.FunctionType} | {types.CellType, types.FrameType, types.ModuleType, type}
"""Types that say nothing of who keeps memory."""
_SHORT = 4
"""Containers with fewer elements are not counted."""
_PART = 256
"""Objects that are counted together."""
_BUFFER = 2**16
"""Bytes from which on a named array counts."""


@dataclass(kw_only=True)
class Census:
    """What there was at one moment."""

    lengths: dict[int, int] = field(default_factory=dict)
    """id of a container or an `lru_cache` -> its length."""
    grown: dict[int, Any] = field(default_factory=dict)
    """id -> container that is longer than in the census before."""
    buffers: dict[tuple[str, str], int] = field(default_factory=dict)
    """(module, function or class that has it, name) -> bytes of an array, tensor or text."""
    graph: int = 0
    """Nodes of the largest autograd graph that a live tensor keeps."""
    tail: Any = None
    """That tensor; kept only inside an inspection."""
    threads: int = 0
    """Python threads."""
    counts: Counter[type] = field(default_factory=Counter)
    """How many objects of each kind the collector lists, those of no use as a culprit left out."""


def take_census(ours: set[int], before: Census | None = None, device: str = HOST_DEVICE) -> Census:
    """Count everything; containers whose ids are in `ours` belong to the watch itself. Of named arrays count the bytes that
    may lie on the device."""
    census = Census(threads=threading.active_count())
    graphs: list[Any] = []
    objects = [item for item in gc.get_objects() if type(item) is not tuple]
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    had = {} if before is None else before.lengths
    census.counts = _count_kinds(objects)
    for kind in (*CONTAINERS, *_NO_CULPRITS):
        census.counts.pop(kind, None)
    skip = {*ours, id(objects), id(graphs), id(census.lengths), id(census.grown), id(had)}
    named = list(named_values())  # also what `gc.freeze()` has hidden from the collector
    frozen = [value for _, _, value in named if isinstance(value, CONTAINERS) and not isinstance(value, io.BytesIO)]
    for item in itertools.chain(_containers(objects, tensor, graphs), _untracked(objects), frozen):
        length = length_of(item)
        if length < _SHORT or (key := id(item)) in skip:
            continue
        census.lengths[key] = length
        if length > had.get(key, length):
            census.grown[key] = item
    del objects
    sizes = {(owner, name): buffer_bytes(value, device) for owner, name, value in named}
    del named, frozen
    census.buffers = {key: size for key, size in sizes.items() if size >= _BUFFER}
    census.graph, census.tail = find_largest_graph(graphs)
    return census


def _count_kinds(objects: list[Any]) -> Counter[type]:
    """How many there are of each kind. Counts up to 256 are numbers that Python keeps; larger ones it would make anew for each
    object, which takes most of the time while it notes where memory is taken."""
    counts: Counter[type] = Counter()
    for low in range(0, len(objects), _PART):
        for kind, count in Counter(map(type, objects[low : low + _PART])).items():
            counts[kind] += count
    return counts


def _containers(objects: list[Any], tensor: type | None, graphs: list[Any]) -> Iterator[Any]:
    """What of these has a length that counts; tensors with a graph are put aside."""
    kinds = set(map(type, objects))
    counted = {kind for kind in kinds if issubclass(kind, CONTAINERS) or kind is CACHE or is_traced_kind(kind)}
    tensors = {kind for kind in kinds - counted if tensor is not None and issubclass(kind, tensor)}
    graphs += [item for item in objects if type(item) in tensors and item.grad_fn is not None]
    return (item for item in objects if type(item) in counted)


def length_of(item: Any) -> int:
    """The length of a container of any kind, whatever its class makes of `len`."""
    kind = type(item)
    if kind is list or kind is dict or kind is set:
        return len(item)
    if kind is CACHE:
        return int(item.cache_info().currsize)
    if isinstance(item, io.BytesIO):
        return item.getbuffer().nbytes if not item.closed else 0
    if is_traced_kind(kind):
        return count_traces(item)
    base: Any = next(base for base in CONTAINERS if isinstance(item, base))
    return int(base.__len__(item))


def _untracked(objects: list[Any]) -> Iterator[Any]:
    """Containers that the collector does not list (a dict of arrays holds nothing that could make a cycle): what listed
    objects refer to."""
    holders = [item for item in objects if type(item) not in _NO_HOLDERS]
    kinds = {dict, bytearray, io.BytesIO}
    for low in range(0, len(holders), 4096):
        for item in [item for item in gc.get_referents(*holders[low : low + 4096]) if type(item) in kinds]:
            if type(item) is not dict or not gc.is_tracked(item):
                yield item


def named_values() -> Iterator[tuple[str, str, Any]]:
    """(owner, name, value) of the program's own modules, of the functions it is in, and of its objects."""
    modules = user_modules()
    for module in modules:
        for name, value in list(vars(module).items()):
            yield module.__name__, name, value
            yield from _attributes(value)
    for frame in user_frames():
        if frame.f_locals is not frame.f_globals:
            for name, value in locals_of(frame).items():
                yield frame.f_code.co_qualname, name, value
                yield from _attributes(value)


def _attributes(value: Any) -> Iterator[tuple[str, str, Any]]:
    """The attributes of an object of one of the program's own classes, and of a class itself."""
    kind = value if isinstance(value, type) else type(value)
    module = sys.modules.get(getattr(kind, "__module__", ""))
    if module is None or not is_user_module(module) or not hasattr(value, "__dict__"):
        return
    for name, inner in list(vars(value).items()):
        yield kind.__qualname__, f".{name}", inner


def find_largest_graph(tensors: Sequence[Any]) -> tuple[int, Any]:
    """(nodes, tensor) of the largest autograd graph behind one of the tensors, each counted up to `GRAPH_NODES`.

    A state that is never detached keeps the tensors of all earlier steps, and the graph of each is a part of the next one's.
    So all graphs are walked together first, each node once: what another one's walk meets is a part of it and needs no count."""
    seen: set[Any] = set()
    whole: dict[Any, Any] = {}
    for tensor in reversed(tensors):
        root = tensor.grad_fn
        if root in seen:
            continue
        if len(seen) >= _ALL_NODES:
            break
        for node in _walk(root, seen, GRAPH_NODES):
            whole.pop(node, None)
        whole[root] = tensor
    left, largest, tail = _ALL_NODES, 0, None
    for root, tensor in whole.items():
        counted: set[Any] = set()
        for _ in _walk(root, counted, min(left, GRAPH_NODES)):
            pass
        left -= len(counted)
        if len(counted) > largest:
            largest, tail = len(counted), tensor
        if left <= 0:
            break
    return largest, tail


def _walk(root: Any, seen: set[Any], most: int) -> Iterator[Any]:
    """The nodes behind a node, through those that were not seen before and up to so many of them; they are then."""
    queue, before = [root], len(seen)
    while queue and len(seen) - before < most:
        node = queue.pop()
        if node is None:
            continue
        yield node
        if node not in seen:
            seen.add(node)
            queue += [parent for parent, _ in node.next_functions]
