"""Every way to make a step of a model on the host smaller, one row each, in one table.

In: hosted facts. Out: for each remedy its levels (the changes it makes to a `Choice`), the bytes that it saves on the device,
its costs, how exact it keeps the step, and how it is told. The search tries all combinations, the last remedy's levels first,
so levels go from the fastest to the smallest. What a combination holds in all is traced, not added up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outsize.core.failure import Exactness
from outsize.model.fitting.choice import UPDATES, Choice
from outsize.model.fitting.move.units import sizeof
from outsize.model.fitting.plan.host_memory import filed_bytes
from outsize.model.fitting.plan.hosted_facts import HostedFacts
from outsize.model.fitting.plan.projection import Projection
from outsize.model.fitting.plan.remedies import KIND_OF
from outsize.model.fitting.plan.remedy_kind import Level

PARTS = (6, 3, 12, 24)
"""A unit has at most one part in so many of the device's budget."""

PIECES = (1, 2, 4, 8, 16, 32)
"""Pieces in which a unit's rows run."""

CHUNKS = (0, 8)
"""Pieces of output head and loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedRemedy:
    """One remedy."""

    name: str
    """As a user reads it."""
    on: Callable[[Choice], Any]
    """True where a choice uses it."""
    how: Callable[[Choice], str]
    """What is done, for the user."""
    costs: str = "copies"
    """What it costs, in a word."""
    exactness: Exactness = Exactness.BITWISE
    levels: Callable[[HostedFacts], list[Level]] = lambda facts: [{}]
    """Changes to a choice, from the fastest to the smallest."""
    is_sensible: Callable[[Choice, HostedFacts], bool] = lambda choice, facts: True
    """False where a choice contradicts itself or pays for nothing."""
    saves: Callable[[Choice, HostedFacts, Projection], int] = lambda choice, facts, projection: 0
    """Bytes that the device (of what is on disk: the host) need not hold."""


def _unit_bytes(facts: HostedFacts, part: int) -> int:
    """At least one byte, also of a budget that nothing fits into: a choice with none would not be hosted."""
    return max(1, facts.device // part)


def _updates(facts: HostedFacts) -> list[Level]:
    """Where the update takes least time; after the backward pass where it has to wait."""
    if facts.call is not None:
        return [UPDATES["none"]]
    return [UPDATES["kept" if facts.forced else place_of_update(facts)]]


def _inputs(facts: HostedFacts) -> list[Level]:
    """On the device, or on the host."""
    allowed = facts.call is None and "offload" not in facts.forbidden
    return [{"inputs_away": away} for away in ((False, True) if allowed else (False,))]


def _pieces(facts: HostedFacts) -> list[Level]:
    """1, 2, 4, ... up to one row a piece."""
    allowed = "pieces" not in facts.forbidden
    return [{"pieces": n} for n in PIECES if n == 1 or (allowed and n <= facts.rows)]


def _loss_is_sensible(choice: Choice, facts: HostedFacts) -> bool:
    """Where rows run in many pieces, whole logits would be the largest thing left."""
    if choice.chunks:
        return "chunks" not in facts.forbidden
    return choice.pieces <= 2 or not facts.work.heads


HOSTED_REMEDIES: tuple[HostedRemedy, ...] = (
    HostedRemedy(
        name=KIND_OF["stream"].name, on=lambda choice: True,
        how=lambda choice: "from the host, the next unit while one runs",
        levels=lambda facts: [{"unit_bytes": _unit_bytes(facts, part)} for part in PARTS],
        saves=lambda choice, facts, projection: max(0, facts.cut(choice).weights - choice.ring),
    ),
    HostedRemedy(
        name=KIND_OF["state_away"].name, on=lambda choice: choice.update == "card",
        how=lambda choice: "on the host; visits as gradients come",
        levels=_updates, saves=lambda choice, facts, projection: facts.state,
    ),
    HostedRemedy(
        name=KIND_OF["in_backward"].name, on=lambda choice: choice.in_backward, costs="",
        how=lambda choice: "each gradient is used and freed as it comes",
        saves=lambda choice, facts, projection: facts.cut(choice).weights,
    ),
    HostedRemedy(
        name=KIND_OF["checkpoint"].name, on=lambda choice: choice.update != "none", costs="a forward pass",
        how=lambda choice: "every unit keeps its inputs only",
    ),
    HostedRemedy(  # `host_memory.spill` chooses what, for each choice that is traced
        name="keep it on disk", on=lambda choice: choice.transfer_bytes, costs="reads and writes",
        how=lambda choice: f"{' and '.join(choice.disk)} that the host has no room for",
        saves=lambda choice, facts, projection: sum(filed_bytes(facts, choice).values()),
    ),
    HostedRemedy(
        name=KIND_OF["offload"].name, on=lambda choice: choice.inputs_away,
        how=lambda choice: "inputs of units on the host",
        levels=_inputs, saves=lambda choice, facts, projection: projection.away,
        is_sensible=lambda choice, facts: (  # smaller units are tried once inputs are away
            choice.inputs_away or facts.call is not None or choice.unit_bytes == _unit_bytes(facts, PARTS[0])
        ),
    ),
    HostedRemedy(
        name="rows in pieces", on=lambda choice: choice.pieces > 1, costs="smaller kernels", exactness=Exactness.ROUNDING,
        how=lambda choice: f"each unit's rows in {choice.pieces} pieces",
        levels=_pieces,
        is_sensible=lambda choice, facts: choice.pieces == 1 or choice.inputs_away or facts.call is not None,
    ),
    HostedRemedy(
        name=KIND_OF["chunks"].name, on=lambda choice: choice.chunks, costs="", exactness=Exactness.ROUNDING,
        how=lambda choice: f"{choice.chunks} pieces of head and loss",
        levels=lambda facts: [{"chunks": n} for n in (CHUNKS if facts.call is None else CHUNKS[:1])],
        is_sensible=_loss_is_sensible,
    ),
)  # fmt: skip
"""All of them."""


def place_of_update(facts: HostedFacts) -> str:
    """Update where it takes less time: state over the link, or gradients over the link and the host's own rate."""
    if facts.spills:
        return "card"  # state and weights that come from a file go to the device, and only there
    if "state_away" in facts.forbidden:
        return "host"
    rates, state = facts.rates, facts.state
    weights = sum(sizeof(p) for p in facts.work.model.parameters() if p.requires_grad)
    card = max((2 * weights + state) / rates.both, (weights + state) / rates.both)
    host = max(2 * weights / rates.both, weights / rates.host)
    return "card" if card <= host else "host"
