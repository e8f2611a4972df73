"""Medians, quantiles and the first few: a few elements of each lane, found without sorting it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from outsize.array.api.lazy import Array
from outsize.array.functions.elementwise import asarray
from outsize.array.graph import build as make
from outsize.array.graph.barrier import Lane, Select
from outsize.array.graph.external_sort import sort_lanes
from outsize.array.graph.node import Node
from outsize.array.graph.turn import settled
from outsize.array.kernels.ranks import Best, Counts, digits_of
from outsize.array.store.base import Block
from outsize.array.tuning import current
from outsize.core.errors import InputError

__all__ = ["median", "percentile", "quantile", "topk"]


def _lanes(x: Any, axis: Any) -> tuple[Node, tuple[int, ...], Node | None]:
    """The array with the given axes as one, the last; the lengths of all axes, with 1 for the given ones; and the array itself,
    where all of it is one lane."""
    node = asarray(x).node
    axes = make.axis_tuple(axis, node.ndim)
    kept = [a for a in range(node.ndim) if a not in axes]
    order = [*kept, *axes]
    native = make.cast(node, node.dtype.newbyteorder("="))
    turned = make.permute(native, order)
    if order != sorted(order) and node.nbytes > current().turned:
        turned = settled(turned)
    length = math.prod(node.shape[a] for a in axes)
    lanes = make.reshape(turned, (*(node.shape[a] for a in kept), length))
    ones = tuple(1 if a in axes else n for a, n in enumerate(node.shape))
    return lanes, ones, native if axes and not kept else None


def _ranked(
    name: str, node: Node, ranks: tuple[int, ...], then: Callable[[Block], Block], key: tuple[Any, ...] = (),
    whole: Node | None = None,
) -> Node:  # fmt: skip
    """then(the elements of these ranks) for every lane; `then` works along the last axis, `key` tells it from others. Where all
    of an array is one lane, `whole` is that array: its elements are counted in the order in which they are cheapest to read."""
    probe = then(np.zeros(len(ranks), node.dtype))
    shape = (*node.shape[:-1], len(probe))
    lane = functools.partial(Lane, shape=shape, dtype=probe.dtype, name=name, axis=node.ndim - 1, key=key)
    if node.shape[-1] * node.dtype.itemsize <= current().ranked_lane:
        return lane(inputs=(node,), function=functools.partial(_pick, ranks=ranks, then=then), memory=1)
    if node.dtype.kind == "c":
        return lane(inputs=(make.take(sort_lanes(node), ranks, node.ndim - 1),), function=then, memory=2)
    found: tuple[Node, ...] = ()
    digits, piece = digits_of(node.dtype, len(ranks)), current().rank_piece
    source = node if whole is None else whole
    axes = (node.ndim - 1,) if whole is None else tuple(range(whole.ndim))
    lead = node.shape[:-1] if whole is None else (1,) * (whole.ndim - 1)
    for number, (shift, bits) in enumerate(digits, 1):
        last = number == len(digits)
        rule = Counts(
            axes, source.ndim, node.dtype, ranks, shift, bits, piece, then if last else None, key if last else ()
        )
        made = Select(
            shape=(*lead, len(probe) if last else 2 * len(ranks)), dtype=probe.dtype if last else np.dtype(np.uint64),
            inputs=(source, *found), name=f"{name}, digit {number} of {len(digits)},", axes=axes, working=node.dtype,
            rule=rule,
        )  # fmt: skip
        found = (made,)
    return make.reshape(made, shape)


def _pick(block: Block, ranks: tuple[int, ...], then: Callable[[Block], Block]) -> Block:
    block.partition(ranks, axis=-1)
    return then(block[..., list(ranks)])


def _shaped(node: Node, ones: tuple[int, ...], lead: tuple[int, ...], axis: Any, keepdims: bool) -> Array:
    """The few elements of each lane as leading axes, the lanes behind them as they lay."""
    turned = make.permute(node, (node.ndim - 1, *range(node.ndim - 1)))
    axes = make.axis_tuple(axis, len(ones))
    kept = ones if keepdims else tuple(n for a, n in enumerate(ones) if a not in axes)
    return Array(make.reshape(turned, (*lead, *kept)))


def median(x: Any, /, axis: Any = None, *, keepdims: bool = False) -> Array:
    """The middle element of each lane, or the mean of the middle two; a lane may be larger than the budget.

    A lane of up to 1 MiB is read once; a longer one as often as its dtype has digits of 16 bits (float32: twice).
    """
    node, ones, whole = _lanes(x, axis)
    length = node.shape[-1]
    if length == 0:
        dtype = np.mean(np.zeros(1, node.dtype)).dtype
        return _shaped(make.fill((*node.shape[:-1], 1), np.nan, dtype), ones, (), axis, keepdims)
    inexact = node.dtype.kind in "fc"
    ranks = tuple(sorted({(length - 1) // 2, length // 2, *([length - 1] if inexact else [])}))
    middle = [ranks.index((length - 1) // 2), ranks.index(length // 2)][: 2 - length % 2]
    then = functools.partial(_middle, places=middle, inexact=inexact)
    return _shaped(_ranked("median", node, ranks, then, whole=whole), ones, (), axis, keepdims)


def _middle(found: Block, places: list[int], inexact: bool) -> Block:
    result = np.mean(found[..., places], axis=-1, keepdims=True)
    return _nan_where(result, found) if inexact else result


def _nan_where(result: Block, found: Block) -> Block:
    """NaN for a lane that has one: it is sorted last."""
    last = found[..., -1:]
    np.copyto(result, last, where=np.isnan(last), casting="unsafe")
    return result


def quantile(x: Any, q: Any, /, axis: Any = None, *, method: str = "linear", keepdims: bool = False) -> Array:
    """The elements below which the shares `q` (0 to 1) of each lane lie, between neighbours by NumPy's linear rule.

    Lanes are read as for `median`; many shares at once take digits of fewer bits, so a pass or two more.
    """
    return _quantile("quantile", x, np.asarray(q), type(q) in (int, float), axis, method, keepdims)


def percentile(x: Any, q: Any, /, axis: Any = None, *, method: str = "linear", keepdims: bool = False) -> Array:
    """Quantiles by percentages, 0 to 100."""
    share = np.asarray(np.true_divide(q, 100))
    return _quantile("percentile", x, share, type(q) in (int, float), axis, method, keepdims)


def _quantile(name: str, x: Any, q: Block, weak: bool, axis: Any, method: str, keepdims: bool) -> Array:
    if method != "linear":
        raise InputError(f"{name} has the method 'linear', not {method!r}: sort the array and pick from it")
    node, ones, whole = _lanes(x, axis)
    length, inexact = node.shape[-1], node.dtype.kind == "f"
    if node.dtype.kind in "bc":
        raise InputError(f"{name} takes real numbers, not {node.dtype}: cast it first")
    if length == 0:
        raise InputError(f"{name} of no elements (shape {asarray(x).shape}, axis {axis}) has no value")
    if q.ndim > 1 or not bool(np.all((q >= 0) & (q <= 1))):
        raise InputError(f"{name} takes one share or a list of them, from 0 to {1 if name == 'quantile' else 100}")
    virtual = np.asarray((length - 1) * q).reshape(-1)
    below = np.minimum(np.floor(virtual).astype(np.int64), length - 1)
    above = np.minimum(below + 1, length - 1)
    gamma: Any = virtual - np.floor(virtual) if virtual.dtype.kind == "f" else None
    gamma = float(gamma[0]) if weak and gamma is not None else gamma
    ranks = tuple(sorted({*below.tolist(), *above.tolist(), *([length - 1] if inexact else [])}))
    low, high = (np.searchsorted(ranks, places) for places in (below, above))
    then = functools.partial(_between, low=low, high=high, share=gamma, inexact=inexact)
    key = (q.dtype.str, q.tobytes(), weak)
    return _shaped(_ranked(name, node, ranks, then, key, whole), ones, q.shape, axis, keepdims)


def _between(found: Block, low: Block, high: Block, share: Any, inexact: bool) -> Block:
    """From the elements at `low` to those at `high` by a share (None: none of it), from whichever is nearer: as NumPy rounds
    it."""
    result = found[..., low]
    if share is not None:
        b = found[..., high]
        step = b - result
        result = np.asarray(result + step * share)
        np.subtract(b, step * (1 - share), out=result, where=np.asarray(share >= 0.5), casting="unsafe")
    return _nan_where(result, found) if inexact else result


def topk(x: Any, k: int, /, axis: int = -1, *, largest: bool = True) -> tuple[Array, Array]:
    """The `k` largest (or smallest) elements along an axis in order, and their indices: equal ones as they lie, NaN as
    the largest. The array is read once, whatever the length of its lanes; `k` elements of each are held."""
    array = asarray(x)
    place = make.axis_index(axis, array.ndim)
    node, _, _ = _lanes(array, place)
    if not isinstance(k, int | np.integer):
        raise InputError(f"topk takes a whole number of elements, not {k!r}")
    if not 0 <= k <= node.shape[-1]:
        raise InputError(f"axis {axis} has {node.shape[-1]} elements: it has no first {k}")
    shape = (*node.shape[:-1], k)
    rule = Best(node.ndim, node.dtype, k, largest)
    made = []
    for part, dtype in (("values", node.dtype), ("indices", np.dtype(np.int64))):
        name = f"topk {part}"
        found: Node = Select(
            shape=shape, dtype=dtype, inputs=(node,), name=name, axes=(node.ndim - 1,), working=node.dtype, rule=rule
        )
        order = list(range(node.ndim - 1))
        order.insert(place, node.ndim - 1)
        made.append(Array(make.permute(found, order)))
    return made[0], made[1]
