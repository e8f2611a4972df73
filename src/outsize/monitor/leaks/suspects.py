"""Three counts, a few steps apart -> suspects: containers, caches, named arrays and autograd graphs that grew both times.

A container that is made anew each step may have the address of an older one; it does not grow twice in a row by about as
much.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections import deque
from dataclasses import dataclass
from typing import Any

from outsize.core.outcomes.recording import HOST_DEVICE
from outsize.monitor.leaks.census import CACHE, GRAPH_NODES, Census, length_of
from outsize.monitor.leaks.frameworks import is_traced_kind
from outsize.monitor.leaks.retained import measure_each

MOST = 12
"""Suspects that are followed line by line."""
_LOOKED_AT = 8
"""New elements of a container that are measured."""
_FEWEST = 3
"""Objects of one kind that must have come each time."""


@dataclass(kw_only=True)
class Suspect:
    """Something that grew."""

    item: Any
    """The container or cache; the tensor whose graph grew; None for a named array."""
    kind: str
    """`container`, `cache`, `buffer`, `graph`, `traces` (of a function that JAX or TensorFlow compiles), `kind` (objects of one
    kind that no container holds)."""
    added: int
    """Elements (nodes of a graph, bytes of an array) that came in the time watched."""
    each: int
    """Bytes that each further element keeps for itself."""
    length: int
    """Elements now."""
    sample: Any = None
    """One of the new elements."""
    name: tuple[str, str] | None = None
    """Owner and name of an array that grew."""

    @property
    def bytes(self) -> int:
        """Bytes by which it grew."""
        return self.added * self.each


def find_suspects(first: Census, second: Census, device: str = HOST_DEVICE) -> list[Suspect]:
    """What is longer in the second count, the one that keeps most first."""
    found = []
    inside = {id(part) for item in second.grown.values() if type(item) is CACHE for part in _parts_of_cache(item)}
    for key, item in second.grown.items():
        added = second.lengths[key] - first.lengths[key]
        if key in inside or (_end(item) is not None):
            continue
        elements = newest_elements(item, min(added, _LOOKED_AT))
        kind = "cache" if type(item) is CACHE else "traces" if is_traced_kind(type(item)) else "container"
        each = measure_each(elements, device) if not isinstance(item, bytearray) and elements else int(kind != "traces")
        sample = elements[-1] if elements else None
        found.append(Suspect(item=item, kind=kind, added=added, each=each, length=length_of(item), sample=sample))
    found.sort(key=lambda suspect: (not has_graph(suspect.sample), suspect.kind != "traces", -suspect.bytes))
    return found[:MOST]


def find_filling(census: Census) -> list[str]:
    """Containers that grow up to a bound of their own: no leak, if the bound is small enough."""
    grown = [item for item in census.grown.values() if not str(getattr(item, "__module__", "")).startswith("outsize.")]
    return [text for item in grown if (text := _end(item)) is not None]


def _end(item: Any) -> str | None:
    """What bounds a container, None for one without a bound, or with one that memory does not reach."""
    name, most = "a deque", item.maxlen if isinstance(item, deque) else None
    if type(item) is CACHE:
        most = item.cache_info().maxsize
        name = f"the lru_cache of {getattr(getattr(item, '__wrapped__', None), '__qualname__', 'a function')}"
    if most is None or most * measure_each(newest_elements(item, _LOOKED_AT)) > 0.5 * _RAM:
        return None
    return f"{name} fills up: it has at most {most:,} elements"


_RAM = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def confirm(suspects: list[Suspect], second: Census, third: Census) -> list[Suspect]:
    """Those that grew again, by a rate of the same order; measured over both times."""
    kept = []
    for suspect in suspects:
        now, before = length_of(suspect.item), second.lengths.get(id(suspect.item), 0)
        again = now - before
        if again > 0 and again <= 64 * suspect.added and suspect.added <= 64 * again:
            suspect.added, suspect.length = suspect.added + again, now
            kept.append(suspect)
    return kept


def find_buffers(censuses: tuple[Census, Census, Census]) -> list[Suspect]:
    """Named arrays and texts that were larger each time."""
    first, second, third = (census.buffers for census in censuses)
    found = []
    for key, size in third.items():
        sizes = first.get(key, 0), second.get(key, 0), size
        if 0 < sizes[0] < sizes[1] < sizes[2]:
            added = sizes[2] - sizes[0]
            found.append(Suspect(item=None, kind="buffer", added=added, each=1, length=size, name=key))
    return sorted(found, key=lambda suspect: -suspect.added)


def find_kinds(censuses: tuple[Census, Census, Census], device: str = HOST_DEVICE) -> list[Suspect]:
    """Kinds of objects of which there were more each time, though no container grew: a chain in which each holds the next,
    or callbacks that C code holds."""
    first, second, third = (census.counts for census in censuses)
    grown = {
        kind: (again, earlier)
        for kind, count in third.items()
        if (again := count - second.get(kind, 0)) >= _FEWEST
        and (earlier := second.get(kind, 0) - first.get(kind, 0)) >= _FEWEST
        and again <= 64 * earlier
        and earlier <= 64 * again
    }
    made: dict[type, list[Any]] = {kind: [] for kind in grown}
    for generation in range(3):  # the newest first: the youngest generation, and the end of each
        for item in reversed(gc.get_objects(generation=generation)):
            if type(item) in made:
                made[type(item)].append(item)
    found = []
    for kind, (again, earlier) in grown.items():
        newest = made[kind][: min(again, _LOOKED_AT)]
        sample, each = (newest[0] if newest else None), measure_each(newest, device)
        found.append(
            Suspect(item=sample, kind="kind", added=again + earlier, each=each, length=third[kind], sample=sample)
        )
    return sorted(found, key=lambda suspect: -suspect.bytes)


def find_graph(censuses: tuple[Census, Census, Census], steps: int) -> Suspect | None:
    """The autograd graph behind one tensor, where it gained nodes each time: a sum or a state that was never detached."""
    first, second, third = (census.graph for census in censuses)
    grew_twice = 0 < first < second < third and third - first >= steps
    if not grew_twice and third < GRAPH_NODES:
        return None
    return Suspect(item=censuses[2].tail, kind="graph", added=third - first, each=0, length=third)


def has_graph(element: Any) -> bool:
    """True for a tensor that keeps the graph that made it."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if isinstance(element, tuple | list) and 0 < len(element) <= 16:
        return any(has_graph(part) for part in element)
    if isinstance(element, dict) and 0 < len(element) <= 32:
        return any(has_graph(part) for part in element.values())
    return tensor is not None and isinstance(element, tensor) and element.grad_fn is not None


def newest_elements(item: Any, count: int) -> list[Any]:
    """The last elements that came; any of a set. Keys of a dict count with their values."""
    try:
        if type(item) is CACHE:
            inner = [part for part in _parts_of_cache(item) if isinstance(part, dict) and part]
            return newest_elements(max(inner, key=len), count) if inner else []
        if isinstance(item, dict):
            keys = list(itertools.islice(reversed(item.keys()), count))
            return [item[key] if isinstance(key, int | str) else (key, item[key]) for key in reversed(keys)]
        if isinstance(item, list | deque):
            return [item[-number] for number in range(min(count, len(item)), 0, -1)]
        return list(itertools.islice(item, count)) if isinstance(item, set) else []
    except (RuntimeError, KeyError, IndexError, TypeError):  # another thread changed it meanwhile
        return []


def _parts_of_cache(cache: Any) -> list[Any]:
    return [part for part in gc.get_referents(cache) if isinstance(part, dict)]
