"""One mode of a tensor made as short as the allowed loss lets it be: survey, then project.

A survey mixes a few chunks and says how many columns a basis needs. The projection then reads everything once, checks every
chunk and grows the basis. Where that ends up larger than expected (what the chunks had in common was not all), the basis is
found again from all data: from the Gram matrix where it fits, else from a wider mixture. A mode that cannot be made shorter is
left as it is, which loses nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outsize.array.kernels.blas import blas_threads
from outsize.array.store.base import Block
from outsize.core.errors import BudgetError, ClusterError
from outsize.engine.pool import cores
from outsize.factor.algorithms.projection import BasisTooSmall, Projection, Projections
from outsize.factor.algorithms.ranks import Key, Survey
from outsize.factor.algorithms.sampling import Gram, Mixing, gram_bytes
from outsize.factor.algorithms.session import Session
from outsize.factor.algorithms.tensor import Tensor

_SAMPLE = 1 << 18
"""Elements of a chunk of a survey; more where a fibre is long."""
_COLUMNS = 96
"""Columns of the first mixture; three times as many in the next."""
WORTH = 0.8
"""A mode that would keep more than this part of its length is left as it is."""
_HOPELESS = 0.4
"""Where a mixture as wide as this part of the mode does not hold it, a wider one would not make it much shorter."""
_LONG = 4096
"""Longer modes have no Gram matrix: its eigenvectors would take minutes."""
_DIRECT = 1e-8
"""Where less than this share of the squares may be lost, it is measured as itself, not as a difference of larger sums."""
_FEW = 512
"""Columns of a matrix that one thread factorises."""
_EACH, _HANDS = 1 << 19, 4
"""Elements of a tall matrix for each thread that factorises it, and how many there are at most."""
SPARE = 4
"""Columns more than a rank that is asked for."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """A tensor with one mode shorter."""

    basis: Block
    """(length, columns)."""
    left: Tensor
    """The tensor in that basis; its mode may be longer than the basis has columns, by zeros."""
    norm2: float
    """Squares of the tensor before."""
    lost2: float
    """Squares of what was lost, at most."""
    kept2: float
    """Squares of what is left."""
    more: tuple[Block, ...] = ()
    """Bases of further modes that were made shorter with it."""


def columns_for(session: Session, tensor: Tensor, axis: int, wanted: int = _COLUMNS) -> int:
    """Columns of a mixture that the room allows; 0 where it is too small for any that help."""
    length = tensor.shape[axis]
    most = min(length, max(1, tensor.size // max(1, length)))
    room = session.room // 3 // (5 * length * working(tensor).itemsize)
    columns = min(most, wanted, room)
    return columns if columns >= min(most, 16) else 0


def working(tensor: Tensor) -> np.dtype[Any]:
    """The dtype of all arithmetic."""
    return np.dtype(np.complex128 if tensor.dtype.kind == "c" else np.float64)


def survey(
    session: Session, tensor: Tensor, axis: int, allowed: float | None, key: Key, *, rank: int | None = None, whole: bool = False
) -> Survey | None:  # fmt: skip
    """Mix until the mixture is wide enough to say what the mode needs, or to hold the rank that is asked for; None where the
    room is too small."""
    length = tensor.shape[axis]
    most = min(length, max(1, tensor.size // max(1, length)))
    wanted = _COLUMNS if rank is None else max(_COLUMNS, 2 * rank + SPARE)
    while True:
        columns = columns_for(session, tensor, axis, wanted)
        if not columns or (rank is not None and columns < min(most, rank + SPARE)):
            return None
        name = f"{'mixture' if whole else 'sample'} of axis {axis}"

        def make(columns: int = columns, name: str = name) -> Mixing:
            return Mixing(length, columns, axis, working(tensor), name)

        kernel, share = session.stream(
            tensor, axis, make, sample=None if whole else max(_SAMPLE, length * columns // 4)
        )
        session.note_finished(kernel)
        complete = columns == length or (columns == most and share == 1)
        with session.work_in_memory(f"basis of axis {axis}", 5 * kernel.total.nbytes), few_threads(kernel.total.size):
            if session.dry:
                supposed = session.ranks.supposed(key, length, most)
                found = replace(supposed, axis=axis, basis=kernel.total, most=columns // (1 if complete else 2))
            else:
                basis, energy = kernel.basis()
                found = Survey(axis, basis, energy, kernel.norm2 / share, length, complete, key)
        if allowed is None or found.told(allowed) is not None:
            break
        if columns == most or columns < wanted or columns > _HOPELESS * length:
            break
        wanted *= 3
    if allowed is not None:
        wide = columns == min(most, wanted) and (columns == most or columns > _HOPELESS * length)
        session.note_survey(found, allowed, hopeless=wide)
    return found


def few_threads(size: int) -> AbstractContextManager[None]:
    """A tall matrix of so many elements is factorised by a few threads, a small one by one."""
    return blas_threads(min(_HANDS, cores(), 1 + size // _EACH))


def one_thread(columns: int) -> AbstractContextManager[None]:
    """Small matrices are factorised by one thread: several would wait for each other, the longer the busier a machine is."""
    return blas_threads(1) if columns <= _FEW else contextlib.nullcontext()


def shrink(
    session: Session, tensor: Tensor, found: Survey, dtype: np.dtype[Any], *, allowed: float | None, rank: int | None,
    most: float | None = None,
) -> Shrunk | None:  # fmt: skip
    """Project the surveyed mode; None where it stays as it is. The basis is chosen to lose `allowed` of the tensor's squares, and
    grows where it would lose `most` of them."""
    most = allowed if most is None or allowed is None else max(most, allowed)
    length = found.length
    for attempt in ("sample", "all", "more"):
        if rank is not None:
            columns, spare = min(length, found.basis.shape[1], rank + SPARE), 0
        else:
            assert allowed is not None
            needed = found.needed(0.8 * allowed if attempt == "sample" else allowed * (1 - 1e-6))
            more = max(4, needed // 8) if attempt == "sample" else 0
            columns = max(needed, min(needed + more, found.basis.shape[1]))
            spare = max(8, columns // 4) * (attempt != "more" or not found.complete)
        if columns > WORTH * length or columns > found.basis.shape[1]:
            return None
        try:
            with _in_vain(session, session.dry and attempt == "sample" and found.key in session.ranks.again):
                return _project(session, tensor, [(found, columns, min(length, columns + spare))], dtype, most)
        except BasisTooSmall:
            session.ranks.again.add(found.key)
        found = _look_at_all(session, tensor, found, allowed, rank)
    return None


def shrink_together(
    session: Session,
    tensor: Tensor,
    found: Sequence[Survey],
    dtype: np.dtype[Any],
    *,
    allowed: Sequence[float],
    most: float,
) -> Shrunk | None:
    """Project several surveyed modes by a device; None where that is not worth it, or their bases lose more than `most`."""
    modes, key = [], ("together", found[0].axis)
    for one, share in zip(found, allowed, strict=True):
        needed = one.needed(0.8 * share)
        columns = min(needed + max(4, needed // 8), one.basis.shape[1])
        if needed > columns or columns > one.length // 2:
            return None
        modes.append((one, columns, columns))
    try:
        with _in_vain(session, session.dry and key in session.ranks.again):
            return _project(session, tensor, modes, dtype, most)
    except (BasisTooSmall, BudgetError):  # a chunk has whole planes: one mode after another takes less
        session.ranks.again.add(key)
        return None


@contextlib.contextmanager
def _in_vain(session: Session, known: bool) -> Iterator[None]:
    """In a plan, a projection of which it is known that its basis will not suffice: nothing of it stays."""
    held, scratch = dict(session.held), dict(session.scratch)
    yield
    if known:
        session.held, session.scratch = held, scratch
        raise BasisTooSmall


def _look_at_all(session: Session, tensor: Tensor, found: Survey, allowed: float | None, rank: int | None) -> Survey:
    """The same survey of all data."""
    axis, length = found.axis, found.length
    if length <= _LONG and gram_bytes(length, working(tensor)) <= session.room // 2:
        made = Gram(length, axis, working(tensor), f"Gram matrix of axis {axis}")
        kernel, _ = session.stream(tensor, axis, lambda: made)
        session.note_finished(kernel)
        if session.dry:
            seen = replace(session.ranks.supposed(found.key, length), axis=axis, basis=made.total)
        else:
            with one_thread(length):
                basis, energy = kernel.basis()
            seen = Survey(axis, basis, energy, kernel.norm2, length, True, found.key)
        if allowed is not None:
            session.note_survey(seen, allowed, hopeless=False)
        return seen
    half = None if allowed is None else allowed / 2
    wider = survey(session, tensor, axis, half, found.key, rank=rank, whole=True)
    return found if wider is None else wider


def gram_survey(session: Session, tensor: Tensor, axis: int, key: Key, rank: int) -> Survey | None:
    """A survey of all data at once, for ranks that are given."""
    found = _look_at_all(session, tensor, unknown(tensor, axis, key), None, rank)
    return found if found.basis.shape[1] else None


def unknown(tensor: Tensor, axis: int, key: Key) -> Survey:
    """A mode that nobody has looked at."""
    return Survey(axis, np.zeros((tensor.shape[axis], 0)), np.zeros(0), 0.0, tensor.shape[axis], False, key)


def _project(
    session: Session,
    tensor: Tensor,
    modes: Sequence[tuple[Survey, int, int]],
    dtype: np.dtype[Any],
    allowed: float | None,
) -> Shrunk:
    """`modes`: a survey, how many of its columns are used, and how many there is room for."""
    shape, bases = list(tensor.shape), []
    for found, columns, room in modes:
        basis: Block = np.zeros((found.length, room), working(tensor))
        if not session.dry:
            basis[:, :columns] = found.basis[:, :columns]
        shape[found.axis] = room
        bases.append(basis)
    target = session.target(tuple(shape), dtype, tensor)
    session.held["what is left"] = target.nbytes if target.path is None else 0
    session.scratch["what is left"] = 0 if target.path is None else target.nbytes
    (found, columns, room), axes = modes[0], " and ".join(str(found.axis) for found, _, _ in modes)
    lengths = ", ".join(f"{found.length} -> {room}" for found, _, room in modes)
    name = f"projection of ax{'i' if len(modes) == 1 else 'e'}s {axes}: {lengths}"

    def make() -> Projection:
        if len(modes) > 1:
            assert allowed is not None
            several = tuple((mode[0].axis, basis) for mode, basis in zip(modes, bases, strict=True))
            return Projections(several, target, name, allowed=allowed, expected=found.squares, size=tensor.size)
        return Projection(
            bases[0], columns, found.axis, target, name, allowed=allowed, expected=found.squares, size=tensor.size,
            direct=allowed is not None and allowed < _DIRECT,
        )  # fmt: skip

    if not session.dry:
        target.create()
    try:
        note = f"{2 * tensor.size * room / 1e9:,.1f} billion operations"
        kernel, _ = session.stream(tensor, found.axis, make, note=note)
        if not session.dry:
            kernel.finish()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | ClusterError):
            target.close()  # the same call goes on with what is in the file
        else:
            target.abandon()
        session.held.pop("what is left"), session.scratch.pop("what is left")
        raise
    session.note_finished(kernel)
    tensor.end()
    _settle(session, target.nbytes if target.path is None else 0, 0 if target.path is None else target.nbytes)
    for basis in bases:
        session.held[f"basis {len(session.held)}"] = basis.nbytes
    if session.dry:
        return Shrunk(bases[0], target.phantom(), 1.0, 0.0, 1.0, tuple(bases[1:]))
    if kernel.used > columns:
        session.ranks.note_rank(found.key, found.length, kernel.used * 8 // 9)  # a plan adds an eighth
    basis = kernel.basis[:, : kernel.used]
    return Shrunk(basis, target.tensor(), kernel.norm2, kernel.lost2, kernel.kept2, tuple(bases[1:]))


def _settle(session: Session, held: int, scratch: int) -> None:
    """What was left before is gone, and this has taken its place."""
    session.held.pop("what is left"), session.scratch.pop("what is left")
    session.held["the tensor"], session.scratch["the tensor"] = held, scratch
