"""Several results in one walk over the data: `compute(a, b, c)` and `save({"z.npy": z, "m.npy": m})`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from outsize.array.api.lazy import Array
from outsize.array.graph import build as make
from outsize.array.graph.node import Node
from outsize.array.run.results import compute_nodes, plan_nodes, save_nodes
from outsize.array.store.base import Block
from outsize.core.errors import InputError
from outsize.core.events import Listener, default_listener
from outsize.core.plan import Plan


def compute(
    *arrays: Array, budget: int | str | None = None, progress: Listener | None = None, device: Any = None, tf32: bool = False
) -> tuple[Block, ...]:  # fmt: skip
    """The values of several arrays as NumPy arrays. What they have in common is read and computed once.

    >>> mean, largest = outsize.compute(x.mean(axis=0), x.max(axis=0))
    """
    nodes = [_node(array) for array in arrays]
    if not nodes:
        raise InputError("compute takes arrays: outsize.compute(a, b)")
    return tuple(compute_nodes(nodes, budget, progress, device=device, tf32=tf32))


def save(
    arrays: Mapping[Any, Array], budget: int | str | None = None,
    progress: Listener | bool | None = None, *, device: Any = None, tf32: bool = False,
) -> dict[str, Array]:  # fmt: skip
    """Write several arrays, each to its path in the format of the suffix, and open what was written. What they have in common is
    read once. All files appear at the end, or none does; an interrupted call begins again.

    >>> outsize.save({"z.npy": z, "m.npy": x.mean(axis=0)}, budget="1GiB")
    """
    listener = default_listener() if progress is None or progress is True else progress or None
    wanted = _wanted(arrays)
    stores = save_nodes(wanted, budget, listener, device=device, tf32=tf32)
    return {path: Array(make.source(store)) for path, store in zip(wanted, stores, strict=True)}


def plan_save(
    arrays: Mapping[Any, Array], budget: int | str | None = None, *, device: Any = None, tf32: bool = False
) -> Plan:  # fmt: skip
    """What `save` would read, write and hold."""
    return plan_nodes(_wanted(arrays), budget, device=device, tf32=tf32)


def _wanted(arrays: Mapping[Any, Array]) -> dict[str, Node]:
    if not isinstance(arrays, Mapping):
        raise InputError(f'save takes paths and arrays, {{"z.npy": z, "m.npy": m}}, not {type(arrays).__name__}')
    return {os.fspath(path): _node(array) for path, array in arrays.items()}


def _node(array: Any) -> Node:
    if not isinstance(array, Array):
        raise InputError(f"{type(array).__name__} is not a lazy array: open it with outsize.open(...)")
    return array.node
