"""What NumPy's users call on series and tables: averages, slopes, areas, interpolation, comparison. All are made of others."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from outsize.array.api.lazy import Array, apply
from outsize.array.functions.blockwise import map_blocks
from outsize.array.functions.elementwise import asarray, imag, isclose, real, where
from outsize.array.functions.manipulation import broadcast_to, concat, diff, expand_dims, reshape
from outsize.array.functions.products import cov, tensordot
from outsize.array.functions.reductions import cumsum
from outsize.array.graph import build as make
from outsize.array.graph.elementwise import operation
from outsize.array.store.base import Block
from outsize.core.errors import InputError

__all__ = [
    "allclose", "angle", "array_equal", "average", "corrcoef", "ediff1d", "gradient", "inner", "interp", "iscomplexobj",
    "isrealobj", "kron", "ptp", "select", "trapezoid", "unwrap", "vdot",
]  # fmt: skip


def ptp(x: Any, /, axis: Any = None, *, keepdims: bool = False) -> Array:
    """From the smallest to the largest element."""
    array = asarray(x)
    return array.max(axis, keepdims=keepdims) - array.min(axis, keepdims=keepdims)


def average(
    x: Any, /, axis: Any = None, weights: Any = None, returned: bool = False, *, keepdims: bool = False
) -> Array | tuple[Array, Array]:
    """Mean with weights: of the array's shape, or a vector along one axis. `returned=True` gives the sum of weights beside it."""
    array = asarray(x)
    if weights is None:
        found = array.mean(axis, keepdims=keepdims)
        number = math.prod(array.shape[a] for a in make.axis_tuple(axis, array.ndim))
        return (found, broadcast_to(asarray(np.asarray(number, found.dtype)), found.shape)) if returned else found
    heavy = asarray(weights)
    if heavy.shape != array.shape:
        if heavy.ndim != 1 or axis is None or isinstance(axis, tuple):
            raise InputError(f"average of shape {array.shape} takes weights of that shape, or a vector and one axis")
        place = make.axis_index(axis, array.ndim)
        if heavy.shape[0] != array.shape[place]:
            raise InputError(f"axis {axis} has {array.shape[place]} elements and there are {heavy.shape[0]} weights")
        heavy = broadcast_to(heavy[(slice(None), *[None] * (array.ndim - 1 - place))], array.shape)
    whole = array.dtype.kind in "iub"
    dtype = np.result_type(array.dtype, heavy.dtype, np.float64) if whole else np.result_type(array.dtype, heavy.dtype)
    total = heavy.sum(axis, dtype=dtype, keepdims=keepdims)
    if bool((total == 0).any()):
        raise ZeroDivisionError("the weights add up to zero: there is no average")
    found = (array.astype(dtype) * heavy).sum(axis, dtype=dtype, keepdims=keepdims) / total
    return (found, total) if returned else found


def allclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """True where all elements of two arrays are close; computed now."""
    return bool(isclose(a, b, rtol, atol, equal_nan).all())


def array_equal(a1: Any, a2: Any, equal_nan: bool = False) -> bool:
    """True where two arrays have the same shape and elements; computed now."""
    one, two = asarray(a1), asarray(a2)
    if one.shape != two.shape:
        return False
    same = one == two
    if equal_nan and one.dtype.kind in "fc" and two.dtype.kind in "fc":
        same = same | ((one != one) & (two != two))
    return bool(same.all())


def corrcoef(x: Any, y: Any = None, rowvar: bool = True) -> Array:
    """Correlation of variables in rows (or, with rowvar=False, columns)."""
    found = cov(x, y, rowvar=rowvar)
    if not found.ndim:
        return found / found
    numbers = real(found) if found.dtype.kind == "c" else found
    scale = apply(operation(np.sqrt), reshape(numbers, (-1,))[:: found.shape[0] + 1])
    result = found / scale[:, None] / scale[None, :]
    if result.dtype.kind == "c":
        raise InputError("corrcoef takes real numbers")
    return apply(operation(np.minimum), apply(operation(np.maximum), result, -1), 1)


def gradient(f: Any, *spacing: Any, axis: Any = None, edge_order: int = 1) -> Array | tuple[Array, ...]:
    """Slopes by differences of neighbours, as NumPy's: an array, or a list with one for each axis."""
    array = asarray(f)
    axes = make.axis_tuple(axis, array.ndim)
    if len(spacing) not in (0, 1, len(axes)):
        raise InputError(f"gradient takes one distance, or one for each of {len(axes)} axes, not {len(spacing)}")
    given = list(spacing) * len(axes) if len(spacing) == 1 else list(spacing) or [1.0] * len(axes)
    if array.dtype.kind in "iub":
        array = array.astype(np.float64)
    found = [_slope(array, place, step, edge_order) for place, step in zip(axes, given, strict=True)]
    return found[0] if len(found) == 1 else tuple(found)


def _slope(f: Array, axis: int, spacing: Any, edge_order: int) -> Array:
    if edge_order not in (1, 2):
        raise InputError(f"gradient takes edge_order=1 or 2, not {edge_order}")
    if f.shape[axis] < edge_order + 1:
        raise InputError(
            f"a gradient of order {edge_order} at the edges needs {edge_order + 1} elements along axis {axis}"
        )
    steps = np.asarray(spacing)
    if steps.ndim:
        if steps.shape != (f.shape[axis],):
            raise InputError(
                f"gradient takes a distance or {f.shape[axis]} places along axis {axis}, not {steps.shape}"
            )
        steps = np.diff(steps.astype(np.float64) if steps.dtype.kind in "iu" else steps)
        steps = steps[0] if (steps == steps[0]).all() else steps

    def at(key: Any) -> Array:
        return f[(*(slice(None),) * axis, key)]

    def wide(values: Any) -> Any:
        return asarray(values)[(slice(None), *[None] * (f.ndim - 1 - axis))]

    if steps.ndim:
        before, behind = steps[:-1], steps[1:]
        inner = (
            wide(-behind / (before * (before + behind))) * at(slice(None, -2))
            + wide((behind - before) / (before * behind)) * at(slice(1, -1))
            + wide(before / (behind * (before + behind))) * at(slice(2, None))
        )
        ends = (steps[0], steps[-1])
    else:
        inner = (at(slice(2, None)) - at(slice(None, -2))) / (2.0 * steps[()])
        ends = (steps[()], steps[()])
    if edge_order == 1:
        first = (at(slice(1, 2)) - at(slice(0, 1))) / ends[0]
        last = (at(slice(-1, None)) - at(slice(-2, -1))) / ends[1]
    else:
        even = (steps, steps) if not steps.ndim else None
        a, b = even or (steps[0], steps[1])
        first = _edge(at, (0, 1, 2), -(2.0 * a + b) / (a * (a + b)), (a + b) / (a * b), -a / (b * (a + b)))
        a, b = even or (steps[-2], steps[-1])
        last = _edge(at, (-3, -2, -1), b / (a * (a + b)), -(b + a) / (a * b), (2.0 * b + a) / (b * (a + b)))
    return concat([first, inner, last], axis=axis).astype(
        f.dtype if f.dtype.kind == "f" and not steps.ndim else np.result_type(f.dtype, steps.dtype)
    )


def _edge(at: Callable[[Any], Array], places: tuple[int, ...], *factors: Any) -> Array:
    total: Array | None = None
    for place, factor in zip(places, factors, strict=True):
        part = float(factor) * at(slice(place, place + 1 or None))
        total = part if total is None else total + part
    assert total is not None
    return total


def trapezoid(y: Any, x: Any = None, dx: float = 1.0, axis: int = -1) -> Array:
    """The area below samples, by trapezoids."""
    array = asarray(y)
    place = make.axis_index(axis, array.ndim)
    lead = (slice(None),) * place
    width: Array | float = dx
    if x is not None:
        places = asarray(x)
        steps = diff(places, axis=place if places.ndim > 1 else 0)
        width = steps[(slice(None), *[None] * (array.ndim - 1 - place))] if places.ndim == 1 else steps
    pairs = array[(*lead, slice(1, None))] + array[(*lead, slice(None, -1))]
    return (width * pairs / 2.0).sum(place)


def interp(x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None, period: Any = None) -> Array:
    """Values between samples by straight lines. The samples are held in memory."""
    places, values = np.asarray(xp), np.asarray(fp)
    if places.ndim != 1 or places.shape != values.shape or not places.size:
        raise InputError(f"interp takes xp and fp of one length, not empty, not {places.shape} and {values.shape}")
    function = functools.partial(_interp, xp=places, fp=values, left=left, right=right, period=period)
    wide = asarray(x).astype(np.float64)
    dtype = np.complex128 if values.dtype.kind == "c" else np.float64
    return map_blocks(function, wide, memory=2 if period is None else 6, dtype=dtype)


def _interp(block: Block, **options: Any) -> Block:
    return np.asarray(np.interp(block, **options))


def unwrap(p: Any, discont: float | None = None, axis: int = -1, *, period: float = 2 * math.pi) -> Array:
    """Angles without jumps: steps of more than half a period are made shorter by whole periods."""
    array = asarray(p)
    array = array if array.dtype.kind == "f" else array.astype(np.float64)
    place = make.axis_index(axis, array.ndim)
    lead = (slice(None),) * place
    step = diff(array, axis=place)
    half = period / 2
    short = apply(operation(np.remainder), step + half, period) - half
    short = where((short == -half) & (step > 0), array.dtype.type(half), short)
    mend = where(abs(step) < (half if discont is None else discont), array.dtype.type(0), short - step)
    return concat([array[(*lead, slice(0, 1))], array[(*lead, slice(1, None))] + cumsum(mend, place)], axis=place)


def kron(a: Any, b: Any) -> Array:
    """Every element of one array times the whole of another."""
    one, two = asarray(a), asarray(b)
    ndim = max(one.ndim, two.ndim)
    one, two = (array[(None,) * (ndim - array.ndim)] if array.ndim < ndim else array for array in (one, two))
    left = expand_dims(one, axis=tuple(range(1, 2 * ndim, 2))) if ndim else one
    right = expand_dims(two, axis=tuple(range(0, 2 * ndim, 2))) if ndim else two
    return reshape(left * right, tuple(m * n for m, n in zip(one.shape, two.shape, strict=True)))


def inner(a: Any, b: Any) -> Array:
    """Sums of products along the last axes."""
    one, two = asarray(a), asarray(b)
    return one * two if not one.ndim or not two.ndim else tensordot(one, two, axes=((-1,), (-1,)))


def vdot(a: Any, b: Any) -> Array:
    """The sum of products of all elements, the first conjugated."""
    one, two = reshape(asarray(a), (-1,)), reshape(asarray(b), (-1,))
    return tensordot(apply(operation(np.conjugate), one) if one.dtype.kind == "c" else one, two, axes=1)


def ediff1d(x: Any, to_end: Any = None, to_begin: Any = None) -> Array:
    """Differences of all neighbours, with others before and behind."""
    parts = [to_begin, diff(reshape(asarray(x), (-1,))), to_end]
    found = [asarray(part) for part in parts if part is not None]
    return concat([part.reshape(-1) for part in found])


def select(condlist: Any, choicelist: Any, default: Any = 0) -> Array:
    """From each place the first choice whose condition holds."""
    if not condlist or len(condlist) != len(choicelist):
        raise InputError(f"select takes as many choices as conditions, not {len(choicelist)} for {len(condlist)}")
    choices = [asarray(choice) for choice in choicelist]
    dtype = np.result_type(
        *(choice.dtype for choice in choices), default if isinstance(default, int | float) else asarray(default).dtype
    )
    found: Any = asarray(np.asarray(default)) if not isinstance(default, Array) else default
    for condition, choice in zip(reversed(condlist), reversed(choices), strict=True):
        found = where(condition, choice, found)
    return found.astype(dtype)  # type: ignore[no-any-return]


def angle(z: Any, deg: bool = False) -> Array:
    """The angle of complex numbers."""
    array = asarray(z)
    array = array if array.dtype.kind in "fc" else array.astype(np.float64)
    above = imag(array) if array.dtype.kind == "c" else Array(make.fill(array.shape, 0, array.dtype))
    found = apply(operation(np.arctan2), above, real(array) if array.dtype.kind == "c" else array)
    return found * (180 / math.pi) if deg else found


def iscomplexobj(x: Any) -> bool:
    """True of complex dtypes."""
    return asarray(x).dtype.kind == "c"


def isrealobj(x: Any) -> bool:
    """True of all other dtypes."""
    return not iscomplexobj(x)
