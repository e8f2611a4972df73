"""Remedies that keep numbers in fewer bits: they change results by more than rounding, so only `allow="approximate"` opens them.

In: the facts of a step. Out: as of every remedy (`remedy_kind.py`). Each says in `how` what becomes less exact. The
optimizer stays the user's own: torchao's 8-bit AdamW (0.18 on torch 2.13) would take its place, knows Adam only, and compiled
for 77 seconds before its first step on a CPU. Here any optimizer that treats parameters one by one keeps its class, its groups
and its schedulers, and a plan counts what it holds.
"""

from __future__ import annotations

from dataclasses import replace

from outsize.core.failure import Exactness
from outsize.model.fitting.choice import Choice
from outsize.model.fitting.move.codes import narrow_share
from outsize.model.fitting.plan.facts import Facts, Sizes
from outsize.model.fitting.plan.projection import RATES
from outsize.model.fitting.plan.remedy_kind import Level, RemedyKind, UpdatedInGroups

TOUCHED = {
    "cpu": {"state8": 107, "state4": 430, "frozen": 12, "kept": 80},
    "cuda": {"state8": 12, "state4": 24, "frozen": 12, "kept": 12},
}
"""How often packing and unpacking go through the numbers, about. On a CPU: what steps of a GPT took beside the plain ones
(`benchmarks/approximate_fit.py`), shared out by what each format takes for a number. On a card nothing was measured."""


class StateBits(UpdatedInGroups):
    """Optimizer state in 8 or 4 bits between updates."""

    key = "state_bits"
    name = "optimizer state in fewer bits"
    exactness = Exactness.APPROXIMATE

    def levels(self, facts: Facts) -> list[Level]:
        return [{self.key: bits} for bits in ((0, 8, 4) if facts.state else (0,))]

    def is_sensible(self, choice: Choice, facts: Facts) -> bool:
        """It is here, in fewer bits, or elsewhere."""
        return not choice.state_away and not choice.gradients_away and not choice.stream

    def bytes(self, sizes: Sizes, choice: Choice, facts: Facts) -> Sizes:
        """Whole only for the groups that are being updated."""
        saved = facts.state * (1 - narrow_share(choice.state_bits, 4))
        return replace(sizes, fixed=sizes.fixed - saved, visiting=sizes.visiting + facts.copies)

    def seconds(self, choice: Choice, facts: Facts) -> float:
        touched = TOUCHED[facts.device][f"state{choice.state_bits}"]
        return touched * facts.state / RATES[facts.device][1]

    def degree(self, choice: Choice) -> str:
        return f"{choice.state_bits} bits"

    def how(self, choice: Choice, facts: Facts) -> str:
        form = "float8, of second moments their roots" if choice.state_bits == 8 else "16 levels"
        return (
            f"kept in {choice.state_bits} bits a number ({form}, a scale for 128), whole for the update of a few parameters; "
            "updates differ from yours"
        )


class FrozenBits(RemedyKind[Facts]):
    """Weights that are not trained, in 8 bits."""

    key = "frozen_bits"
    name = "frozen weights in 8 bits"
    exactness = Exactness.APPROXIMATE

    def levels(self, facts: Facts) -> list[Level]:
        return [{self.key: bits} for bits in ((0, 8) if facts.frozen else (0,))]

    def is_sensible(self, choice: Choice, facts: Facts) -> bool:
        return not choice.stream

    def bytes(self, sizes: Sizes, choice: Choice, facts: Facts) -> Sizes:
        """One module's weights are whole at a time."""
        return replace(sizes, fixed=sizes.fixed - facts.frozen * (1 - narrow_share(8, 4)) + facts.largest)

    def seconds(self, choice: Choice, facts: Facts) -> float:
        return 2 * choice.slices * TOUCHED[facts.device]["frozen"] * facts.frozen / RATES[facts.device][1]

    def degree(self, choice: Choice) -> str:
        return ""

    def how(self, choice: Choice, facts: Facts) -> str:
        return (
            "weights that are not trained are rounded to 8 bits, with a scale for 128 numbers, and stay rounded after undo(): "
            "load them again for the exact ones"
        )


class KeptBits(RemedyKind[Facts]):
    """Activations in 8 bits until the backward pass."""

    key = "kept_bits"
    name = "activations in 8 bits"
    exactness = Exactness.APPROXIMATE

    def levels(self, facts: Facts) -> list[Level]:
        return [{self.key: 0}, {self.key: 8}]

    def is_sensible(self, choice: Choice, facts: Facts) -> bool:
        return not choice.offload and not choice.stream

    def bytes(self, sizes: Sizes, choice: Choice, facts: Facts) -> Sizes:
        """A quarter of most of them, and one that is being packed or unpacked."""
        return replace(sizes, precision=sizes.precision * 0.4)

    def gentler(self, choice: Choice, facts: Facts) -> list[Choice]:
        return [replace(choice, kept_bits=0), choice]

    def seconds(self, choice: Choice, facts: Facts) -> float:
        return TOUCHED[facts.device]["kept"] * facts.activations / RATES[facts.device][1]

    def degree(self, choice: Choice) -> str:
        return ""

    def how(self, choice: Choice, facts: Facts) -> str:
        return "kept for the backward pass in 8 bits, with a scale for 128 numbers; gradients are those of rounded activations"
