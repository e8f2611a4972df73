"""What a step would hold, from the trace of one step.

In: the ledger of a traced step, its phases, its device. Out: `Projection`: peaks by phase, what each module keeps, and
whether an allocator with a limit gets through.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from outsize.allocator import PhaseEvent
from outsize.core.noun import Noun
from outsize.model.tracing.ledger import Held, Ledger
from outsize.model.tracing.replay import replay_on_card

Ends = tuple[set[Held], set[Held]]
"""Records that a module took in the forward pass, and those that it made and gave out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection(Noun):
    """What a step would hold."""

    peaks: dict[str, int]
    """Bytes on the device, by phase: of storages on a CPU; on a card of what torch's allocator has handed out, and what
    it has `reserved` for that, which only grows."""
    away: int
    """Most bytes that wait elsewhere."""
    kept: dict[str, int]
    """Bytes alive at the end of the forward pass, by the module that made them; empty for inference."""
    stays: dict[str, int]
    """Bytes that stay where a module keeps its input only: what it gives out, and inputs that nobody else keeps."""
    gives: dict[str, int]
    """Those of them that it gives out."""
    fixed: int
    """Bytes that are there before every step but the first: weights, buffers, batch, state."""
    state: int
    """Bytes of optimizer state on the device."""
    calls: dict[str, int]
    """How often each module ran in the forward pass, 0 for those that the user's own code runs again in the backward pass."""
    seconds: dict[tuple[str, str], float]
    """Estimated time by (phase, module)."""
    operators: dict[str, int]
    """Operators by phase."""
    moves: tuple[PhaseEvent, ...] = field(repr=False)
    """Every allocation and free of the first step and before it."""
    again: tuple[PhaseEvent, ...] = field(repr=False)
    """Those of every later step: what the first one keeps comes once."""
    card: bool
    """A card's allocator is played."""
    grown_peaks: dict[str, int] = field(default_factory=dict, repr=False)
    """On a card the peaks where segments grow."""
    beside: int = 0
    """Bytes of them all that are held by tensors which are not the step's."""
    brought: int = 0
    """Of a model on the host: bytes of weights and state that come to the device in a step."""
    order: tuple[str, ...] = ()
    """Of a model on the host: its units, as a forward pass meets them."""
    outside: tuple[str, ...] = ()
    """Of a model on the host: parameters that are used while their unit is not there."""
    random: tuple[str, ...] = ()
    """Of a model on the host: operators and generators that draw random numbers."""
    sources: tuple[Any, ...] = ()
    """Of a model on the host: generators beside torch's that were drawn from."""
    written: dict[Any, tuple[str, ...]] = field(default_factory=dict, repr=False)
    """Of a model on the host: buffers that a forward pass writes, by module."""
    heads_taken: bool = False
    """Of a model on the host: output head and loss ran in pieces, as planned."""

    @property
    def peak(self) -> int:
        """The highest moment in bytes."""
        return max(self.peaks.values())

    @property
    def computing(self) -> float:
        """Estimated seconds of all operators."""
        return sum(self.seconds.values())

    @property
    def grown(self) -> int:
        """Bytes that a card's allocator would reserve with segments that grow."""
        return self.grown_peaks.get("reserved", 0)

    def growing(self) -> Projection:
        """The same step where segments grow."""
        return replace(self, peaks=self.grown_peaks)

    def settles(self, limit: int) -> bool:
        """True where an allocator that may not reserve more than `limit` gets through, in the end without clearing its cache."""
        if not self.card:
            return self.peak <= limit
        replayed = replay_on_card(self.moves, self.again, limit)
        return not replayed.failed and not replayed.retries


def kept_by(
    ledger: Ledger, label: str, marks: list[tuple[int, str]], names: set[str], ends: dict[str, Ends]
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Bytes alive at the end of the first forward pass by the module that made them, what stays of a module with its input
    alone, and what of that it gave out."""
    start = next(index for index, name in marks if name == "forward")
    stop = next((index for index, name in marks if name == "backward"), start)
    sizes: dict[str, int] = {}
    alive: dict[int, int] = {}
    for held in ledger.all:
        if held.label == label and start <= held.born < stop and (held.died is None or held.died >= stop):
            name = held.module if held.module in names else ""
            sizes[name] = sizes.get(name, 0) + held.bytes
            alive[held.id] = held.bytes
    stays, gives = {}, {}
    for name, (taken, gave) in ends.items():
        alone = sum(h.bytes for h in taken if h.label == label and h.died is not None and h.died < stop)
        gives[name] = sum(alive.get(held.id, 0) for held in gave)
        stays[name] = alone + gives[name]
    return sizes, stays, gives
