"""Which format is smallest at the asked error, honestly: Tucker and train from one compression, plain dtypes by their bytes.

The modes are made shorter once; from the same core both formats are cut, so their sizes are what they would really take. Where
modes do not shrink and the data do not fit, a tensor train is tried for itself. Blocks of zfp are taken where they
are smaller still, a plain float16 or bfloat16 where no factors are smaller and its measured error is small enough; data in which
no format finds anything are refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from outsize.array.graph.node import Node
from outsize.core.errors import BudgetError, InputError
from outsize.core.units import format_bytes
from outsize.factor.algorithms.coded import Compressed, coded
from outsize.factor.algorithms.found import Found, count_bytes
from outsize.factor.algorithms.narrow import narrow_error
from outsize.factor.algorithms.request import Request
from outsize.factor.algorithms.session import Session
from outsize.factor.algorithms.tensor import Tensor
from outsize.factor.algorithms.train import train
from outsize.factor.algorithms.tucker import compress

_STRUCTURE = 0.9
"""Where factors take more than this part of the data, they have found nothing in them."""
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
    single = node.dtype.char in "?bBhHefF"
    factor = (4 if single else 8) / 8
    candidates = _factors(session, node, request)
    if session.dry:
        return None
    sizes = {name: int(count_bytes(found.arrays) * factor) for name, found in candidates.items()}
    best = min(sizes, key=lambda name: sizes[name], default=None)
    plain = node.nbytes // node.dtype.itemsize * 2
    least = sizes[best] if best is not None else node.nbytes
    narrow = _narrow(session, node, request) if least > plain and node.dtype.char in NARROW else None
    notes = tuple(f"{name} would take {format_bytes(size)}" for name, size in sizes.items() if name != best)
    packed = coded(session, node, request.error, min(least, plain if narrow else least)) if request.error else None
    smooth = packed is not None and 8 * packed.form.nbytes < _noise_bits(request) * (node.nbytes // node.dtype.itemsize)
    if packed is not None and (smooth or least <= _STRUCTURE * node.nbytes):
        others = (f"{best} would take {format_bytes(least)}",) if best is not None else ()
        return Choice("zfp", packed, packed.error, (*others, *notes))
    if least > _STRUCTURE * node.nbytes:
        raise _refusal(node, request, best, least, narrow, packed)
    if narrow is not None:
        assert best is not None
        return Choice(narrow[0], None, narrow[1], (f"{best} would take {format_bytes(least)}", *notes))
    assert best is not None
    return Choice(best, candidates[best], notes=notes)


def _factors(session: Session, node: Node, request: Request) -> dict[str, Found]:
    """The formats that fit the budget, each cut to the asked error."""
    made: dict[str, Found] = {}
    try:
        small = compress(session, Tensor(node), replace(request, method="tucker"))
    except BudgetError as error:
        if error.culprit != "the core":
            raise
        small = None
    if small is not None:
        made["tucker"], made["tt"] = small.cut(None), small.train()
        return made
    if session.dry:
        return made
    session.held.clear()
    try:
        found = train(session, Tensor(node), replace(request, method="tt"))
    except BudgetError as error:
        if error.culprit != "the middle of the train":
            raise
        return made
    return made if found is None else {"tt": found}


def _narrow(session: Session, node: Node, request: Request) -> tuple[str, float] | None:
    for name in NARROW[node.dtype.char]:
        error = narrow_error(node, name, session.host)
        if request.error is not None and error <= request.error:
            return name, error
    return None


def _noise_bits(request: Request) -> float:
    """Bits for each element of noise at the asked error, about: what takes fewer has found something."""
    return 1 + math.log2(1 / (request.error or 1))


def _refusal(
    node: Node, request: Request, best: str | None, least: int, narrow: tuple[str, float] | None, packed: Compressed | None
) -> InputError:  # fmt: skip
    saved = max(0.0, 100 * (1 - least / node.nbytes))
    if packed is not None:
        saved = max(saved, 100 * (1 - packed.form.nbytes / node.nbytes))
        way = f"zfp only drops digits (error {packed.error:.1e}): method='zfp' takes it"
    elif narrow is not None:
        saved = max(saved, 100 * (1 - 2 / node.dtype.itemsize))
        way = f"plain {narrow[0]} does (error {narrow[1]:.1e}): method='{narrow[0]}' takes it"
    else:
        way = "keep the data as they are, or ask for a larger error"
    factors = "no factors fit the budget" if best is None else f"{best} would take {format_bytes(least)}"
    return InputError(
        f"nothing saves more than {saved:.0f} % of {format_bytes(node.nbytes)} at an error of {request.error:g}: the data have "
        f"no low-rank structure ({factors}); {way}"
    )
