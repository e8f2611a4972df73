"""Tensor train: from both ends towards the middle, the end that shrinks most first.

In: a tensor of any size, an error or ranks. Out: its cores. A step takes the mode at one end, together with the columns that the
step before left there, as one long mode and makes it shorter; what remains is read by the next. The data themselves are
read once. It is the TT-SVD (Oseledets 2011), begun at both ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from outsize.array.graph.frame import phantom
from outsize.array.store.base import Block
from outsize.factor.algorithms.found import Found, room_for
from outsize.factor.algorithms.ranks import Key, Survey
from outsize.factor.algorithms.request import Request
from outsize.factor.algorithms.session import Session
from outsize.factor.algorithms.shrink import gram_survey, one_thread, shrink, survey, working
from outsize.factor.algorithms.tensor import Tensor
from outsize.factor.algorithms.tucker import MOST, RESERVE, Account, brought, check_squares, choose_share, is_small
from outsize.factor.formats.rounding import Rounded, round_train, split_train, train_bytes

CUT = "cut of the train"
"""The last step."""
_GROUP = 64
"""Modes at an end are taken together until they are this long: a short mode by itself saves nothing."""
_SUMS = 1e-13
"""What the sums of a difference of squares may lose."""


class _Ends:
    """The cores that were found at both ends, and what is between them."""

    def __init__(self, tensor: Tensor, dry: bool) -> None:
        self.tensor, self.dry = tensor, dry
        self.modes = list(tensor.shape)
        """Lengths of the modes that no core has yet."""
        self.ranks = [1, 1]
        """Columns at the left and the right end."""
        self.cores: tuple[list[Block], list[Block]] = ([], [])
        """From the left, and from the right towards the middle."""

    def counts(self) -> tuple[int, int]:
        """How many modes each end takes at a step: enough to be worth it."""
        found = []
        for side, modes in ((0, self.modes), (1, self.modes[::-1])):
            length, count = self.ranks[side], 0
            while count < len(modes) and (count == 0 or length < _GROUP):
                length, count = length * modes[count], count + 1
            found.append(count)
        most = len(self.modes)
        return min(found[0], most // 2), min(found[1], most - most // 2)

    def cut(self, side: int) -> Key:
        """Which cut a step at this end makes."""
        left, right = self.counts()
        if side == 0:
            return "cut", len(self.cores[0]) + left - 1
        return "cut", len(self.cores[0]) + len(self.modes) - right - 1

    def grouped(self) -> Tensor:
        """What is between, with each end as one mode: (left, modes ..., right)."""
        left, right = self.counts()
        middle = self.modes[left : len(self.modes) - right]
        ends = (self.ranks[0] * math.prod(self.modes[:left]), math.prod(self.modes[-right:]) * self.ranks[1])
        return self.tensor.reshaped((ends[0], *middle, ends[1]))

    def take(self, side: int, basis: Block, left: Tensor) -> None:
        """Cores were found at one end."""
        columns, count = left.shape[0 if side == 0 else -1], self.counts()[side]
        if self.dry:
            self._suppose(side, count, columns, basis.dtype)
            self.tensor = left
            return
        basis = np.concatenate([basis, np.zeros((basis.shape[0], columns - basis.shape[1]), basis.dtype)], axis=1)
        if side == 0:
            modes, self.modes = self.modes[:count], self.modes[count:]
            self.cores[0].extend(split_train(basis.reshape(self.ranks[0], *modes, columns)))
        else:
            modes, self.modes = self.modes[-count:], self.modes[:-count]
            turned = np.moveaxis(basis.reshape(*modes, self.ranks[1], columns), -1, 0)
            self.cores[1].extend(reversed(split_train(np.ascontiguousarray(turned))))
        self.ranks[side] = columns
        self.tensor = left

    def _suppose(self, side: int, count: int, columns: int, dtype: np.dtype[Any]) -> None:
        """Cores without contents."""
        modes = self.modes[:count] if side == 0 else self.modes[-count:]
        ends = (self.ranks[0], *modes, columns) if side == 0 else (columns, *modes, self.ranks[1])
        cores = [phantom(shape, dtype) for shape in _middle_shapes(ends)]
        self.cores[side].extend(cores if side == 0 else reversed(cores))
        self.modes, self.ranks[side] = self.modes[count:] if side == 0 else self.modes[:-count], columns


def train(session: Session, tensor: Tensor, request: Request) -> Found | None:
    """Decompose; None in a dry session."""
    account, ends = Account(request.error), _Ends(tensor, session.dry)
    session.expected = 3 * len(tensor.shape)
    if not is_small(session, ends.tensor):
        _walk_inwards(session, ends, request, account)
    middle = (ends.ranks[0], *ends.modes, ends.ranks[1])
    shapes = [*(core.shape for core in ends.cores[0]), *_middle_shapes(middle), *(core.shape for core in ends.cores[1])]
    takes = train_bytes(shapes, working(tensor).itemsize)
    with brought(session, ends.tensor, takes, CUT) as block:
        if session.dry:
            return None
        if account.norm2 is None:
            account.norm2 = check_squares(block)
        with one_thread(max(max(shape) for shape in shapes)):
            cut, lost2 = _cut(ends, split_train(block.reshape(middle)), request, account)
    return Found(cut.arrays, math.sqrt(account.norm2), lost2, account.rounded, cut.values, cut.kept)


def _cut(ends: _Ends, middle: list[Block], request: Request, account: Account) -> tuple[Rounded, float]:
    """(the rounded train, squares of all that was lost). The cut is an orthogonal projection, and so was what the passes
    did; but a cut inside an end leaves the span of that end's columns, so their losses need not be at right angles. What left
    the span is measured and counted with both (Cauchy and Schwarz); where that is too much, the cut gets what is left of the
    norm, which is enough at any angle."""
    assert account.norm2 is not None
    cores = [*ends.cores[0], *middle, *reversed(ends.cores[1])]
    passes = math.sqrt(account.lost2)
    allowed2 = room_for(request.error, account.norm2, account.lost2, account.rounded, RESERVE)
    most = account.lost2 + allowed2
    for room2 in (allowed2, max(0.0, math.sqrt(most) - passes) ** 2):
        cut = round_train(cores, room2, request.ranks)
        away = min(math.sqrt(cut.lost2), _outside(ends, cut.arrays))
        lost2 = account.lost2 + cut.lost2 + 2 * passes * away
        if request.error is None or lost2 <= most:
            break
    return cut, lost2


def _outside(ends: _Ends, cores: Sequence[Block]) -> float:
    """Norm of the part of a train that lies outside of what the columns at both ends span, at most; none where no end has a cut
    inside."""
    if max(len(side) for side in ends.cores) < 2:
        return 0.0
    count = len(ends.cores[0]), len(cores) - len(ends.cores[1])
    whole, inside = np.ones((1, 1)), np.ones((1, 1))
    for place, core in enumerate(
        cores
    ):  # whole: (ket, ket); inside: (ket, ket) of the part in the span of the left end
        whole = _step(whole, core, core)
        left = place < count[0]
        inside = _step(inside, ends.cores[0][place] if left else core, core)
        if place + 1 == count[0]:
            inside = inside.conj().T @ inside
        if place + 1 == count[1]:
            break
    ahead, right = np.ones((1, 1)), np.ones((1, 1))
    for core, basis in zip(reversed(cores[count[1] :]), ends.cores[1], strict=True):
        turned = core.transpose(2, 1, 0)
        ahead, right = _step(ahead, turned, turned), _step(right, basis.transpose(2, 1, 0), turned)
    right = right.conj().T @ right
    norm2, inside2 = float(np.sum(whole * ahead).real), float(np.sum(inside * right).real)
    return math.sqrt(max(0.0, norm2 - inside2) + _SUMS * norm2)


def _step(before: Block, bra: Block, ket: Block) -> Block:
    """Overlap of two trains, one core further: (bra, ket)."""
    half = np.tensordot(before, ket, axes=(1, 0))
    return np.tensordot(bra.conj(), half, axes=((0, 1), (0, 1)))


def _walk_inwards(session: Session, ends: _Ends, request: Request, account: Account) -> None:
    """Find cores at either end as long as one shrinks."""
    dtype, stuck = request.left_dtype(ends.tensor.dtype), set[int]()
    while len(ends.modes) > 1 and len(stuck) < 2:
        whole = ends.grouped()
        sides = [side for side in (0, 1) if side not in stuck]
        found = _survey_ends(session, whole, request, account, sides, ends)
        if not found:
            return
        side, best = min(found, key=lambda one: _kept_part(one[1], request, account, len(ends.modes)))
        share = choose_share(best, account, len(ends.modes) - 1)
        rank = _rank_at(request, ends, side)
        made = shrink(
            session, whole, best, dtype, allowed=account.allowed(share), rank=rank, most=account.allowed(MOST)
        )
        if made is None:
            stuck.add(side)
            continue
        account.note(made, dtype)
        ends.take(side, made.basis, made.left)
        stuck.clear()


def _survey_ends(
    session: Session, whole: Tensor, request: Request, account: Account, sides: list[int], ends: _Ends
) -> list[tuple[int, Survey]]:
    found: list[tuple[int, Survey]] = []
    for side in sides:
        axis = 0 if side == 0 else len(whole.shape) - 1
        if request.ranks is not None:
            rank = _rank_at(request, ends, side)
            long = rank is not None and whole.shape[axis] > rank + 4
            one = gram_survey(session, whole, axis, ends.cut(side), rank or 0) if long else None
            if one is not None:
                return [(side, one)]
            continue
        surveyed = survey(session, whole, axis, 0.8 * (account.allowed(MOST) or 0.0), ends.cut(side))
        if surveyed is not None:
            found.append((side, surveyed))
    return found


def _rank_at(request: Request, ends: _Ends, side: int) -> int | None:
    """The rank that was asked for at the cut which a step at this end makes."""
    if request.ranks is None:
        return None
    return request.ranks[ends.cut(side)[1]]


def _kept_part(found: Survey, request: Request, account: Account, modes: int) -> float:
    if request.ranks is not None:
        return max(request.ranks) / found.length
    return found.needed(
        0.8 * (account.allowed(choose_share(found, account, modes - 1)) or 0.0)
    ) / found.length - 1e-6 * (found.axis > 0)


def _middle_shapes(middle: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Shapes of the cores that `split_train` makes, at most."""
    left, right = middle[0], middle[-1]
    shapes = []
    for place, mode in enumerate(middle[1:-1]):
        rest = math.prod(middle[2 + place :])
        columns = right if place == len(middle) - 3 else min(left * mode, rest)
        shapes.append((left, mode, columns))
        left = columns
    return shapes
