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
from outsize.array.functions.elementwise import asarray
from outsize.array.graph.build import source
from outsize.array.run.results import compute_node
from outsize.array.store.formats.pieces import ObjectStore
from outsize.core.errors import InputError


class OutsizeManager(ChunkManagerEntrypoint[Array]):  # type: ignore[misc]
    """Makes and computes lazy arrays for xarray."""

    array_cls = Array
    available = True

    def __init__(self) -> None:
        self.array_cls = Array

    def is_chunked_array(self, data: Any) -> bool:
        """True of ours."""
        return isinstance(data, Array)

    def chunks(self, data: Array) -> tuple[tuple[int, ...], ...]:
        """As the array says."""
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
        granule = getattr(data, "preferred_chunks", None) or getattr(data, "chunks", None)
        regular = granule if isinstance(granule, tuple) and all(isinstance(n, int) for n in granule) else None
        return Array(source(ObjectStore(data, regular, 5.0)))

    def rechunk(self, data: Array, chunks: Any, **options: Any) -> Array:
        """The array."""
        return data

    def compute(self, *data: Any, **options: Any) -> tuple[Any, ...]:
        """The values, inside the current budget."""
        return tuple(compute_node(one.node) if isinstance(one, Array) else one for one in data)

    def persist(self, *data: Any, **options: Any) -> tuple[Any, ...]:
        """The values, as lazy arrays again."""
        return tuple(asarray(compute_node(one.node)) if isinstance(one, Array) else one for one in data)

    @property
    def array_api(self) -> Any:
        """The namespace."""
        import outsize.array

        return outsize.array

    def apply_gufunc(self, func: Callable[..., Any], signature: str, *args: Any, **options: Any) -> Any:
        """func of lazy arrays: it has to be made of NumPy's or the standard's functions."""
        wanted = {key: value for key, value in options.items() if key in (options.get("kwargs") or {})}
        return func(*args, **wanted)

    def store(self, sources: Any, targets: Any, **options: Any) -> Any:
        """Write arrays into what a backend opened, some mebibytes at a time."""
        regions = options.get("regions") or [None] * len(sources)
        for one, target, region in zip(sources, targets, regions, strict=True):
            _store(one, target, region)
        return None

    def unify_chunks(self, *args: Any, **options: Any) -> tuple[dict[str, Any], list[Any]]:
        """Nothing to unify."""
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


def _store(array: Array, target: Any, region: Any) -> None:
    """array into target[region], piece by piece."""
    if not array.ndim:
        target[region if region is not None else ()] = compute_node(array.node)
        return
    starts = [(part.start or 0) if isinstance(part, slice) else 0 for part in region or ()] or [0] * array.ndim
    low = 0
    for length in array.chunks[0]:
        block = compute_node(array[low : low + length].node)
        spans = zip(starts, block.shape, strict=True)
        key = tuple(
            slice(a + (low if axis == 0 else 0), a + (low if axis == 0 else 0) + n) for axis, (a, n) in enumerate(spans)
        )
        target[key] = block
        low += length
