"""Which format is smallest at the asked error, honestly: every one by the bytes that it really takes.

The modes are made shorter once; from the same core both Tucker and train are cut. Where modes do not shrink and the data do not
fit, a tensor train is tried for itself. Blocks of zfp and plain float16 or bfloat16 are no decompositions: they keep each
element with fewer digits, whatever the data. Where one of them is smaller than all factors it is taken, and a note says that the
data are not low-rank. Data for which nothing is smaller are refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from outsize.array.graph.node import Node
from outsize.core.errors import BudgetError, InputError
from outsize.core.units import format_bytes
from outsize.factor.algorithms import train as trains
from outsize.factor.algorithms import tucker as tuckers
from outsize.factor.algorithms.coded import Compressed, coded
from outsize.factor.algorithms.found import Found, count_bytes
from outsize.factor.algorithms.narrow import narrow_error
from outsize.factor.algorithms.request import Request
from outsize.factor.algorithms.session import Session
from outsize.factor.algorithms.tensor import Tensor

_SAVES = 0.9
"""What takes more than this part of the data saves nothing worth an error."""
NARROW = {"f": ("float16", "bfloat16"), "d": ("float16", "bfloat16")}
"""dtype -> plain dtypes that are smaller, each tried where the one before it is too coarse."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What `auto` takes."""

    method: str
    """A format, or a plain dtype."""
    found: Found | Compressed | None
    """The factors or blocks, None for a plain dtype."""
    error: float = 0.0
    """Measured error of a plain dtype."""
    notes: tuple[str, ...] = ()
    """What else there was."""


def choose(session: Session, node: Node, request: Request) -> Choice | None:
    """The smallest format; None in a dry session."""
    factor = (4 if node.dtype.char in "?bBhHefF" else 8) / 8
    candidates, sizes = _factors(session, node, request), {}
    if session.dry:
        if node.dtype.char in NARROW:
            narrow_error(session, node, "float16")
        coded(session, node, request.error or 1.0, node.nbytes)
        return None
    for name, found in candidates.items():
        sizes[name] = int(count_bytes(found.arrays) * factor)
    if not sizes:
        sizes["tucker"] = int(_supposed_size(session, node, request) * 8 * factor)
    best = min(sizes, key=lambda name: sizes[name])
    least, plain = sizes[best], node.nbytes // node.dtype.itemsize * 2
    narrow = _narrow(session, node, request) if least > plain and node.dtype.char in NARROW else None
    packed = coded(session, node, request.error or 1.0, min(least, node.nbytes, plain if narrow else node.nbytes))
    taken = packed.form.nbytes if packed is not None else plain if narrow is not None else least
    if taken > _SAVES * node.nbytes:
        raise InputError(_refusal(node, request, taken, sizes))
    if packed is None and narrow is None:
        others = tuple(f"{name} would take {format_bytes(size)}" for name, size in sizes.items() if name != best)
        return Choice(best, candidates[best], notes=others)
    notes = (_not_low_rank(node, sizes, "zfp" if packed is not None else narrow[0] if narrow else "", taken),)
    if packed is not None:
        return Choice("zfp", packed, packed.error, notes)
    assert narrow is not None
    return Choice(narrow[0], None, narrow[1], notes)


def _factors(session: Session, node: Node, request: Request) -> dict[str, Found]:
    """The formats that fit the budget, each cut to the asked error; none where they do not and the modes are known not to
    shrink."""
    try:
        small = tuckers.compress(session, Tensor(node), replace(request, method="tucker"))
    except BudgetError as error:
        if error.culprit != tuckers.CUT:
            raise
    else:
        return {} if small is None else {"tucker": small.cut(None), "tt": small.train()}
    session.held.clear()
    session.scratch.clear()
    try:
        found = trains.train(session, Tensor(node), replace(request, method="tt"))
    except BudgetError as error:
        if error.culprit != trains.CUT or _supposed_size(session, node, request) < _SAVES * math.prod(node.shape):
            raise
        session.held.clear()
        session.scratch.clear()
        return {}
    return {} if found is None else {"tt": found}


def _supposed_size(session: Session, node: Node, request: Request) -> int:
    """Numbers of a Tucker decomposition with the ranks that were seen; 0 where a mode was not seen."""
    allowed, ranks = (request.error or 0.0) ** 2 / len(node.shape), []
    for axis, length in enumerate(node.shape):
        key = tuckers.mode(axis)
        if length < tuckers.SHORT:
            ranks.append(length)
        elif key in session.surveyed:
            ranks.append(session.ranks.supposed(key, length).needed(allowed))
        else:
            return 0
    return math.prod(ranks) + sum(length * rank for length, rank in zip(node.shape, ranks, strict=True))


def _narrow(session: Session, node: Node, request: Request) -> tuple[str, float] | None:
    for name in NARROW[node.dtype.char]:
        error = narrow_error(session, node, name)
        if request.error is not None and error <= request.error:
            return name, error
    return None


def _not_low_rank(node: Node, sizes: dict[str, int], name: str, taken: int) -> str:
    """Why no factors are taken."""
    saved, least = _saved(node, taken), min(sizes.values())
    if least <= _SAVES * node.nbytes:
        return f"{name} is smaller here than any decomposition ({_would(sizes)})"
    return (
        f"the data are not low-rank at this error: no decomposition saves more than {_saved(node, least)} % "
        f"({_would(sizes)}); {name} keeps each element with fewer digits, and saves {saved} %"
    )


def _refusal(node: Node, request: Request, taken: int, sizes: dict[str, int]) -> str:
    return (
        f"nothing saves more than {_saved(node, taken)} % of {format_bytes(node.nbytes)} at an error of {request.error:g}: the "
        f"data are not low-rank ({_would(sizes)}), and no narrower element is near enough; keep them as they are, or ask for a "
        "larger error"
    )


def _would(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} would take {format_bytes(size)}" for name, size in sizes.items())


def _saved(node: Node, size: int) -> int:
    return max(0, math.floor(100 * (1 - size / node.nbytes)))
