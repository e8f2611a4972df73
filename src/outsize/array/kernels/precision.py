"""The error that a cast costs, measured while the data streams past.

In: blocks before and after the cast. Out: a `Precision`. `MeasuredStore` is the source store seen through the cast:
whoever reads it gets the new dtype, and every element that passes is measured on its way, so one pass over the data
both writes it and knows what that cost. Work is done in slices that stay in the cache.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from outsize.array.store.base import Block, Buffer, Region, Store, round_up
from outsize.array.store.io.narrow_floats import round_to_bfloat16
from outsize.array.store.io.view import SeenStore
from outsize.core.outcomes.conversion import Precision

_SLICE = 16384
"""Elements measured at once."""
_TEMPORARIES = 16
"""Temporaries of one slice that are alive at once, at most."""


Measured = tuple[dict[str, int], dict[str, float], float, float]
"""Counts, extremes, the largest error, squares of errors relative to it."""


class Meter:
    """Sums up the error of a cast over blocks, from any thread."""

    def __init__(self, before: np.dtype[Any], after: np.dtype[Any], *, bfloat16: bool = False) -> None:
        self._work = _working_type(before, after)
        self._range = _integer_range(after)
        self._exact = not bfloat16 and _is_exact(before, after)
        self._narrowing = before.kind == after.kind == "f" and before.isnative and before.itemsize <= 8
        self.held = _TEMPORARIES * _SLICE * self._work.itemsize
        """Bytes that measuring takes, however large the block."""
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._counts = dict.fromkeys(("elements", "changed", "overflowed", "flushed", "nans_created", "kept"), 0)
        self._peaks = {"max_abs": 0.0, "max_rel": 0.0, "largest": 0.0, "smallest": math.inf}
        self._scale, self._squares = 0.0, 0.0

    def add(self, before: Block, after: Block) -> None:
        """Measure a block; both have one shape."""
        if self._exact:
            self._merge({"elements": before.size, "kept": before.size}, {}, 0.0, 0.0)
            return
        flat, cast = before.reshape(-1), after.reshape(-1)
        for start in range(0, flat.size, _SLICE):
            old, new = flat[start : start + _SLICE], cast[start : start + _SLICE]
            if not (self._narrowing and self._add_plain(old, new)):
                self._add_slice(old, new)

    def _add_plain(self, before: Block, after: Block) -> bool:
        """A slice of floats that stayed finite and of which none became zero: most slices, at half the cost.

        A float minus itself rounded to fewer bits is a float of the same type exactly, so nothing wider is needed.
        """
        with np.errstate(all="ignore"):
            size = np.abs(before)
            new = after.astype(before.dtype, copy=False)
            error = np.abs(before - new)
            largest, largest_error = float(size.max()), float(error.max())
            zeros = size.size - int(np.count_nonzero(size))
            if not (largest_error < 1e150 and math.isfinite(largest)) or zeros != new.size - int(np.count_nonzero(new)):
                return False
            smallest = float(size.min() if not zeros else size.min(where=size > 0, initial=math.inf))
            squares = float(np.square(error, dtype=np.float64).sum())
            relative = float(np.fmax.reduce(np.divide(error, size, out=size)))  # ignores the NaN of 0 / 0
        counts = {"elements": before.size, "changed": int(np.count_nonzero(error)), "kept": before.size}
        peaks = {
            "max_abs": largest_error, "max_rel": 0.0 if math.isnan(relative) else relative, "largest": largest,
            "smallest": smallest,
        }  # fmt: skip
        self._merge(counts, peaks, 1.0, squares)
        return True

    def _add_slice(self, before: Block, after: Block) -> None:
        with np.errstate(all="ignore"):
            old, new = before.astype(self._work), after.astype(self._work)
            size = np.abs(old)
            finite = np.isfinite(old)
            over = self._is_over(old, new, finite)
            created = np.isnan(new) & ~np.isnan(old)
            flushed = (new == 0) & (size > 0) & ~over
            kept = finite & np.isfinite(new) & ~over
            error = np.where(kept, np.abs(old - new), 0)
            relative = error[kept & (size > 0) & ~flushed] / size[kept & (size > 0) & ~flushed]
            nonzero = size[finite & (size > 0)]
        largest_error = float(error.max(initial=0))
        squares = float(np.sum(np.square(error / largest_error))) if largest_error else 0.0
        counts = {
            "elements": before.size, "changed": int(np.count_nonzero(error)), "overflowed": int(np.count_nonzero(over)),
            "flushed": int(np.count_nonzero(flushed)), "nans_created": int(np.count_nonzero(created)),
            "kept": int(np.count_nonzero(kept)),
        }  # fmt: skip
        peaks = {
            "max_abs": largest_error, "max_rel": float(relative.max(initial=0)),
            "largest": float(nonzero.max(initial=0)), "smallest": float(nonzero.min(initial=math.inf)),
        }  # fmt: skip
        self._merge(counts, peaks, largest_error, squares)

    def _is_over(self, old: Block, new: Block, finite: Block) -> Block:
        """Where a value is beyond the new type's range."""
        if self._range is None:
            return finite & np.isinf(new)
        low, high = self._range
        parts = (old.real, old.imag) if old.dtype.kind == "c" else (old,)
        over: Block = ~finite
        for part in parts:
            over |= (np.trunc(part) < low) | (np.trunc(part) > high)
        return over

    def _merge(self, counts: dict[str, int], peaks: dict[str, float], scale: float, squares: float) -> None:
        with self._lock:
            for name, count in counts.items():
                self._counts[name] += count
            for name, peak in peaks.items():
                self._peaks[name] = (min if name == "smallest" else max)(self._peaks[name], peak)
            if scale > self._scale:  # squares are kept relative to the largest error, so that they cannot overflow
                self._squares = self._squares * (self._scale / scale) ** 2 + squares
                self._scale = scale
            elif scale:
                self._squares += squares * (scale / self._scale) ** 2

    def take(self) -> Measured:
        """What was measured since the last time, which another meter can `give` itself."""
        with self._lock:
            found = (self._counts, self._peaks, self._scale, self._squares)
            self._begin()
        return found

    def give(self, measured: Measured) -> None:
        """What another meter has measured."""
        self._merge(*measured)

    def read(self) -> Precision:
        with self._lock:
            kept = self._counts["kept"]
            smallest = self._peaks["smallest"]
            return Precision(
                elements=self._counts["elements"], changed=self._counts["changed"], max_abs=self._peaks["max_abs"],
                max_rel=self._peaks["max_rel"], rms=self._scale * math.sqrt(self._squares / kept) if kept else 0.0,
                overflowed=self._counts["overflowed"], flushed=self._counts["flushed"],
                nans_created=self._counts["nans_created"],
                largest=None if self._exact else self._peaks["largest"],
                smallest=None if math.isinf(smallest) else smallest,
            )  # fmt: skip


def _working_type(before: np.dtype[Any], after: np.dtype[Any]) -> np.dtype[Any]:
    """The type in which errors are computed: it holds every value before and after."""
    wide = before.itemsize > {"c": 16, "f": 8}.get(before.kind, 4)
    if "c" in (before.kind, after.kind):
        return np.dtype(np.clongdouble if wide else np.complex128)
    return np.dtype(np.longdouble if wide else np.float64)


def _is_exact(before: np.dtype[Any], after: np.dtype[Any]) -> bool:
    """True where the new type holds every value of the old one, so that nothing needs to be measured."""
    if before.kind in "iu" and after.kind in "fc":  # NumPy calls int64 -> float64 safe
        return bool(8 * before.itemsize <= np.finfo(after).nmant)
    return bool(np.can_cast(before, after, "safe"))


def _integer_range(dtype: np.dtype[Any]) -> tuple[Any, Any] | None:
    """The range of an integer type; None for types in which what is beyond the range becomes infinite."""
    if dtype.kind == "b":
        return np.longdouble(0), np.longdouble(1)
    if dtype.kind not in "iu":
        return None
    info = np.iinfo(dtype)
    return np.longdouble(info.min), np.longdouble(info.max)


class MeasuredStore(SeenStore):
    """A store seen through a cast; every element that is read is measured."""

    def __init__(self, inner: Store, dtype: np.dtype[Any], *, bfloat16: bool = False) -> None:
        self.name, self.shape, self.paths = inner.name, inner.shape, inner.paths
        self.granule, self.order = inner.granule, inner.order
        self.dtype = np.dtype(dtype)
        self.meter = Meter(inner.dtype, self.dtype, bfloat16=bfloat16)
        self.inner = inner
        self._bfloat16 = bfloat16

    def __reduce__(self) -> Any:
        again = functools.partial(MeasuredStore, bfloat16=self._bfloat16)
        return again, (self.inner, self.dtype)  # in another process it measures for itself

    def _beside(self, region: Region) -> int:
        return round_up(self.bytes_of(region)) + self.meter.held

    def read(self, region: Region, buffer: Buffer) -> Block:
        """Read, cast and measure a region; the cast block has the strides' order of the inner one."""
        before = self.inner.read(region, buffer[round_up(self.bytes_of(region)) :])
        order = sorted(range(before.ndim), key=lambda axis: -abs(before.strides[axis]))
        turned = before.transpose(order)
        after = np.ndarray(turned.shape, self.dtype, buffer.data)
        for old, new in _rows(turned, after):
            for start in range(0, old.size, _SLICE):
                piece, out = old[start : start + _SLICE], new[start : start + _SLICE]
                with np.errstate(all="ignore"):
                    np.copyto(out, piece, casting="unsafe")
                if self._bfloat16:
                    round_to_bfloat16(out)
                self.meter.add(piece, out)
        return after.transpose(np.argsort(order)) if order else after

    def fingerprint(self) -> str:
        return f"{self.inner.fingerprint()} as {self.dtype.str} {self._bfloat16}"


def _rows(before: Block, after: Block) -> Iterator[tuple[Block, Block]]:
    """Both blocks as rows of one axis, without a copy: one row where they are contiguous, else along the last axis."""
    if before.flags.c_contiguous:
        yield before.reshape(-1), after.reshape(-1)
    else:
        for index in np.ndindex(before.shape[:-1]):
            yield before[index], after[index]
