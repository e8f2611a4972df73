"""xarray's door: `chunked_array_type="outsize"` gives arrays that are computed inside the budget.

In: what xarray asks of its chunk managers. Out: lazy arrays. Found by xarray through the package's entry point, so this module is
imported only where xarray is. `Dataset.compute()` gives NumPy's arrays, `to_zarr` and `to_netcdf` stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from xarray.namedarray.parallelcompat import ChunkManagerEntrypoint

from outsize.array.api.lazy import Array
from outsize.array.functions.blockwise import map_blocks
from outsize.array.functions.elementwise import asarray
from outsize.array.graph.build import source
from outsize.array.graph.node import Node
from outsize.array.run.results import compute_node, store_nodes
from outsize.array.store.formats.pieces import ObjectSink, ObjectStore
from outsize.core.errors import InputError


class OutsizeManager(ChunkManagerEntrypoint[Array]):  # type: ignore[misc]
    """Makes and computes lazy arrays for xarray."""

    available = True

    def __init__(self) -> None:
        self.array_cls = Array

    def is_chunked_array(self, data: Any) -> bool:
        return isinstance(data, Array)

    def chunks(self, data: Array) -> tuple[tuple[int, ...], ...]:
        return data.chunks

    def normalize_chunks(
        self, chunks: Any, shape: Any = None, limit: Any = None, dtype: Any = None, previous_chunks: Any = None
    ) -> tuple[tuple[int, ...], ...]:
        """One piece of each axis: plans cut arrays as the budget asks, whatever pieces are named."""
        return tuple((int(n),) for n in shape)

    def from_array(self, data: Any, chunks: Any, **options: Any) -> Array:
        """A lazy array over what a backend of xarray's opened; nothing is read."""
        if isinstance(data, Array | np.ndarray):
            return asarray(data)
        plain = _unwrapped(data)
        if plain is not None:
            return plain
        granule = getattr(data, "preferred_chunks", None) or getattr(data, "chunks", None)
        regular = granule if isinstance(granule, tuple) and all(isinstance(n, int) for n in granule) else None
        return Array(source(ObjectStore(data, regular, 5.0)))

    def rechunk(self, data: Array, chunks: Any, **options: Any) -> Array:
        return data

    def compute(self, *data: Any, **options: Any) -> tuple[Any, ...]:
        """The values, inside the current budget."""
        return tuple(compute_node(one.node) if isinstance(one, Array) else one for one in data)

    def persist(self, *data: Any, **options: Any) -> tuple[Any, ...]:
        """The values, as lazy arrays again."""
        return tuple(asarray(compute_node(one.node)) if isinstance(one, Array) else one for one in data)

    @property
    def array_api(self) -> Any:
        import outsize.array

        return outsize.array

    def apply_gufunc(self, func: Callable[..., Any], signature: str, *args: Any, **options: Any) -> Any:
        """func of lazy arrays: it has to be made of NumPy's or the standard's functions."""
        wanted = {key: value for key, value in options.items() if key in (options.get("kwargs") or {})}
        return func(*args, **wanted)

    def store(self, sources: Any, targets: Any, **options: Any) -> Any:
        """Write arrays into what a backend opened, all in one walk over what they read."""
        regions = options.get("regions") or [None] * len(sources)
        store_nodes([_into(*each) for each in zip(sources, targets, regions, strict=True)])

    def unify_chunks(self, *args: Any, **options: Any) -> tuple[dict[str, Any], list[Any]]:
        return {}, list(args[::2])

    def map_blocks(self, func: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Refused: a block's memory is not known."""
        raise InputError("map_blocks of xarray has no memory rule here: use outsize.array.map_blocks(memory=...)")

    def scan(self, func: Any, binop: Any, ident: float, arr: Array, axis: int | None = None, **options: Any) -> Array:
        """A running sum or product."""
        import outsize.array

        ours = getattr(outsize.array, getattr(func, "__name__", ""), None)
        if ours is None:
            raise InputError(f"a running {func} has no out-of-core rule")
        return ours(arr, axis=axis)  # type: ignore[no-any-return]


_WRAPPERS = ("ImplicitToExplicitIndexingAdapter", "CopyOnWriteArray", "MemoryCachedArray", "LazilyIndexedArray")
"""Classes of xarray that give what they wrap as it is, unless they were indexed."""


_DECODING = 5.0
"""What xarray's functions for missing values, scales and offsets allocate, as a multiple of what they read."""


def _unwrapped(data: Any) -> Array | None:
    """The zarr array that xarray has wrapped, read by our own store and decoded by xarray's functions, lazily: chunks then come
    without zarr's library, and a plan knows them. None where there is none, or it was indexed."""
    kind = type(data).__name__
    if kind in _WRAPPERS:
        taken = getattr(getattr(data, "key", None), "tuple", ())
        parts = zip(taken, data.array.shape, strict=False)
        whole = all(part in (slice(None), slice(0, n), slice(0, n, 1)) for part, n in parts)
        return _unwrapped(data.array) if whole else None
    if kind == "_ElementwiseFunctionArray":
        inner = _unwrapped(data.array)
        return None if inner is None else map_blocks(data.func, inner, dtype=data.dtype, memory=_DECODING)
    inner = getattr(data, "_array", None)
    if kind != "ZarrArrayWrapper" or inner is None or type(inner).__module__.partition(".")[0] != "zarr":
        return None
    return asarray(inner) if inner.shape == data.shape and inner.dtype.kind in "biufc" else None


def _into(array: Any, target: Any, region: Any) -> tuple[Node, ObjectSink]:
    """What is written, and where."""
    node = asarray(array).node
    first = tuple((part.start or 0) if isinstance(part, slice) else 0 for part in region or ()) or (0,) * node.ndim
    chunks = getattr(getattr(target, "_array", None), "chunks", None)  # zarr's are files of their own
    grains = chunks if isinstance(chunks, tuple) and len(chunks) == node.ndim else None
    if grains is not None and any(low % grain for low, grain in zip(first, grains, strict=True)):
        grains = None
    granule = grains and tuple(min(grain, max(1, n)) for grain, n in zip(grains, node.shape, strict=True))
    return node, ObjectSink(target, node.shape, node.dtype, first, granule)
