"""The remedies of a model that lives on the host, one small class each; their lines are in `remedies.REMEDIES`.

In: hosted facts. Out: as of every remedy, but for seconds and bytes: copies hide behind what is computed, and what a combination
holds is traced, not added up. So levels stand in the order in which they are tried, and the last remedy's levels come first.
"""

from __future__ import annotations

from outsize.core.failure import Exactness
from outsize.model.fitting.batch import NotJoined
from outsize.model.fitting.choice import UPDATES, Choice
from outsize.model.fitting.plan.facts import HostedFacts
from outsize.model.fitting.plan.host_memory import filed_bytes
from outsize.model.fitting.plan.projection import Projection
from outsize.model.fitting.plan.remedy_kind import Level, RemedyKind
from outsize.model.fitting.run.row_pieces import MixesRows
from outsize.model.torch_port.objects import sizeof

PARTS = (6, 3, 12, 24)
"""A unit has at most one part in so many of the device's budget."""

PIECES = (1, 2, 4, 8, 16, 32)
"""Pieces in which a unit's rows run."""

CHUNKS = (0, 8)
"""Pieces of output head and loss."""


class HostedRemedy(RemedyKind[HostedFacts]):
    """A remedy without levels of its own: the residence, or another remedy, decides."""

    hosted = True

    def levels(self, facts: HostedFacts) -> list[Level]:
        return [{}]


class Visits(HostedRemedy):
    """Weights visit the device in units."""

    key = "stream"
    name = "stream weights"
    done = "from the host, the next unit while one runs"

    def levels(self, facts: HostedFacts) -> list[Level]:
        return [{"unit_bytes": _unit_bytes(facts, part)} for part in PARTS]

    def on(self, choice: Choice) -> bool:
        return True

    def is_sensible(self, choice: Choice, facts: HostedFacts) -> bool:
        """Smaller units are tried once inputs are away."""
        return choice.inputs_away or facts.call is not None or choice.unit_bytes == _unit_bytes(facts, PARTS[0])

    def saves(self, choice: Choice, facts: HostedFacts, projection: Projection) -> int:
        return max(0, facts.cut(choice).weights - choice.ring)


class VisitingState(HostedRemedy):
    """Optimizer state lives on the host, and visits the device where the update runs there."""

    key = "state_away"
    name = "keep optimizer state elsewhere"
    done = "on the host; visits as gradients come"

    def levels(self, facts: HostedFacts) -> list[Level]:
        """Where the update takes least time; after the backward pass where it has to wait."""
        if facts.call is not None:
            return [UPDATES["none"]]
        return [UPDATES["kept" if facts.side.forced else place_of_update(facts)]]

    def on(self, choice: Choice) -> bool:
        return choice.update == "card"

    def saves(self, choice: Choice, facts: HostedFacts, projection: Projection) -> int:
        return facts.state


class EarlyUpdate(HostedRemedy):
    """Gradients are used in the backward pass."""

    key = "in_backward"
    name = "update in the backward pass"
    done = "each gradient is used and freed as it comes"
    costs = ""

    def saves(self, choice: Choice, facts: HostedFacts, projection: Projection) -> int:
        return facts.cut(choice).weights


class InputsOnly(HostedRemedy):
    """Every unit is computed again in the backward pass."""

    key = "checkpoint"
    name = "compute activations again"
    done = "every unit keeps its inputs only"
    costs = "a forward pass"

    def on(self, choice: Choice) -> bool:
        return choice.update != "none"


class Disk(HostedRemedy):
    """What the host has no room for is in a file: `host_memory.spill` chooses it for each choice that is traced."""

    key = "disk"
    name = "keep it on disk"
    costs = "reads and writes"

    def saves(self, choice: Choice, facts: HostedFacts, projection: Projection) -> int:
        return sum(filed_bytes(facts, choice).values())

    def on(self, choice: Choice) -> bool:
        return choice.transfer_bytes > 0

    def how(self, choice: Choice, facts: HostedFacts) -> str:
        return f"{' and '.join(choice.disk)} that the host has no room for"


class InputsAway(HostedRemedy):
    """Inputs of units wait on the host for the backward pass."""

    key = "offload"
    name = "keep activations elsewhere"
    done = "inputs of units on the host"

    def levels(self, facts: HostedFacts) -> list[Level]:
        return [{"inputs_away": away} for away in ((False, True) if facts.call is None else (False,))]

    def on(self, choice: Choice) -> bool:
        return choice.inputs_away

    def saves(self, choice: Choice, facts: HostedFacts, projection: Projection) -> int:
        return projection.away


class Pieces(HostedRemedy):
    """The rows of each unit run in pieces."""

    key = "pieces"
    name = "rows in pieces"
    costs = "smaller kernels"
    exactness = Exactness.ROUNDING
    refusals = (RuntimeError, MixesRows, NotJoined)  # a unit keeps something, or gives no rows

    def levels(self, facts: HostedFacts) -> list[Level]:
        """1, 2, 4, ... up to one row a piece."""
        return [{"pieces": n} for n in PIECES if n == 1 or n <= facts.rows]

    def on(self, choice: Choice) -> bool:
        return choice.pieces > 1

    def is_sensible(self, choice: Choice, facts: HostedFacts) -> bool:
        """Where rows run in many pieces, whole logits would be the largest thing left."""
        if "pieces" in facts.forbidden or not (choice.inputs_away or facts.call is not None):
            return False
        return choice.pieces <= 2 or choice.chunks > 0 or not facts.work.heads

    def is_ruled_out(self, choice: Choice, projection: Projection, facts: HostedFacts) -> bool:
        """Pieces would draw other random numbers, and write buffers more than once."""
        return bool(projection.random and facts.exact) or bool(facts.work.written)

    def how(self, choice: Choice, facts: HostedFacts) -> str:
        return f"each unit's rows in {choice.pieces} pieces"


class HeadInPieces(HostedRemedy):
    """Output head and cross entropy in pieces."""

    key = "chunks"
    name = "loss in pieces"
    costs = ""
    exactness = Exactness.ROUNDING

    def levels(self, facts: HostedFacts) -> list[Level]:
        return [{"chunks": n} for n in (CHUNKS if facts.call is None else CHUNKS[:1])]

    def is_sensible(self, choice: Choice, facts: HostedFacts) -> bool:
        """There has to be such a head, which the first trace shows."""
        return "chunks" not in facts.forbidden and (bool(facts.work.heads) or not facts.order)

    def is_ruled_out(self, choice: Choice, projection: Projection, facts: HostedFacts) -> bool:
        return choice.chunks > 0 and not projection.heads_taken

    def stays(self, facts: HostedFacts) -> tuple[str, ...]:
        return facts.work.heads

    def how(self, choice: Choice, facts: HostedFacts) -> str:
        return f"{choice.chunks} pieces of head and loss"


def _unit_bytes(facts: HostedFacts, part: int) -> int:
    """At least one byte, also of a budget that nothing fits into: a choice with none would not be hosted."""
    return max(1, facts.budget // part)


def place_of_update(facts: HostedFacts) -> str:
    """Update where it takes less time: state over the link, or gradients over the link and the host's own rate."""
    if facts.spills:
        return "card"  # state and weights that come from a file go to the device, and only there
    if "state_away" in facts.forbidden:
        return "host"
    rates, state = facts.rates, facts.state
    weights = sum(sizeof(p) for p in facts.work.model.parameters() if p.requires_grad)
    host = max(2 * weights / rates.both, weights / rates.host)
    return "card" if (2 * weights + state) / rates.both <= host else "host"
