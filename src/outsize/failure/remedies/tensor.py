"""Remedies for one tensor whose shape is known: what each gives back, to the byte, with the code."""

from __future__ import annotations

from collections.abc import Iterator

from outsize.core.failure import Remedy
from outsize.core.noun import Known
from outsize.core.spec import Spec, may_be_low_rank
from outsize.core.units import format_bytes as said
from outsize.failure.advice import APPROXIMATE, BITWISE, ROUNDING
from outsize.failure.case import Case, make_remedy, pair_of_long_axes

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
        yield make_remedy(
            "keep it sparse: nearly all of it is zeros",
            case.need,
            "scipy.sparse.csr_matrix, no .toarray(), pd.get_dummies(x, sparse=True), OneHotEncoder()   # keras: labels "
            "as integers, sparse_categorical_crossentropy",
            "not every function takes sparse input",
            known=Known.BOUND,
        )


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
        yield make_remedy(
            f"{narrow} instead of {spec.dtype.name}: {said(spec.bytes)} -> {said(after.bytes)}",
            spec.bytes - after.bytes,
            case.framework.cast.format(dtype=narrow),
            "values must fit" if integer else costs,
            BITWISE if integer else APPROXIMATE,
            Known.EXACT,
        )


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
    if not data and may_be_low_rank(spec):
        yield make_remedy(
            "keep a few factors of it, where its values are low-rank (fields, video, simulations)",
            None,
            f'f = outsize.decompose("x.npy", error=0.01, budget="{mib}MiB")\n'
            "f.ratio, f.error, f[10:20]                      # how much smaller, how far off, a part",
            "an error of 1 % of the norm, promised",
            APPROXIMATE,
        )


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
    name = "half of" if pieces == 2 else f"1/{pieces} of"
    yield make_remedy(
        f"{name} axis {axis} at a time: {length} -> {part[axis]}",
        spec.bytes - after.bytes,
        how,
        f"{pieces} passes",
        known=Known.EXACT,
    )


def pairs_in_blocks(case: Case) -> Iterator[Remedy]:
    """A matrix with two long axes: was it meant, is it mostly zeros, or some rows at a time."""
    shape, need = case.failure.shape, case.need
    pair = None if shape is None else pair_of_long_axes(shape)
    if shape is None or pair is None or need is None or need < 2**32 or not case.on_host:
        return
    rows = max(1, (2**28 * shape[0]) // need)
    if pair[0] != pair[1]:
        yield make_remedy(
            f"see whether {pair[0]:,} x {pair[1]:,} was meant; if it is mostly zeros, keep it sparse",
            need,
            f"print(x.shape) before the call; scipy.sparse.csr_matrix   # or {rows:,} rows at a time",
            "not every function takes sparse input",
            known=Known.BOUND,
        )
        return
    yield make_remedy(
        f"keep only the pairs that matter, or make {rows:,} rows at a time",
        need,
        f"scipy.sparse, sklearn: kneighbors_graph(), pairwise_distances_chunked()   # or x[i:i + {rows}] against all, in a loop",
        "time, or the pairs that are left out",
        known=Known.BOUND,
    )


def fewer_rows(case: Case) -> Iterator[Remedy]:
    """A table whose rows were multiplied: see where, and let each row come once."""
    if case.multiplies and not case.makes_dense:
        yield make_remedy(
            "see where the rows multiply, and let each come once",
            case.need,
            'print(len(df)) around each call   # merge: df.drop_duplicates(keys), validate="many_to_one"; explode: one column of '
            "lists at a time, each in a table of its own",
            known=Known.BOUND,
        )


def was_it_meant(case: Case) -> Iterator[Remedy]:
    """More than nearly any machine has, in an array with more than two axes: a smaller input rather than a disk."""
    shape, need = case.failure.shape, case.need
    if shape is None or need is None or need < 2**38 or not case.on_host or pair_of_long_axes(shape) is not None:
        return
    size = " x ".join(f"{axis:,}" for axis in shape)
    how = "print(x.shape) before the call   # a smaller picture, fewer points or channels; else a part of it at a time"
    name = f"see whether {size} was meant, and give it a smaller input"
    yield make_remedy(name, need, how, "less detail", APPROXIMATE, Known.BOUND)


def other_operands(case: Case) -> Iterator[Remedy]:
    """The matrix nobody wanted: operands of one shape, or lengths that are right; in blocks if every pair was meant."""
    shape, need = case.failure.shape, case.need
    pair = None if shape is None else pair_of_long_axes(shape)
    if shape is None or pair is None or need is None:
        return
    if pair[0] == pair[1]:
        item = max(1, need // (pair[0] * pair[1]))
        how = "x.ravel() - y.ravel()   # or x - y[:, None]: (n, 1) with (n, 1)"
        yield make_remedy("give both operands the same shape", need - item * pair[0], how, known=Known.EXACT)
    else:  # a wrong index or padding rather than a broadcast
        how = "print the shapes of the operands, or the padding, just before the call"
        yield make_remedy("look where the two lengths come from", need, how, known=Known.BOUND)
    rows = max(1, (2**28 * shape[0]) // need)
    yield make_remedy(
        f"if every pair was meant: {rows:,} rows at a time",
        need - need * rows // shape[0],
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
