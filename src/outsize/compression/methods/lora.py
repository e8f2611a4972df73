"""Adapters beside frozen weights, for fine-tuning: what is trained is small, what is frozen is kept in 16, 8 or 4 bits.

Used only where the user names it: it trains something else. At first it costs what the rounding of the frozen weights costs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from outsize.compression.method import Candidate, Stage, Subject
from outsize.compression.methods import adapters
from outsize.compression.weights import own_parameters
from outsize.core.failure import Exactness


@dataclass(frozen=True)
class Lora:
    """Frozen weights in fewer bits and adapters that are trained."""

    name = "lora"
    exactness = Exactness.APPROXIMATE
    fitted = False
    trains = True
    saves = (
        "gradients and optimizer state of all weights but the adapters', and weights where they are kept in fewer bits"
    )
    costs = "rounding of the frozen weights; only what an adapter can say is learned"
    needs = "Linear layers whose weights are not shared"
    loads = "outsize; an exported program (torch.export) needs torch alone"

    def candidates(self, subject: Subject) -> list[Candidate]:
        names = adapters.find_adapted(subject.model)
        touched = frozenset(name for name, module in subject.model.named_modules() if own_parameters(module))
        return [
            Candidate(
                method=self.name, site="", level=f"rank {adapters.RANK}, frozen weights in {bits} bits", stage=Stage.ADAPTERS,
                touches=touched, apply=functools.partial(add, names=tuple(names), bits=bits),
            )
            for bits in (16, 8, 4)
            if names
        ]  # fmt: skip


def add(model: Any, names: tuple[str, ...], bits: int) -> Any:
    """Plain adapters, so that files can say what they are."""
    return adapters.add_adapters(model, list(names), adapters.RANK, bits, adapters.SCALE, peft=False)
