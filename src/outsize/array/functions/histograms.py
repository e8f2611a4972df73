"""Counting by value: histograms, bin counts, and which bin an element is in. The largest element has to be known before there is
a shape, so it is found at the call; the counts are lazy."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from outsize.array.api.lazy import Array
from outsize.array.functions.elementwise import asarray
from outsize.array.functions.sets import searchsorted
from outsize.array.graph.binned import count_bins
from outsize.array.store.base import Block
from outsize.core.errors import InputError

__all__ = ["bincount", "digitize", "histogram", "histogram_bin_edges"]


def bincount(x: Any, /, weights: Any = None, minlength: int = 0) -> Array:
    """How often each whole number from 0 on is there, or the sum of its weights. The largest is found at the call."""
    values = asarray(x)
    if values.ndim != 1 or values.dtype.kind not in "iub":
        raise InputError(f"bincount counts whole numbers in one dimension, not {values.dtype}{list(values.shape)}")
    if minlength < 0:
        raise InputError(f"bincount cannot have {minlength} bins: minlength is 0 or more")
    low, high = (int(values.min()), int(values.max())) if values.size else (0, -1)
    if low < 0:
        raise InputError(f"bincount counts whole numbers from 0 on, and the smallest is {low}")
    bins = max(high + 1, minlength)
    beside = None if weights is None else asarray(weights).astype(np.float64)
    if beside is not None and beside.shape != values.shape:
        raise InputError(
            f"bincount needs a weight for each of {values.size} elements, not weights of shape {beside.shape}"
        )
    if not bins or not values.size:
        return asarray(np.zeros(bins, np.int64))  # NumPy's, whatever the weights are
    count = functools.partial(_count, bins=bins)
    return Array(count_bins(values.node, None if beside is None else beside.node, bins, count, ("bincount", bins)))


def _count(values: Block, weights: Block | None, bins: int) -> Block:
    return np.bincount(values.astype(np.intp, copy=False), weights, bins)


def histogram_bin_edges(x: Any, bins: Any = 10, range: Any = None, weights: Any = None) -> Array:
    """The edges that `histogram` counts between."""
    return asarray(_edges(asarray(x), bins, range)[0])


def histogram(
    x: Any, /, bins: Any = 10, range: Any = None, density: bool | None = None, weights: Any = None
) -> tuple[Array, Array]:
    """(how many elements are in each bin, the bins' edges), as NumPy's. Without `range` the ends are found at the call."""
    values = asarray(x).reshape(-1)
    edges, even = _edges(values, bins, range)
    number = len(edges) - 1
    beside = None if weights is None else asarray(weights).reshape(-1)
    if beside is not None and beside.shape != values.shape:
        raise InputError(f"histogram needs a weight for each of {values.size} elements, not {beside.size}")
    if values.dtype == bool:
        values = values.astype(np.uint8)
    if values.size:
        count = functools.partial(_histogram, edges=edges, even=even)
        flat = None if beside is None else beside.astype(np.result_type(beside.dtype, np.float64)).node
        key = ("histogram", even, edges.tobytes())
        found = Array(count_bins(values.node, flat, number, count, key))
    else:
        found = asarray(np.zeros(number, np.int64 if beside is None else np.float64))
    if beside is not None:
        found = found.astype(np.histogram([0.0], 1, weights=np.zeros(1, beside.dtype))[0].dtype)
    return (found / found.sum() / np.diff(edges) if density else found), asarray(edges)


def _histogram(values: Block, weights: Block | None, edges: Block, even: bool) -> Block:
    if even:
        return np.histogram(values, len(edges) - 1, (edges[0], edges[-1]), weights=weights)[0]
    return np.histogram(values, edges, weights=weights)[0]


def _edges(values: Array, bins: Any, range: Any) -> tuple[Block, bool]:
    """(edges, True where they are evenly apart by NumPy's own rule)."""
    if isinstance(bins, str):
        raise InputError(
            f"histogram has no rule {bins!r} for the number of bins: give a number of bins, or their edges"
        )
    if np.ndim(bins):
        edges = np.asarray(bins)
        if edges.ndim != 1 or (edges[1:] < edges[:-1]).any():
            raise InputError("the edges of bins are one list of numbers that do not decrease")
        return edges, False
    if range is None and values.size:
        range = (values.min().compute()[()], values.max().compute()[()])
    if range is not None and not np.isfinite(range).all():
        raise InputError(f"a histogram from {range[0]} to {range[1]} has no even bins: give range=, or edges")
    # NumPy's own edges, of an array of the same dtype; the range says the rest
    probe = np.zeros(0, values.dtype if values.dtype != bool else np.uint8)
    return np.histogram_bin_edges(probe, bins, range), range is not None and values.dtype.kind != "c"


def digitize(x: Any, bins: Any, right: bool = False) -> Array:
    """In which bin each element is: as many edges as lie below it (or at it, unless `right`)."""
    edges = np.asarray(bins)
    side = "left" if right else "right"
    if edges.ndim != 1 or not ((edges[1:] >= edges[:-1]).all() or (edges[1:] <= edges[:-1]).all()):
        raise InputError("digitize takes edges in one dimension that only increase or only decrease")
    if (edges[1:] >= edges[:-1]).all():
        return searchsorted(edges, x, side=side)
    return len(edges) - searchsorted(edges[::-1].copy(), x, side=side)
