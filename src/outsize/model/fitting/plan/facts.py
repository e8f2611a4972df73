"""What the planner knows of a plain step.

In: nothing. Out: `Facts`, the value that `take_apart` makes: bytes of weights, gradients, state and activations, blocks, times,
and why a remedy is forbidden. Remedies and the search do their arithmetic on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from outsize.core.noun import Noun
from outsize.model.fitting.plan.projection import Projection
from outsize.model.fitting.plan.recompute_ladder import Part, Rung
from outsize.model.fitting.plan.speeds import Timing
from outsize.model.fitting.update.optimizer_subset import room_of

PIECE = 256 * 2**20
"""Bytes of logits in a piece of the loss: small beside everything else, large enough to fill a card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block(Noun):
    """A module that can be treated by itself."""

    name: str
    """Its name in the model."""
    kept: int
    """Bytes of activations that it keeps for the backward pass."""
    weights: int
    """Bytes of its parameters."""
    seconds: float
    """Time of its forward pass."""
    compound: bool
    """It is made of other modules; a single operator keeps only what others need anyway."""
    runs: int = 1
    """How often it runs in a forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts(Noun):
    """The plain step, taken apart."""

    device: str
    rows: int
    plain: Projection
    blocks: tuple[Block, ...]
    """In the order of the model."""
    weights: int
    gradients: int
    state: int
    largest: int
    """Bytes of the largest parameter."""
    copies: float
    """Bytes of state for each byte of a parameter."""
    parameters: int
    """Number of parameters."""
    shares: tuple[float, ...]
    """Parts of all parameters' bytes, and so of the state, that the largest one has, the two largest, and so on."""
    activations: int
    """Bytes alive between forward and backward pass, beside what is always there."""
    heads: tuple[str, ...]
    """Output heads whose loss can be taken in pieces."""
    logits: int
    """Bytes that such a head and its loss keep."""
    pieces: Projection | None
    """The plain step with its loss in pieces, None where there is no such head."""
    parts: dict[str, Part]
    """Modules that can be computed again, by name."""
    ladders: tuple[tuple[Rung, ...], ...]
    """Sets of them, from the cheapest bytes to the most; in one ladder of any size, in others of small modules only."""
    timing: Timing
    """How long the plain step takes."""
    growable: bool
    """The allocator can be told to let segments grow."""
    writing: frozenset[str]
    """Modules that change what they are given, so that they cannot run twice."""
    forbidden: dict[str, str]
    """Remedy -> why not."""

    @property
    def grows(self) -> bool:
        """It may be told so."""
        return self.growable and "expandable" not in self.forbidden

    @property
    def group(self) -> int:
        """Bytes of parameters that are updated at once."""
        return room_of(self.largest, self.gradients)

    @property
    def groups(self) -> int:
        """How many such groups there are, about."""
        return -(-3 * self.gradients // max(1, 2 * self.group))

    def share(self, part: float) -> float:
        """The part of the state that is elsewhere where so much is to be: parameters are not divided."""
        return next((share for share in self.shares if share >= part), 1.0) if part else 0.0

    @property
    def link(self) -> float:
        """Bytes a second to the place next to the device."""
        return self.timing.link

    @property
    def passes(self) -> float:
        """Seconds of forward and backward pass of the whole batch."""
        return self.timing.passes(self.rows)

    def passes_in(self, slices: int, again: float = 0.0, calls: float = 0.0) -> float:
        """Seconds of the passes in slices; `again`: of the forward pass of the whole batch that runs twice, `calls`: of the
        processor for that, a slice.

        A slice takes as long as the card works or as long as the processor needs to launch it, whichever is more.
        """
        rows = -(-self.rows // slices)
        took, least = self.timing.passes(rows), self.timing.least
        share = rows / self.rows
        if self.device != "cuda":
            return slices * (took + again * share + calls)
        works = took if took > 1.1 * least else self.passes * share
        launches = least + self.timing.points[0][1] * again / max(self.timing.forward(self.rows), 1e-12) + calls
        return slices * max(works + again * share, launches)

    def pieces_of_loss(self) -> int:
        """How many pieces keep the logits of one below `PIECE` bytes."""
        return max(8, -(-self.logits // PIECE))
