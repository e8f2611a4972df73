"""What is added to a replay: constants of the machine, and the margins that make a projection a bound.

The CUDA context and the kernels that torch loads take memory outside the allocator. They were measured on an H200;
`outsize.calibrate()` replaces them by values of this machine. Of two equal blocks the one with the lower address is
used, and only the driver knows addresses. So two runs of one program reserve different amounts. The margin covers what
was seen, and stored receipts can widen it.
"""

from __future__ import annotations

from outsize.core.cards import CONTEXT_BYTES, Card
from outsize.core.footprint import Amount
from outsize.core.noun import Known
from outsize.core.units import MiB
from outsize.model.estimation import calibration
from outsize.model.estimation.replayed_steps import ReplayedSteps

CONTEXT_LIKELY = 795_000_000
"""Beyond reserved after training steps on an H200: 787 to 808 million bytes."""

ALLOCATED_MARGIN = 0.02
"""Addresses decide whether a block is up to 1 MiB larger than requested: 1.7 % at worst over 262 measured steps."""

RESERVED_MARGIN = 0.08
"""Runs of the same program with other addresses reserved up to 7 % apart, and 262 measured steps were within 7.4 %."""

VERDICT_MARGIN = 0.02
"""Room that the bound's replay must leave free to count as fitting: near the limit the allocator gives back its
cache."""


def amounts(replayed: ReplayedSteps, card: Card, estimate: bool) -> tuple[Amount, Amount, Amount]:
    """(allocated, reserved, device use) of a replay, each with its bound."""
    kept = calibration.read(card.name)
    likely, most = replayed.likely.peak, replayed.most.peak
    allocated = Amount(
        bytes=likely.allocated,
        bound=int(max(likely.allocated, most.allocated) * (1 + ALLOCATED_MARGIN)) + 2 * MiB,
        known=Known.ESTIMATE,
    )
    margin = max(RESERVED_MARGIN, kept.reserved_margin)
    reserved = Amount(
        bytes=likely.reserved,
        bound=_pages(int(max(likely.reserved, most.reserved) * (1 + margin))),
        known=Known.ESTIMATE,
    )
    context = CONTEXT_LIKELY if kept.context is None else kept.context
    room = CONTEXT_BYTES if kept.context is None else kept.context + 64 * MiB
    use = Amount(bytes=reserved.bytes + context, bound=reserved.bound + room, known=Known.ESTIMATE)
    return allocated, reserved, use


def _pages(size: int) -> int:
    """Up to whole segments of 2 MiB."""
    return -(-size // (2 * MiB)) * 2 * MiB
