"""Remedies for one tensor whose shape is known: what each gives back, to the byte, with the code."""

from __future__ import annotations

from collections.abc import Iterator

from outsize.core.failure import Remedy
from outsize.core.noun import Known
from outsize.core.spec import Spec, may_be_low_rank
from outsize.core.units import format_bytes as said
from outsize.failure.advice import APPROXIMATE, BITWISE
from outsize.failure.case import Case, make_remedy, pair_of_long_axes
from outsize.failure.remedies.texts import remedy
from outsize.failure.work import Work

_NARROWER = {
    "float64": "float32",
    "complex128": "complex64",
    "int64": "int32",
    "float32": "float16",
    "uint64": "uint32",
    "complex64": "complex32",
    "int32": "int16",
}


def keep_sparse(case: Case) -> Iterator[Remedy]:
    """What is mostly zeros is not written out."""
    if case.makes_dense:
        yield remedy("keep_sparse", case.need)


def open_grid(case: Case) -> Iterator[Remedy]:
    """Every point of a grid is written out, though each coordinate depends on one axis."""
    if case.writes_grid and case.on_host and len(case.failure.shape or ()) > 1:
        yield remedy("open_grid", case.need)


def smaller_tensor(case: Case) -> Iterator[Remedy]:
    """What the shape itself allows, to the byte."""
    spec = case.spec
    if spec is None or spec.bytes < 2**26 or (case.in_graph and case.makes_weights):
        return
    yield from _on_disk(case, spec)
    if not (case.in_graph and case.half_of_batch) or spec.bytes >= (_room(case) or 2**63):
        yield from _in_pieces(case, spec)
    for narrow, costs in _narrower(case, spec):
        after = Spec.of(spec.shape, narrow)
        integer = spec.dtype.kind in ("int", "uint")
        name = f"{narrow} instead of {spec.dtype.name}: {said(spec.bytes)} -> {said(after.bytes)}"
        costs, exact = ("values must fit", BITWISE) if integer else (costs, APPROXIMATE)
        how = case.framework.cast.format(dtype=narrow)
        yield make_remedy(name, spec.bytes - after.bytes, how, costs, exact, Known.EXACT)


def fewer_at_once(case: Case) -> Iterator[Remedy]:
    """One request of several times the device, whose shape nobody names: half of it would not do."""
    room = case.failure.total_bytes or case.failure.limit_bytes
    if case.spec is not None or not case.need or not room or case.need < 4 * room or case.work is Work.PAINTS:
        return
    parts = -(-case.need // max(1, room // 2))
    yield remedy("fewer_at_once", case.need - case.need // parts, need=said(case.need), parts=parts)


def less_in_one_step(case: Case) -> Iterator[Remedy]:
    """One request larger than the whole card, whose shape nobody names: its inputs, whatever they are."""
    room = case.failure.total_bytes or case.failure.limit_bytes
    if (
        case.spec is None
        and case.on_torch
        and case.work in (Work.TRAINS, Work.UNKNOWN)
        and case.need
        and room
        and case.need < 4 * room
        and (case.need > room or case.takes_all_free)
    ):
        yield remedy(
            "less_in_one_step", case.need - room // 2 if case.need > room else case.need // 2, need=said(case.need)
        )


def fewer_pictures(case: Case) -> Iterator[Remedy]:
    """An array in RAM whose shape is that of pictures: what fills RAM is how many of them are held, and how large they are."""
    shape = case.pictures
    if case.reads_raster and case.failure.shape and (case.need or 0) >= 2**28:
        yield remedy("part_of_raster", case.need)
    if shape is None:
        return
    count, height, width = shape
    what = f"{count:,} pictures of {height} x {width} at once" if count > 1 else f"a picture of {height} x {width}"
    yield remedy("fewer_pictures", case.need * 9 // 10 if case.need and case.need >= 2**29 else None, what=what)


def smaller_input(case: Case) -> Iterator[Remedy]:
    """A large array that somebody's program makes in one piece, where no line of code is shown or no shape is known."""
    if case.failure.framework not in ("numpy", "python", "pandas") or case.need is None or case.need < 2**28:
        return
    if case.spec is not None and not (case.of_another or case.computes):
        return
    pieces = "for part in np.array_split(rows, 10): ..."
    if case.spec is not None:
        axis, length = max(enumerate(case.spec.shape), key=lambda pair: pair[1])
        pieces = f"a tenth of axis {axis} at a time: {length} -> {-(-length // 10)}"
    name = "smaller_input" if case.spec is None or case.of_another else "part_at_a_time"
    yield remedy(name, case.need * 9 // 10, bytes=said(case.need), pieces=pieces)


def _narrower(case: Case, spec: Spec) -> Iterator[tuple[str, str]]:
    """Element types with fewer bits in which the tensor would go, and what each costs."""
    room = _room(case)
    half = [("float16", "3 digits, largest value 65504")] if spec.dtype.name == "float64" else []
    for name, costs in [(_NARROWER.get(spec.dtype.name, ""), "fewer digits"), *half]:
        numpy_has_it = name != "complex32" or case.failure.framework != "numpy"
        if name and numpy_has_it and (room is None or Spec.of(spec.shape, name).bytes <= room):
            yield name, costs


def _on_disk(case: Case, spec: Spec) -> Iterator[Remedy]:
    """Through a budget of RAM, from and to disk; or only its factors, where its data may be low-rank."""
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
    data = data or ("if it is data that is kept, " if case.computes else "")
    yield remedy(
        "stream_from_disk", None if data else spec.bytes - mib * 2**20, data=data, bytes=said(spec.bytes), mib=mib
    )
    if not data and may_be_low_rank(spec):
        yield remedy("keep_factors", mib=mib)


def _room(case: Case) -> int | None:
    """Bytes that can be had where the tensor was wanted, None if unknown."""
    if case.on_host:
        return None if case.reading is None else case.reading.host.available
    return case.failure.limit_bytes or case.device_room


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
    name = f"{'half' if pieces == 2 else f'1/{pieces}'} of axis {axis} at a time: {length} -> {part[axis]}"
    yield make_remedy(name, spec.bytes - after.bytes, how, f"{pieces} passes", known=Known.EXACT)


def pairs_in_blocks(case: Case) -> Iterator[Remedy]:
    """A matrix with two long axes: was it meant, is it mostly zeros, or some rows at a time."""
    if case.paired is not None:
        yield remedy("fewer_pairs", case.need, count=case.paired // 4)
        return
    need, pair = case.need, case.long_pair or _wide_matrix(case)
    if pair is None or need is None or need < 2**32 or not case.on_host or case.reads_raster:
        return
    rows = max(1, (2**28 * _rows(case, pair)) // need)
    if pair[0] != pair[1]:
        if any(axis not in (1, *pair) for axis in case.failure.shape or ()):  # points or pictures, not a matrix
            return
        yield remedy("see_both_lengths", need, pair_0=pair[0], pair_1=pair[1], rows=rows)
        return
    yield remedy("pairs_in_blocks", need, rows=rows)


def _wide_matrix(case: Case) -> tuple[int, int] | None:
    """A matrix of at least 8 GiB whose shorter axis is thousands long: as a rule most of it is zeros."""
    shape = case.failure.shape or ()
    wide = len(shape) == 2 and min(shape) >= 5_000 and (case.need or 0) >= 2**33
    return (max(shape), min(shape)) if wide else None


def fewer_rows(case: Case) -> Iterator[Remedy]:
    """A table whose rows were multiplied: see where, and let each row come once."""
    if case.multiplies and not case.makes_dense:
        yield remedy("fewer_rows", case.need)


def was_it_meant(case: Case) -> Iterator[Remedy]:
    """More than nearly any machine has, in an array with more than two axes: a smaller input rather than a disk."""
    shape, need = case.failure.shape, case.need
    if shape is None or need is None or need < 2**38 or not case.on_host or pair_of_long_axes(shape) is not None:
        return
    size = " x ".join(f"{axis:,}" for axis in shape)
    yield remedy("was_it_meant", need, size=size)


def other_operands(case: Case) -> Iterator[Remedy]:
    """The matrix nobody wanted: operands of one shape, or lengths that are right; in blocks if every pair was meant."""
    need, pair = case.need, case.long_pair
    if pair is None or need is None:
        return
    if pair[0] == pair[1]:
        item = max(1, need // (pair[0] * pair[1]))
        yield remedy("same_shape", need - item * pair[0])
    else:  # a wrong index or padding rather than a broadcast
        yield remedy("see_where_lengths_come_from", need)
    length = _rows(case, pair)
    rows = max(1, (2**28 * length) // need)
    yield remedy("pairs_in_rows", need - need * rows // length, rows=rows)


def _rows(case: Case, pair: tuple[int, int]) -> int:
    return pair[0] if case.failure.shape is None else case.failure.shape[0]


def check_length(case: Case) -> Iterator[Remedy]:
    """A wrapped or corrupt length."""
    yield remedy("check_length")
