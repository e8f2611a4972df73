"""The bytes of a step, taken apart: what every remedy changes in turn.

In: facts of the plain step. Out: `Sizes`, whose `peak` is the arithmetic that ranks choices before any is traced. A remedy gets
the sizes so far and gives others: no remedy knows of another but through them.
"""

from __future__ import annotations

from dataclasses import dataclass

from outsize.model.fitting.move.stores import IN_FLIGHT
from outsize.model.fitting.plan.facts import Facts
from outsize.model.fitting.plan.projection import Projection


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of a step at the moments that can be its highest."""

    fixed: float
    """Always there: weights, buffers, batch, state."""
    activations: int
    """Of the whole batch, at the end of its forward pass."""
    again: int = 0
    """Activations that are made again, or come back, while the backward pass is at one module."""
    share: float = 1.0
    """Part of the batch in its largest slice."""
    precision: float = 1.0
    """Bytes of activations over those of the plain step's precision."""
    gradients: float
    """At the end of the backward pass, without `visiting`."""
    visits_backward: int = 0
    """How many groups of `visiting` parameters are there in the backward pass."""
    early: float = 0.0
    """There in the whole backward pass beside activations and gradients."""
    accumulated: bool = False
    """The gradients of a slice are added to those of the slices before it."""
    update: float
    """What the update of a group of parameters holds, without `visiting`."""
    visits_update: int
    """How many groups of `visiting` parameters are there in the update."""
    visiting: float = 0.0
    """Bytes that come for each byte of a parameter when it is updated: its state, its weight."""

    def peak(self, facts: Facts) -> int:
        """The highest moment: between the passes, at the first block's backward pass, or in the update."""
        comes = facts.group * self.visiting
        gradients = self.gradients + self.visits_backward * comes
        early = self.early + (gradients if self.accumulated and gradients == facts.gradients else 0)
        activations = (self.activations + self.again) * self.share * self.precision
        last = (
            self.fixed + gradients + self.again * self.share
        )  # at the first block's backward pass all gradients are there
        update = self.update + self.visits_update * comes
        return int(max(self.fixed + activations + early, last, self.fixed + update))


def plain_sizes(facts: Facts) -> Sizes:
    """Those of the plain step."""
    fixed, activations = passes_of(facts.plain, facts)
    return Sizes(
        fixed=float(fixed), activations=activations, gradients=facts.gradients,
        update=facts.gradients + undo_bytes(facts), visits_update=groups_at_once(facts),
    )  # fmt: skip


def passes_of(plain: Projection, facts: Facts) -> tuple[int, int]:
    """(bytes that are always there, bytes of activations and what kernels take beside them) of a traced step."""
    kept = sum(plain.kept.values())
    extra = max(0, int(reserved_of(plain, facts) * _in_passes(plain)) - plain.fixed - kept)
    return plain.fixed, kept + extra


def reserved_of(plain: Projection, facts: Facts) -> int:
    """What the plain step's allocator takes, in the better of both ways."""
    return min(plain.peak, plain.grown) if facts.grows else plain.peak


def _in_passes(plain: Projection) -> float:
    """Part of the peak that forward and backward pass reach: what the update takes beyond it is no activation."""
    phases = {name: size for name, size in plain.peaks.items() if name != "reserved"}
    return max(phases["forward"], phases["backward"]) / max(1, *phases.values())


def undo_bytes(facts: Facts) -> float:
    """What is kept of a group of parameters, so that its update can be taken back."""
    return facts.group * (2 + facts.copies)


def groups_at_once(facts: Facts) -> int:
    """Groups of parameters that are there at once in the update: on a card the next one comes meanwhile."""
    return 2 if facts.device == "cuda" else 1


def in_flight(size: int, facts: Facts) -> int:
    """Bytes that are on their way out at once, of so many: on a CPU copies end at once."""
    return min(IN_FLIGHT, size) if facts.device == "cuda" else 0
