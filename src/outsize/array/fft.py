"""Fourier transforms of arrays larger than memory: `outsize.array.fft`, with the names of the array API standard.

In: an array, an axis. Out: a lazy array. A lane of up to 16 MiB is transformed whole, by NumPy. A longer one, which may be
larger than the budget, is seen as a matrix n1 x n2: its columns are transformed, multiplied by roots of unity, its rows
are transformed, and it is read out across (Gentleman and Sande's four steps): every pass reads and writes it once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from outsize.array.api.lanes import in_lanes
from outsize.array.api.lazy import Array, as_node
from outsize.array.functions.creation import arange
from outsize.array.functions.elementwise import real
from outsize.array.functions.manipulation import concat, flip, pad, roll
from outsize.array.functions.ufuncs import conj, exp
from outsize.array.graph.build import axis_index, permute, whole
from outsize.array.graph.node import Node
from outsize.array.graph.turn import settled
from outsize.array.store.base import Block
from outsize.array.tuning import current
from outsize.core.errors import InputError

__all__ = [
    "fft", "fftfreq", "fftn", "fftshift", "hfft", "ifft", "ifftn", "ifftshift", "ihfft", "irfft", "irfftn", "rfft", "rfftfreq",
    "rfftn",
]  # fmt: skip

Numbers = Sequence[int] | None
_OPPOSITE = {"backward": "forward", "ortho": "ortho", "forward": "backward"}


def fft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    """The discrete Fourier transform along an axis."""
    return _transform("fft", x, n, axis, norm)


def ifft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    """The inverse of `fft`."""
    return _transform("ifft", x, n, axis, norm)


def rfft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    """`fft` of real numbers: the first half, which determines the other."""
    return _transform("rfft", x, n, axis, norm)


def irfft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    """The inverse of `rfft`; `n` is the length of the result, left out the even one."""
    return _transform("irfft", x, n, axis, norm)


def hfft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    """`fft` of numbers with Hermitian symmetry, which gives real ones; `n` as for `irfft`."""
    return irfft(conj(x), n=n, axis=axis, norm=_opposite(norm))


def ihfft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Array:
    """The inverse of `hfft`."""
    return conj(rfft(x, n=n, axis=axis, norm=_opposite(norm)))


def fftn(x: Array, /, *, s: Numbers = None, axes: Numbers = None, norm: str = "backward") -> Array:
    """`fft` along several axes, left out all of them."""
    return _several(fft, fft, x, s, axes, norm)


def ifftn(x: Array, /, *, s: Numbers = None, axes: Numbers = None, norm: str = "backward") -> Array:
    """The inverse of `fftn`."""
    return _several(ifft, ifft, x, s, axes, norm)


def rfftn(x: Array, /, *, s: Numbers = None, axes: Numbers = None, norm: str = "backward") -> Array:
    """`rfft` along the last of several axes, `fft` along the others."""
    return _several(rfft, fft, x, s, axes, norm)


def irfftn(x: Array, /, *, s: Numbers = None, axes: Numbers = None, norm: str = "backward") -> Array:
    """The inverse of `rfftn`."""
    lengths, places = _axes(x, s, axes)
    for n, axis in zip(lengths[:-1], places[:-1], strict=True):
        x = ifft(x, n=n, axis=axis, norm=norm)
    return irfft(x, n=None if s is None else lengths[-1], axis=places[-1], norm=norm)


def fftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Array:
    """Frequencies of `fft`'s results, in cycles a unit where samples are `d` units apart."""
    places = (arange(n) + n // 2) % n - n // 2
    return (places / (n * d)).astype(dtype or np.float64)


def rfftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Array:
    """Frequencies of `rfft`'s results."""
    return (arange(n // 2 + 1) / (n * d)).astype(dtype or np.float64)


def fftshift(x: Array, /, *, axes: int | Sequence[int] | None = None) -> Array:
    """Frequency 0 in the middle."""
    places = _places(x, axes)
    return roll(x, tuple(x.shape[axis] // 2 for axis in places), axis=places)


def ifftshift(x: Array, /, *, axes: int | Sequence[int] | None = None) -> Array:
    """The inverse of `fftshift`."""
    places = _places(x, axes)
    return roll(x, tuple(-(x.shape[axis] // 2) for axis in places), axis=places)


def _places(x: Array, axes: int | Sequence[int] | None) -> tuple[int, ...]:
    if axes is None:
        return tuple(range(x.ndim))
    return tuple(axis_index(axis, x.ndim) for axis in ([axes] if isinstance(axes, int | np.integer) else axes))


def _axes(x: Array, s: Numbers, axes: Numbers) -> tuple[list[int], list[int]]:
    """(lengths, axes) of a transform along several."""
    count = x.ndim if s is None else len(s)
    places = list(_places(x, axes if axes is not None else range(x.ndim - count, x.ndim)))
    lengths = [x.shape[axis] for axis in places] if s is None else list(s)
    if len(lengths) != len(places) or not places:
        raise InputError(f"{len(lengths)} lengths and {len(places)} axes: as many of both are needed, and at least one")
    return [x.shape[axis] if n == -1 else n for n, axis in zip(lengths, places, strict=True)], places


def _several(last: Callable[..., Array], other: Callable[..., Array], x: Array, s: Any, axes: Any, norm: str) -> Array:
    lengths, places = _axes(x, s, axes)
    found = last(x, n=lengths[-1], axis=places[-1], norm=norm)
    for n, axis in zip(reversed(lengths[:-1]), reversed(places[:-1]), strict=True):
        found = other(found, n=n, axis=axis, norm=norm)
    return found


def _opposite(norm: str) -> str:
    if norm not in _OPPOSITE:
        raise InputError(f"norm {norm!r} is not one of {', '.join(_OPPOSITE)}")
    return _OPPOSITE[norm]


def _transform(name: str, x: Array, n: int | None, axis: int, norm: str) -> Array:
    node = as_node(x)
    place = axis_index(axis, node.ndim)
    _opposite(norm)  # or an error
    length = node.shape[place] if n is None else whole("n", n)
    if name == "irfft" and n is None:
        length = 2 * (length - 1)
    if length < 1:
        raise InputError(f"{name} of {length} points along axis {place}: at least one is needed")
    try:
        element = getattr(np.fft, name)(np.zeros(2, node.dtype)).dtype
    except TypeError:
        raise InputError(f"{name} takes numbers and not {node.dtype}: rfft and ihfft real ones") from None
    if not node.shape[place]:  # NumPy would read the first point all the same
        node = _fitted(Array(node), place, length).node
    if length * np.dtype(np.complex128).itemsize > current().transformed_lane and _cut(length) is not None:
        return _long(name, Array(node), length, place, norm).astype(element)
    return Array(_whole(name, node, length, place, norm, element))


def _whole(name: str, node: Node, length: int, axis: int, norm: str, element: np.dtype[Any]) -> Node:
    kept = length // 2 + 1 if name == "rfft" else length
    made, given = kept * element.itemsize, node.shape[axis] * node.dtype.itemsize
    widest = 16 * max(length, node.shape[axis])
    function = functools.partial(_transformed, name=name, length=length, norm=norm, element=element)
    memory = (made + 2 * widest) / max(1, given)
    return in_lanes(
        node, axis, function, name=f"{name} {length} {norm}", length=kept, dtype=element, memory=memory,
        beside=_workspace(length), into=True,
    )  # fmt: skip


def _transformed(
    block: Block, axis: int, name: str, length: int, norm: str, element: np.dtype[Any], out: Block | None = None
) -> Block:  # fmt: skip
    found: Block = getattr(np.fft, name)(block, length, axis, norm, out).astype(element, copy=False)
    return found


def _workspace(length: int) -> int:
    """Bytes in which NumPy transforms a lane: roots and a copy; with a large prime in its length (Bluestein) it becomes a
    convolution of twice the length."""
    rest, prime = length, 2
    while prime * prime <= rest:
        if rest % prime:
            prime += 1
        else:
            rest //= prime
    return 16 * length * (9 if rest * rest > length else 2)


def _cut(length: int) -> tuple[int, int] | None:
    """n1 x n2 = length, as near each other as can be, both short enough; None where there are none."""
    first = next(n for n in range(math.isqrt(length), 0, -1) if length % n == 0)
    return (first, length // first) if 16 * (length // first) <= current().transformed_lane else None


def _long(name: str, x: Array, length: int, axis: int, norm: str) -> Array:
    """A transform of lanes that are cut in two."""
    if name == "rfft":
        return _part(_long("fft", x, length, axis, norm), axis, 0, length // 2 + 1)
    if name == "irfft":
        half = _fitted(x, axis, length // 2 + 1)
        mirrored = flip(conj(_part(half, axis, 1, (length + 1) // 2)), axis=axis)
        return real(_long("ifft", concat([half, mirrored], axis=axis), length, axis, norm))
    inverse = name == "ifft"
    first, second = _cut(length) or (1, length)
    lead, trail = x.shape[:axis], x.shape[axis + 1 :]
    matrix = _fitted(x, axis, length).astype(np.complex128).reshape((*lead, first, second, *trail))
    sign, plain = (2j, "forward") if inverse else (-2j, "backward")  # neither scales
    columns = _transform(name, matrix, None, axis, plain)
    turns = (arange(first)[:, None] * arange(second)[None, :]) % length
    roots = exp(turns * (sign * math.pi / length))
    columns = columns * roots.reshape((first, second, *(1 for _ in trail)))
    rows = _transform(name, columns, None, axis + 1, plain)
    order = [*range(axis), axis + 1, axis, *range(axis + 2, rows.ndim)]
    turned = permute(rows.node, order)
    found = Array(settled(turned))  # read along, it is in crumbs
    scale = 1 / math.sqrt(length) if norm == "ortho" else 1 / length if inverse == (norm == "backward") else 1.0
    return found.reshape((*lead, length, *trail)) * scale


def _part(x: Array, axis: int, start: int, stop: int) -> Array:
    return x[(*(slice(None) for _ in range(axis)), slice(start, stop))]


def _fitted(x: Array, axis: int, length: int) -> Array:
    """Cut, or filled up with zeros."""
    lacking = length - x.shape[axis]
    if lacking <= 0:
        return _part(x, axis, 0, length)
    return pad(x, [(0, lacking if place == axis else 0) for place in range(x.ndim)])
