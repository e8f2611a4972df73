"""Canonical polyadic (CP): alternating least squares on the Tucker core (CANDELINC), by TensorLy's kernels.

A CP of the core, times the bases, is a CP of the data, and the core is small. There is no theorem that says which rank reaches an
error, and the fit may stop in a local minimum: so several starts are tried, ranks grow until the asked error is reached, and the
error that is said is measured, exactly: what the projections lost and what the fit leaves of the core are orthogonal.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outsize.array.store.base import Block
from outsize.core.errors import InputError
from outsize.core.extras import need
from outsize.factor.algorithms.found import Found
from outsize.factor.algorithms.request import Request
from outsize.factor.algorithms.session import Session
from outsize.factor.algorithms.shrink import one_thread
from outsize.factor.algorithms.tensor import Tensor
from outsize.factor.algorithms.tucker import mode as mode_key
from outsize.factor.algorithms.tucker import tucker

_STARTS = 3
"""Random starts of each rank, beside the one from singular vectors."""
_STEPS = 300
"""Steps of a start."""
_SHARE = 0.6
"""Part of the asked error that the Tucker core may take (in squares: 0.36)."""
_WIDER = 8
"""How much wider than twice the rank the core is where a rank is asked for."""
_MOST_RANK = 256
"""Ranks are tried up to this."""
_WORK = 1 << 24
"""Elements of the core times the rank, at most: a step then takes a few hundredths of a second."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A CP of a core."""

    weights: Block
    factors: tuple[Block, ...]
    lost2: float
    """Squares of what it leaves of the core."""


def canonical(session: Session, tensor: Tensor, request: Request) -> tuple[Found, tuple[str, ...]] | None:
    """(factors and what is known of them, notes); None in a dry session."""
    parafac = need("tensorly.decomposition", "method='cp'", "use method='tucker'").parafac
    found = tucker(session, tensor, _for_core(request, tensor.shape))
    core = _supposed(session, request, tensor.shape) if found is None else found.arrays[0].shape
    ranks = _ranks(core, tensor.shape) if request.ranks is None else list(request.ranks)
    with session.work_in_memory("CP of the core", _fit_bytes(core, max(ranks))):
        return None if found is None else _search(parafac, found, request, ranks)


def _for_core(request: Request, shape: tuple[int, ...]) -> Request:
    """The Tucker decomposition that CP works on: of an error, a part of it; of a rank, twice as wide a core and some more, since
    the best CP need not lie in as few leading directions as it has components."""
    if request.ranks is None:
        assert request.error is not None
        return replace(request, error=_SHARE * request.error)
    rank = request.ranks[0]
    return replace(request, ranks=tuple(min(length, 2 * rank + _WIDER) for length in shape))


def _supposed(session: Session, request: Request, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The core's shape before it is known."""
    tucker_request = _for_core(request, shape)
    if tucker_request.ranks is not None:
        return tucker_request.ranks
    allowed = (tucker_request.error or 0.0) ** 2 / len(shape)
    return tuple(session.ranks.supposed(mode_key(axis), length).needed(allowed) for axis, length in enumerate(shape))


def _fit_bytes(shape: tuple[int, ...], rank: int) -> int:
    """A bound of what the fit holds beside the core: TensorLy's unfoldings, their singular vectors with LAPACK's own copies, and
    the products of the factors."""
    size = math.prod(shape)
    return 16 * (6 * size + 3 * rank * (size // min(shape) + sum(shape) + rank))


def _search(parafac: Any, found: Found, request: Request, ranks: list[int]) -> tuple[Found, tuple[str, ...]]:
    """The first rank that reaches the error, or the rank that was asked for."""
    core, bases = found.arrays[0], found.arrays[1:]
    allowed2 = None if request.error is None else (0.98 * request.error * found.norm) ** 2 - found.lost2
    best: Fit | None = None
    with one_thread(0), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for place, rank in enumerate(ranks):
            last = place == len(ranks) - 1
            best = _fit(parafac, core, rank, _STARTS if last else 0, _STEPS if last else _STEPS // 4)
            if allowed2 is not None and best.lost2 <= allowed2:
                break
    assert best is not None
    rank = len(best.weights)
    total = math.sqrt(found.lost2 + best.lost2) / found.norm if found.norm else 0.0
    if allowed2 is not None and best.lost2 > allowed2:
        raise InputError(
            f"cp reached an error of {total:.2g} with rank {rank}, {request.error:g} was asked: no rank is known to "
            "suffice; give rank= to take what it reaches, or use method='tucker'"
        )
    factors = tuple(base @ factor for base, factor in zip(bases, best.factors, strict=True))
    kept = replace(found, arrays=(best.weights, *factors), lost2=found.lost2 + best.lost2, values=(), kept=())
    return kept, _notes(core, best, found)


def _ranks(core: tuple[int, ...], shape: tuple[int, ...]) -> list[int]:
    """Ranks that are tried where an error was asked for, each half as large again, as long as CP takes less than Tucker."""
    column, size = sum(shape) + 1, math.prod(core)
    whole = size + sum(length * rank for length, rank in zip(shape, core, strict=True))
    most = max(1, min(_MOST_RANK, whole // column, _WORK // max(1, size)))
    ranks = [1]
    while ranks[-1] < most:
        ranks.append(min(most, ranks[-1] + max(1, ranks[-1] // 2)))
    return ranks


def _fit(parafac: Any, core: Block, rank: int, starts: int, steps: int) -> Fit:
    """The best of a start from singular vectors and some random ones."""
    norm2 = float(np.linalg.norm(core) ** 2)
    if norm2 == 0:
        return Fit(np.zeros(rank), tuple(np.full((n, rank), 1 / math.sqrt(n)) for n in core.shape), 0.0)
    best: Fit | None = None
    for start in range(starts + 1):
        init = "svd" if start == 0 and rank <= min(core.shape) else "random"
        try:
            weights, factors = parafac(
                core, rank, n_iter_max=steps, init=init, tol=1e-7, random_state=start, normalize_factors=True
            )
        except np.linalg.LinAlgError:
            continue
        weights, factors = np.asarray(weights), tuple(np.asarray(factor) for factor in factors)
        lost2 = float(np.linalg.norm(core - compose(weights, factors)) ** 2)
        if math.isfinite(lost2) and (best is None or lost2 < best.lost2):
            best = Fit(weights, factors, lost2)
        if best is not None and best.lost2 <= 1e-12 * norm2:
            break
    if best is None:
        raise InputError(f"cp of rank {rank} did not converge from any start: try another rank, or method='tucker'")
    return best


def compose(weights: Block, factors: tuple[Block, ...]) -> Block:
    """The tensor that a CP stands for."""
    made = weights[None, :] * factors[0]
    for factor in factors[1:-1]:
        made = made[..., None, :] * factor
    return np.asarray(made @ factors[-1].T) if len(factors) > 1 else np.asarray(made.sum(axis=-1))


def core_consistency(core: Block, fit: Fit) -> float:
    """How far the core is diagonal in the factors found (Bro and Kiers 2003): 100 where CP describes it, near or below 0 where
    the rank is too large."""
    ideal = core
    for mode, factor in enumerate(fit.factors):
        scaled = factor * fit.weights if mode == 0 else factor
        ideal = np.moveaxis(np.tensordot(np.linalg.pinv(scaled), ideal, axes=(1, mode)), 0, mode)
    rank = len(fit.weights)
    ones = np.zeros((rank,) * core.ndim)
    ones[(np.arange(rank),) * core.ndim] = 1.0
    return float(100 * (1 - np.linalg.norm(ideal - ones) ** 2 / rank))


def _notes(core: Block, fit: Fit, found: Found) -> tuple[str, ...]:
    norm2 = float(np.linalg.norm(core) ** 2)
    share = 1.0 - (fit.lost2 / norm2 if norm2 else 0.0)
    rank = len(fit.weights)
    notes = [f"fit of the core {100 * share:.4g} % of its squares with rank {rank}"]
    if norm2 and rank**core.ndim <= 1 << 22:
        notes.append(f"core consistency {core_consistency(core, fit):.0f} of 100")
    notes.append(
        "the error is measured: no theorem says which rank of CP reaches an error, and another start may fit better"
    )
    return tuple(notes)
