"""The first reading on a device: the Gram matrix of a mode and the projection on it, by the arrays' own passes.

In: the data, a mode, a device. Out: what `shrink` gives. Both are contractions in double precision (which cards for this work
do at the rate of their memory), so the promise is the same: what is lost is the data's squares less those of the result. What is
left is small, and the processor goes on with it.
"""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import numpy as np

from outsize.array import astype, conj, matmul, permute_dims, reshape
from outsize.array.api.lazy import Array
from outsize.array.graph import build as make
from outsize.array.graph.node import Source
from outsize.array.run.now import remove
from outsize.array.store.base import Block
from outsize.array.store.formats.memory import MemoryStore
from outsize.array.tuning import current
from outsize.core.errors import BudgetError
from outsize.core.units import format_bytes
from outsize.factor.algorithms.ranks import Key, Survey
from outsize.factor.algorithms.sampling import count_needed, gram_bytes
from outsize.factor.algorithms.session import Session
from outsize.factor.algorithms.shrink import SPARE, WORTH, Shrunk, one_thread, working
from outsize.factor.algorithms.tensor import Tensor

_FINE = 1e-5
"""Where less than this share of the squares may be lost, what is left is kept in double precision."""
_LEAST = 1e-10
"""A smaller share cannot be told from the rounding of a Gram matrix: the processor's passes can."""


def choose_axis(tensor: Tensor) -> int:
    """The mode whose Gram matrix costs least, of those long enough to be worth it; the last of equals lies best."""
    worth = [axis for axis, length in enumerate(tensor.shape) if length >= 8] or list(range(len(tensor.shape)))
    return min(worth, key=lambda axis: (tensor.shape[axis], -axis))


def shrink_on_device(
    session: Session, tensor: Tensor, axis: int, dtype: np.dtype[Any], key: Key, *, allowed: float | None, rank: int | None
) -> Shrunk | None:  # fmt: skip
    """Project one mode; None where it cannot be made shorter."""
    length, wide = tensor.shape[axis], working(tensor)
    if allowed is not None and allowed < _LEAST:
        return None
    if allowed is not None and allowed < _FINE:
        dtype = wide  # the squares of rounded values would not tell so little
    if gram_bytes(length, wide) > session.room // 2:
        needed = 2 * gram_bytes(length, wide) + sum(session.held.values())
        raise BudgetError(
            f"the Gram matrix of axis {axis} takes {format_bytes(gram_bytes(length, wide))} with its eigenvectors, half of what "
            f"the budget of {format_bytes(session.host)} leaves: leave device= out, or give more", needed=needed,
            budget=session.host, culprit=f"axis {axis}",
        )  # fmt: skip
    rows = _rows(Array(tensor.node), axis, wide)  # (fibres, length)
    turned = matmul(permute_dims(rows, (1, 0)), conj(rows) if wide.kind == "c" else rows)
    gram = session.compute(turned, f"Gram matrix of axis {axis}", on_device=True)
    if session.dry:
        columns = min(length, rank or session.ranks.supposed(key, length).needed(allowed or 0.0))
        return None if columns > WORTH * length else _described(session, tensor, axis, columns, dtype)
    with one_thread(length):
        values, vectors = np.linalg.eigh(gram)
    norm2 = float(np.trace(gram).real)
    if not math.isfinite(norm2):
        return None  # the processor's passes say where
    energy = np.maximum(values[::-1], 0.0)
    total = float(energy.sum())
    count = count_needed(energy / total, (allowed or 0.0) * (1 - 1e-6), length, None) if total > 0 else 1
    columns = min(length, rank + 4) if rank is not None else max(1, count or length)
    session.ranks.note_rank(key, length, columns)
    if columns > WORTH * length:
        return None
    basis = np.ascontiguousarray(vectors[:, ::-1][:, :columns])
    left = _project(session, rows, basis, tensor.shape, axis, dtype)
    kept2 = float(np.sum((gram @ basis) * basis.conj()).real)  # |X B|^2, which the Gram matrix knows
    slack = (
        1e-11 + 4 * length * 2.0**-53 * math.sqrt(columns) + (2.0**-22 if dtype.itemsize < wide.itemsize else 0)
    ) * norm2
    return Shrunk(basis, left, norm2, max(0.0, norm2 - kept2) + slack, kept2)


def project_on_device(
    session: Session, tensor: Tensor, found: Survey, dtype: np.dtype[Any], *, norm2: float, allowed: float | None,
    rank: int | None,
) -> Shrunk | None:  # fmt: skip
    """Project a further mode of what lies in memory, in the basis that samples gave; `norm2` are its squares. None where that is
    the processor's: little is left, the mode lies in the middle, the basis lacks too much, or the error is too small to be told
    from squares of rounded values."""
    axis, length, wide = found.axis, found.length, working(tensor)
    lies = _memory(Array(tensor.node)) is not None and axis in (0, len(tensor.shape) - 1)
    if not lies or tensor.size * tensor.dtype.itemsize <= current().device_least:
        return None
    if allowed is not None and allowed < _FINE:
        return None
    columns = found.basis.shape[1]
    if rank is not None:
        columns = min(columns, rank + SPARE)
    elif allowed is not None:
        needed = found.needed(0.8 * allowed)
        columns = min(columns, needed + max(SPARE, needed // 8))
        if needed > columns:
            return None
    if not 0 < columns <= WORTH * length:
        return None
    if session.dry:
        return _described(session, tensor, axis, columns, dtype)
    basis, held, scratch = np.ascontiguousarray(found.basis[:, :columns]), dict(session.held), dict(session.scratch)
    left = _project(session, _rows(Array(tensor.node), axis, wide), basis, tensor.shape, axis, dtype)
    squares = abs(astype(Array(left.node), wide)) ** 2
    kept2 = float(session.compute(squares.sum(), f"squares of what is left of axis {axis}"))
    slack = (1e-11 + 4 * length * 2.0**-53 * math.sqrt(columns) + 2.0**-21) * norm2
    lost2 = max(0.0, norm2 - kept2) + slack
    if allowed is not None and lost2 > allowed * norm2:
        left.end()
        session.held, session.scratch = held, scratch
        return None
    tensor.end()
    session.held[f"basis {len(session.held)}"] = basis.nbytes
    return Shrunk(basis, left, norm2, lost2, kept2)


def _rows(x: Array, axis: int, wide: np.dtype[Any]) -> Array:
    """All fibres of a mode as the rows of a matrix, in double precision, lazy. Of memory that lies in one piece it is a view."""
    memory, length = _memory(x), x.shape[axis]
    if memory is not None and axis in (0, x.ndim - 1):
        matrix = memory.reshape(length, -1).T if axis == 0 else memory.reshape(-1, length)
        return astype(Array(make.constant(matrix)), wide)
    order = (*(other for other in range(x.ndim) if other != axis), axis)
    turned = x if order == tuple(range(x.ndim)) else permute_dims(x, order)
    return astype(reshape(turned, (x.size // x.shape[axis], x.shape[axis])), wide)


def _memory(x: Array) -> Block | None:
    """The array that lies behind a lazy one, if that is all of it and in one piece; a plan's has no memory at all."""
    store = x.node.store if isinstance(x.node, Source) else None
    if not isinstance(store, MemoryStore):
        return None
    return store.array if store.array.flags.c_contiguous or not any(store.array.strides) else None


def _project(
    session: Session, rows: Array, basis: Block, shape: tuple[int, ...], axis: int, dtype: np.dtype[Any]
) -> Tensor:
    """The data in a basis: (fibres, columns), turned back; in memory or in scratch."""
    columns = basis.shape[1]
    others = (*shape[:axis], *shape[axis + 1 :])
    made = astype(matmul(rows, Array(make.constant(basis.conj()))), dtype)
    back = (*range(axis), len(others), *range(axis, len(others)))
    turned = (
        permute_dims(reshape(made, (*others, columns)), back)
        if axis != len(others)
        else reshape(made, (*others, columns))
    )
    size = turned.nbytes
    if size <= session.room // 4 and axis == len(others):
        array = session.compute(made, f"projection of axis {axis}", on_device=True).reshape(turned.shape)
        session.held["the tensor"] = size
        return Tensor(make.constant(array), resident=size)
    if size <= session.room // 4:
        array = session.compute(turned, f"projection of axis {axis}", on_device=True)
        session.held["the tensor"] = size
        return Tensor(make.constant(array), resident=size)
    path = os.path.join(session.scratch_folder(), f"left-{len(session.steps)}.npy")
    for step in turned.plan(session.room, path, device=session.device).steps:
        session.add(step)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    saved = turned.save(path, budget=session.room, progress=session.listener, device=session.device)
    session.scratch["the tensor"] = size
    return Tensor(saved.node, scratch=size, end=functools.partial(remove, path))


def _described(session: Session, tensor: Tensor, axis: int, columns: int, dtype: np.dtype[Any]) -> Shrunk:
    shape = (*tensor.shape[:axis], columns, *tensor.shape[axis + 1 :])
    basis = np.zeros((tensor.shape[axis], columns), working(tensor))
    rows = _rows(Array(tensor.node), axis, working(tensor))
    session.compute(matmul(rows, Array(make.constant(basis))), f"projection of axis {axis}", on_device=True)
    target = session.target(shape, dtype, tensor)
    session.held["the tensor"] = target.nbytes if target.path is None else 0
    return Shrunk(basis, target.phantom(), 1.0, 0.0, 1.0)
