"""Reductions in three steps: slices into the partial of a chunk, partials into the state of a tile, the state into a
result.

Slices are summed pairwise in their own dtype, everything above them in float64, so that billions of float32 do not
drift. Moments are shifted sums within a chunk (the shift is the first slice's mean, or nothing where that is small
beside the spread; a chunk in which the shift turns out poor is gone through again with its own mean) and Chan's
pairwise formula between chunks. Partials are folded in the chunks' order, so that a result does not depend on which
thread was faster.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from outsize.array.kernels.fused import Index
from outsize.array.store.base import Block, Region, region_shape

States = list[Block]

_SAFE_ROWS = 512
"""Elements that may be summed one after another in float32; more go through float64."""
_WORTH_SHIFT = 0.95
"""Share of the squares that the mean must explain for slices of a long chunk to be shifted."""
_LONG = 4096
"""Elements summed in one chunk from which on slices' roundings even out, so that a small shift can be spared."""
_POOR_SHIFT = 0.99
"""Share of the squares that the shift may explain before a chunk is gone through again."""

_FOLDS: dict[str, tuple[np.ufunc, Any]] = {
    "add": (np.add, 0),
    "multiply": (np.multiply, 1),
    "minimum": (np.minimum, max),
    "maximum": (np.maximum, min),
    "or": (np.logical_or, False),
    "and": (np.logical_and, True),
}
"""Kind -> its ufunc and where it starts; `max` and `min` stand for the dtype's own ends."""

KINDS = {
    "sum": "add", "mean": "add", "prod": "multiply", "min": "minimum", "max": "maximum", "any": "or", "all": "and",
    "var": "moments", "std": "moments", "argmin": "argmin", "argmax": "argmax",
}  # fmt: skip
"""Reduction -> the kind of accumulator it needs; a mean beside a var or std of the same thing takes theirs."""


def _end(dtype: np.dtype[Any], pick: Callable[..., Any]) -> Any:
    if dtype.kind == "b":
        return pick is max
    if dtype.kind in "iu":
        return pick(np.iinfo(dtype).min, np.iinfo(dtype).max)
    return pick(-np.inf, np.inf) * (1 if dtype.kind == "f" else complex(1, 1))


class Accumulator(abc.ABC):
    """What one reduction of one input keeps: a state a tile, a partial a chunk. `consumer` or `take_block` fills a partial."""

    device_kinds: tuple[str, ...] = ()
    """Folds that a device makes of a chunk, one array each; empty: the processor does it."""

    takes_over = False
    """True where the partial of a chunk that has whole lanes is their state."""

    def __init__(self, axes: tuple[int, ...], ndim: int, dtype: np.dtype[Any], working: np.dtype[Any]) -> None:
        self.axes, self.dtype, self.working = axes, dtype, working
        self.flat = len(axes) == ndim

    @abc.abstractmethod
    def dtypes(self) -> tuple[np.dtype[Any], ...]:
        """dtypes of the state's arrays, each of the tile's shape with reduced axes of length 1."""

    @abc.abstractmethod
    def start(self, states: States) -> None:
        """Before the first chunk."""

    @abc.abstractmethod
    def combine(self, states: States, partial: States, count: int) -> None:
        """Fold the partial of a chunk, made of `count` elements each, into the state."""

    def temporaries(self, elements: int, region: Region) -> int:
        """Bytes that NumPy's own temporaries take while a chunk is reduced, in slices of `elements`, and folded."""
        kept = math.prod(self.kept(region_shape(region)))
        return (min(elements, kept) + kept) * max(self.working.itemsize, 8)

    def kept(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the state for a chunk of this shape."""
        return tuple(1 if axis in self.axes else length for axis, length in enumerate(shape))


class Taking:
    """The slices of one chunk on their way into its partial."""

    def __init__(self, owner: Accumulator, partial: States) -> None:
        self.owner, self.partial = owner, partial
        self.flat = owner.flat
        self.axes: tuple[int, ...] | None = None
        self.views = partial

    def begin(self, order: tuple[int, ...] | None, shape: tuple[int, ...]) -> None:
        """Turn the partial's axes as the slices' are."""
        if order is None:
            self.axes, self.views = None, [part.reshape(()) for part in self.partial]
            return
        self.axes = tuple(place for place, axis in enumerate(order) if axis in self.owner.axes)
        self.views = [part.transpose(order) for part in self.partial]

    def places(self, index: Index) -> States:
        """Where in the partial a slice belongs."""
        if self.axes is None:
            return self.views
        picks = tuple(slice(0, 1) if place in self.axes else part for place, part in enumerate(index))
        return [view[picks] for view in self.views]

    def reduce(self, ufunc: np.ufunc, value: Block, dtype: np.dtype[Any] | None) -> Any:
        """ufunc over the reduced axes of a slice."""
        if self.axes is None:
            return ufunc.reduce(value, axis=None, dtype=dtype)
        return ufunc.reduce(value, axis=self.axes, dtype=dtype, keepdims=True)

    def long(self, value: Block) -> bool:
        """True where more elements are summed one after another than float32 bears."""
        return self.axes is not None and _is_long(value, self.axes)


def _is_long(value: Block, axes: tuple[int, ...]) -> bool:
    if len(value.shape) - 1 in axes and value.shape[-1] > 8:
        return False
    rows: int = math.prod(value.shape[axis] for axis in axes)
    return rows > _SAFE_ROWS


def _folded_in(kind: str, value: Block, long: bool, working: np.dtype[Any]) -> np.dtype[Any] | None:
    """dtype in which a slice is folded: None is its own."""
    if kind == "add" and value.dtype.char in "fFdD" and not long:
        return None  # pairwise or short: NumPy's own sum is good, and fast
    return None if kind in ("minimum", "maximum", "or", "and") else working


def fold_whole(name: str, value: Block, axes: tuple[int, ...], working: np.dtype[Any], out: Block) -> bool:
    """A reduction of a whole block at once, as a fold of slices makes it; False where it is no fold."""
    kind = KINDS[name]
    if kind not in _FOLDS:
        return False
    dtype = _folded_in(kind, value, _is_long(value, axes), working)
    state: Any = _FOLDS[kind][0].reduce(value, axis=axes, dtype=dtype, keepdims=True)
    finish(name, [state], math.prod(value.shape[axis] for axis in axes), 0, out)
    return True


class Fold(Accumulator):
    """sum, product, minimum, maximum, any, all."""

    takes_over = True

    def __init__(
        self, kind: str, axes: tuple[int, ...], ndim: int, dtype: np.dtype[Any], working: np.dtype[Any]
    ) -> None:
        super().__init__(axes, ndim, dtype, working)
        self.kind = kind
        self.device_kinds = (kind,)
        self.ufunc, begin = _FOLDS[kind]
        self.identity = _end(working, begin) if begin in (max, min) else begin

    def dtypes(self) -> tuple[np.dtype[Any], ...]:
        return (self.working,)

    def start(self, states: States) -> None:
        states[0][...] = self.identity

    def combine(self, states: States, partial: States, count: int) -> None:
        self.ufunc(states[0], partial[0], out=states[0])

    def consumer(self, partial: States) -> Any:
        self.start(partial)
        return _Folding(self, partial)


class _Folding(Taking):
    owner: Fold
    whole = True
    """Makes no temporaries that grow with the slice, so a slice of any length will do."""

    def take(self, value: Block, index: Index) -> None:
        owner = self.owner
        dtype = _folded_in(owner.kind, value, self.long(value), owner.working)
        (place,) = self.places(index)
        owner.ufunc(place, self.reduce(owner.ufunc, value, dtype), out=place)


class Moments(Accumulator):
    """Count, mean and sum of squared deviations."""

    device_kinds = ("add", "add")

    @property
    def narrow(self) -> np.dtype[Any]:
        """dtype in which slices are shifted and squared; they want room of as many elements."""
        return self.dtype if self.dtype.char in "fdgFDG" else self.working

    def temporaries(self, elements: int, region: Region) -> int:
        return 8 * math.prod(self.kept(region_shape(region))) * max(self.working.itemsize, 8)

    def dtypes(self) -> tuple[np.dtype[Any], ...]:
        real = np.dtype(self.working.char.lower()) if self.working.kind == "c" else self.working
        return (real, self.working, real)

    def start(self, states: States) -> None:
        for state in states:
            state[...] = 0

    def combine(self, states: States, partial: States, count: int) -> None:
        """Chan, Golub and LeVeque 1979: (n, mean, M2) of two sets into that of both."""
        n, mean, squares = states
        _, part_mean, part_squares = partial
        total = n + count
        delta = part_mean - mean
        apart = mean * (n / total) + part_mean * (
            count / total
        )  # where the difference is infinite, the mean may not be
        np.copyto(mean, np.where(np.isfinite(delta), mean + delta * (count / total), apart))
        squares += part_squares + np.square(np.abs(delta)) * (n * (count / total))
        n[...] = total

    def consumer(self, partial: States, room: Block) -> Any:
        return _Shifting(self, partial, room)


class _Shifting(Taking):
    """Sums of x - shift and of its square; the shift lives in the partial's third array until `close`."""

    def __init__(self, owner: Moments, partial: States, room: Block, shift: Block | None = None) -> None:
        super().__init__(owner, partial)
        self.given, self.room = shift, room
        self.shift = np.zeros(partial[0].shape, owner.narrow)
        if shift is not None:
            np.copyto(self.shift, shift, where=np.isfinite(shift), casting="unsafe")
        self.sums = np.zeros(partial[1].shape, owner.working)
        self.squares = np.zeros(partial[2].shape, partial[2].dtype)
        self.shifted = shift is not None or owner.dtype != self.shift.dtype
        """Slices are shifted before they are squared; always so where they must be widened anyway."""

    def begin(self, order: tuple[int, ...] | None, shape: tuple[int, ...]) -> None:
        super().begin(order, shape)
        self.spare = math.prod(shape if self.axes is None else [shape[axis] for axis in self.axes]) >= _LONG
        arrays = [self.shift, self.sums, self.squares]
        self.views = [a.reshape(()) if order is None else a.transpose(order) for a in arrays]

    def take(self, value: Block, index: Index) -> None:
        shift, sums, squares = self.places(index)
        wide = self.owner.working if self.long(value) or value.dtype.char not in "fdgFDG" else None
        spans = index if self.axes is None else tuple(index[axis] for axis in self.axes)
        room = self.room[: value.size].reshape(value.shape)
        first = self.given is None and all(span.start == 0 for span in spans)
        if not first:
            if self.shifted:
                np.subtract(value, shift, out=room, casting="unsafe")
            total, square = self._sum(room if self.shifted else value, room, wide)
        else:
            if value.dtype != room.dtype:
                np.copyto(room, value, casting="unsafe")
            plain = room if value.dtype != room.dtype else value
            count = value.size if self.axes is None else math.prod(value.shape[axis] for axis in self.axes)
            total, square = self._sum(plain, room, wide) if self.spare else (self.reduce(np.add, plain, wide), np.inf)
            if self._choose(shift, total / count, square / count) or self.shifted:
                np.subtract(value, shift, out=room, casting="unsafe")
                total, square = self._sum(room, room, wide)
        sums += total
        squares += square

    def _choose(self, shift: Block, mean: Any, square: Any) -> bool:
        """Take the first slice's mean as the shift, where it explains so much of the squares that it is worth it."""
        small = np.isfinite(square) & (np.square(np.abs(mean)) <= _WORTH_SHIFT * square)
        worth = not (self.spare and bool(np.all(small)))
        if worth:
            shift[...] = np.where(np.isfinite(mean), mean, 0)
            self.shifted = True
        return worth

    def _sum(self, value: Block, room: Block, wide: np.dtype[Any] | None) -> tuple[Any, Any]:
        """Sum and sum of squares of a slice; `room` may be the slice itself and is lost."""
        total = self.reduce(np.add, value, wide)
        if room.dtype.kind == "c":
            real, imag = room.real, room.imag
            np.multiply(value.real, value.real, out=real)
            np.multiply(value.imag, value.imag, out=imag)
            np.add(real, imag, out=real)
            return total, self.reduce(np.add, real, None if wide is None else self.squares.dtype)
        if wide is None and self.axes == (value.ndim - 1,) and value.flags.c_contiguous:
            return total, np.vecdot(value, value)[..., None]  # one visit of rows instead of two
        np.multiply(value, value, out=room)
        return total, self.reduce(np.add, room, wide)

    def close(self, count: int) -> bool:
        """Turn the sums into mean and squared deviations; False where the shift was too poor to trust them."""
        explained = np.square(np.abs(self.sums)) / count
        poor = self.given is None and bool(np.any(explained > _POOR_SHIFT * self.squares) and np.any(explained > 0))
        self.partial[1][...] = self.shift + self.sums / count
        self.partial[2][...] = np.maximum(self.squares - explained, 0)
        return not poor


class ArgExtreme(Accumulator):
    """Where the smallest or largest element is; the first NaN wins, the smaller index on ties, as in NumPy."""

    takes_over = True

    def __init__(
        self, kind: str, axes: tuple[int, ...], ndim: int, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> None:
        super().__init__(axes, ndim, dtype, np.dtype(np.int64))
        self.kind, self.shape = kind, shape

    def dtypes(self) -> tuple[np.dtype[Any], ...]:
        return (self.dtype.newbyteorder("="), np.dtype(np.int64))

    def start(self, states: States) -> None:
        states[1][...] = -1

    def temporaries(self, elements: int, region: Region) -> int:
        shape = region_shape(region)
        return math.prod(shape) * self.dtype.itemsize + 6 * 8 * math.prod(self.kept(shape))

    def take_block(self, block: Block, region: Region, partial: States) -> None:
        """A whole chunk at once."""
        find = np.argmin if self.kind == "argmin" else np.argmax
        if len(self.axes) == 1:
            axis = self.axes[0]
            where = find(block, axis=axis, keepdims=True)
            partial[0][...] = np.take_along_axis(block, where, axis)
            partial[1][...] = where + region[axis][0]
            return
        place = np.unravel_index(int(find(block)), block.shape)
        partial[0][...] = block[place]
        flat = 0
        for index, (start, _), length in zip(place, region, self.shape, strict=True):
            flat = flat * length + start + int(index)
        partial[1][...] = flat

    def combine(self, states: States, partial: States, count: int) -> None:
        value, where = states
        other, there = partial
        better = other < value if self.kind == "argmin" else other > value
        tie = (other == value) | ((other != other) & (value != value))
        wins = (where < 0) | better | ((other != other) & (value == value)) | (tie & (there < where))
        wins &= ~((value != value) & (other == other)) | (where < 0)
        np.copyto(value, other, where=wins)
        np.copyto(where, there, where=wins)


def _mean(states: States, count: int, ddof: float) -> Any:
    return states[1] if len(states) == 3 else states[0] / np.asarray(count, np.float64)


def _variance(states: States, count: int, ddof: float) -> Any:
    return states[2] / np.maximum(np.asarray(count - ddof, states[2].dtype), 0)


FINISH: dict[str, Callable[[States, int, float], Any]] = {
    "mean": _mean, "var": _variance, "std": lambda states, count, ddof: np.sqrt(_variance(states, count, ddof)),
    **dict.fromkeys(("argmin", "argmax"), lambda states, count, ddof: states[1]),
    **dict.fromkeys(("sum", "prod", "min", "max", "any", "all"), lambda states, count, ddof: states[0]),
}  # fmt: skip
"""Reduction -> its values, of (states, count, ddof)."""


def finish(name: str, states: States, count: int, ddof: float, out: Block) -> None:
    """The result of a reduction."""
    with np.errstate(all="ignore"):
        np.copyto(out, FINISH[name](states, count, ddof), casting="unsafe")


def make_accumulator(
    kind: str, axes: tuple[int, ...], shape: tuple[int, ...], dtype: np.dtype[Any], working: np.dtype[Any]
) -> Accumulator:
    """The accumulator of a kind over an input of this shape and dtype."""
    if kind == "moments":
        return Moments(axes, len(shape), dtype, working)
    if kind in ("argmin", "argmax"):
        return ArgExtreme(kind, axes, len(shape), dtype, shape)
    return Fold(kind, axes, len(shape), dtype, working)
