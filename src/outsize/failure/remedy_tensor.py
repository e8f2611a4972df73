"""Remedies for one tensor whose shape is known: what each gives back, to the byte, with the code."""

from __future__ import annotations

from collections.abc import Iterator

from outsize.core.failure import Remedy
from outsize.core.noun import Known
from outsize.core.spec import Spec
from outsize.core.units import format_bytes as said
from outsize.failure.case import Case, make_remedy, pair_of_long_axes
from outsize.failure.framework import APPROXIMATE, BITWISE, ROUNDING

_NARROWER = {
    "float64": "float32",
    "complex128": "complex64",
    "int64": "int32",
    "float32": "float16",
    "uint64": "uint32",
    "complex64": "complex32",
    "int32": "int16",
}


def smaller_tensor(case: Case) -> Iterator[Remedy]:
    """What the shape itself allows, to the byte."""
    spec = case.spec
    if spec is None or spec.bytes < 2**26:
        return
    yield from _stream(case, spec)
    yield from _in_pieces(case, spec)
    narrow = _NARROWER.get(spec.dtype.name)
    if (
        narrow
        and _fits(case, Spec.of(spec.shape, narrow))
        and not (narrow == "complex32" and case.failure.framework == "numpy")
    ):
        after = Spec.of(spec.shape, narrow)
        integer = spec.dtype.kind in ("int", "uint")
        yield make_remedy(
            f"{narrow} instead of {spec.dtype.name}: {said(spec.bytes)} -> {said(after.bytes)}",
            spec.bytes - after.bytes,
            case.framework.cast.format(dtype=narrow),
            "values must fit" if integer else "fewer digits",
            BITWISE if integer else APPROXIMATE,
            Known.EXACT,
        )
    if spec.dtype.name == "float64" and _fits(case, Spec.of(spec.shape, "float16")):
        after = Spec.of(spec.shape, "float16")
        yield make_remedy(
            f"float16 instead of {spec.dtype.name}: {said(spec.bytes)} -> {said(after.bytes)}",
            spec.bytes - after.bytes,
            case.framework.cast.format(dtype="float16"),
            "3 digits, largest value 65504",
            APPROXIMATE,
            Known.EXACT,
        )


def _stream(case: Case, spec: Spec) -> Iterator[Remedy]:
    """Through a budget of RAM, from and to disk."""
    if not case.on_host and case.failure.framework not in {"numpy", "tensorflow", "pytorch"}:
        return
    rooms = [case.host_room, None if case.reading is None else case.reading.host.available]
    room = min((size for size in rooms if size is not None), default=None)
    disk = case.reading.disk.available if case.reading else None
    if disk is not None and spec.bytes > disk:
        return
    budget = min(2**30, spec.bytes // 4) if room is None else min(room // 2, 2**30, spec.bytes // 4)
    mib = budget // 2**20
    if not mib or case.on_torch:
        return
    data = "if it is data, not an activation, " if case.framework.accelerated or not case.on_host else ""
    yield make_remedy(
        f"{data}stream it: {said(spec.bytes)} on disk, {mib} MiB in RAM",
        None if data else spec.bytes - mib * 2**20,
        f'x = outsize.open("x.npy")                       # nothing is loaded\ny = (x - x.mean(axis=0)) / '
        f"x.std(axis=0)        # any array expression\n"
        f'y.save("y.zarr", budget="{mib}MiB")',
        "time to read and write the disk",
        ROUNDING,
        Known.EXACT,
    )


def _room(case: Case) -> int | None:
    """Bytes that can be had where the tensor was wanted, None if unknown."""
    if case.on_host:
        return None if case.reading is None else case.reading.host.available
    return case.failure.limit_bytes or case.failure.total_bytes


def _fits(case: Case, spec: Spec) -> bool:
    """False where the smaller tensor would not go either."""
    room = _room(case)
    return room is None or spec.bytes <= room


def _in_pieces(case: Case, spec: Spec) -> Iterator[Remedy]:
    """Half of an axis at a time, or as many pieces as it takes."""
    axis, length = max(enumerate(spec.shape), key=lambda pair: (pair[1] > 1 and pair[0] == 0, pair[1]))
    room = _room(case)
    pieces = 2 if not room else max(2, -(-2 * spec.bytes // room))
    if length < pieces:
        return
    part = list(spec.shape)
    part[axis] = -(-length // pieces)
    after = Spec.of(part, spec.dtype)
    slices = ":, " * axis + f"start:start + {part[axis]}"
    how = case.framework.split.format(axis=axis, axis_length=length, length=part[axis], pieces=pieces, slices=slices)
    name = "half of" if pieces == 2 else f"1/{pieces} of"
    yield make_remedy(
        f"{name} axis {axis} at a time: {length} -> {part[axis]}",
        spec.bytes - after.bytes,
        how,
        f"{pieces} passes",
        known=Known.EXACT,
    )


def reshape_operands(case: Case) -> Iterator[Remedy]:
    """The matrix nobody wanted."""
    pair = None if case.failure.shape is None else pair_of_long_axes(case.failure.shape)
    if pair is None or case.need is None or pair[0] != pair[1]:
        return
    item = max(1, case.need // (pair[0] * pair[1]))
    yield make_remedy(
        "give both operands the same shape",
        case.need - item * pair[0],
        "x.ravel() - y.ravel()   # or x - y[:, None]: (n, 1) with (n, 1)",
        known=Known.EXACT,
    )


def pairwise_in_blocks(case: Case) -> Iterator[Remedy]:
    """If every pair was meant."""
    shape = case.failure.shape
    if shape is None or case.need is None or pair_of_long_axes(shape) is None:
        return
    rows = max(1, (2**28 * shape[0]) // case.need)
    yield make_remedy(
        f"if every pair was meant: {rows:,} rows at a time",
        case.need - case.need * rows // shape[0],
        f"for i in range(0, len(x), {rows}):\n    block = x[i:i + {rows}, None] - y   # use it, keep only the answer",
        "time",
        known=Known.EXACT,
    )


def check_length(case: Case) -> Iterator[Remedy]:
    """A wrapped or corrupt length."""
    yield make_remedy(
        "look where the length comes from",
        None,
        "print the shape just before the call; a negative or overflowed int32 product is the usual reason",
    )
