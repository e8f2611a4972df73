"""Tucker: modes are made shorter one after another, the one that shrinks most first; the core is cut last, in memory.

In: a tensor of any size, an error or ranks. Out: a core and orthonormal factors. It is the sequentially truncated higher-order
SVD (Vannieuwenhoven, Vandebril, Meerbergen 2012) with one reading of the data: each pass reads what the one before it
left.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outsize.array.kernels.blas import packing
from outsize.array.run.results import compute_node, plan_compute
from outsize.array.store.base import Block
from outsize.array.tuning import current
from outsize.engine.pool import cores
from outsize.factor.algorithms.fibers import Fibers
from outsize.factor.algorithms.found import Found, room_for
from outsize.factor.algorithms.ranks import Key, Survey
from outsize.factor.algorithms.request import Request
from outsize.factor.algorithms.sampling import finite, gram_bytes
from outsize.factor.algorithms.session import Session
from outsize.factor.algorithms.shrink import Shrunk, gram_survey, one_thread, shrink, shrink_together, survey, working
from outsize.factor.algorithms.tensor import Tensor
from outsize.factor.formats.rounding import Rounded, round_train, round_tucker, split_train, tucker_bytes

RESERVE = 0.02
"""Part of the asked error that is left for rounding."""
MOST = 0.85
"""The largest share of the allowed loss that one mode gets."""

CUT = "cut of the core"
"""The last step."""
ACROSS = 4
"""A mode across the rows is read in short pieces: its pass takes about so many times as long as one along them (6.4 GB: 24 and
6.5 seconds)."""
SHORT_ENOUGH = 0.1
"""Where a pass leaves this part of the data, for what it takes, the others are not asked whether they would leave less."""
SHORT = 8
"""Shorter modes are left to the last cut."""


class Account:
    """What was lost on the way."""

    def __init__(self, error: float | None) -> None:
        self.error = error
        self.norm2: float | None = None
        self.lost2 = 0.0
        self.rounded = 0.0
        self.now2 = 0.0
        """Squares of what is left."""

    def allowed(self, share: float) -> float | None:
        """The share of the present tensor's squares that a pass may lose, if it gets this share of what is left."""
        if self.error is None:
            return None
        if self.norm2 is None:
            return share * (self.error * (1 - RESERVE)) ** 2
        left = room_for(self.error, self.norm2, self.lost2, self.rounded, RESERVE)
        return share * left / self.now2 if self.now2 > 0 else 0.0

    def note(self, made: Shrunk, dtype: np.dtype[Any]) -> None:
        """A pass is done."""
        if self.norm2 is None:
            self.norm2 = made.norm2
        self.lost2 += made.lost2
        if dtype.itemsize < working(made.left).itemsize:
            self.rounded += 2.0**-24 * math.sqrt(made.kept2) * (1 + 1e-6) + 2.0**-149 * math.sqrt(made.left.size)
        self.now2 = made.kept2


def choose_share(found: Survey, account: Account, left: int) -> float:
    """How much of the allowed loss a mode gets: an even part, or most of it where that makes the mode much shorter (what
    is lost is counted as it is, so unused room goes to the others)."""
    even = 1 / (left + 1)
    if account.error is None:
        return even
    little, much = (found.needed(0.8 * (account.allowed(share) or 0.0)) for share in (even, MOST))
    return MOST if much < 0.6 * little else even


def compress_modes(
    session: Session, tensor: Tensor, request: Request, account: Account
) -> tuple[Tensor, list[Block], np.dtype[Any]]:
    """Every mode that can be made shorter is; the bases of the others are empty."""
    dtype = request.left_dtype(tensor.dtype)
    bases: list[Block] = [np.zeros((0, 0))] * len(tensor.shape)
    left = [] if is_small(session, tensor) else [axis for axis, length in enumerate(tensor.shape) if length >= SHORT]
    session.expected = 3 * len(left) + 1
    seen: dict[int, Survey | None] = {}
    if session.device is not None and request.ranks is None and len(tensor.shape) > 2:
        tensor = _project_planes(session, tensor, request, account, bases, left, seen, dtype)
    while (best := _choose(session, tensor, request, account, left, seen)) is not None:
        rank = None if request.ranks is None else request.ranks[best.axis]
        allowed, most = account.allowed(choose_share(best, account, len(left))), account.allowed(MOST)
        made = shrink(session, tensor, best, dtype, allowed=allowed, rank=rank, most=most)
        left.remove(best.axis)
        if made is not None:
            bases[best.axis] = made.basis
            account.note(made, dtype)
            tensor = made.left
            seen.clear()
    return tensor, bases, dtype


def _project_planes(
    session: Session, tensor: Tensor, request: Request, account: Account, bases: list[Block], left: list[int],
    seen: dict[int, Survey | None], dtype: np.dtype[Any],
) -> Tensor:  # fmt: skip
    """Two modes by one crossing of the link: those whose planes lie in one piece."""
    pair = tuple(_order(tensor))[:-3:-1]
    if not set(pair) <= set(left):
        return tensor
    found = []
    for axis in pair:
        one = seen[axis] = _look(session, tensor, request, account, axis)
        if one is None:
            return tensor
        found.append(one)
    shares = [min(MOST / 2, choose_share(one, account, len(left))) for one in found]
    allowed, most = [account.allowed(share) or 0.0 for share in shares], account.allowed(MOST) or 0.0
    made = shrink_together(session, tensor, found, dtype, allowed=allowed, most=most)
    if made is None:
        return tensor
    for axis, basis in zip(pair, (made.basis, *made.more), strict=True):
        bases[axis] = basis
        left.remove(axis)
    account.note(made, dtype)
    seen.clear()
    return made.left


def _order(tensor: Tensor) -> Sequence[int]:
    """Modes from slow to fast, as they are stored."""
    return getattr(getattr(tensor.node, "store", None), "order", None) or range(len(tensor.shape))


def _dearness(tensor: Tensor, axis: int) -> int:
    """How dear a pass over all data is for this mode: cheapest for the one along the rows of what is stored."""
    return 1 if axis == _order(tensor)[-1] else ACROSS


def _choose(
    session: Session,
    tensor: Tensor,
    request: Request,
    account: Account,
    left: list[int],
    seen: dict[int, Survey | None],
) -> Survey | None:
    """The mode that shrinks most for what its pass takes, None where none is left. Modes are looked at in the order that their
    lengths (or the ranks that are given) suggest, until one becomes so short that a better one would save little. `seen` keeps
    what is known of the present tensor; None is a mode that is left as it is."""

    def cost(axis: int) -> float:
        return (1 if request.ranks is None else request.ranks[axis]) / tensor.shape[axis] * _dearness(tensor, axis)

    def kept(found: Survey) -> float:
        return _kept_part(found, request, account, len(left)) * _dearness(tensor, found.axis)

    for axis in sorted(left, key=cost):
        if axis not in seen:
            seen[axis] = _look(session, tensor, request, account, axis)
        one = seen[axis]
        if one is not None and (request.ranks is not None or kept(one) <= SHORT_ENOUGH):
            return one
    return min((one for axis, one in seen.items() if one is not None and axis in left), key=kept, default=None)


def _look(session: Session, tensor: Tensor, request: Request, account: Account, axis: int) -> Survey | None:
    """What a mode needs; None where it cannot be made shorter."""
    if request.ranks is None:
        return survey(session, tensor, axis, 0.8 * (account.allowed(MOST) or 0.0), mode(axis))
    rank = request.ranks[axis]
    return None if tensor.shape[axis] <= rank + 4 else gram_survey(session, tensor, axis, mode(axis), rank)


def mode(axis: int) -> Key:
    """By what the rank of a mode is known."""
    return "mode", axis


def _kept_part(found: Survey, request: Request, account: Account, left: int) -> float:
    """The part of a mode's length that stays, small first; of equals, the mode that lies along the rows."""
    if request.ranks is not None:
        return request.ranks[found.axis] / found.length
    return (
        found.needed(0.8 * (account.allowed(choose_share(found, account, left)) or 0.0)) / found.length
        - 1e-6 * found.axis
    )


@contextlib.contextmanager
def brought(session: Session, tensor: Tensor, takes: int, what: str) -> Iterator[Block]:
    """What is left, in memory and in double precision, for work that takes so much beside it; a `BudgetError` where that is
    too large. A dry session has nothing in it."""
    wide, narrow = working(tensor), tensor.size * tensor.dtype.itemsize
    if session.at_once:
        session.packed = max(session.packed, _most_packing(session, tensor))
    size = tensor.size * wide.itemsize + max(narrow, takes)
    reading = plan_compute(tensor.node, max(session.room, 0))
    size = max(size, min(reading.peak(), reading.smallest or 0))
    with session.work_in_memory(what, size):
        if session.dry:
            yield np.zeros((0,) * len(tensor.shape), wide)
            return
        block = compute_node(tensor.node, size, None).astype(wide)
        tensor.end()
        session.held["the tensor"] = 0
        yield block


def _most_packing(session: Session, tensor: Tensor) -> int:
    """What BLAS has taken at most, whatever passes came before: it copies parts of matrices, none
    larger than the tensor or than a Gram matrix that fits half of the room."""
    threads = max(1, min(cores(), session.host // current().thread_room))
    wide = working(tensor)
    largest = max(tensor.size, session.host // (2 * gram_bytes(1, wide)))
    return packing(largest, largest, 1, wide).total(1, threads)


@dataclass(frozen=True, slots=True)
class Compressed:
    """A tensor whose modes were made shorter, in memory."""

    core: Block
    """What is left."""
    bases: tuple[Block, ...]
    """Of each mode; empty where it was left as it is."""
    account: Account
    """What was lost."""
    allowed2: float
    """Squares that may still be lost."""

    def cut(self, ranks: tuple[int, ...] | None) -> Found:
        """As Tucker factors."""
        return self._found(round_tucker(self.core, self.bases, self.allowed2, ranks))

    def train(self) -> Found:
        """As a tensor train: that of the core, with the bases multiplied into it."""
        cores = split_train(self.core[None, ..., None])
        cut = round_train(cores, self.allowed2, None)
        joined = tuple(
            core if base.size == 0 else np.ascontiguousarray(np.moveaxis(np.tensordot(base, core, axes=(1, 1)), 0, 1))
            for core, base in zip(cut.arrays, self.bases, strict=True)
        )
        return self._found(replace(cut, arrays=joined))

    def _found(self, cut: Rounded) -> Found:
        account = self.account
        assert account.norm2 is not None
        lost2 = account.lost2 + cut.lost2
        return Found(cut.arrays, math.sqrt(account.norm2), lost2, account.rounded, cut.values, cut.kept)


def tucker(session: Session, tensor: Tensor, request: Request) -> Found | None:
    """Decompose; None in a dry session."""
    made = compress(session, tensor, request)
    if made is None:
        return None
    with one_thread(max(made.core.shape)):
        found = made.cut(request.ranks)
    for axis, rank in enumerate(found.kept):
        session.ranks.note_rank(mode(axis), tensor.shape[axis], rank)
    return found


def compress(session: Session, tensor: Tensor, request: Request) -> Compressed | None:
    """Make all modes shorter that can be, and bring what is left into memory; None in a dry session."""
    account = Account(request.error)
    shape = tensor.shape
    tensor, bases, _ = compress_modes(session, tensor, request, account)
    wide = working(tensor).itemsize
    takes = tucker_bytes(shape, tensor.shape, wide)
    with brought(session, tensor, takes, CUT) as core:
        if session.dry:
            return None
        if account.norm2 is None:
            account.norm2 = check_squares(core)
        allowed2 = room_for(request.error, account.norm2, account.lost2, account.rounded, RESERVE)
        core = core[tuple(slice(base.shape[1] if base.size else None) for base in bases)]
    return Compressed(core, tuple(bases), account, allowed2)


def check_squares(block: Block) -> float:
    """Squares of data that no pass has looked at."""
    whole = np.ascontiguousarray(block)
    return finite(Fibers(whole.reshape(1, whole.shape[0], -1)), tuple((0, n) for n in whole.shape), 0)


def is_small(session: Session, tensor: Tensor) -> bool:
    """True where the whole is cut in memory at once."""
    return session.at_once or (session.device is None and tensor.size * 16 <= min(current().small, session.room // 8))
