"""Every way to make a step of a model on the host smaller, one small class each, in one list.

In: hosted facts. Out: for each remedy its levels (the changes it makes to a `Choice`), the bytes that it saves on the device,
its costs, how exact it keeps the step, and how it is told. The search tries all combinations, the last remedy's levels first,
so levels go from the fastest to the smallest. What a combination holds in all is traced, not added up.
"""

from __future__ import annotations

from typing import ClassVar

from outsize.core.failure import Exactness
from outsize.model.fitting.move.units import sizeof
from outsize.model.fitting.plan.choice import UPDATES, Choice
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


class HostedRemedy:
    """One remedy."""

    name: ClassVar[str]
    """As a user reads it."""
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    costs: ClassVar[str] = "copies"
    """What it costs, in a word."""

    def levels(self, facts: HostedFacts) -> list[Level]:
        """Changes to a choice, from the fastest to the smallest."""
        return [{}]

    def is_sensible(self, choice: Choice, facts: HostedFacts) -> bool:
        """False where a choice contradicts itself or pays for nothing."""
        return True

    def on(self, choice: Choice) -> bool:
        """True where a choice uses it."""
        raise AssertionError(self.name)

    def saves(self, choice: Choice, facts: HostedFacts, projection: Projection) -> int:
        """Bytes that the device need not hold."""
        return 0

    def how(self, choice: Choice) -> str:
        """What is done, for the user."""
        raise AssertionError(self.name)


class StreamUnits(HostedRemedy):
    """Weights live on the host and visit unit by unit."""

    name = KIND_OF["stream"].name

    def levels(self, facts: HostedFacts) -> list[Level]:
        """Units of several sizes."""
        return [{"unit_bytes": facts.device // part} for part in PARTS]

    def on(self, choice: Choice) -> bool:
        """Always."""
        return True

    def saves(self, choice: Choice, facts: HostedFacts, projection: Projection) -> int:
        """All but the ring."""
        return max(0, facts.cut(choice).weights - choice.ring)

    def how(self, choice: Choice) -> str:
        """From where."""
        return "from the host, the next unit while one runs"


class VisitingState(HostedRemedy):
    """State lives on the host, and visits the device for the update or is updated on the host."""

    name = KIND_OF["state_away"].name

    def levels(self, facts: HostedFacts) -> list[Level]:
        """Where the update takes least time; after the backward pass where it has to wait."""
        if facts.call is not None:
            return [UPDATES["none"]]
        return [UPDATES["kept" if facts.forced else place_of_update(facts)]]

    def on(self, choice: Choice) -> bool:
        """It visits."""
        return choice.update == "card"

    def saves(self, choice: Choice, facts: HostedFacts, projection: Projection) -> int:
        """All of it."""
        return facts.state

    def how(self, choice: Choice) -> str:
        """When."""
        return "on the host; visits as gradients come"


class UpdateInBackward(HostedRemedy):
    """Gradients are used as they come."""

    name = KIND_OF["in_backward"].name
    costs = ""

    def on(self, choice: Choice) -> bool:
        """On the device or on the host."""
        return choice.in_backward

    def saves(self, choice: Choice, facts: HostedFacts, projection: Projection) -> int:
        """All gradients."""
        return facts.cut(choice).weights

    def how(self, choice: Choice) -> str:
        """What happens to gradients."""
        return "each gradient is used and freed as it comes"


class RecomputeUnits(HostedRemedy):
    """Every unit is computed again in the backward pass, from its inputs."""

    name = KIND_OF["checkpoint"].name
    costs = "a forward pass"

    def on(self, choice: Choice) -> bool:
        """In every training step."""
        return choice.update != "none"

    def how(self, choice: Choice) -> str:
        """What is kept."""
        return "every unit keeps its inputs only"


class OnDisk(HostedRemedy):
    """What the host has no room for is in a scratch file: `host_memory.spill` chooses it for each choice that is traced."""

    name = "keep it on disk"
    costs = "reads and writes"

    def on(self, choice: Choice) -> bool:
        """There is such a file."""
        return choice.transfer_bytes > 0

    def saves(self, choice: Choice, facts: HostedFacts, projection: Projection) -> int:
        """Bytes of the host, not of the device."""
        return sum(filed_bytes(facts, choice).values())

    def how(self, choice: Choice) -> str:
        """What is there."""
        return f"{' and '.join(choice.disk)} that the host has no room for"


class InputsAway(HostedRemedy):
    """Inputs of units wait on the host for the backward pass."""

    name = KIND_OF["offload"].name

    def levels(self, facts: HostedFacts) -> list[Level]:
        """On the device, or on the host."""
        allowed = facts.call is None and "offload" not in facts.forbidden
        return [{"inputs_away": away} for away in ((False, True) if allowed else (False,))]

    def is_sensible(self, choice: Choice, facts: HostedFacts) -> bool:
        """Smaller units are tried once inputs are away."""
        return choice.inputs_away or facts.call is not None or choice.unit_bytes == facts.device // PARTS[0]

    def on(self, choice: Choice) -> bool:
        """They wait there."""
        return choice.inputs_away

    def saves(self, choice: Choice, facts: HostedFacts, projection: Projection) -> int:
        """All that wait."""
        return projection.away

    def how(self, choice: Choice) -> str:
        """Where to."""
        return "inputs of units on the host"


class RowsInPieces(HostedRemedy):
    """The rows of each unit run in pieces."""

    name = "rows in pieces"
    exactness = Exactness.ROUNDING
    costs = "smaller kernels"

    def levels(self, facts: HostedFacts) -> list[Level]:
        """1, 2, 4, ... up to one row a piece."""
        allowed = "pieces" not in facts.forbidden
        return [{"pieces": n} for n in PIECES if n == 1 or (allowed and n <= facts.rows)]

    def is_sensible(self, choice: Choice, facts: HostedFacts) -> bool:
        """Inputs leave before rows are cut."""
        return choice.pieces == 1 or choice.inputs_away or facts.call is not None

    def on(self, choice: Choice) -> bool:
        """More than one piece."""
        return choice.pieces > 1

    def how(self, choice: Choice) -> str:
        """How many."""
        return f"each unit's rows in {choice.pieces} pieces"


class LossInPieces(HostedRemedy):
    """Output head and cross entropy run in pieces."""

    name = KIND_OF["chunks"].name
    exactness = Exactness.ROUNDING
    costs = ""

    def levels(self, facts: HostedFacts) -> list[Level]:
        """Whole, or in pieces."""
        return [{"chunks": n} for n in (CHUNKS if facts.call is None else CHUNKS[:1])]

    def is_sensible(self, choice: Choice, facts: HostedFacts) -> bool:
        """Where rows run in many pieces, whole logits would be the largest thing left."""
        if choice.chunks:
            return "chunks" not in facts.forbidden
        return choice.pieces <= 2 or not facts.stage.work.heads

    def on(self, choice: Choice) -> bool:
        """In pieces."""
        return choice.chunks > 0

    def how(self, choice: Choice) -> str:
        """How many."""
        return f"{choice.chunks} pieces of head and loss"


HOSTED_REMEDIES: tuple[HostedRemedy, ...] = (
    StreamUnits(), VisitingState(), UpdateInBackward(), RecomputeUnits(), OnDisk(), InputsAway(), RowsInPieces(), LossInPieces(),
)  # fmt: skip
"""All of them."""


def place_of_update(facts: HostedFacts) -> str:
    """Update where it takes less time: state over the link, or gradients over the link and the host's own rate."""
    if facts.spills:
        return "card"  # state and weights that come from a file go to the device, and only there
    if "state_away" in facts.forbidden:
        return "host"
    rates, state = facts.rates, facts.state
    weights = sum(sizeof(p) for p in facts.stage.work.model.parameters() if p.requires_grad)
    card = max((2 * weights + state) / rates.both, (weights + state) / rates.both)
    host = max(2 * weights / rates.both, weights / rates.host)
    return "card" if card <= host else "host"
